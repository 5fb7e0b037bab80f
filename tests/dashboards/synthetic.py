"""Synthetic run directories: steps run on paper, written down as pptrace's runtime would have them profiled.

Each rank's Kineto trace holds the step's ops, a P2P range with its waits for every group of messages, and an optimizer range.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pptrace.marks import SpanKind, SpanMark
from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.registry import build
from tests.support.kineto import write_kineto
from tests.support.synthetic import START, Job, host_events, marked, run_on_paper

FORWARD_NS, BACKWARD_NS, TRANSFER_NS, GAP_NS = 4_000_000, 8_000_000, 400_000, 20_000_000


def write_run(folder: Path, schedule: str, pp: int, num_microbatches: int, num_steps: int = 1) -> Path:
    """A run directory with one trace per rank and run.json; each step is slower than the one before, and stage 1 the slowest."""
    plan = build(schedule, pp, num_microbatches)
    events = [[] for _ in range(pp)]
    at = START
    for step in range(2, 2 + num_steps):

        def cost(action: Action, slowness: float = 0.6 + 0.2 * step) -> int:
            ns = FORWARD_NS if action.kind is Kind.F else BACKWARD_NS
            return round(ns * (1.3 if action.stage == 1 else 1.0) * slowness)

        run = run_on_paper(plan, cost, TRANSFER_NS)
        for rank, of_rank in enumerate(events):
            end = at + run.ranks[rank][-1].end
            of_rank += host_events(run, rank, range(pp), step, at)
            of_rank.append(marked(SpanMark(SpanKind.OPTIMIZER, step), end + 100_000, end + 2_100_000))
        at += run.end + GAP_NS
    for rank, of_rank in enumerate(events):
        write_kineto(folder / f"rank{rank}.json.gz", of_rank, pptrace=Job(plan).metadata(rank, "synthetic"))
    write_run_json(folder, pp)
    return folder


def write_run_json(folder: Path, pp: int, status: str = "ok", **changes_of_rank: dict[str, Any]) -> None:
    """run.json; ``rank2={...}`` changes the entry of rank 2."""
    ranks = [
        {"rank": rank, "trace": f"rank{rank}.json.gz", "status": "ok", "error": None, "note": None}
        | changes_of_rank.get(f"rank{rank}", {})
        for rank in range(pp)
    ]
    run = {
        "schema": "pptrace.run/1",
        "command": ["train.py", "--synthetic"],
        "script": "train.py",
        "status": status,
        "exit_code": 0 if status == "ok" else 1,
        "started_at": "2026-01-05T09:30:00+00:00",
        "world_size": pp,
        "ranks": ranks,
    }
    (folder / "run.json").write_text(json.dumps(run))
