"""The table of a plan against its actions, its messages and its order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given

from pptrace.schedule.actions import Action, Kind, Phase
from pptrace.schedule.lower import lower
from pptrace.schedule.messages import crosses_ranks, message_of_op
from pptrace.schedule.needs import Output
from pptrace.schedule.plan import Plan
from pptrace.schedule.plan_table import PlanTable
from pptrace.schedule.registry import SCHEDULES, build
from pptrace.schedule.text import from_rows
from tests.schedule.shapes import legal_shapes, plans


def actions_of(plan: Plan) -> list[tuple[int, int, Action]]:
    """(rank, position, action) of each row."""
    return [(rank, index, action) for rank in range(plan.pp) for index, action in enumerate(plan.compute_actions(rank))]


def slot_of(plan: Plan, half: Action) -> int:
    outputs = {Kind.F: Output.FORWARD, Kind.B: Output.BACKWARD, Kind.I: Output.BACKWARD, Kind.W: Output.WEIGHT_GRAD}
    return (half.stage * plan.num_microbatches + half.microbatch) * 3 + outputs[half.kind]


def needed_actions(plan: Plan, action: Action) -> Iterator[tuple[Action, bool]]:
    """Yield what an action needs, and whether a message brings it: from the plan's messages and what a backward reads at home."""
    for half in action.halves:
        if half.kind in (Kind.B, Kind.I):
            yield plan.by_key[Kind.F, half.stage, half.microbatch][1], False
        if half.kind is Kind.W:
            yield plan.by_key[Kind.I, half.stage, half.microbatch][1], False
        if message := message_of_op(plan, half, sends=False):
            keys = [(kind, message.source_stage, half.microbatch) for kind in message.direction.producers]
            yield next(plan.by_key[key][1] for key in keys if key in plan.by_key), crosses_ranks(plan, message)


def rows_needed(table: PlanTable, row: int) -> list[int]:
    return table.dep[table.dep_ptr[row] : table.dep_ptr[row + 1]].tolist()


@pytest.mark.parametrize("name", SCHEDULES)
def test_columns_and_slots_of_every_schedule_are_those_of_its_actions(name: str) -> None:
    for shape in list(legal_shapes(name, max_pp=4, rounds=2))[::2]:
        plan = build(name, *shape)
        table = plan.table
        rows = actions_of(plan)
        assert len(table) == len(rows)
        assert table.kind.tolist() == [list(Kind).index(action.kind) for _, _, action in rows]
        assert table.phase.tolist() == [list(Phase).index(action.phase) for _, _, action in rows]
        for column in ("stage", "microbatch", "chunk"):
            assert getattr(table, column).tolist() == [getattr(action, column) for _, _, action in rows]
        assert table.rank.tolist() == [rank for rank, _, _ in rows]
        assert table.position.tolist() == [position for _, position, _ in rows]
        assert table.rank_ptr.tolist() == np.cumsum([0, *map(len, plan.ranks)]).tolist()
        filled = {slot_of(plan, half): row for row, (_, _, action) in enumerate(rows) for half in action.halves}
        assert sum(len(action.halves) for _, _, action in rows) == len(filled)  # no two ops share a slot
        assert {slot: row for slot, row in enumerate(table.slot_to_row.tolist()) if row >= 0} == filled
        assert table.slot.tolist() == [slot_of(plan, action.halves[0]) for _, _, action in rows]
        second = [slot_of(plan, action.halves[1]) if action.parts else -1 for _, _, action in rows]
        assert table.second_slot.tolist() == second
        halves = [action.halves[1] if action.parts else None for _, _, action in rows]
        assert table.second_kind.tolist() == [-1 if half is None else half.kind.code for half in halves]
        assert table.second_stage.tolist() == [-1 if half is None else half.stage for half in halves]


@pytest.mark.parametrize("name", SCHEDULES)
def test_dependencies_of_every_schedule_are_its_messages_and_what_a_backward_reads_of_its_own_stage(name: str) -> None:
    for shape in list(legal_shapes(name, max_pp=4, rounds=2))[::2]:
        plan = build(name, *shape)
        table, message = plan.table, 0
        for row, (_, _, action) in enumerate(actions_of(plan)):
            needed = list(needed_actions(plan, action))
            slots = [slot_of(plan, half) for half, _ in needed]
            begin, end = table.dep_ptr[row], table.dep_ptr[row + 1]
            assert sorted(table.dep_slot[begin:end].tolist()) == sorted(slots)
            assert rows_needed(table, row) == table.slot_to_row[table.dep_slot[begin:end]].tolist()
            brought = {slot for slot, (_, is_message) in zip(slots, needed, strict=True) if is_message}
            for index in range(begin, end):
                assert table.dep_is_message[index] == (table.dep_slot[index] in brought)
                if table.dep_is_message[index]:
                    assert table.dep_message[index] == table.slot_to_message[table.dep_slot[index]] == message
                    message += 1
        assert table.num_messages == message == np.count_nonzero(table.slot_to_message >= 0)


@given(plans())
def test_a_level_is_one_more_than_the_highest_that_a_row_needs_or_follows(plan: Plan) -> None:
    table = plan.table
    level = table.level.tolist()
    for row in range(len(table)):
        before = [level[row - 1]] if table.position[row] else []
        assert level[row] == 1 + max([level[needed] for needed in rows_needed(table, row)] + before, default=-1)
    assert table.is_runnable
    by_level = [table.order[table.level_ptr[index] : table.level_ptr[index + 1]] for index in range(table.num_levels)]
    assert np.concatenate(by_level).tolist() == sorted(range(len(table)), key=lambda row: (level[row], row))
    assert all(set(table.level[rows].tolist()) == {index} for index, rows in enumerate(by_level))


