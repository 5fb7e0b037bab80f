"""Synthetic run directories: simulated steps written down as pptrace's runtime would have them profiled.

Each rank's Kineto trace holds the step's ops, a P2P range with its wait for every message, and an optimizer range. A message
is posted when its producer ends; the receiver posts when its own previous op ends, so that waits and bubbles are as in life.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pptrace.marks import Axis, Mark, OpMark, P2PMark, SpanKind, SpanMark, Transfer, WaitMark, format_mark
from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.messages import peer_of
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import build
from pptrace.schedule.text import to_rows
from pptrace.simulator import Costs, Simulation, simulate

BASE_NS = 1_700_000_000_000_000_000
FORWARD_NS, BACKWARD_NS, TRANSFER_NS, GAP_NS = 4_000_000, 8_000_000, 400_000, 20_000_000
NUM_BYTES = 65_536


def write_run(
    folder: Path, schedule: str, pp: int, num_microbatches: int, num_steps: int = 1, num_chunks: int | None = None
) -> Path:
    """A run directory with one trace per rank and run.json; each step is slower than the one before, and stage 1 the slowest."""
    plan = build(schedule, pp, num_microbatches, num_chunks)
    events: list[list[dict[str, Any]]] = [[] for _ in range(pp)]
    start = 0
    for step in range(2, 2 + num_steps):
        simulation = simulate(plan, costs_of_step(plan, step))
        for rank in range(pp):
            events[rank] += step_events(simulation, rank, step, start)
        start += simulation.makespan_ns + GAP_NS
    facts = facts_of_plan(plan)
    for rank, own in enumerate(events):
        trace = {
            "schemaVersion": 1,
            "baseTimeNanoseconds": BASE_NS,
            "traceEvents": own,
            "pptrace": facts | {"rank": rank},
        }
        (folder / f"rank{rank}.json.gz").write_bytes(gzip.compress(json.dumps(trace).encode(), 1))
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


def facts_of_plan(plan: Plan) -> dict[str, Any]:
    reading = {"time_ns": BASE_NS, "monotonic_ns": 0}
    return {
        "mesh": {"pp": plan.pp, "vpp": plan.num_chunks, "tp": 1, "cp": 1, "dp": 1},
        "pp_ranks": list(range(plan.pp)),
        "world_size": plan.pp,
        "plan": {"name": plan.name, "num_microbatches": plan.num_microbatches, "rows": to_rows(plan)},
        "host": "synthetic",
        "clock": {"start": reading, "stop": reading},
    }


def costs_of_step(plan: Plan, step: int) -> Costs:
    stages: dict[tuple[Kind, int], int] = {}
    for stage in range(plan.num_stages):
        factor = (1.3 if stage == 1 else 1.0) * (1 + 0.2 * (step - 2))
        stages[Kind.F, stage] = round(FORWARD_NS * factor)
        stages[Kind.B, stage] = round(BACKWARD_NS * factor)
    return Costs(stages=stages, p2p_latency_ns=TRANSFER_NS)


def step_events(simulation: Simulation, rank: int, step: int, origin: int) -> list[dict[str, Any]]:
    row = simulation.ranks[rank].timeline
    events = [_event(OpMark(timed.action, step), origin + timed.start, origin + timed.end) for timed in row]
    events += _messages(simulation, rank, step, origin)
    last = origin + max(timed.end for timed in row)
    events.append(_event(SpanMark(SpanKind.OPTIMIZER, step), last + 100_000, last + 2_100_000))
    return events


def _messages(simulation: Simulation, rank: int, step: int, origin: int) -> Iterator[dict[str, Any]]:
    """The P2P ranges of one rank."""
    plan = simulation.plan
    ends = {timed.action.key: timed.end for own in simulation.ranks for timed in own.timeline}
    idle_since = 0
    for timed in simulation.ranks[rank].timeline:
        action = timed.action
        source = _producer(plan, action)
        if source is not None and plan.placement[source[1]] != rank:
            sent = ends[source]
            kind = Kind.RECV_F if action.kind is Kind.F else Kind.RECV_B
            posted = min(idle_since, sent)
            yield from _transfer(plan, action, kind, step, origin + posted, origin + sent + TRANSFER_NS)
        idle_since = timed.end
        target = _reader_stage(plan, action)
        if target is not None and plan.placement[target] != rank:
            kind = Kind.SEND_F if action.kind is Kind.F else Kind.SEND_B
            yield from _transfer(plan, action, kind, step, origin + timed.end, origin + timed.end + TRANSFER_NS)


def _transfer(plan: Plan, action: Action, kind: Kind, step: int, start: int, end: int) -> Iterator[dict[str, Any]]:
    message = Action(kind, action.stage, action.microbatch, action.chunk, action.phase)
    transfer = Transfer(message, peer_of(plan, message), NUM_BYTES)
    yield _event(P2PMark((transfer,), Axis.PP, step), start, end)
    yield _event(WaitMark(transfer, step), start, end)


def _producer(plan: Plan, action: Action) -> tuple[Kind, int, int | None] | None:
    """The key of the op whose output this one reads from another stage."""
    stage = plan.previous_stage(action.stage) if action.kind is Kind.F else plan.next_stage(action.stage)
    return None if stage is None else (action.kind, stage, action.microbatch)


def _reader_stage(plan: Plan, action: Action) -> int | None:
    return plan.next_stage(action.stage) if action.kind is Kind.F else plan.previous_stage(action.stage)


def _event(mark: Mark, start_ns: int, end_ns: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "user_annotation",
        "name": format_mark(mark),
        "pid": 1,
        "tid": 1,
        "ts": start_ns / 1000,
        "dur": (end_ns - start_ns) / 1000,
    }
