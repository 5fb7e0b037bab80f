"""Step windows, the time from the start to the end of one pipeline's work on one step, and the bounds of steps that ranges mark:
what counts for throughput is the time from one's start to the next one's, its period.

Within a window are warmup, steady and cooldown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import pandas as pd
from msgspec import Struct

from pptrace.clock import Clock
from pptrace.model.device import DeviceWork
from pptrace.model.mesh import MeshInfo
from pptrace.model.tables import BACKWARD_KINDS, COMPUTE_KINDS, FORWARD_KINDS, Int64
from pptrace.schedule.actions import Kind, Phase
from pptrace.schedule.plan import Plan, phases_by_order
from pptrace.slices import Slice, distinct_of, reduce_groups, rows_among, rows_where, slice_of, slices


class StepWindow(Struct, frozen=True):
    """One step of one pipeline replica: from the earliest start to the latest end of any F/B/I/W op over its ranks, ns.

    ``ranks`` are the global ranks of the pipeline that are in the trace, in pipeline order.
    """

    step: int
    ranks: tuple[int, ...]
    start_ns: int
    end_ns: int

    @property
    def span_ns(self) -> int:
        return self.end_ns - self.start_ns


def step_windows(ops: pd.DataFrame, mesh: MeshInfo) -> tuple[StepWindow, ...]:
    """The windows of all steps and pipelines, in time order. ``ops`` must be on one clock."""
    of_rank: dict[int, dict[int, tuple[int, int]]] = {}
    for rank, step, start, end in zip(*(column.tolist() for column in _spans(ops)), strict=True):
        of_rank.setdefault(rank, {})[step] = (start, end)
    windows = []
    for pipeline in mesh.pipelines:
        for step in sorted({step for rank in pipeline for step in of_rank.get(rank, {})}):
            present = {rank: of_rank[rank][step] for rank in pipeline if step in of_rank.get(rank, {})}
            first, last = min(start for start, _ in present.values()), max(end for _, end in present.values())
            windows.append(StepWindow(step, tuple(present), first, last))
    return tuple(sorted(windows, key=lambda window: (window.step, window.ranks)))


def _spans(ops: pd.DataFrame) -> tuple[Int64, Int64, Int64, Int64]:
    """(rank, step, start, end) of the compute ops of each rank and step.

    Rows of a rank and step that follow one another, which are all of them where the table is in that order, become one first.
    """
    rank, step = ops["rank"].to_numpy(), ops["step"].to_numpy()
    first = np.flatnonzero(np.r_[len(ops) > 0, (rank[1:] != rank[:-1]) | (step[1:] != step[:-1])])
    is_compute = rows_among(ops["kind"], COMPUTE_KINDS)
    starts = np.where(is_compute, ops["start_ns"].to_numpy(), _LATEST)
    start = np.minimum.reduceat(starts, first) if len(first) else starts
    del starts  # as long as the table
    ends = np.where(is_compute, ops["end_ns"].to_numpy(), -_LATEST)
    end = np.maximum.reduceat(ends, first) if len(first) else ends
    computes = start != _LATEST
    first, start, end = first[computes], start[computes], end[computes]
    number, at = distinct_of([rank[first], step[first]])
    starts = reduce_groups(np.minimum, start, number, len(at))
    return rank[first[at]], step[first[at]], starts, reduce_groups(np.maximum, end, number, len(at))


_LATEST = np.iinfo(np.int64).max


class StepBounds(Struct, frozen=True):
    """The first begin of each step on any rank, by its number, and the bounds of each step's range on each rank, by both."""

    begin_ns: Mapping[int, int]
    ranges_ns: Mapping[tuple[int, int], tuple[int, int]]

    def last_end_ns(self, step: int) -> int | None:
        """The latest end of a step's ranges."""
        ends = [end for (number, _), (_, end) in self.ranges_ns.items() if number == step]
        return max(ends, default=None)


