"""Ranks that have a trace, in pipelines of which others have none: right, or open and said so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from pptrace.analysis.analyse import Analysis, analyse
from pptrace.errors import ScheduleError
from pptrace.recognise.shown import Detail
from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import SCHEDULES, build
from pptrace.simulate import simulate
from pptrace.simulate.costs import Costs
from pptrace.tables import COMMS, Trace, empty_table
from tests.synthetic import make_trace

COSTS = Costs({Kind.F: 100, Kind.I: 90, Kind.W: 110, Kind.B: 200}, p2p_latency_ns=7)


@dataclass(frozen=True)
class Case:
    """One pipeline rank's ops of a plan, with as much of them labelled as ``detail`` says.

    ``stride`` is the distance of neighbours in a world of ``stride`` · p ranks.
    """

    plan: Plan
    place: int
    detail: Detail
    stride: int = 1
    knows_world: bool = True

    @property
    def rank(self) -> int:
        return self.place * self.stride

    def trace(self) -> Trace:
        ops = simulate(self.plan, COSTS).ops()
        ops = ops[ops["rank"] == self.place].assign(rank=-1, phase="", source="label").reset_index(drop=True)
        actions = [self.labelled(action) for action in self.plan.compute_actions(self.place)]
        if self.detail is Detail.KINDS:
            actions = list(in_order(actions))
        if self.detail is not Detail.STAGES:
            ops["pair"] = [str(action) if action.parts else "" for action in actions]
            ops["stage"] = [action.stage for action in actions]
            ops["microbatch"] = [action.microbatch for action in actions]
            ops["chunk"] = -1
        return replace(make_trace([], self.rank), ops=ops, comms=empty_table(COMMS), framework="a table")

    def labelled(self, action: Action) -> Action:
        """The action with its chunk in the place of its stage, or nothing."""
        parts = tuple(map(self.labelled, action.parts))
        return replace(action, stage=-1 if self.detail is Detail.KINDS else -1 - action.chunk, parts=parts)

    def analyse(self) -> Analysis:
        return analyse([self.trace()], num_ranks=self.stride * self.plan.pp if self.knows_world else None)


def in_order(actions: Sequence[Action]) -> Iterator[Action]:
    """Actions of which only the kinds are known: the k-th of a kind is that of microbatch k."""
    counts: Counter[Kind] = Counter()

    def numbered(action: Action) -> Action:
        parts = tuple(map(numbered, action.parts))
        if parts:
            return replace(action, microbatch=parts[0].microbatch, parts=parts)
        counts[action.kind] += 1
        return replace(action, microbatch=counts[action.kind] - 1)

    yield from map(numbered, actions)


def assert_right_or_open(case: Case) -> bool:
    """Whether the schedule is named; what is told must be true."""
    analysis, plan = case.analyse(), case.plan
    report = analysis.report
    schedule, mesh = report.schedule, report.mesh
    assert schedule.name in (plan.name, "unknown"), schedule
    assert mesh.pp in (plan.pp, None)
    assert mesh.vpp in (plan.num_chunks, None)
    assert schedule.num_microbatches in (plan.num_microbatches, None)
    assert schedule.num_stages in (plan.num_stages, None)
    assert schedule.mismatches == ()
    if schedule.name == "unknown":
        assert any("is that of" in line or "no schedule recognised" in line for line in report.warnings), (
            report.warnings
        )
    truth = plan.compute_actions(case.place)
    for step in report.steps:
        (rank,) = step.ranks
        assert rank.pp_rank in (case.place, None)
        assert rank.bubble_ns is None
        assert rank.compute_ns == sum(op.end_ns - op.start_ns for op in rank.ops)
        assert rank.not_compute_ns == rank.window_ns - rank.compute_ns
        for op, action in zip(rank.ops, truth, strict=True):
            assert op.kind == action.kind
            assert op.stage in (action.stage, None)
            assert op.chunk in (action.chunk, None)
            assert op.microbatch in (action.microbatch, None)
            if plan.name == schedule.name or schedule.candidates:
                assert op.phase in (str(action.phase), None)
    assert len(report.steps) == 1
    return schedule.name == plan.name


def shapes() -> Iterator[Plan]:
    """Small plans of every schedule, with its variants."""
    for name in SCHEDULES:
        for pp in (2, 3, 4, 5):
            for microbatches in (1, 2, 3, 4, 6, 8, 10, 12):
                for chunks in (1, 2, 3):
                    for group, lean in ((None, False), (None, True), (pp + 1, False)):
                        try:
                            yield build(name, pp, microbatches, chunks, group, lean)
                        except ScheduleError:
                            continue


SHAPES = list(shapes())


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.data())
def test_what_one_rank_alone_tells_is_right_or_open(data: st.DataObject) -> None:
    """Without any message, so that order alone decides."""
    plan = data.draw(st.sampled_from(SHAPES), label="plan")
    details = [detail for detail in Detail if detail is not Detail.CHUNKS or plan.num_chunks > 1]
    case = Case(
        plan,
        data.draw(st.integers(0, plan.pp - 1), label="place"),
        data.draw(st.sampled_from(details)),
        data.draw(st.sampled_from((1, 2)), label="stride"),
        data.draw(st.booleans(), label="knows world"),
    )
    assert_right_or_open(case)
