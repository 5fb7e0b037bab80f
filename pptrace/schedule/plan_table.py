"""A plan as columns: one row per compute action, with slots to look rows up by, dependencies, and levels.

Everything that an action can wait for, and everything that a measured op can be, has a *slot*:
(stage · m + microbatch) · 3 + {forward, backward, weight gradient}, where the backward is that of a B or an I. An overlapped
pair has the slots of both of its halves.

The dependencies are those of :mod:`pptrace.schedule.needs`. Besides them, a rank runs its actions one after the other. A row's
*level* is the length of the longest chain of both that leads to it, so that the rows of a level are of different ranks and
need rows of lower levels alone: a replay can time them all at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.needs import NEEDS, OUTPUT_OF, Output, neighbour

if TYPE_CHECKING:
    from pptrace.schedule.plan import Plan
    from pptrace.schedule.replay_program import Program

Int8 = npt.NDArray[np.int8]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

NONE = -1
"""Code of no row, no slot, no message, no level."""

_MOST_NEEDS = max(map(len, NEEDS.values()))


@dataclass(frozen=True, eq=False)
class PlanTable:
    """The compute actions of a plan, rank by rank in order of execution: the rows of rank r are ``rank_ptr[r]:rank_ptr[r + 1]``.

    ``kind`` and ``phase`` are codes (:attr:`pptrace.schedule.actions.Kind.code`); ``position`` counts the compute actions of a
    rank. ``stage``, ``microbatch`` and ``chunk`` of an overlapped pair are those of its forward.

    ``slot`` is what a row fills, and ``second_slot`` what the backward half of a pair fills, of which ``second_kind`` and
    ``second_stage`` are kind and stage (−1: no pair). ``slot_to_row`` is the reverse, −1 for a slot that no row fills; of a slot
    that several rows fill (a measured order may), the first. ``slot_kind`` is the kind of what fills it, of a pair that of
    the half.

    ``dep[dep_ptr[i]:dep_ptr[i + 1]]`` are the rows that row i needs, −1 for one that the plan lacks, and ``dep_slot`` the
    slots by which it needs them. ``dep_message`` numbers the dependencies on other ranks, in the order of ``dep``; −1 is one
    on the row's own rank. ``slot_to_message`` is the message that brings a slot's output to its reader.

    ``order`` has the rows of level l at ``level_ptr[l]:level_ptr[l + 1]``, by rank: a topological order. A row that can never
    run, because it or a row before it waits for ever, has level −1 and is not in it.
    """

    pp: int
    num_stages: int
    num_microbatches: int
    kind: Int8
    stage: Int32
    microbatch: Int32
    chunk: Int32
    phase: Int8
    rank: Int32
    position: Int32
    rank_ptr: Int32
    slot: Int32
    second_slot: Int32
    second_kind: Int8
    second_stage: Int32
    slot_to_row: Int32
    slot_kind: Int8
    dep_ptr: Int32
    dep: Int32
    dep_slot: Int32
    dep_message: Int32
    slot_to_message: Int32
    level: Int32
    level_ptr: Int32
    order: Int32

    def __len__(self) -> int:
        return len(self.kind)

    @cached_property
    def dep_reader(self) -> Int32:
        """The row that has each dependency."""
        return np.repeat(np.arange(len(self), dtype=np.int32), np.diff(self.dep_ptr))

    @property
    def dep_is_message(self) -> Bool:
        return self.dep_message >= 0

    @cached_property
    def messages(self) -> tuple[Int64, Int64, Int64]:
        """(the row that sends each message, the one that reads it, the slot whose output it is)."""
        sender, reader, slot = (column[self.dep_is_message] for column in (self.dep, self.dep_reader, self.dep_slot))
        return sender.astype(np.int64), reader.astype(np.int64), slot.astype(np.int64)

    @property
    def num_messages(self) -> int:
        return int(np.count_nonzero(self.dep_is_message))

    @cached_property
    def program(self) -> Program:
        """Program of a replay, level by level."""
        from pptrace.schedule.replay_program import compile_table

        return compile_table(self, every_dependency=False)

    @cached_property
    def full_program(self) -> Program:
        """The same with dependencies that hold by themselves where nothing takes a negative time."""
        from pptrace.schedule.replay_program import compile_table

        return compile_table(self, every_dependency=True)

    @property
    def num_levels(self) -> int:
        return len(self.level_ptr) - 1

    @property
    def is_runnable(self) -> bool:
        """Return whether every row gets to run."""
        return len(self.order) == len(self)

    def slots_of(self, kind: npt.ArrayLike, stage: npt.ArrayLike, microbatch: npt.ArrayLike) -> Int64:
        """The slots of ops, by their kinds' codes; of a pair, that of its forward. −1 for what the plan cannot have."""
        kind, stage, microbatch = (np.asarray(column, np.int64) for column in (kind, stage, microbatch))
        is_kind = (kind >= 0) & (kind < len(_OUTPUT_OF_CODE))
        output = np.where(is_kind, _OUTPUT_OF_CODE[np.where(is_kind, kind, 0)], NONE)
        is_known = (output >= 0) & (stage >= 0) & (stage < self.num_stages)
        is_known &= (microbatch >= 0) & (microbatch < self.num_microbatches)
        return np.where(is_known, (stage * self.num_microbatches + microbatch) * len(Output) + output, NONE)

    def rows_of(self, kind: npt.ArrayLike, stage: npt.ArrayLike, microbatch: npt.ArrayLike) -> Int64:
        """The rows that fill the slots of ops; −1 where none does. Such a row may be of another kind: B and I share a slot."""
        slots = self.slots_of(kind, stage, microbatch)
        return np.where(slots >= 0, self.slot_to_row[slots], NONE)