def step_bounds(ops: pd.DataFrame, work: Mapping[int, DeviceWork], clock: Clock) -> StepBounds:
    """The bounds of all steps that STEP ranges mark; they end with the last range that is in them.

    On a device a step neither begins nor ends before the work is over that was launched until then, as an event of CUDA would
    show: a host may run ahead. Ranges in the device's own time stay as they are.

    Args:
        ops: on the common clock.
        work: the device work of ranks, each on its own clock.
    """
    ranges = slice_of(rows_where(ops, ~rows_among(ops["kind"], COMPUTE_KINDS)))
    number, at = distinct_of([ranges["rank"], ranges["step"]]) if len(ranges) else (np.zeros(0, np.int64),) * 2
    marks = np.flatnonzero(ranges["kind"] == "STEP")
    begins = reduce_groups(np.minimum, ranges["start_ns"][marks], number[marks], len(at))
    ends = reduce_groups(np.maximum, ranges["end_ns"], number, len(at))
    on_device = np.zeros(len(at), dtype=np.bool_)
    on_device[number[marks[(ranges["clock"] == "device")[marks]]]] = True
    begin_ns: dict[int, int] = {}
    ranges_ns: dict[tuple[int, int], tuple[int, int]] = {}
    marked = np.flatnonzero(np.bincount(number[marks], minlength=len(at)))
    marked = marked[np.lexsort((ranges["step"][at[marked]], ranges["rank"][at[marked]]))]
    of_marks = ranges["rank"][at[marked]]
    for rank in dict.fromkeys(of_marks.tolist()):
        of_rank = marked[of_marks == rank]
        bounds = [begins[of_rank], ends[of_rank]]
        if rank in work and not on_device[of_rank].any():
            bounds = [work[rank].done_ns(times, partial(clock.to_common_clock, rank)) for times in bounds]
        steps = ranges["step"][at[of_rank]].tolist()
        for step, begin, end in zip(steps, *(times.tolist() for times in bounds), strict=True):
            begin_ns[step] = min(begin, begin_ns.get(step, begin))
            ranges_ns[step, rank] = begin, end
    return StepBounds(begin_ns, ranges_ns)


class PhaseSpan(Struct, frozen=True):
    """A phase of one rank in one step, ns. The three spans of a rank cover its window without overlap."""

    phase: Phase
    start_ns: int
    end_ns: int
    num_forward: int
    num_backward: int


def tag_ops(ops: pd.DataFrame, plan_of: Callable[[int], Plan | None], by_order: bool = True) -> pd.DataFrame:
    """The ops with ``phase`` filled: that of the same action in its step's plan, else its own label, else by order.

    Without ``by_order`` those that neither tells stay "": several schedules may have run, with other phases.
    """
    is_compute = rows_among(ops["kind"], COMPUTE_KINDS)
    codes, names = slice_of(ops[["phase"]]).codes("phase")
    of_name = np.array([_NAMES.index(name) if name in _NAMES else UNTAGGED for name in names], dtype=np.int8)
    phase = of_name[codes] if len(names) else np.zeros(len(ops), dtype=np.int8)
    steps = ops["step"].to_numpy()
    plans = {step: plan_of(step) for step in np.unique(steps[is_compute]).tolist()}
    distinct = {id(plan): plan for plan in plans.values() if plan is not None}
    for plan in distinct.values():
        of_plan = [step for step, step_plan in plans.items() if step_plan is plan]
        is_planned = is_compute if len(of_plan) == len(plans) else is_compute & np.isin(steps, of_plan)
        _tag_from_plan(ops, np.flatnonzero(is_planned), plan, phase)
    if by_order and (is_compute & (phase == UNTAGGED)).any():
        _tag_by_order(ops, np.flatnonzero(is_compute), phase)
    return ops.assign(phase=pd.Categorical.from_codes(phase, dtype=_PHASES))


UNTAGGED = 0
_NAMES = ("", *sorted(map(str, Phase)))
_PHASES: pd.CategoricalDtype[str] = pd.CategoricalDtype(list(_NAMES))
_CODE_OF_PHASE = np.array([_NAMES.index(str(phase)) for phase in Phase], dtype=np.int8)


