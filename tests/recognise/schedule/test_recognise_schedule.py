"""The schedule that unmarked ops follow, and where they leave it."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import pytest

from pptrace.model.mesh import MeshInfo
from pptrace.model.schedule_info import PlanSource, ScheduleInfo
from pptrace.model.tables import COMPUTE_KINDS, OPS
from pptrace.recognise.groups.mesh import mesh_from_stages
from pptrace.recognise.schedule.recognise_schedule import recognise_schedule
from pptrace.schedule.actions import parse_action
from pptrace.schedule.registry import build
from pptrace.schedule.text import to_rows
from tests.support.tables import named, table_of

Rows = list[list[str]]


def ops_of(steps: Sequence[Rows], ranks: Sequence[int] | None = None) -> pd.DataFrame:
    """Ops in the order of the cells, a nanosecond each; ``ranks`` are those of the rows."""
    rows = []
    for step, cells in enumerate(steps):
        for position, row in enumerate(cells):
            for index, cell in enumerate(row):
                action, at = parse_action(cell), 1000 * step + index
                rank = position if ranks is None else ranks[position]
                rows.append((rank, step, action.stage, action.kind.value, action.microbatch, at, at + 1))
    return table_of(OPS, named("rank step stage kind microbatch start_ns end_ns", rows), -1)


def mesh_of(ops: pd.DataFrame, num_ranks: int) -> MeshInfo:
    compute = ops[ops["kind"].isin(COMPUTE_KINDS)]
    return mesh_from_stages({rank: frozenset(rows["stage"]) for rank, rows in compute.groupby("rank")}, num_ranks)


def recognised(steps: Sequence[Rows], ranks: Sequence[int] | None = None, num_ranks: int = 4) -> ScheduleInfo:
    ops = ops_of(steps, ranks)
    return recognise_schedule(ops, mesh_of(ops, num_ranks), [], None)


def swapped(rows: Rows, rank: int, index: int) -> Rows:
    changed = [list(row) for row in rows]
    changed[rank][index : index + 2] = reversed(changed[rank][index : index + 2])
    return changed


def test_one_rank_that_leaves_the_order_leaves_the_schedule_its_name() -> None:
    rows = to_rows(build("1f1b", 4, 8))
    run = recognised([swapped(rows, 2, 13)] * 2)
    assert (run.name, run.plan) == ("1f1b", build("1f1b", 4, 8))
    assert run.mismatches == ("rank 2: op 14 is 2B6 where 1f1b has 2F7",)


@pytest.mark.parametrize(("num_other", "lost"), [(3, 0), (4, 1)])
def test_replicas_with_other_numbers_of_microbatches_have_no_plan_and_those_that_lack_an_op_have_it(
    num_other: int, lost: int
) -> None:
    first, second = to_rows(build("1f1b", 2, 4)), to_rows(build("1f1b", 2, num_other))
    second[1] = second[1][: len(second[1]) - lost]
    of_ranks = [first[0], second[0], first[1], second[1]]  # ranks 0 and 2 are one pipeline, 1 and 3 the other
    run = recognised([of_ranks] * 2)
    if lost:
        assert run.plan == build("1f1b", 2, 4)
        return
    assert (run.plan, run.mismatches) == (None, ())
    assert run.warnings == ("no schedule recognised: pipelines run different numbers of microbatches in step 0, 1",)


@pytest.mark.parametrize("num_microbatches", [3, 6])
def test_backwards_from_the_last_microbatch_to_the_first_are_no_other_schedule(num_microbatches: int) -> None:
    order = range(num_microbatches)
    rows = [[f"{stage}F{mb}" for mb in order] + [f"{stage}B{mb}" for mb in reversed(order)] for stage in range(4)]
    run = recognised([rows, rows])
    assert (run.name, run.mismatches) == ("gpipe", ())
    assert to_rows(run.plan) == rows
    assert run.warnings == ("the run follows gpipe, but its backwards run the microbatches in the opposite order",)
    usual = {action.key: action.phase for row in build("gpipe", 4, num_microbatches).ranks for action in row}
    assert {action.key: action.phase for row in run.plan.ranks for action in row} == usual
    fewer = [[cell for cell in row if not cell.endswith("2")] for row in rows]
    if num_microbatches == 3:
        assert recognised([rows, rows, fewer]).mismatches == ()


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved-1f1b", 2)])
@pytest.mark.parametrize("absent", [1, 2])
def test_a_rank_without_a_trace_does_not_hide_the_schedule(name: str, chunks: int, absent: int) -> None:
    rows = to_rows(build(name, 4, 8, chunks))
    present = [rank for rank in range(4) if rank != absent]
    run = recognised([[rows[rank] for rank in present]], present)
    assert (run.name, run.mismatches) == (name, ())
    assert (run.plan.pp, run.plan.num_microbatches, run.plan.num_chunks) == (4, 8, chunks)


def test_a_trace_that_ends_early_keeps_the_schedule_without_mismatches() -> None:
    rows = to_rows(build("1f1b", 4, 8))
    run = recognised([[row[: 14 - rank] for rank, row in enumerate(rows)]])
    assert (run.name, run.mismatches) == ("1f1b", ())


def test_steps_of_evaluation_are_not_compared_and_alone_make_no_schedule() -> None:
    rows = to_rows(build("1f1b", 2, 4))
    evaluation = [[cell for cell in row if "F" in cell] for row in rows]
    run = recognised([rows, evaluation], num_ranks=2)
    assert (run.name, run.mismatches) == ("1f1b", ())
    assert any("step 1 has forwards only" in line for line in run.warnings)
    alone = recognised([evaluation], num_ranks=2)
    assert (alone.name, alone.plan) == ("unknown", None)
    assert "forwards only" in alone.warnings[0]


@pytest.mark.parametrize("wanted", [None, "1f1b"])
def test_steps_of_evaluation_are_no_deviation_from_a_plan_that_the_run_declares(wanted: str | None) -> None:
    rows = to_rows(build("1f1b", 2, 4))
    evaluation = [[cell for cell in row if "F" in cell] for row in rows]
    ops = ops_of([rows, evaluation, rows, [*evaluation[:1], evaluation[1][:2]]])
    plan = {"plan": {"name": "1f1b", "rows": rows}}
    run = recognise_schedule(ops, mesh_of(ops, 2), [plan], wanted)
    assert (run.name, run.mismatches) == ("1f1b", ())
    assert run.warnings == ("step 1, 3 has forwards only, as in evaluation: not compared with the schedule",)
    declared = {"plan": {"name": "custom", "rows": evaluation}}
    assert recognise_schedule(ops, mesh_of(ops, 2), [declared], None).mismatches != ()
    alone = ops_of([evaluation, evaluation])
    assert recognise_schedule(alone, mesh_of(alone, 2), [declared], None).mismatches == ()
    swapped_evaluation = recognise_schedule(ops_of([swapped(evaluation, 1, 2)]), mesh_of(alone, 2), [declared], None)
    assert swapped_evaluation.mismatches == ("rank 1: op 3 is 1F3 where custom has 1F2",)


def test_an_order_of_ones_own_is_custom_and_says_what_is_nearest() -> None:
    rows = [[f"{rank}{kind}{b}" for kind in "FB" for b in (3, 1, 0, 2)] for rank in range(2)]
    run = recognised([rows], num_ranks=2)
    assert (run.name, run.plan is None) == ("custom", False)
    assert "no known schedule" in run.warnings[0]


def test_an_order_of_ones_own_has_no_plan_for_another_number_of_microbatches() -> None:
    long = [[f"{rank}{kind}{b}" for kind in "FB" for b in (3, 1, 0, 2)] for rank in range(2)]
    short = [[f"{rank}{kind}{b}" for kind in "FB" for b in (1, 0)] for rank in range(2)]
    run = recognised([long, short], num_ranks=2)
    assert (run.name, run.mismatches, run.plan_of(1)) == ("custom", (), None)
    assert run.plan_of(0) == run.plan
    assert any(
        "step 1 has another number of microbatches, for which custom has no plan" in line for line in run.warnings
    )


def test_a_rank_that_leaves_a_step_with_another_number_of_microbatches_is_named() -> None:
    long, short = (to_rows(build("1f1b", 4, m)) for m in (8, 5))
    run = recognised([long, swapped(short, 1, 5)])
    assert run.mismatches == ("rank 1: op 6 is 1F4 where 1f1b has 1B1 (in step 1)",)
    assert run.plan_of(1) == build("1f1b", 4, 5)


def test_a_rank_in_an_order_of_its_own_without_the_others_makes_no_schedule_and_says_why() -> None:
    run = recognised([[["1F1", "1F0", "1B0", "1B1"]]], [1])
    assert (run.plan, run.name, run.source) == (None, "unknown", PlanSource.NONE)
    (line,) = run.warnings
    assert "stage 0 has no action though stage 1 has" in line
    assert "the closest" in line


def test_ops_of_the_optimizer_alone_make_no_schedule() -> None:
    ops = ops_of([[["0F0"]]]).assign(kind="OPTIMIZER", stage=-1, microbatch=-1)
    schedule = recognise_schedule(ops, mesh_of(ops, 1), [], None)
    assert (schedule.name, schedule.plan, schedule.warnings) == ("unknown", None, ())


@pytest.mark.parametrize("ranks", [(0, 2, 3), (8, 24, 32)])
def test_the_rank_that_is_missing_in_a_pipeline_has_the_number_between_the_others(ranks: tuple[int, ...]) -> None:
    mesh = mesh_from_stages(dict(zip(ranks, map(frozenset, ([0], [2], [3])), strict=True)), 4)
    between = ranks[0] + (ranks[1] - ranks[0]) // 2
    assert mesh.pipelines == ((ranks[0], between, ranks[1], ranks[2]),)


def test_a_step_that_lacks_its_last_backward_has_no_number_of_microbatches_of_its_own() -> None:
    long, short = (to_rows(build("1f1b", 4, m)) for m in (8, 5))
    assert recognised([long, [row[:-1] for row in short]]).plan_by_step == {}
