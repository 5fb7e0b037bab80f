"""Ranks that have a trace, in pipelines of which others have none: right, or open and said so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from pptrace.errors import ScheduleError
from pptrace.model.tables import COMMS, UNKNOWN, empty_table
from pptrace.model.traces import Trace
from pptrace.recognise.infer.candidates import Detail
from pptrace.report.to_json import report_object
from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import SCHEDULES, build
from pptrace.simulator import simulate
from pptrace.simulator.simulation import Costs
from pptrace.workflow.analyse import Analysis
from tests.support.analysed import analyse
from tests.support.extent import ALL, by_turns
from tests.support.lanes import bubble_ns
from tests.support.synthetic import make_trace, record

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
            ops["pair"] = [self.text(action) if action.parts else "" for action in actions]
            ops["stage"] = UNKNOWN
            ops["microbatch"] = [action.microbatch for action in actions]
            ops["chunk"] = [UNKNOWN if self.detail is Detail.KINDS else action.chunk for action in actions]
        return structs.replace(make_trace([], self.rank), ops=ops, comms=empty_table(COMMS), framework="a table")

    def labelled(self, action: Action) -> Action:
        """The action with the chunk that its label names, 0 for none."""
        parts = tuple(map(self.labelled, action.parts))
        return replace(action, chunk=0 if self.detail is Detail.KINDS else action.chunk, parts=parts)

    def text(self, action: Action) -> str:
        """The action as text, with its chunk in the place of its stage."""
        if action.parts:
            return f"({';'.join(map(self.text, action.parts))}){action.kind}"
        return f"?{action.chunk}{action.kind}{action.microbatch}"

    def analyse(self) -> Analysis:
        return analyse([self.trace()], num_ranks=self.stride * self.plan.pp if self.knows_world else None)


def in_order(actions: Sequence[Action]) -> Iterator[Action]:
    """Actions of which only the kinds are known: the k-th of a kind is that of microbatch k."""
    counts: Counter[Kind] = Counter()

    def with_number(action: Action) -> Action:
        parts = tuple(map(with_number, action.parts))
        if parts:
            return replace(action, microbatch=parts[0].microbatch, parts=parts)
        counts[action.kind] += 1
        return replace(action, microbatch=counts[action.kind] - 1)

    yield from map(with_number, actions)


def assert_right_or_open(case: Case) -> bool:
    """Return whether the schedule is named; what is reported must be true."""
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
        assert any("matches" in line or "no schedule recognised" in line for line in report.warnings), report.warnings
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
                        if SCHEDULES[name].only_groups_of_p and microbatches % (group or pp):
                            continue  # a last group smaller than p, which no runtime without labels runs
                        try:
                            yield build(name, pp, microbatches, chunks, group, lean)
                        except ScheduleError:
                            continue


@cache
def all_shapes() -> list[Plan]:
    return list(shapes())


@settings(max_examples=30 if ALL else 12, deadline=None, derandomize=True)
@given(st.data())
def test_what_one_rank_alone_tells_is_right_or_open(data: st.DataObject) -> None:
    """Without any message, so that order alone decides."""
    plan = data.draw(st.sampled_from(all_shapes()), label="plan")
    details = [detail for detail in Detail if detail is not Detail.CHUNKS or plan.num_chunks > 1]
    case = Case(
        plan,
        data.draw(st.integers(0, plan.pp - 1), label="place"),
        data.draw(st.sampled_from(details)),
        data.draw(st.sampled_from((1, 2)), label="stride"),
        data.draw(st.booleans(), label="knows world"),
    )
    assert_right_or_open(case)


def test_stages_1_and_5_of_a_world_of_four_are_two_chunks_of_four_ranks() -> None:
    report = Case(build("interleaved-1f1b", 4, 8, 2), 1, Detail.STAGES).analyse().report
    assert (report.mesh.num_ranks, report.mesh.pp, report.mesh.vpp, report.mesh.dp) == (4, 4, 2, 1)
    assert (report.schedule.name, report.schedule.source) == ("interleaved-1f1b", "recognised")
    ((rank,),) = [step.ranks for step in report.steps]
    assert rank.pp_rank == 1
    assert any("rank 1 exchanges messages with rank 0 and rank 2:" in line for line in report.warnings)


def test_stages_2_and_5_are_a_v_of_four_ranks_though_nothing_tells_how_many_there_were() -> None:
    report = Case(build("zbv", 4, 8), 2, Detail.STAGES, knows_world=False).analyse().report
    assert (report.mesh.pp, report.mesh.dp, report.schedule.name) == (4, None, "zbv")


def test_an_order_of_several_schedules_names_them_and_what_they_have_in_common() -> None:
    """The last rank runs one forward, one backward in 1F1B as well as with twice the warmup."""
    report = Case(build("1f1b", 4, 8), 3, Detail.STAGES).analyse().report
    schedule = report.schedule
    assert (schedule.name, schedule.source) == ("unknown", "none")
    assert (schedule.num_microbatches, schedule.num_stages, report.mesh.pp) == (8, 4, 4)
    assert {result.name for result in schedule.candidates} == {"1f1b", "eager-1f1b"}
    assert any("matches 1f1b or eager-1f1b" in line for line in report.warnings)


def test_phases_on_which_the_schedules_that_fit_disagree_are_null() -> None:
    """Four forwards, then four backwards: GPipe has no steady phase, 1F1B of four ranks has one op each way in it."""
    report = Case(build("gpipe", 4, 4), 0, Detail.STAGES).analyse().report
    assert {result.name for result in report.schedule.candidates} >= {"gpipe", "1f1b"}
    ((rank,),) = [step["ranks"] for step in report_object(report, with_ops=True)["steps"]]
    assert rank["phases"] is None
    assert {op["phase"] for op in rank["ops"]} == {None}
    assert rank["ideal"] is None


def test_an_order_of_no_schedule_keeps_the_pipeline_that_its_stages_tell() -> None:
    case = Case(build("interleaved-1f1b", 4, 8, 2), 1, Detail.STAGES)
    trace = case.trace()
    swapped = trace.ops.copy()
    swapped.loc[[0, 1], "microbatch"] = [1, 0]
    report = analyse([structs.replace(trace, ops=swapped)], num_ranks=4).report
    assert (report.mesh.pp, report.mesh.vpp, report.schedule.name) == (4, 2, "unknown")
    assert any("matches no known schedule; the closest, interleaved-1f1b" in line for line in report.warnings)


def own_bubble(whole: Analysis, rank: int) -> int | None:
    """A rank's bubble within its own first and last op, ns, of a run of one step of which every rank has a trace."""
    ops = whole.data.part(rank, 0).ops
    return bubble_ns(whole.data.lanes[rank], int(ops["start_ns"].min()), int(ops["end_ns"].max()))