def _tag_from_plan(ops: pd.DataFrame, rows: npt.NDArray[np.intp], plan: Plan, phase: npt.NDArray[np.int8]) -> None:
    """Tag those of the rows that are actions of the plan."""
    part = slice_of(ops[["kind", "stage", "microbatch"]].iloc[rows])
    kind, kinds = part.codes("kind")
    code = np.array([Kind(name).code for name in kinds], dtype=np.int64)[kind]
    table, num_kinds = plan.table, len(Kind)
    # Of an action that a measured order has twice, both have the later one's phase.
    phase_of_key = np.full(len(table.slot_to_row) * num_kinds, UNTAGGED, dtype=np.int8)
    phase_of_key[table.slot * np.int64(num_kinds) + table.kind] = _CODE_OF_PHASE[table.phase]
    slot = table.slots_of(code, part["stage"], part["microbatch"])
    of_plan = np.where(slot >= 0, phase_of_key[slot * num_kinds + code], UNTAGGED)
    is_planned = of_plan != UNTAGGED
    phase[rows[is_planned]] = of_plan[is_planned]


def _tag_by_order(ops: pd.DataFrame, rows: npt.NDArray[np.intp], phase: npt.NDArray[np.int8]) -> None:
    """Tag the rows of each rank's step that has untagged ones by their order, where they have no phase."""
    columns = ops[["rank", "step", "start_ns", "kind"]].iloc[rows]
    for part in slices(columns.assign(row=rows), ("rank", "step")).values():
        if (phase[part["row"]] == UNTAGGED).any():
            ordered = part.in_order_of("start_ns")
            by_order = phases_by_order([Kind(kind) for kind in ordered["kind"].tolist()])
            codes = _CODE_OF_PHASE[[of_op.code for of_op in by_order]]
            phase[ordered["row"]] = np.where(phase[ordered["row"]] == UNTAGGED, codes, phase[ordered["row"]])


def phase_spans_of_steps(
    ops: Slice, step: Int64, starts_ns: Sequence[int], ends_ns: Sequence[int]
) -> list[tuple[PhaseSpan, ...]]:
    """The phases of one rank in each of several windows.

    A window is cut at the start of the first steady op and at the end of the last one, so that waiting for the pipeline
    to fill counts as warmup and waiting for it to drain as cooldown. Without a steady phase it is cut after the last warmup op.

    Args:
        ops: the rank's tagged ops.
        step: for each of them the index of its window.
        starts_ns, ends_ns: the windows.
    """
    num_steps, phases = len(starts_ns), tuple(Phase)
    code, names = ops.codes("phase")
    group = step * len(phases) + np.array([phases.index(Phase(name)) for name in names], dtype=np.int64)[code]
    first = reduce_groups(np.minimum, ops["start_ns"], group, num_steps * len(phases))
    last = reduce_groups(np.maximum, ops["end_ns"], group, num_steps * len(phases))
    kind, kinds = ops.codes("kind")
    counts = np.bincount(group, minlength=len(first))
    forwards, backwards = (
        np.bincount(group, np.isin(kinds, of_kind)[kind] if len(kinds) else None, minlength=len(first)).astype(np.int64)
        for of_kind in (FORWARD_KINDS, BACKWARD_KINDS)
    )
    begins, ends, num_ops = (column.reshape(num_steps, -1) for column in (first, last, counts))
    warmup, steady = phases.index(Phase.WARMUP), phases.index(Phase.STEADY)
    filled = np.where(num_ops[:, warmup] > 0, ends[:, warmup], starts_ns)
    has_steady = num_ops[:, steady] > 0
    begin = np.where(has_steady, begins[:, steady], filled).tolist()
    end = np.where(has_steady, ends[:, steady], filled).tolist()
    num_forward, num_backward = (column.reshape(num_steps, -1).tolist() for column in (forwards, backwards))
    return [
        tuple(map(PhaseSpan, phases, edges[:-1], edges[1:], num_forward[index], num_backward[index]))
        for index, edges in enumerate(zip(starts_ns, begin, end, ends_ns, strict=True))
    ]
