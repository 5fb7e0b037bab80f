"""Warmup, steady and cooldown of a measured run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from pptrace.model.tables import BACKWARD_KINDS, COMPUTE_KINDS, FORWARD_KINDS, Int64
from pptrace.schedule.actions import Kind, Phase
from pptrace.schedule.phases import phases_by_order
from pptrace.schedule.plan import Plan
from pptrace.slices import Slice, reduce_groups, rows_among, slice_of, slices
from pptrace.timeline.windows import StepWindow


@dataclass(frozen=True, slots=True)
class PhaseSpan:
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


def phase_spans(ops: Slice, window: StepWindow) -> tuple[PhaseSpan, ...]:
    """The phases of one rank in a window, from its tagged ops in that window; see :func:`phase_spans_of_steps`."""
    step = np.zeros(len(ops), dtype=np.int64)
    return phase_spans_of_steps(ops, step, [window.start_ns], [window.end_ns])[0]


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
