"""The order of the compute ops of each step of each pipeline, rank by rank in time order, as rows of one table; and the
registry's plans that a step follows: the one with the same order, and that of another number of microbatches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pandas as pd
from msgspec import Struct

from pptrace.errors import ScheduleError
from pptrace.model.mesh import MeshInfo
from pptrace.model.tables import COMPUTE_KINDS, Int64
from pptrace.schedule import registry
from pptrace.schedule.actions import Action, Key, Kind, iter_halves, parse_action
from pptrace.schedule.plan import Plan, runs_of
from pptrace.schedule.text import from_rows
from pptrace.slices import Slice, rows_among, rows_where, slice_of

_COLUMNS = ("rank", "step", "start_ns", "kind", "stage", "microbatch", "pair")


class OrderedOps(Struct, frozen=True, dict=True):
    """The compute ops of a run by rank, step and start; ``label`` is that of each in the table that they come from."""

    rows: Slice

    @classmethod
    def of(cls, ops: pd.DataFrame) -> OrderedOps:
        compute = rows_where(ops[list(_COLUMNS)], rows_among(ops["kind"], COMPUTE_KINDS))
        return cls(slice_of(compute.assign(label=compute.index)).sorted_by(("rank", "step", "start_ns")))

    @cached_property
    def keys(self) -> tuple[Int64, Int64]:
        """(kind, stage and microbatch as one number, number of the text of an overlapped pair, 0 where it is none)."""
        (kind, kinds), (pair, pairs) = self.rows.codes("kind"), self.rows.codes("pair")
        code = np.array([Kind(name).code for name in kinds], dtype=np.int64)
        number = np.array([self.pair_numbers[text] if text else 0 for text in pairs], dtype=np.int64)
        return _as_keys(code[kind], self.rows["stage"], self.rows["microbatch"]), number[pair]

    @cached_property
    def pair_numbers(self) -> dict[str, int]:
        """A number from 1 on for the text of each overlapped pair."""
        _, pairs = self.rows.codes("pair")
        return {text: number for number, text in enumerate(filter(None, pairs), 1)}

    def planned_keys(self, plan: Plan) -> list[tuple[Int64, Int64]]:
        """Value of :attr:`keys` for each rank of a plan; −1 for an overlapped pair that never ran."""
        table = plan.table
        keys = _as_keys(table.kind.astype(np.int64), table.stage, table.microbatch)
        is_pair = table.kind == Kind.OVERLAP_F_B.code
        pairs = np.zeros(len(table), dtype=np.int64)
        for rank in range(plan.pp) if is_pair.any() else ():
            first = table.rank_ptr[rank]
            for index, action in enumerate(plan.compute_actions(rank), first):
                if is_pair[index]:
                    pairs[index] = self.pair_numbers.get(str(action), -1)
        edges = list(zip(table.rank_ptr[:-1].tolist(), table.rank_ptr[1:].tolist(), strict=True))
        return [(keys[first:last], pairs[first:last]) for first, last in edges]


def _as_keys(kind: Int64, stage: npt.NDArray[np.integer], microbatch: npt.NDArray[np.integer]) -> Int64:
    """Kind, stage and microbatch in one number; of a pair its kind alone, since its text says the rest."""
    keys: Int64 = ((stage.astype(np.int64) << 32) + microbatch) * len(Kind) + kind
    return np.where(kind == Kind.OVERLAP_F_B.code, kind, keys)


class MeasuredStep(Struct, frozen=True):
    """The ops of one pipeline in one step: of each rank with a trace the rows from the first to before the last of ``bounds``.

    ``pp_ranks`` and ``ranks`` are the pipeline ranks and the global ranks of these.
    """

    step: int
    pp_ranks: tuple[int, ...]
    ranks: tuple[int, ...]
    ops: OrderedOps
    bounds: tuple[tuple[int, int], ...]
    pipeline: tuple[int, ...]

    @property
    def num_ops(self) -> int:
        return sum(last - first for first, last in self.bounds)

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        """The cells of each rank, such as ``0F0``."""
        return tuple(map(self.cells_of, range(len(self.bounds))))

    def cells_of(self, index: int) -> tuple[str, ...]:
        """The cells of one of the ranks, by its index among those with a trace."""
        return tuple(cells(self.ops.rows.where(slice(*self.bounds[index]))))

    @property
    def start_ns(self) -> int:
        """Start of the first op."""
        return int(min(self.ops.rows["start_ns"][first] for first, _ in self.bounds))

    @property
    def labels(self) -> dict[int, npt.NDArray[np.intp]]:
        """Labels of ops in the table of ops, by global rank."""
        labels = self.ops.rows["label"]
        return {rank: labels[slice(*bounds)] for rank, bounds in zip(self.ranks, self.bounds, strict=True)}

    @property
    def kinds(self) -> dict[int, list[str]]:
        """Kinds of ops by pipeline rank."""
        kinds = self.ops.rows["kind"]
        return {rank: kinds[slice(*bounds)].tolist() for rank, bounds in zip(self.pp_ranks, self.bounds, strict=True)}


def cells(rows: Slice) -> Iterator[str]:
    """Ops as text, such as ``0F0``."""
    columns = (rows[name].tolist() for name in ("stage", "kind", "microbatch", "pair"))
    for stage, kind, microbatch, pair in zip(*columns, strict=True):
        yield pair or f"{stage}{kind}{microbatch}"


def steps_of(ops: pd.DataFrame, mesh: MeshInfo) -> list[MeasuredStep]:
    """Every step of every pipeline whose ranks' places in it are known, in order of pipeline and step."""
    ordered = OrderedOps.of(ops)
    bounds_of_rank = _bounds(ordered.rows)
    steps = []
    for pipeline in mesh.pipelines:
        present = {rank: bounds_of_rank[rank] for rank in pipeline if rank in bounds_of_rank}
        pp_rank_of = {rank: mesh.pp_rank(rank) for rank in present}
        for step in sorted({step for bounds in present.values() for step in bounds}):
            ranks = tuple(rank for rank, bounds in present.items() if step in bounds)
            pp_ranks = tuple(pp_rank for rank in ranks if (pp_rank := pp_rank_of[rank]) is not None)
            if len(pp_ranks) == len(ranks):
                bounds_of_step = tuple(present[rank][step] for rank in ranks)
                steps.append(MeasuredStep(step, pp_ranks, ranks, ordered, bounds_of_step, pipeline))
    return steps


