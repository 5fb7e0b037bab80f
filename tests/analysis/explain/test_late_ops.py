"""Time between the ops of ranks without a device: the cause ``host``, in place of what nothing explains."""

from __future__ import annotations

from collections import Counter

import pytest

from pptrace.analysis.result import StepReport
from pptrace.analysis.whole_run import Cause
from pptrace.schedule.actions import Kind
from pptrace.schedule.registry import build
from pptrace.workflow.analyse import analyse
from tests.support.extent import by_turns
from tests.support.optional import not_none
from tests.support.synthetic import Job, Recording, host_events, run_on_paper

LATE_RANK, LATE_NS, TRANSFER_NS = 1, 400, 50


def recording_of(name: str, pp: int, late_ns: int, *, sends: str) -> Recording:
    """A run of which one rank is late for all its calls, all else alike."""
    plan = build(name, pp, 8)
    run = run_on_paper(
        plan,
        lambda action: 2000 if action.kind is Kind.B else 1000,
        TRANSFER_NS,
        one_by_one=sends == "one by one",
        is_buffered=sends == "buffered",
        before_calls=lambda rank, _action: late_ns if rank == LATE_RANK else 0,
    )
    return Recording(Job(plan, 1, 2), run, host_events)


def step_of(name: str, pp: int, late_ns: int, *, sends: str) -> StepReport:
    return analyse(recording_of(name, pp, late_ns, sends=sends).traces()).report.steps[0]


def by_name(causes: tuple[Cause, ...] | None) -> Counter[str]:
    totals = Counter[str]()
    for cause in causes or ():
        totals[cause.cause] += cause.ns
    return totals


@pytest.mark.parametrize(
    ("plan", "sends"),
    by_turns((("1f1b", 4), ("interleaved-1f1b", 2), ("zb-h1", 3)), ("together", "one by one", "buffered")),
)
def test_what_a_rank_is_late_by_is_its_host_s_and_not_unexplained(plan: tuple[str, int], sends: str) -> None:
    name, pp = plan
    late, clean = (step_of(name, pp, ns, sends=sends) for ns in (LATE_NS, 0))
    assert late.span_ns is not None
    causes = by_name(late.causes)
    assert sum(causes.values()) == late.span_ns - (late.ideal_ns or 0)
    assert abs(causes["unexplained"]) <= 0.005 * late.span_ns
    assert causes["host"] == pytest.approx(late.span_ns - not_none(clean.span_ns), rel=0.15)
    assert {tuple(cause.where.items()) for cause in late.causes or () if cause.cause == "host"} == {
        (("rank", LATE_RANK),)
    }
    assert by_name(clean.causes)["host"] == 0