_OUTPUT_OF_CODE = np.array(
    [OUTPUT_OF.get(Kind.F if kind is Kind.OVERLAP_F_B else kind, NONE) for kind in Kind], np.int64
)


def make_table(plan: Plan) -> PlanTable:
    """The table of a plan, lowered or not."""
    rows = [plan.compute_actions(rank) for rank in range(plan.pp)]
    rank_ptr = _pointers(np.array([len(row) for row in rows], np.int64))
    actions = list(chain.from_iterable(rows))
    rank = np.repeat(np.arange(plan.pp, dtype=np.int32), np.diff(rank_ptr))
    columns = _half_columns(actions)
    pairs = np.flatnonzero(columns[0] == Kind.OVERLAP_F_B.code)
    halves = _halves(actions, columns, pairs)
    slots = _slots(plan, halves[0]), _slots(plan, halves[1])
    slot_to_row, slot_kind = _fillings(plan, halves, slots, pairs)
    needs = _needed_slots(plan, halves, pairs)
    level = _levels_of(rank_ptr, rank, np.where(needs >= 0, slot_to_row[needs], len(actions)))
    return PlanTable(
        pp=plan.pp,
        num_stages=plan.num_stages,
        num_microbatches=plan.num_microbatches,
        kind=columns[0],
        stage=columns[1],
        microbatch=columns[2],
        chunk=_column(actions, "chunk", np.int32),
        phase=_column(actions, "phase.code", np.int8),
        rank=rank,
        position=np.arange(len(actions), dtype=np.int32) - rank_ptr[rank],
        rank_ptr=rank_ptr,
        slot=slots[0],
        second_slot=_of_pairs(slots[1], pairs, len(actions)),
        second_kind=_of_pairs(halves[1][0], pairs, len(actions)),
        second_stage=_of_pairs(halves[1][1], pairs, len(actions)),
        slot_to_row=slot_to_row,
        slot_kind=slot_kind,
        level=level,
        **_dependencies(plan, needs, slot_to_row, rank),
        **_order(level),
    )


def _dependencies(plan: Plan, needs: Int32, slot_to_row: Int32, rank: Int32) -> dict[str, Int32]:
    """The dependencies of all rows, and which of them are messages; ``needs`` are the needed slots, a row each."""
    is_need = needs >= 0
    num_needs = np.count_nonzero(is_need, axis=1)
    dep_slot = needs[is_need]
    source_stage = dep_slot // (len(Output) * plan.num_microbatches)
    is_message = np.array(plan.placement, np.int32)[source_stage] != np.repeat(rank, num_needs)
    dep_message = np.where(is_message, np.cumsum(is_message, dtype=np.int32) - 1, NONE).astype(np.int32)
    slot_to_message = np.full(len(slot_to_row), NONE, np.int32)
    slot_to_message[dep_slot[is_message]] = dep_message[is_message]
    return {
        "dep_ptr": _pointers(num_needs),
        "dep": slot_to_row[dep_slot],
        "dep_slot": dep_slot,
        "dep_message": dep_message,
        "slot_to_message": slot_to_message,
    }


def _order(level: Int32) -> dict[str, Int32]:
    num_stuck = np.count_nonzero(level < 0)
    order = np.argsort(level, kind="stable")[num_stuck:].astype(np.int32)
    return {"order": order, "level_ptr": _pointers(np.bincount(level[order]))}


_Half = tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]
"""kind, stage and microbatch."""


def _column(actions: Sequence[Action], name: str, dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.fromiter(map(attrgetter(name), actions), dtype, len(actions))


def _pointers(counts: npt.NDArray[Any]) -> Int32:
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)


def _halves(actions: Sequence[Action], whole: _Half, pairs: npt.NDArray[np.intp]) -> tuple[_Half, _Half]:
    """The first half of every row (itself, where it is no pair), and the second half of each pair."""
    parts = [actions[index].parts for index in pairs.tolist()]
    first, second = (_half_columns([part[half] for part in parts]) for half in (0, 1))
    kind, stage, microbatch = (column.copy() if len(pairs) else column for column in whole)
    for column, values in zip((kind, stage, microbatch), first, strict=True):
        column[pairs] = values
    return (kind, stage, microbatch), second


