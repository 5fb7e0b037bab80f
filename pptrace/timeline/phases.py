"""Warmup, steady and cooldown of a measured run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from pptrace.model.tables import COMPUTE_KINDS
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
    for rows in slices(ops.assign(place=np.arange(len(ops))), ("rank", "step")).values():
        if (rows["phase"] == "").any():
            rows = rows.in_order_of("start_ns")
            by_order = phases_by_order([Kind(kind) for kind in rows["kind"].tolist()])
            phase[rows["place"]] = np.where(
                rows["phase"] == "", [str(phase_of_op) for phase_of_op in by_order], rows["phase"]
            )
    return phase


def phase_spans(ops: Slice, window: StepWindow) -> tuple[PhaseSpan, ...]:
    """The phases of one rank in a window, from its tagged ops in that window.

    The window is cut at the start of the first steady op and at the end of the last one, so that waiting for the pipeline
    to fill counts as warmup and waiting for it to drain as cooldown. Without a steady phase it is cut after the last warmup op.
    """
    by_phase = {phase: ops.where(ops["phase"] == str(phase)) for phase in Phase}
    steady = by_phase[Phase.STEADY]
    if len(steady):
        cuts = (int(steady["start_ns"].min()), int(steady["end_ns"].max()))
    else:
        warmup = by_phase[Phase.WARMUP]
        cut = int(warmup["end_ns"].max()) if len(warmup) else window.start_ns
        cuts = (cut, cut)
    edges = (window.start_ns, *cuts, window.end_ns)
    return tuple(
        PhaseSpan(
            phase,
            start,
            end,
            num_forward=int(by_phase[phase].among("kind", ("F", "OVERLAP_F_B")).sum()),
            num_backward=int(by_phase[phase].among("kind", ("B", "I", "OVERLAP_F_B")).sum()),
        )
        for phase, start, end in zip(Phase, edges[:-1], edges[1:], strict=True)
    )
