"""Warmup, steady and cooldown of a measured run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from pptrace.model.tables import COMPUTE_KINDS, Int64
from pptrace.schedule.actions import Kind, Phase
from pptrace.schedule.phases import phases_by_order
from pptrace.schedule.plan import Plan
from pptrace.slices import Slice, slices
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
    tagged = ops.copy()
    compute = tagged["kind"].isin(COMPUTE_KINDS)
    plans = {step: plan_of(step) for step in tagged.loc[compute, "step"].unique().tolist()}
    if any(plan is not None for plan in plans.values()):
        rows = tagged.loc[compute, ["step", "kind", "stage", "microbatch", "phase"]]
        tagged.loc[compute, "phase"] = [
            phase if (plan := plans[step]) is None else str(plan.phase_of.get((Kind(kind), stage, microbatch), phase))
            for step, kind, stage, microbatch, phase in rows.itertuples(index=False)
        ]
    unknown = compute & (tagged["phase"] == "")
    if by_order and unknown.any():
        tagged.loc[compute, "phase"] = _by_order(tagged[compute])
    return tagged


def _by_order(ops: pd.DataFrame) -> npt.NDArray[np.object_]:
    """The phases of compute ops; where they have none, those of their place in the order of their rank's step."""
    phase = ops["phase"].to_numpy(dtype=object, copy=True)
    for rows in slices(ops.assign(row=np.arange(len(ops))), ("rank", "step")).values():
        if (rows["phase"] == "").any():
            rows = rows.in_order_of("start_ns")
            by_order = phases_by_order([Kind(kind) for kind in rows["kind"].tolist()])
            phase[rows["row"]] = np.where(
                rows["phase"] == "", [str(phase_of_op) for phase_of_op in by_order], rows["phase"]
            )
    return phase


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
    group = step * len(phases) + _index_of_phase(ops, phases)
    first = np.full(num_steps * len(phases), np.iinfo(np.int64).max)
    last = np.full(num_steps * len(phases), np.iinfo(np.int64).min)
    np.minimum.at(first, group, ops["start_ns"])
    np.maximum.at(last, group, ops["end_ns"])
    kind, kinds = ops.codes("kind")
    counts = np.bincount(group, minlength=len(first))
    forwards, backwards = (
        np.bincount(group, np.isin(kinds, of_kind)[kind] if len(kinds) else None, minlength=len(first)).astype(np.int64)
        for of_kind in (("F", "OVERLAP_F_B"), ("B", "I", "OVERLAP_F_B"))
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


def _index_of_phase(ops: Slice, phases: Sequence[Phase]) -> Int64:
    codes, names = ops.codes("phase")
    of_name = np.array([phases.index(Phase(name)) for name in names], dtype=np.int64)
    return of_name[codes]