def _bounds(rows: Slice) -> dict[int, dict[int, tuple[int, int]]]:
    """Index of the first row and of the one behind the last, by rank and step."""
    bounds: dict[int, dict[int, tuple[int, int]]] = {}
    if not len(rows):
        return bounds
    rank, step = rows["rank"], rows["step"]
    firsts = np.flatnonzero(np.concatenate(([True], (rank[1:] != rank[:-1]) | (step[1:] != step[:-1]))))
    edges = np.append(firsts, len(rows)).tolist()
    for of_rank, of_step, edge in zip(rank[firsts].tolist(), step[firsts].tolist(), pairwise(edges), strict=True):
        bounds.setdefault(of_rank, {})[of_step] = edge
    return bounds


def measured_steps(ops: pd.DataFrame, mesh: MeshInfo) -> list[MeasuredStep]:
    """Every step of every pipeline, without ops whose stage is unknown."""
    return steps_of(rows_where(ops, (ops["stage"] >= 0) & (ops["microbatch"] >= 0)), mesh)


def most_complete(measured: Sequence[MeasuredStep]) -> MeasuredStep:
    """The step with most ranks and then most ops: the last of a run may have been cut off."""
    return max(measured, key=lambda step: (len(step.ranks), step.num_ops))


def fullest(steps: Sequence[MeasuredStep]) -> MeasuredStep:
    """The step with most ops, the earliest of these."""
    return max(steps, key=lambda step: (step.num_ops, -step.start_ns))


def kinds_by_pp_rank(ops: pd.DataFrame, mesh: MeshInfo) -> dict[int, list[str]]:
    """The kinds of ops of each rank of a pipeline in its fullest step, by pipeline rank."""
    steps = steps_of(ops, mesh)
    return fullest(steps).kinds if steps else {}


def match_registry(plan: Plan) -> Plan:
    """The registry's plan with the same actions in the same order, which has a name and exact phases; else the plan itself.

    One microbatch makes the same plan of several schedules; then the plan's own name decides.
    """
    keys = _keys(plan)
    return next((built for built in _variants(plan) if _keys(built) == keys), plan)


def match_reversed(plan: Plan) -> Plan | None:
    """The registry's plan that a plan is but for its backwards, which run the microbatches in the opposite order; None if none.

    GPipe often runs them from the last to the first, in its paper's figure 2 too (arXiv 1811.06965): what the last forwards keep
    is freed first. Plans of a search have no usual order.
    """
    last = plan.num_microbatches - 1

    def turned(action: Action) -> Action:
        if action.kind is Kind.F or action.parts or action.microbatch is None:
            return action
        return replace(action, microbatch=last - action.microbatch)

    keys = _keys(plan)
    for built in _variants(plan):
        if not registry.get(built.name).searches:
            reversed_plan = replace(built, ranks=tuple(tuple(map(turned, row)) for row in built.ranks))
            if _keys(reversed_plan) == keys:
                return reversed_plan
    return None


def match_runs(plan: Plan) -> tuple[Plan, ...]:
    """The registry's plans that follow each other in a plan, as in a step whose gradients are accumulated over several calls of a
    schedule; () where it is no such plan.
    """
    runs = runs_of(plan)
    matched = []
    for rows in runs if len(runs) > 1 else ():
        first = min(half.microbatch or 0 for row in rows for action in row for half in action.halves)
        cells = [[str(action.later(-first)) for action in row] for row in rows]
        try:
            matched.append(match_registry(from_rows(cells, "custom")))
        except ScheduleError:
            return ()
    is_known = bool(matched) and all(run.name in registry.SCHEDULES for run in matched)
    return tuple(matched) if is_known and max(run.num_microbatches for run in matched) > 1 else ()


