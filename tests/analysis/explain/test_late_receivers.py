"""Senders that wait until their receivers have come: explained along the way in which the run sends and receives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache

import pytest

from pptrace.analysis.report import Report
from pptrace.analysis.result import StepReport
from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.registry import build
from tests.support.analysed import analyse
from tests.support.extent import by_turns
from tests.support.parts import by_cause
from tests.support.synthetic import record

SLOWER_NS = 5_000


@cache
def step_of(name: str, slow: tuple[int, int] | None, *, one_by_one: bool) -> StepReport:
    """The first step of a run whose messages block; the forward of a stage and microbatch is ``slow``."""

    def cost(action: Action) -> int:
        usual = {Kind.F: 1000, Kind.B: 2000}.get(action.kind, 1000)
        is_slow = action.kind is Kind.F and (action.stage, action.microbatch) == slow
        return usual + (SLOWER_NS if is_slow else 0)

    return analyse(record(build(name, 4, 8), cost, 200, steps=2, one_by_one=one_by_one).traces()).report.steps[0]


@pytest.mark.parametrize(("name", "one_by_one"), by_turns(("1f1b", "interleaved-1f1b", "zb-h1"), (False, True)))
def test_waits_for_late_receivers_are_explained_and_not_left_over(name: str, one_by_one: bool) -> None:
    usual, slowed = (step_of(name, slow, one_by_one=one_by_one) for slow in (None, (1, 3)))
    shares = Counter[str]()
    for step, sign in ((usual, -1), (slowed, 1)):
        causes = by_cause(step.causes)
        assert causes["unexplained"] == 0
        assert sum(causes.values()) == (step.span_ns or 0) - (step.ideal_ns or 0)
        assert step.bubble.waterfall_ns.unexplained == 0
        shares.update({name: sign * ns for name, ns in causes.items()})
    assert shares["jitter"] == pytest.approx((slowed.span_ns or 0) - (usual.span_ns or 0), rel=0.1)


@pytest.mark.parametrize(("name", "slow"), by_turns(("gpipe", "interleaved-1f1b", "zb-h1"), ((0, 1), (1, 3), (2, 2))))
def test_ranks_blocked_behind_blocked_ranks_blame_the_op_that_the_last_of_them_runs(
    name: str, slow: tuple[int, int]
) -> None:
    """Rank 3 sends only when it has received what rank 2 computes: who waits for rank 3 waits for rank 2."""
    before, after = (step_of(name, which, one_by_one=True) for which in (None, slow))
    added = after.blame.total_ns - before.blame.total_ns
    most = after.blame.ops[0]
    assert (most.kind, most.stage, most.microbatch) == ("F", *slow)
    charged_before = sum(op.ns for op in before.blame.ops if (op.kind, op.stage, op.microbatch) == ("F", *slow))
    assert added > 2 * SLOWER_NS
    assert most.ns - charged_before >= 0.95 * added
    assert sum(after.critical_path.parts.values()) == after.span_ns


@pytest.mark.parametrize(("late", "name"), [(3, "gpipe"), (2, "zb-h1")])
def test_ranks_that_wait_for_one_that_has_run_nothing_yet_lose_what_it_is_late_by(late: int, name: str) -> None:
    """Senders wait until it posts its first receive: their time is part of its finding, and of its blame."""
    plan = build(name, 4, 8)

    def report_of(late_by: Mapping[int, int]) -> Report:
        recording = record(plan, lambda op: 2000 if op.kind is Kind.B else 1000, 20, steps=4, late_by=late_by)
        return analyse(recording.traces()).report

    report, clean = report_of({late: 12_000}), report_of({})
    (finding,) = (finding for finding in report.findings if finding.evidence["cause"] != "structural")
    assert (finding.evidence["reason"], finding.evidence["where"]) == ("late start", {"rank": late})
    step, usual = report.steps[0], clean.steps[0]
    assert finding.gain_ns == pytest.approx((step.span_ns or 0) - (usual.span_ns or 0), rel=0.05)
    added = step.blame.total_ns - usual.blame.total_ns
    assert step.blame.by_rank[late] - usual.blame.by_rank[late] >= 0.95 * added
    assert step.blame.by_kind["idle"] >= 0.95 * added