def _half_columns(actions: Sequence[Action]) -> _Half:
    try:
        microbatch = _column(actions, "microbatch", np.int32)
    except TypeError:  # a None
        microbatch = np.array([action.microbatch or 0 for action in actions], np.int32)
    return _column(actions, "kind.code", np.int8), _column(actions, "stage", np.int32), microbatch


def _of_pairs(values: npt.NDArray[Any], pairs: npt.NDArray[np.intp], num_rows: int) -> npt.NDArray[Any]:
    """A column with the values of pairs, −1 in all other rows."""
    column = np.full(num_rows, NONE, values.dtype)
    column[pairs] = values
    return column


def _slots(plan: Plan, half: _Half) -> Int32:
    kind, stage, microbatch = half
    cell = stage.astype(np.int64) * plan.num_microbatches + microbatch
    slots: Int32 = (cell * len(Output) + _OUTPUT_OF_CODE[kind]).astype(np.int32)
    return slots


def _fillings(
    plan: Plan, halves: tuple[_Half, _Half], slots: tuple[Int32, Int32], pairs: npt.NDArray[np.intp]
) -> tuple[Int32, Int8]:
    """The row that fills each slot, and the kind of what fills it; ``slots`` are those of both halves."""
    num_slots = plan.num_stages * plan.num_microbatches * len(Output)
    slot_to_row, slot_kind = np.full(num_slots, NONE, np.int32), np.full(num_slots, NONE, np.int8)
    rows = np.concatenate((np.arange(len(slots[0])), pairs))
    last_first = np.argsort(-rows, kind="stable") if len(pairs) else slice(None, None, -1)
    slot = np.concatenate(slots)[last_first]
    slot_to_row[slot] = rows[last_first]  # of several, the last assignment stands
    slot_kind[slot] = np.concatenate((halves[0][0], halves[1][0]))[last_first]
    return slot_to_row, slot_kind


def _needed_slots(plan: Plan, halves: tuple[_Half, _Half], pairs: npt.NDArray[np.intp]) -> Int32:
    """The slots that each row needs, in the order of :func:`pptrace.schedule.needs.needs_of`; −1 where it needs fewer."""
    first = _needed_by(plan, halves[0])
    if not len(pairs):
        return first
    second = np.full_like(first, NONE)
    second[pairs] = _needed_by(plan, halves[1])
    return np.concatenate((first, second), axis=1)


def _needed_by(plan: Plan, half: _Half) -> Int32:
    kind, stage, microbatch = half
    slots = np.full((len(kind), _MOST_NEEDS), NONE, np.int32)
    for of_kind, needs in NEEDS.items():
        rows = np.flatnonzero(kind == of_kind.code)
        for column, need in enumerate(needs):
            stages = (neighbour(plan, other, need.hop) for other in range(plan.num_stages))
            source = np.array([NONE if other is None else other for other in stages], np.int64)[stage[rows]]
            slot = (source * plan.num_microbatches + microbatch[rows]) * len(Output) + need.output
            slots[rows, column] = np.where(source >= 0, slot, NONE)
    return slots


def _levels_of(rank_ptr: Int32, rank: Int32, needed: npt.NDArray[np.integer]) -> Int32:
    """The level of each row: the length of the longest chain of rows that lead to it; −1 where it never gets to run.

    ``needed`` has in its columns the rows that each row needs, −1 where the plan lacks one, and the number of rows where nothing
    is needed. Lets every rank run its next action, if that can run, for each level.
    """
    num_rows = len(needed)
    awaited = _awaited(needed, rank)
    level = np.full(num_rows, -1, np.int32)
    has_run = np.zeros(num_rows + 2, np.bool_)  # the last stands for a missing row, the one before it for none
    has_run[num_rows] = True
    columns = [np.ascontiguousarray(column) for column in awaited.T]
    next_row, end = rank_ptr[:-1].astype(np.intp), rank_ptr[1:]
    number = check_ends_at = 0
    while True:
        if number == check_ends_at:  # no rank ends earlier
            has_more = next_row < end
            next_row, end = next_row[has_more], end[has_more]
            check_ends_at = number + int((end - next_row).min(initial=num_rows))
        can_run = has_run[columns[0][next_row]]
        for column in columns[1:]:
            can_run &= has_run[column[next_row]]
        rows = next_row[can_run]
        if not len(rows):
            return level
        level[rows] = number
        has_run[rows] = True
        next_row += can_run
        number += 1


def _awaited(needed: npt.NDArray[np.integer], rank: Int32) -> npt.NDArray[np.integer]:
    """Rows that each row needs and that do not come before it on its own rank anyway, in as few columns as hold them."""
    num_rows = len(needed)
    before = np.arange(num_rows)[:, np.newaxis]
    is_before = (needed >= 0) & (needed < before) & (rank[np.minimum(needed, num_rows - 1)] == rank[:, np.newaxis])
    awaited = np.sort(np.where(is_before, num_rows, needed), axis=1)
    most = int(np.count_nonzero(awaited < num_rows, axis=1).max(initial=0))
    return awaited[:, : max(1, most)]
