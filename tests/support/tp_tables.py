"""Tables of ops of a pipeline whose ops end with all-reduces along tp, run on paper."""

from __future__ import annotations

import csv
from collections.abc import Callable
from itertools import product
from pathlib import Path

from pptrace.schedule.registry import build
from tests.support.synthetic import run_on_paper

NAMES = ("rank", "step", "kind", "stage", "microbatch", "axis", "group_size", "bytes", "start_ns", "end_ns")
COMPUTE_NS, GAP_NS = 7_000_000, 5_000_000


def transfer_ns(size: int, latency_ns: int, gbps: float) -> int:
    return round(latency_ns + size / gbps)


def write_run(
    path: Path, size_of: Callable[[int], int], latency_ns: int, gbps: float, pp: int = 2, microbatches: int = 4
) -> int:
    """Write three steps of 1F1B whose F takes 7 ms and an all-reduce of two ranks, whose B takes two of both. Returns the span of
    a step, ns.

    Args:
        size_of: bytes of the all-reduces of a microbatch.
    """
    plan = build("1f1b", pp, microbatches)

    def moved(microbatch: int | None) -> int:
        return transfer_ns(size_of(microbatch or 0), latency_ns, gbps)

    run = run_on_paper(plan, lambda op: (COMPUTE_NS + moved(op.microbatch)) * (1 if op.kind == "F" else 2))
    length = run.window[1]
    rows: list[dict[str, object]] = []
    for step, rank in product(range(3), range(2 * pp)):
        begin, place = step * (length + GAP_NS), {"rank": rank, "step": step}
        rows.append(place | {"kind": "STEP", "start_ns": begin, "end_ns": begin + length})
        for op in run.computes(rank // 2):
            action, taken = op.action, moved(op.action.microbatch)
            of_op = {"kind": action.kind, "stage": action.stage, "microbatch": action.microbatch}
            rows.append(place | of_op | {"start_ns": begin + op.start, "end_ns": begin + op.end})
            call = {"kind": "all_reduce", "axis": "tp", "group_size": 2, "bytes": size_of(action.microbatch or 0)}
            for half in range(1 if action.kind == "F" else 2):
                end = begin + op.end - half * (COMPUTE_NS + taken)
                rows.append(place | call | {"start_ns": end - taken, "end_ns": end})
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, NAMES, restval="")
        writer.writeheader()
        writer.writerows(rows)
    return length