def _keys(plan: Plan) -> list[list[Key]]:
    return [[action.key for action in plan.compute_actions(rank)] for rank in range(plan.pp)]


def _variants(plan: Plan) -> Iterator[Plan]:
    """The registry's plans of a plan's shape, those of its own name first."""
    variants: list[tuple[int | None, bool]] = [(None, False)]
    if plan.num_chunks > 1:
        # Groups of microbatches: as many actions as the first rank runs on its first stage before it turns to another.
        first = plan.compute_actions(0)
        group = next((index for index, action in enumerate(first) if action.stage != first[0].stage), len(first))
        variants += [(group, False), (None, True)]
    for entry in sorted(registry.SCHEDULES.values(), key=lambda entry: entry.name != plan.name):
        for variant in variants:
            built = built_plan(entry.name, plan.pp, plan.num_microbatches, plan.num_chunks, *variant)
            if built is not None:
                yield built


def built_plan(
    name: str, pp: int, num_microbatches: int, num_chunks: int, group_size: int | None = None, lean: bool = False
) -> Plan | None:
    """The plan of a schedule of the registry; None where it has none of this shape."""
    try:
        return registry.build(name, pp, num_microbatches, num_chunks, group_size, lean)
    except ScheduleError:
        return None


def plans_by_step(plan: Plan, measured: Sequence[MeasuredStep]) -> dict[int, Plan | None]:
    """Plans by step: ``plan`` with another number of microbatches, where a step has so many on all of its ranks.

    None for a step with so many that the schedule has no plan for them, or is none of the registry.
    """
    plans: dict[int, Plan | None] = {}
    counts: dict[int, set[int | None]] = {}
    for step in measured:
        counts.setdefault(step.step, set()).add(_num_microbatches(plan, step))
    for step in measured:
        count = counts[step.step]
        if step.step not in plans and len(count) == 1 and None not in count and plan.num_microbatches not in count:
            plans[step.step] = _with_microbatches(plan, max(filter(None, count)), step)
    return plans


def _num_microbatches(plan: Plan, step: MeasuredStep) -> int | None:
    """Number of microbatches of a step: the plan's, unless every rank has all ops of another number on all of its stages."""
    planned = np.diff(plan.table.rank_ptr)
    lengths = zip(step.pp_ranks, step.bounds, strict=True)
    if all(last - first == planned[pp_rank] for pp_rank, (first, last) in lengths if pp_rank < plan.pp):
        return plan.num_microbatches
    pairs = [(pp_rank, row) for pp_rank, row in zip(step.pp_ranks, step.rows, strict=True) if pp_rank < plan.pp]
    counts = {_num_complete_microbatches(plan, pp_rank, tuple(map(parse_action, row))) for pp_rank, row in pairs}
    return counts.pop() if len(counts) == 1 else None


def _num_complete_microbatches(plan: Plan, pp_rank: int, row: tuple[Action, ...]) -> int | None:
    """Number of microbatches whose forwards and backwards a rank ran on each of its stages; None if some are missing."""
    halves = [half for half in iter_halves(row) if half.kind in (Kind.F, Kind.B, Kind.I)]
    forwards = Counter(half.stage for half in halves if half.kind is Kind.F)
    backwards = Counter(half.stage for half in halves if half.kind is not Kind.F)
    microbatches = {half.microbatch for half in halves}
    count = len(microbatches)
    if microbatches != set(range(count)) or forwards != backwards or set(forwards) != set(plan.stages_of(pp_rank)):
        return None
    share = {number * plan.num_chains for number in forwards.values()}
    return count if share == {count} else None


def _with_microbatches(plan: Plan, count: int, step: MeasuredStep) -> Plan | None:
    """The same schedule with so many microbatches: the variant that the step follows, else the usual one."""
    if plan.name not in registry.SCHEDULES:
        return _with_other_runs(plan, step)
    try:
        measured = from_rows(step.rows, plan.name)
    except ScheduleError:
        return with_num_microbatches(plan, count)  # ranks without a trace leave gaps
    followed = match_registry(measured)
    if followed is measured:
        followed = match_reversed(measured) or measured
    if followed is not measured and followed.name == plan.name and followed.pp == plan.pp:
        return followed
    return with_num_microbatches(plan, count)


def _with_other_runs(plan: Plan, step: MeasuredStep) -> Plan | None:
    """The order of a step that runs the schedules of a plan of several runs more or less often; None where it does not."""
    names = {run.name for run in match_runs(plan)}
    try:
        order = from_rows(step.rows, plan.name)
    except ScheduleError:
        return None
    runs = match_runs(order) or (match_registry(order),)
    if {run.name for run in runs} != names:
        return None
    return order if len(runs) > 1 else runs[0]


def with_num_microbatches(plan: Plan, count: int) -> Plan | None:
    """The plan of the same schedule with another number of microbatches; None if there is none."""
    return built_plan(plan.name, plan.pp, count, plan.num_chunks) if plan.name in registry.SCHEDULES else None
