"""The steps of a rank on tables worked out by hand, and the ideal bubble of each rank in closed form."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from msgspec.structs import replace

from pptrace.analysis.aligned import AlignedRun, RowsByRank
from pptrace.analysis.result import RankStep, StepReport
from pptrace.analysis.steps.steps import Ideal, PlannedStep, ideal_of, report_steps
from pptrace.clock import Clock, ClockMethod
from pptrace.model.device import DeviceWork
from pptrace.model.mesh import MeshInfo
from pptrace.model.predicted import MemoryParts, RankPrediction
from pptrace.model.tables import COMMS, MEMORY, OPS
from pptrace.schedule.registry import build
from pptrace.timeline.lanes import lane_of
from pptrace.timeline.windows import step_windows
from tests.support.parts import parts_ns
from tests.support.tables import table_of

ONE_CLOCK = Clock(ClockMethod.SAME_HOST, {}, 0)
ALONE = MeshInfo(1, 1, 1, 1, 1, 1, 1, pipelines=((0,),))
TWO = MeshInfo(2, 2, 1, 1, 1, 1, 1, pipelines=((0, 1),))
Row = dict[str, object]


def op(rank: int, step: int, kind: str, start: int, end: int, **more: object) -> Row:
    times: Row = {"rank": rank, "step": step, "kind": kind, "start_ns": start, "end_ns": end}
    return times | {"phase": "steady", "stage": rank, "clock": "host"} | more


def comm(rank: int, step: int, start: int, moving: int, end: int, **more: object) -> Row:
    """A matched message that moves to its end, and for which its rank waits from its start."""
    times: Row = {"start_ns": start, "posted_ns": start, "asked_ns": start, "end_ns": end}
    times |= {"transfer_start_ns": moving, "transfer_end_ns": end}
    return times | {"rank": rank, "step": step, "kind": "recv", "axis": "pp", "bytes": 10, "clock": "host"} | more


def memory(rank: int, time: int, allocated: int) -> Row:
    return {"rank": rank, "t_ns": time, "allocated_bytes": allocated, "reserved_bytes": 0}


def run_of(
    ops: Sequence[Row],
    comms: Sequence[Row] = (),
    samples: Sequence[Row] = (),
    clock: Clock = ONE_CLOCK,
    lacking: Sequence[int] = (),
    missing: Sequence[int] = (),
) -> AlignedRun:
    tables = [table_of(schema, rows) for schema, rows in ((OPS, ops), (COMMS, comms), (MEMORY, samples))]
    by_rank = RowsByRank(tables[0], tables[1])
    ranks = sorted({int(str(row["rank"])) for row in ops})
    none, mask = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.bool_)
    work = {rank: DeviceWork(none, none, none, none, mask, mask, "nccl" if rank in missing else "") for rank in ranks}
    lanes = {}
    for rank in ranks:
        rows = by_rank.of_rank(rank)
        lanes[rank] = lane_of(rank, rows.ops, rows.comms, work[rank], clock, rank in lacking)
    return AlignedRun(*tables, by_rank, lanes, work, clock, lacking=frozenset(lacking))


def steps_of(data: AlignedRun, mesh: MeshInfo = TWO, ideal: Ideal | None = None) -> tuple[StepReport, ...]:
    windows = step_windows(data.ops, mesh)
    steps = sorted({window.step for window in windows})
    planned = [PlannedStep(tuple(w for w in windows if w.step == step), None, ideal) for step in steps]
    return report_steps(planned, data, mesh)[0]


def partition(rank: RankStep) -> tuple[int | None, ...]:
    return rank.window_ns, rank.compute_ns, rank.exposed_comm_ns, rank.bubble_ns


def bounds(rank: RankStep) -> tuple[int | None, ...]:
    return rank.not_compute_ns, rank.bubble_low_ns, rank.bubble_high_ns


OPS_OF_TWO = [
    *(op(0, 4, "F", 0, 30), op(0, 4, "B", 60, 100), op(1, 4, "F", 40, 50), op(0, 6, "F", 200, 210)),
    op(1, 6, "F", 205, 240),
]
COMMS_OF_TWO = [comm(0, 4, 35, 45, 55), comm(1, 4, 10, 30, 40), comm(0, 6, 215, 220, 230), comm(0, 5, 150, 150, 160)]


def test_each_step_of_each_rank_is_partitioned_by_its_own_rows() -> None:
    """Time between the steps, and communication of a step without ops, belongs to none."""
    first, second = steps_of(run_of(OPS_OF_TWO, COMMS_OF_TWO))
    assert [partition(rank) for rank in first.ranks] == [(100, 70, 10, 20), (100, 10, 10, 80)]
    assert [partition(rank) for rank in second.ranks] == [(40, 10, 10, 20), (40, 35, 0, 5)]
    assert [bounds(rank) for rank in first.ranks] == [(30, 20, 20), (90, 80, 80)]
    assert (first.bubble.ratio, first.bubble.share) == (100 / 80, 100 / 200)
    assert [[comm.count for comm in rank.comms] for step in (first, second) for rank in step.ranks] == [
        *([1], [1]),
        *([1], []),
    ]
    assert [len(rank.ops) for step in (first, second) for rank in step.ranks] == [2, 1, 1, 1]
    assert [rank.ops[0].start_ns for step in (first, second) for rank in step.ranks] == [0, 40, 200, 205]


def test_a_bubble_is_known_where_all_ranks_of_the_mesh_know_theirs() -> None:
    ideal = Ideal(0.5, 0.25, ())
    whole, _ = steps_of(run_of(OPS_OF_TWO), ideal=ideal)
    assert (whole.bubble.ideal_ratio, whole.bubble.ideal_share) == (0.5, 0.25)
    assert [rank.ideal for rank in whole.ranks] == [None, None], "the plan has fewer ranks than the pipeline"
    three = MeshInfo(3, 3, 1, 1, 1, 1, 1, pipelines=((0, 1, 2),))
    partly, _ = steps_of(run_of(OPS_OF_TWO), three)
    assert [rank.bubble_ns for rank in partly.ranks] == [30, 90]
    assert (partly.bubble.ratio, partly.bubble.share) == (None, None)
    unknown, _ = steps_of(run_of(OPS_OF_TWO, [comm(1, 4, 10, 30, 40, match=-1, peer=0)]))
    assert [rank.bubble_ns for rank in unknown.ranks] == [30, None]
    assert unknown.bubble.ratio is None
    empty = steps_of(run_of([op(0, 1, "F", 5, 5), op(1, 1, "F", 5, 5)]))[0]
    assert (empty.span_ns, empty.bubble.ratio, empty.bubble.share) == (0, None, None)
    (half_empty,) = steps_of(run_of([op(0, 1, "F", 0, 30), op(1, 1, "F", 10, 10)]))
    assert (half_empty.bubble.ratio, half_empty.bubble.share) == (30 / 30, 30 / 60)


def test_replicas_are_summed_and_the_longest_is_the_span() -> None:
    """Pipelines of ranks 1 and 0, and of 2 and 3."""
    mesh = MeshInfo(4, 2, 1, 1, 1, 2, 1, pipelines=((1, 0), (2, 3)))
    rows = [op(1, 0, "F", 0, 10), op(0, 0, "F", 10, 30), op(2, 0, "F", 5, 15), op(3, 0, "F", 40, 50)]
    (step,) = steps_of(run_of(rows), mesh, ideal_of(build("gpipe", 2, 2)))
    assert (step.start_ns, step.end_ns, step.span_ns) == (0, 50, 45)
    assert [rank.rank for rank in step.ranks] == [0, 1, 2, 3]
    assert [rank.pp_rank for rank in step.ranks] == [1, 0, 0, 1]
    assert step.bubble.ratio == (20 + 10 + 35 + 35) / 50
    assert step.bubble.share == 100 / (30 + 30 + 45 + 45)
    assert [rank.ideal for rank in step.ranks] == [
        ideal_of(build("gpipe", 2, 2)).ranks[place] for place in (1, 0, 0, 1)
    ]


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (3, 3), (1, 2)])
def test_the_ideal_of_each_rank_of_1f1b_in_closed_form(p: int, m: int) -> None:
    """Of 3m of compute each rank waits 3(p − 1); rank r begins r later than the first and ends 2r earlier."""
    ideal = ideal_of(build("1f1b", p, m))
    assert (ideal.ratio, ideal.share) == pytest.approx(((p - 1) / m, (p - 1) / (m + p - 1)))
    for r, rank in enumerate(ideal.ranks):
        inner = 3 * (p - 1 - r)
        expected = (p - 1) / m, (p - 1) / (m + p - 1), inner / (3 * m), inner / (inner + 3 * m)
        assert (rank.ratio, rank.share, rank.own_ratio, rank.own_share) == pytest.approx(expected)


def test_where_clocks_do_not_compare_a_rank_has_a_window_of_its_own_ops_in_each_step() -> None:
    """Step 4 lasts 100 and may be off by 30, which compares; step 6 lasts 40."""
    data = run_of(OPS_OF_TWO, COMMS_OF_TWO, clock=replace(ONE_CLOCK, uncertainty_ns=30))
    first, second = steps_of(data)
    assert [partition(rank) for rank in first.ranks] == [(100, 70, 10, 20), (100, 10, 10, 80)]
    assert [partition(rank) for rank in second.ranks] == [(10, 10, None, None), (35, 35, None, None)]
    assert (second.start_ns, second.end_ns, second.span_ns) == (200, 240, None)
    (seen,) = second.ranks[0].comms
    assert (seen.count, seen.total_ns, seen.wait_ns, seen.exposed_ns, seen.algbw_gbps) == (1, 15, None, None, None)
    assert first.ranks[0].comms[0].wait_ns == 10
    exact = replace(ONE_CLOCK, uncertainty_ns=20)
    assert steps_of(run_of(OPS_OF_TWO, COMMS_OF_TWO, clock=exact))[1].span_ns == 40, "half of a step is enough"


def test_an_uncertain_bubble_is_bounded_by_what_the_matched_messages_may_have_waited() -> None:
    """Each end may be off by the clocks of both sides: 2 × 3 ns for each of two messages, and no more than there is."""
    unmatched = comm(0, 4, 31, 31, 33, match=-1, peer=1)
    comms = [comm(0, 4, 35, 45, 55), comm(0, 4, 55, 56, 59), unmatched]
    (rank, _) = steps_of(run_of(OPS_OF_TWO, comms, clock=replace(ONE_CLOCK, uncertainty_ns=3)))[0].ranks
    assert partition(rank) == (100, 70, None, None)
    assert bounds(rank) == (30, 30 - 20 - 4 - 2, 30 - 10 - 3 + 2 * 2 * 3)
    (wide, _) = steps_of(run_of(OPS_OF_TWO, comms, clock=replace(ONE_CLOCK, uncertainty_ns=9)))[0].ranks
    assert bounds(wide)[2] == 30


def test_alone_in_its_pipeline_a_rank_without_messages_may_have_waited_or_not() -> None:
    """With messages the least bubble is what no communication covers; the clock of one rank compares with itself."""
    ops = [op(1, 4, "F", 0, 30), op(1, 4, "B", 60, 100)]
    for comms, expected in (
        ([], (30, 0, 30)),
        ([comm(1, 4, 35, 40, 55, match=-1, peer=0)], (30, 10, 30)),
        ([comm(1, 4, 35, 40, 55, match=-1, axis="unknown", peer=0)], (30, 10, 30)),
        ([comm(1, 4, 35, 40, 55, match=-1, axis="cp", peer=0)], (30, 0, 30)),
        ([comm(1, 4, 35, 40, 55, kind="all_reduce", axis="dp", group_size=1)], (30, 0, 15)),
        ([comm(1, 9, 35, 40, 55, match=-1, peer=0)], (30, 0, 30)),
    ):
        ((rank,),) = [step.ranks for step in steps_of(run_of(ops, comms, lacking=[1])) if step.step == 4]
        assert (rank.exposed_comm_ns, rank.bubble_ns) == (None, None)
        assert bounds(rank) == expected


def test_two_ranks_of_three_that_compare_know_their_bubble_without_the_third() -> None:
    three = MeshInfo(3, 3, 1, 1, 1, 1, 1, pipelines=((0, 1, 2),))
    (first, _) = steps_of(run_of(OPS_OF_TWO, COMMS_OF_TWO, lacking=[0, 1]), three)
    assert [rank.bubble_ns for rank in first.ranks] == [20, 80]
    apart = replace(ONE_CLOCK, method=ClockMethod.NONE)
    (first, _) = steps_of(run_of(OPS_OF_TWO, clock=apart, lacking=[0]), three)
    assert [bounds(rank) for rank in first.ranks] == [(30, 0, 30), (0, 0, 0)]
    (first, _) = steps_of(run_of(OPS_OF_TWO, clock=apart, lacking=[]), three)
    assert [bounds(rank) for rank in first.ranks] == [(30, 30, 30), (0, 0, 0)]
    (first, _) = steps_of(run_of(OPS_OF_TWO, COMMS_OF_TWO, clock=apart), three)
    assert bounds(first.ranks[0]) == (30, 10, 30), "waiting and transfer cannot be distinguished"


def test_a_rank_whose_device_was_not_recorded_shows_no_times() -> None:
    (first, _) = steps_of(run_of(OPS_OF_TWO, COMMS_OF_TWO, missing=[1]))
    seen, unseen = first.ranks
    assert partition(unseen) == (10, None, None, None)
    assert bounds(unseen) == (None, None, None)
    assert bounds(seen)[0] == seen.window_ns - 70
    (call,) = unseen.comms
    assert (call.count, call.bytes, call.total_ns, call.wait_ns, call.busbw_gbps) == (1, 10, None, None, None)


def test_phases_of_a_step_with_an_untagged_op_are_left_out_and_the_others_have_their_bubbles() -> None:
    rows = [
        *(op(0, 4, "F", 0, 30, phase="warmup"), op(0, 4, "F", 40, 50), op(0, 4, "B", 90, 100, phase="cooldown")),
        *(op(0, 6, "F", 200, 230), op(0, 6, "B", 240, 250, phase=""), op(0, 8, "F", 300, 330)),
    ]
    first, second, third = (step.ranks[0].phases for step in steps_of(run_of(rows), ALONE))
    assert {name: (p.start_ns, p.end_ns, p.bubble_ns) for name, p in first.items()} == {
        "warmup": (0, 40, 10),
        "steady": (40, 50, 0),
        "cooldown": (50, 100, 40),
    }
    assert [(p.num_forward, p.num_backward) for p in first.values()] == [(1, 0), (1, 0), (0, 1)]
    assert second == {}
    assert third["steady"].end_ns == 330


def test_the_stage_of_a_step_is_the_lowest_that_is_known() -> None:
    rows = [
        *(op(0, 1, "F", 0, 1, stage=5), op(0, 1, "F", 1, 2, stage=2), op(0, 1, "F", 2, 3, stage=-1)),
        *(op(0, 2, "F", 10, 11, stage=-1), op(0, 3, "F", 20, 21, stage=0), op(0, 3, "F", 21, 22, stage=4)),
    ]
    steps = steps_of(run_of(rows), ALONE)
    assert [step.ranks[0].stage for step in steps] == [2, None, 0]


def test_other_ranges_are_summed_and_peak_memory_is_that_of_the_steps_own_range() -> None:
    rows = [
        *(*OPS_OF_TWO, op(0, 4, "STEP", 0, 120), op(0, 4, "STEP", 130, 140), op(0, 4, "OPTIMIZER", 100, 110)),
        *(op(0, 4, "OPTIMIZER", 111, 113), op(0, 5, "OPTIMIZER", 150, 190), op(0, 6, "GRAD_SYNC", 210, 217)),
        op(1, 6, "STEP", 300, 400),
    ]
    samples = [memory(0, 0, 5), memory(0, 125, 70), memory(0, 140, 80), memory(0, 141, 999), memory(1, 299, 999)]
    first, second = steps_of(run_of(rows, samples=samples))
    assert [rank.spans for rank in first.ranks] == [{"OPTIMIZER": 12, "STEP": 130}, {}]
    assert [rank.spans for rank in second.ranks] == [{"GRAD_SYNC": 7}, {"STEP": 100}]
    assert [rank.peak_memory_bytes for step in (first, second) for rank in step.ranks] == [80, None, None, None]
    more = [*samples, memory(1, 300, 7), memory(1, 400, 6)]
    assert steps_of(run_of(rows, samples=more))[1].ranks[1].peak_memory_bytes == 7


def test_other_ranges_are_listed_by_kind() -> None:
    kinds = ["DATA", "EVAL", "GRAD_SYNC", "LOSS", "OPTIMIZER", "SAVE", "STEP"]
    rows = [op(0, step, kind, 100 * step, 100 * step + 9) for step in range(9) for kind in ("F", *reversed(kinds))]
    for step in steps_of(run_of(rows), ALONE):
        assert list(step.ranks[0].spans) == kinds


def test_what_a_rank_should_have_communicated_is_beside_what_it_did() -> None:
    of_step = {("pp", "recv"): 70, ("pp", "send"): 80}
    prediction = RankPrediction(((range(1, 2), of_step),), MemoryParts(1, 1, 1, None, {}, "unknown"))
    data = replace(run_of(OPS_OF_TWO, COMMS_OF_TWO), predicted={0: prediction, 1: prediction})
    for step in steps_of(data):
        for rank in step.ranks:
            expected = {"recv": 70, "send": 80} if step.step == 1 else {comm.kind: None for comm in rank.comms}
            assert {comm.kind: comm.predicted_bytes for comm in rank.comms} == expected
    assert [comm.predicted_bytes for comm in steps_of(run_of(OPS_OF_TWO, COMMS_OF_TWO))[0].ranks[0].comms] == [None]


def test_a_step_has_a_waterfall_where_every_op_of_the_plan_was_measured_were_it_for_no_time() -> None:
    """Forwards of 0 and 6 and backwards of 10 and 14 on one rank, with 5 between them; in step 2 a backward is missing."""
    plan = build("1f1b", 1, 2)
    rows = [
        op(0, 1, "F", 0, 0, microbatch=0),
        op(0, 1, "B", 0, 10, microbatch=0),
        op(0, 1, "F", 15, 21, microbatch=1),
        op(0, 1, "B", 21, 35, microbatch=1),
    ]
    missing = [row | {"step": 2} for row in rows[:3]]
    foreign = op(0, 1, "W", 30, 33, microbatch=7)
    data = run_of([*rows, foreign, *missing])
    first, second = (PlannedStep((window,), plan) for window in step_windows(data.ops, ALONE))
    (whole, partly, unplanned), _ = report_steps([first, second, replace(first, plan=None)], data, ALONE)
    assert whole.bubble.waterfall_ns == parts_ns(30, host=5)
    assert partly.bubble.waterfall_ns is None
    assert unplanned.bubble.waterfall_ns is None


def test_steps_have_waterfalls_where_all_their_pipelines_compare() -> None:
    """Two replicas, one of them in 40 ns; the clocks may be off by 30, or by 20, with which the longer one is attributed."""
    mesh = MeshInfo(2, 1, 1, 1, 1, 2, 1, pipelines=((0,), (1,)))
    plan = build("1f1b", 1, 1)
    rows = [op(0, 1, "F", 0, 60, stage=0), op(0, 1, "B", 60, 100, stage=0)]
    rows += [op(1, 1, "F", 0, 30, stage=0), op(1, 1, "B", 30, 40, stage=0)]
    for uncertainty, fall in ((30, None), (20, parts_ns(40, host=0, straggler=60))):
        data = run_of(rows, clock=replace(ONE_CLOCK, uncertainty_ns=uncertainty))
        (step,), _ = report_steps([PlannedStep(step_windows(data.ops, mesh), plan)], data, mesh)
        assert step.bubble.waterfall_ns == fall


def test_the_waterfall_has_the_transfers_of_both_directions_that_were_matched() -> None:
    """One microbatch over two ranks, ops of 10; the activation moves for 20, its gradient for 5."""
    plan = build("1f1b", 2, 1)
    rows = [op(0, 1, "F", 0, 10), op(1, 1, "F", 30, 40), op(1, 1, "B", 40, 50), op(0, 1, "B", 55, 65)]
    forward = comm(1, 1, 10, 10, 30, direction="F", stage=1)
    backward = comm(0, 1, 50, 50, 55, direction="B", stage=0)
    for comms, communication, host in (
        ([forward, backward], 25, 0),
        ([forward], 20, None),  # what is not known to be late is unexplained
        ([backward], 5, None),
        ([forward | {"match": -1}, backward | {"kind": "send"}], 5, None),  # a send that its rank waited for
        ([forward | {"microbatch": 4}, backward | {"stage": 1}], 25, None),  # not the plan's, and exposed all the same
        ([forward | {"asked_ns": 28}, backward | {"asked_ns": 60}], 2, 23),
    ):
        data = run_of(rows, comms)
        (step,), _ = report_steps([PlannedStep(step_windows(data.ops, TWO), plan)], data, TWO)
        assert step.bubble.waterfall_ns == parts_ns(
            20, 20, communication=communication, host=host, unexplained=25 - communication - (host or 0)
        )
