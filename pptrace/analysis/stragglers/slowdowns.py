"""Slowdowns of ByteDance's what-if study ("Understanding Stragglers in Large Model Training Using What-if Analysis", OSDI'25).

A step is replayed with what every op, message and collective cost, and with what its kind typically costs; T
is the mean length of the steps. ``slowdown`` is T / T_ideal. That of a stage or of a kind is T / T_ideal where it alone costs
what it did; that of a worker is the smaller of those of its pipeline and of its pipeline rank: as many replays do as there
are pipelines and pipeline ranks (the study's approximation, with a pipeline for the ranks of one dp rank). ``m_w`` and ``m_s``
are the shares of T − T_ideal that go away where the slowest 3 % of workers, or the last stage, cost what is typical.

Replays of all steps of one plan where some of it costs what was measured, and the rest what is typical.

The pipelines of a step run side by side. Where all steps do the same before and after their ops, that is replayed too, with its
collectives between pipelines; else a step is as long as its slowest pipeline.

Costs where nothing straggles: what its kind typically costs in all steps, on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from pptrace.analysis.matrix.step_matrix import RECEIVES, StepMatrix, longest_of_steps, pipelines_of
from pptrace.analysis.stragglers.outside import AFTER, BEFORE, Chains, chains_of, is_collective
from pptrace.analysis.whole_run import KindSlowdown, StageSlowdown, Stragglers, WorkerSlowdown
from pptrace.model.known import all_known
from pptrace.model.tables import GARBAGE_COLLECTION, Bool, Int64
from pptrace.schedule.actions import Kind
from pptrace.schedule.replay_table import rank_ends, rank_ends_of_mixtures

_NAMES = tuple(str(kind) for kind in Kind)


def _typical_costs(plans: Sequence[StepMatrix], chains: Sequence[Chains]) -> Mapping[str, int]:
    """Cost by kind in all plans' steps, and in what is done before and after them, ns: of ops, messages, then all else.

    Of what computes it is the mean; of messages and collectives the median, as the study has it. A kind of message that was
    never matched is left out: it costs nothing in any replay.
    """
    times: dict[str, list[Int64]] = {}
    of_items = ((name, of.work[:, of.name == name]) for of in chains for name in np.unique(of.name).tolist())
    for name, part in chain(*map(_times_of_ops, plans), of_items):
        times.setdefault(name, []).append(part)
    typical = {}
    for name in (*_NAMES, *sorted(times.keys() - set(_NAMES))):
        parts = times.get(name, [])
        if count := sum(part.size for part in parts):
            total = sum(int(part.sum(dtype=np.int64)) for part in parts)
            is_moved = is_collective(name) or name in (_NAMES[code] for code in RECEIVES)
            middle = np.median(np.concatenate([part.ravel() for part in parts])) if is_moved else total / count
            typical[name] = round(float(middle))
    return typical


def _times_of_ops(costs: StepMatrix) -> Iterator[tuple[str, Int64]]:
    """(kind, what each op or matched message of it cost) in some steps, ns."""
    for code in np.unique(costs.table.kind).tolist():
        yield _NAMES[code], costs.durations[:, costs.table.kind == code]
    for code in RECEIVES:
        transfers = costs.transfers[:, costs.message_kind == code]
        yield _NAMES[code], transfers[transfers >= 0]


def replays_of(plans: Sequence[StepMatrix]) -> list[Replays]:
    """The replays of each plan, which share what is typical."""
    chains = all_known(map(_chains, plans)) or []
    sides = [side for both in chains for side in both]
    if not any(len(side.rank) for side in sides):
        chains, sides = [], []
    typical = _typical_costs(plans, sides)
    return [Replays(costs, typical, chains[index] if chains else None) for index, costs in enumerate(plans)]


def _chains(costs: StepMatrix) -> tuple[Chains, Chains] | None:
    """Work before and after the ops; None where steps differ in it."""
    _, num_windows = np.unique(costs.step, return_counts=True)
    of_first = costs.ranks[: num_windows[0]]
    if (num_windows != len(of_first)).any() or (costs.ranks.reshape(-1, *of_first.shape) != of_first).any():
        return None
    before, after = (_chains_of_side(costs, side) for side in (BEFORE, AFTER))
    return None if before is None or after is None else (before, after)


def _chains_of_side(costs: StepMatrix, side: int) -> Chains | None:
    """Work on one side, without garbage collections where these come now and then, or within other work."""
    chains = chains_of(costs.outside, costs.step, costs.table.pp, side)
    is_collection = costs.outside["name"] == GARBAGE_COLLECTION
    if chains is not None or not is_collection.any():
        return chains
    return chains_of(costs.outside.where(~is_collection), costs.step, costs.table.pp, side)


class Replays(Struct, frozen=True, eq=False, dict=True):
    """Time that all steps of one plan take together in replays, ns: with what comes before and after their ops, where there are
    ``chains`` of it. ``typical`` is what each kind typically costs, ns.
    """

    costs: StepMatrix
    typical: Mapping[str, int]
    chains: tuple[Chains, Chains] | None = None

    @cached_property
    def num_steps(self) -> int:
        return len(np.unique(self.costs.step))

    @cached_property
    def _typical_times(self) -> tuple[Int64, Int64]:
        """(the typical cost of each row of the plan, that of each message), ns."""
        by_code = np.array([self.typical.get(name, 0) for name in _NAMES], dtype=np.int64)
        return by_code[self.costs.table.kind], by_code[self.costs.message_kind]

    def with_windows(self, is_measured: Bool | bool) -> int:
        """Replay in which some windows, or all of them, cost what was measured."""
        workers = np.broadcast_to(np.reshape(is_measured, (-1, 1)), self._ideal_ends.shape)
        return self._sum(np.where(workers, self._measured_ends, self._ideal_ends), self._items(workers))

    def with_each_kind(self) -> dict[str, int]:
        """Replays in which one kind alone costs what was measured."""
        codes = {str(member): member.code for member in Kind}
        of_rows, of_messages = self.costs.table.kind, self.costs.message_kind
        ends = self._mixed_ends(
            (of_rows == codes.get(kind, -1), of_messages == codes.get(kind, -1)) for kind in self.typical
        )
        return {
            kind: self._sum(of_kind, [side.name == kind for side in self.chains or ()])
            for kind, of_kind in zip(self.typical, ends, strict=True)
        }

    def with_pipelines(self) -> dict[tuple[int, ...], int]:
        """Time by which each pipeline makes the steps longer, if it alone costs what was measured."""
        ideal, number = self.with_windows(False), np.arange(len(self.costs.step))
        return {
            ranks: self.with_windows(np.isin(number, windows)) - ideal
            for ranks, windows in pipelines_of(self.costs.ranks)
        }

    def with_rows(self, rows: Bool) -> int:
        """Replay in which some rows, shape (…, rows), and the messages that they read cost what was measured.

        So does what a rank does before and after them, if all of its rows do.
        """
        return self._sum_of_rows(rows, self._ends(rows))

    def with_each(self, of_rows: npt.NDArray[Any], count: int) -> list[int]:
        """Replays in which the rows of one number alone, and the messages that they read, cost what was measured."""
        masks = [of_rows == number for number in range(count)]
        every = self._mixed_ends((mask, mask[self.costs.table.messages[1]]) for mask in masks)
        return [self._sum_of_rows(mask, ends) for mask, ends in zip(masks, every, strict=True)]

    def _sum_of_rows(self, rows: Bool, ends: Int64) -> int:
        """Time of all steps with these ends, where some rows, and what their ranks do outside, cost what was measured."""
        bounds = pairwise(self.costs.table.rank_ptr.tolist())
        workers = np.stack([rows[..., begin:end].all(axis=-1) for begin, end in bounds], axis=-1)
        return self._sum(ends, self._items(np.broadcast_to(workers, ends.shape)))

    @cached_property
    def _measured_ends(self) -> Int64:
        return self._ends(np.ones(len(self.costs.table), np.bool_))

    @cached_property
    def _ideal_ends(self) -> Int64:
        table = self.costs.table
        return np.broadcast_to(rank_ends(table, *self._typical_times), (len(self.costs.step), table.pp))

    def _mixed_ends(self, mixtures: Iterable[tuple[Bool, Bool]]) -> list[Int64]:
        """The :meth:`_ends` of several choices of rows and messages, shapes (rows,) and (messages,)."""
        costs, typical, chosen = self.costs, self._typical_times, list(mixtures)
        every = [np.empty((len(costs.step), costs.table.pp), dtype=np.int64) for _ in chosen]
        for part in costs.parts():
            measured = costs.durations[part], np.where(costs.transfers[part] >= 0, costs.transfers[part], typical[1])
            of_part = rank_ends_of_mixtures(costs.table, measured, typical, chosen)
            for ends, result in zip(every, of_part, strict=True):
                ends[part] = result
        return every

    def _ends(self, rows: Bool) -> Int64:
        """Ends of each rank's rows, shape (windows, pp), where some rows and their messages cost what was measured, ns."""
        costs, (durations, transfers) = self.costs, self._typical_times
        ends = np.empty((len(costs.step), costs.table.pp), dtype=np.int64)
        for part in costs.parts():
            of_rows = rows if rows.ndim == 1 else rows[part]
            of_messages = of_rows[..., costs.table.messages[1]] & (costs.transfers[part] >= 0)
            ends[part] = rank_ends(
                costs.table,
                np.where(of_rows, costs.durations[part], durations),
                np.where(of_messages, costs.transfers[part], transfers),
            )
        return ends

    def _items(self, workers: Bool) -> list[Bool]:
        """The items of some workers, shape (windows, pp), on each side."""
        of_steps = workers.reshape(self.num_steps, -1) if self.chains else workers
        return [of_steps[:, side.rank] for side in self.chains or ()]

    def _sum(self, ends: Int64, items: Sequence[Bool]) -> int:
        """All steps together, when their ranks end their rows after so long, with some items as measured on each side."""
        if self.chains is None:
            return int(longest_of_steps(self.costs.step, ends.max(axis=1)).sum())
        (before, after), table = self.chains, self.costs.table
        work = [
            np.where(is_measured, side.work, [self.typical[name] for name in side.name.tolist()])
            for is_measured, side in zip(items, self.chains, strict=True)
        ]
        of_steps = ends.reshape(self.num_steps, -1)
        begun = before.ends(np.zeros_like(of_steps), work[0]).reshape(self.num_steps, -1, table.pp)
        needs_nothing = (table.position == 0) & (np.diff(table.dep_ptr) == 0)
        first = begun[:, :, table.rank[needs_nothing]].max(axis=-1, keepdims=True)
        ready = (ends.reshape(begun.shape) + first).reshape(of_steps.shape)
        return int(after.ends(ready, work[1]).max(axis=1).sum())


