"""An independent reading of host-only traces with pptrace's marks: slow, plain, and sharing no code with pptrace.

It follows the definitions: window, compute, exposed communication, bubble. Nothing but json, re and decimal is used.
"""

from __future__ import annotations

import gzip
import json
import re
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

_OP = re.compile(r"pp1:(\d+)(F|B|I|W)(\d+) chunk=(\d+) phase=(\w+) step=(\d+)")
_PAIR = re.compile(r"pp1:\((\d+)F(\d+);\d+B\d+\)OVERLAP_F_B chunk=\d+ phase=\w+ step=(\d+)")
_MIRROR = re.compile(r"pp1:\w+ step=(\d+) axis=mirror size=2 bytes=\d+")
_P2P = re.compile(r"pp1:p2p step=(\d+) axis=pp ops=(\S+)")
_WAIT = re.compile(r"pp1:wait step=(\d+) op=(\S+)")
_TRANSFER = re.compile(r"(\d+)(SEND|RECV)_(F|B)(\d+)[<>](\d+)@(\d+)")

Interval = tuple[int, int]


def read_ranges(path: Path) -> list[tuple[str, int, int]]:
    """(name, start, end) of every host range with a mark; absolute ns."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        trace = json.load(file, parse_float=Decimal)
    base = int(trace.get("baseTimeNanoseconds", 0))
    ranges = []
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") == "user_annotation" and event["name"].startswith("pp1:"):
            start = base + int(Decimal(event["ts"]) * 1000)
            ranges.append((event["name"], start, start + int(Decimal(event["dur"]) * 1000)))
    return sorted(ranges, key=lambda entry: entry[1])


def partition(directory: Path) -> dict[str, Any]:
    """Per step the span, and per rank compute, exposed communication and bubble, ns; and each rank's order of ops."""
    ranks = {int(path.name[4:].split(".")[0]): read_ranges(path) for path in directory.glob("rank*.json.gz")}
    ops: dict[tuple[int, int], list[tuple[str, int, int]]] = {}
    waits: dict[tuple[int, int, str], Interval] = {}
    sums: dict[tuple[int, int], list[Interval]] = {}
    calls: list[tuple[int, int, str, int, int]] = []  # rank, step, transfer, start, end of the call
    for rank, ranges in ranks.items():
        for name, start, end in ranges:
            if match := _OP.fullmatch(name):
                ops.setdefault((int(match[6]), rank), []).append((f"{match[1]}{match[2]}{match[3]}", start, end))
            elif match := _PAIR.fullmatch(name):  # named for its forward half
                ops.setdefault((int(match[3]), rank), []).append((f"{match[1]}OVERLAP_F_B{match[2]}", start, end))
            elif match := _P2P.fullmatch(name):
                calls += [(rank, int(match[1]), transfer, start, end) for transfer in match[2].split(",")]
            elif match := _MIRROR.fullmatch(name):
                sums.setdefault((int(match[1]), rank), []).append((start, end))
            elif match := _WAIT.fullmatch(name):
                waits[rank, int(match[1]), match[2]] = (start, end)
    transfers = _transfers(calls, waits)
    for (
        step,
        rank,
    ), own in sums.items():  # of gradients, between the two ranks that have the same stages, one after the other
        for (start, end), (start_there, _) in zip(own, sums[step, len(ranks) - 1 - rank], strict=True):
            begin = max(start, start_there)
            transfers.setdefault(rank, []).append((begin, max(begin, end)))
    steps = sorted({step for step, _ in ops})
    return {"steps": [_step(step, ops, transfers) for step in steps]}


def _transfers(
    calls: list[tuple[int, int, str, int, int]], waits: dict[tuple[int, int, str], Interval]
) -> dict[int, list[Interval]]:
    """rank → its transfers, each from the moment when both sides are ready, as far as the rank posts them or waits for them.

    They may reach into the next step's window. What was posted ahead and moves while the rank waits for something else is not
    what it waits for.
    """
    starts: dict[tuple[Any, ...], list[int]] = {}
    sides = []
    for rank, step, text, start, call_end in calls:
        match = _TRANSFER.fullmatch(text)
        assert match, text
        stage, verb, direction, microbatch, peer = int(match[1]), match[2], match[3], int(match[4]), int(match[5])
        producer = stage if verb == "SEND" else stage - 1 if direction == "F" else stage + 1
        source, target = (rank, peer) if verb == "SEND" else (peer, rank)
        key = (step, direction, producer, microbatch, source, target)
        starts.setdefault(key, []).append(start)
        waiting = waits.get((rank, step, text), (start, call_end))
        sides.append((key, rank, start, waiting[1], ((start, call_end), waiting)))
    over = {(key, rank): end for key, rank, _, end, _ in sides}
    result: dict[int, list[Interval]] = {}
    for key, rank, start, end, blocking in sides:
        source, target = key[-2:]
        both = len(starts[key]) == 2
        ready = max(starts[key]) if both else start
        if rank == source and both and min(end, over[key, target]) >= ready:
            end = min(end, over[key, target])  # what has been received has been sent, whenever the sender looked
        if rank == source and end < ready:
            ready = start  # a small message lay in a buffer before its receiver came: nobody waited for it
        begin = min(ready, end)
        result.setdefault(rank, []).extend(
            (max(begin, low), min(end, high)) for low, high in blocking if max(begin, low) < min(end, high)
        )
    return result


def _step(
    step: int, ops: dict[tuple[int, int], list[tuple[str, int, int]]], transfers: dict[int, list[Interval]]
) -> dict[str, Any]:
    rows_by_rank = {rank: rows for (number, rank), rows in sorted(ops.items()) if number == step}
    of_all_steps: dict[int, list[Interval]] = {}  # a rank that is done goes on with the next step in this one's window
    for (_, rank), rows in ops.items():
        of_all_steps.setdefault(rank, []).extend((start, end) for _, start, end in rows)
    first = min(start for rows in rows_by_rank.values() for _, start, _ in rows)
    last = max(end for rows in rows_by_rank.values() for _, _, end in rows)
    ranks = []
    for rank, rows in rows_by_rank.items():
        compute, exposed = _split(of_all_steps[rank], transfers.get(rank, []), first, last)
        ranks.append(
            {
                "rank": rank,
                "compute_ns": compute,
                "exposed_comm_ns": exposed,
                "bubble_ns": last - first - compute - exposed,
                "ops": [name for name, _, _ in rows],
            }
        )
    return {"step": step, "span_ns": last - first, "ranks": ranks}


def _split(computing: list[Interval], moving: list[Interval], first: int, last: int) -> tuple[int, int]:
    """Compute, and transfer beside no compute, inside [first, last): segment by segment between all edges."""
    edges = sorted({first, last, *(edge for pair in (*computing, *moving) for edge in pair if first <= edge <= last)})
    compute = exposed = 0
    for low, high in pairwise(edges):
        if any(start <= low and high <= end for start, end in computing):
            compute += high - low
        elif any(start <= low and high <= end for start, end in moving):
            exposed += high - low
    return compute, exposed