@pytest.mark.parametrize(
    ("name", "device"),
    by_turns(("gpipe", "interleaved-1f1b", "zb-h1", "dualpipe-v", *("1f1b", "zbv") * ALL), (False, True)),
)
def test_bounds_of_one_rank_hold_the_bubble_that_all_ranks_together_tell(name: str, device: bool) -> None:
    recording = record(build(name, 3, 6), lambda action: 300 + 10 * action.stage, 90, device=device)
    traces = recording.traces(with_metadata=False)
    whole = analyse(traces)
    widths = []
    for trace, lines in zip(traces, whole.report.steps[0].ranks, strict=True):
        alone = analyse([trace], num_ranks=3)
        ((rank,),) = [step.ranks for step in alone.report.steps]
        bubble = own_bubble(whole, lines.rank)
        assert rank.bubble_low_ns <= bubble <= rank.bubble_high_ns == rank.not_compute_ns
        assert (rank.bubble_ns, rank.exposed_comm_ns) == (None, None)
        assert alone.report.schedule.name in (name, "unknown")
        widths.append(rank.bubble_high_ns - rank.bubble_low_ns)
    assert max(widths) > 0


def test_where_all_ranks_have_a_trace_the_bounds_are_the_bubble_and_each_rank_has_its_ideal() -> None:
    recording = record(build("1f1b", 4, 8), lambda action: 200 if action.kind is Kind.B else 100)
    (step,) = analyse(recording.traces()).report.steps
    for rank in step.ranks:
        assert rank.bubble_low_ns == rank.bubble_high_ns == rank.bubble_ns
        assert rank.ideal.ratio == pytest.approx(3 / 8)
        behind = 3 - rank.rank  # ranks after this one: their fill and drain lie within its own window
        assert rank.ideal.own_ratio == pytest.approx(behind / 8)


def test_chunks_name_the_schedule_of_a_rank_though_no_label_names_a_stage() -> None:
    report = Case(build("interleaved-1f1b", 2, 8, 2), 1, Detail.CHUNKS, 2, knows_world=False).analyse().report
    assert (report.schedule.name, report.schedule.source) == ("interleaved-1f1b", "recognised")
    assert (report.mesh.pp, report.mesh.vpp) == (2, 2)