LEAST_SLOWDOWN = 1.03
"""Least slowdown of which shares are given, as in the study (its ``decompose_threshold``)."""
SLOWEST_PERCENT = 3


def slowdowns(plans: Sequence[StepMatrix]) -> Stragglers | None:
    """The slowdowns in some steps, of at least one plan; None where they took no time."""
    replays, table = replays_of(plans), plans[0].table
    ideal, measured = (sum(of_plan.with_windows(is_measured) for of_plan in replays) for is_measured in (False, True))
    if not ideal:
        return None
    of_stages = (of_plan.with_each(of_plan.costs.table.stage, table.num_stages) for of_plan in replays)
    stages = [sum(times) / ideal for times in zip(*of_stages, strict=True)]
    with_kinds = [of_plan.with_each_kind() for of_plan in replays]
    kinds = {kind: sum(of_plan[kind] for of_plan in with_kinds) / ideal for kind in replays[0].typical}
    workers = _workers(replays, ideal)
    m_w = m_s = None
    if measured >= LEAST_SLOWDOWN * ideal:
        by_slowdown = sorted(workers, key=lambda rank: (-workers[rank], rank))
        slowest = np.array(by_slowdown[: -(-len(workers) * SLOWEST_PERCENT // 100)], dtype=np.int64)
        others = (~np.isin(one.costs.ranks, slowest)[:, one.costs.table.rank] for one in replays)
        before_last = (one.costs.table.stage != one.costs.table.num_stages - 1 for one in replays)
        m_w, m_s = (
            (measured - sum(map(Replays.with_rows, replays, rows))) / (measured - ideal)
            for rows in (others, before_last)
        )
    return Stragglers(
        measured / ideal,
        m_w,
        m_s,
        tuple(WorkerSlowdown(rank, workers[rank]) for rank in sorted(workers)),
        tuple(StageSlowdown(stage, slowdown) for stage, slowdown in enumerate(stages)),
        tuple(KindSlowdown(kind, slowdown) for kind, slowdown in kinds.items()),
        sum(of_plan.num_steps for of_plan in replays),
        "pipeline" if replays[0].chains is None else "step",
    )


def _workers(replays: Sequence[Replays], ideal: int) -> dict[int, float]:
    """The slowdown of each worker by its rank; in the steps of a plan that it is not in it changes nothing."""
    pp = replays[0].costs.table.pp
    of_pp_ranks = (of_plan.with_each(of_plan.costs.table.rank, pp) for of_plan in replays)
    by_pp_rank = [sum(times) for times in zip(*of_pp_ranks, strict=True)]
    of_plans = [of_plan.with_pipelines() for of_plan in replays]
    return {
        rank: min(sum(beyond.get(pipeline, 0) for beyond in of_plans) + ideal, by_pp_rank[pp_rank]) / ideal
        for pipeline in dict.fromkeys(pipeline for of_plan in of_plans for pipeline in of_plan)
        for pp_rank, rank in enumerate(pipeline)
    }