@given(plans(max_pp=3))
def test_sends_and_receives_are_not_in_the_table(plan: Plan) -> None:
    lowered = lower(plan).table
    for column in ("kind", "stage", "microbatch", "dep", "dep_message", "level", "rank_ptr", "position"):
        assert getattr(lowered, column).tolist() == getattr(plan.table, column).tolist()


def test_rows_of_measured_ops_are_looked_up_by_kind_stage_and_microbatch() -> None:
    table = build("dualpipe", 2, 4).table
    pair = int(np.flatnonzero(table.second_slot >= 0)[0])
    backward = divmod(int(table.second_slot[pair]) // 3, 4)
    kinds = [Kind.F.code, Kind.OVERLAP_F_B.code, Kind.B.code, Kind.SEND_F.code, Kind.F.code, Kind.F.code, -1, 99]
    stages = [table.stage[pair], table.stage[pair], backward[0], 0, 4, -1, 0, 0]
    microbatches = [table.microbatch[pair], table.microbatch[pair], backward[1], 0, 0, 0, 0, 0]
    assert table.rows_of(kinds, stages, microbatches).tolist() == [pair, pair, pair, -1, -1, -1, -1, -1]
    assert table.rows_of([Kind.F.code], [0], [-1]).tolist() == [-1]
    assert build("1f1b", 2, 4).table.rows_of([Kind.W.code], [0], [0]).tolist() == [-1]  # its plan has no W


def test_of_an_action_that_a_measured_order_has_twice_readers_need_the_first() -> None:
    plan = from_rows([["0F0", "0F1", "0F0", "0B1", "0B0"], ["1F0", "1B0", "1F1", "1B1"]], "custom")
    table = plan.table
    assert table.slot_to_row[slot_of(plan, Action(Kind.F, 0, 0))] == 0
    assert rows_needed(table, 5) == [0]  # 1F0
    assert rows_needed(table, 4) == [0, 6]  # 0B0


def test_of_an_op_that_is_also_a_half_of_a_pair_the_first_row_counts() -> None:
    pair = "(0F1;0B0)OVERLAP_F_B"
    for row, filling in ((["0F0", pair, "0F1", "0B1", "0B0"], (1, 1)), (["0F0", "0F1", "0B0", pair, "0B1"], (1, 2))):
        table = from_rows([row], "custom").table
        slots = table.slots_of([Kind.F.code, Kind.B.code], [0, 0], [1, 0])
        assert tuple(table.slot_to_row[slots].tolist()) == filling
        assert table.slot_kind[slots].tolist() == [Kind.F.code, Kind.B.code]


def test_slots_are_those_of_the_stages_microbatches_and_outputs_of_the_plan_alone() -> None:
    """Two stages of three microbatches with three outputs each: 18 slots."""
    table = build("zb-h1", 2, 3).table
    kinds = {Kind.F: 0, Kind.B: 1, Kind.I: 1, Kind.W: 2, Kind.OVERLAP_F_B: 0}
    for kind in Kind:
        for stage, microbatch in ((0, 0), (1, 2), (-1, 0), (2, 0), (0, -1), (0, 3)):
            is_known = kind in kinds and 0 <= stage < 2 and 0 <= microbatch < 3
            expected = (stage * 3 + microbatch) * 3 + kinds[kind] if is_known else -1
            assert table.slots_of(kind.code, stage, microbatch) == expected
    assert [int(table.slots_of(code, 0, 0)) for code in (-1, len(Kind), 99)] == [-1] * 3
    assert len(table.slot_to_row) == 18


def test_rows_that_wait_for_ever_have_no_level() -> None:
    deadlock = from_rows([["0F0", "0B0", "0F1", "0B1"], ["1F1", "1B1", "1F0", "1B0"]], "custom").table
    assert deadlock.level.tolist() == [0, -1, -1, -1, -1, -1, -1, -1]
    assert deadlock.order.tolist() == [0]
    assert not deadlock.is_runnable
    lacking = from_rows([["0F0", "0B0", "0F1"], ["1F0", "1F1", "1B1"]], "custom").table
    assert lacking.level.tolist() == [0, -1, -1, 1, -1, -1]
    assert rows_needed(lacking, 1) == [0, -1]


def test_a_pair_waits_for_the_later_of_the_inputs_of_its_halves() -> None:
    """1F1 reads what rank 0 sends, 1B0 what rank 2 sends; either is late once."""
    pair = "(1F1;1B0)OVERLAP_F_B"
    circular = from_rows([["0F0", "0F1"], ["1F0", pair], ["2F0", "2F1", "2B1", "2B0"]], "custom")
    assert circular.table.level[3] == -1  # 2F1 needs the pair itself
    gradient = from_rows([["0F0", "0F1"], ["1F0", pair], ["2F0", "2B0", "2F1"]], "custom").table
    assert gradient.level.tolist() == [0, 1, 1, 4, 2, 3, 5]
    activation = from_rows([["0F0", "0F2", "0F3", "0F4", "0F5", "0F1"], ["1F0", pair], ["2F0", "2B0"]], "custom").table
    assert activation.level.tolist() == [0, 1, 2, 3, 4, 5, 1, 6, 2, 3]


def test_an_action_that_needs_a_later_one_of_its_rank_never_runs() -> None:
    assert from_rows([["0B0", "0F0"]], "custom").table.level.tolist() == [-1, -1]


def test_the_number_of_chunks_is_that_of_the_rank_with_most_stages() -> None:
    plan = from_rows([["0F0", "2F0", "2B0", "0B0"], ["1F0", "1B0"]], "uneven")
    assert (plan.placement, plan.num_chunks) == ((0, 1, 0), 2)
