"""Ranks that are late for their calls: what a rank does before it posts a message keeps its peers too."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from pptrace.analysis.report import Report
from pptrace.analysis.result import Finding
from pptrace.marks import SpanKind, SpanMark
from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.registry import build
from tests.support.analysed import analyse
from tests.support.extent import ALL, by_turns
from tests.support.synthetic import LEAD, START, Job, groups_of, host_events, make_trace, marked, run_on_paper

USUAL_NS, PYTHON_NS, PAUSE_NS, TRANSFER_NS, STEPS = 200, 4_000, 30_000, 50, 6
LATE_RANK = 1
UNEXPLAINED = 0.005
"""Share of a step by which replays may miss it before another way of sending is tried (docs/limits.md)."""
Lateness = Callable[[int, int, Action], int]
"""Time that a rank takes before a call, from (step, rank, first action of the call), ns."""


def report_of(name: str, pp: int, *, sends: str, late: Lateness, is_collection: bool = False) -> Report:
    plan = build(name, pp, 8)
    rng, runs = random.Random(0), []
    for step in range(STEPS):

        @cache
        def cost(action: Action) -> int:
            return round((10_000 if action.kind is Kind.F else 20_000) * rng.gauss(1, 0.01))

        runs.append(
            run_on_paper(
                plan,
                cost,
                TRANSFER_NS,
                one_by_one=sends == "one by one",
                is_buffered=sends == "buffered",
                before_calls=lambda rank, action, step=step: USUAL_NS + late(step, rank, action),
            )
        )
    length = max(run.end for run in runs) + 1_000
    job = Job(plan, 1, STEPS)
    traces = []
    for rank in range(pp):
        events = []
        for step, run in enumerate(runs):
            at = START + step * length
            events += host_events(run, rank, range(pp), step, at)
            for group in groups_of(run.transfers(rank)) if is_collection else []:
                begun, ns = at + group[0].start, late(step, rank, group[0].action)
                events += [marked(SpanMark(SpanKind.GC, step), begun - ns, begun)] if ns else []
            events.append(marked(SpanMark(SpanKind.STEP, step), at - LEAD - 5, at + run.end + 200))
        traces.append(make_trace(events, rank, job.metadata(rank)))
    return analyse(traces).report


def always(_step: int, rank: int, _action: Action) -> int:
    return PYTHON_NS if rank == LATE_RANK else 0


def now_and_then(step: int, rank: int, action: Action) -> int:
    """Once in a step, before a send or a receive of forwards."""
    is_paused = action.kind is (Kind.SEND_F if step % 2 else Kind.RECV_F) and action.microbatch == 2 + step % 4
    return PAUSE_NS if is_paused and rank == LATE_RANK else 0


def never(_step: int, _rank: int, _action: Action) -> int:
    return 0


def mean_span(report: Report) -> float:
    return float(np.mean([step.span_ns or 0 for step in report.steps]))


@cache
def clean_span(name: str, pp: int, sends: str) -> float:
    return mean_span(report_of(name, pp, sends=sends, late=never))


def finding_of(report: Report, reason: str) -> Finding:
    (finding,) = (one for one in report.findings if one.evidence.get("reason") == reason)
    return finding


SENDS = ("together", "one by one", "buffered")
PLANS = (("1f1b", 4), ("interleaved-1f1b", 2), ("zb-h1", 3), *((("1f1b", 2), ("gpipe", 3)) if ALL else ()))


def assert_gains(report: Report, reason: str, name: str, pp: int, sends: str) -> None:
    finding = finding_of(report, reason)
    assert finding.evidence["where"] == {"rank": LATE_RANK}
    span = mean_span(report)
    assert finding.gain_ns == pytest.approx(span - clean_span(name, pp, sends), rel=0.02, abs=UNEXPLAINED * span)


@pytest.mark.parametrize(
    ("plan", "sends", "late"), by_turns(PLANS, SENDS, ((always, "late launches"), (now_and_then, "pauses")))
)
def test_the_gain_is_what_a_run_gains_whose_rank_is_as_the_others(
    plan: tuple[str, int], sends: str, late: tuple[Lateness, str]
) -> None:
    (name, pp), (lateness, reason) = plan, late
    assert_gains(report_of(name, pp, sends=sends, late=lateness), reason, name, pp, sends)


@pytest.mark.parametrize(("plan", "sends"), by_turns(PLANS, SENDS))
def test_a_collection_before_a_call_is_no_pause(plan: tuple[str, int], sends: str) -> None:
    name, pp = plan
    report = report_of(name, pp, sends=sends, late=now_and_then, is_collection=True)
    assert_gains(report, "garbage collection", name, pp, sends)
    assert not any(finding.evidence.get("reason") == "pauses" for finding in report.findings)
