"""Warmup, steady and cooldown of a measured run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from pptrace.recognise.schedule import COMPUTE_KINDS
from pptrace.schedule.actions import Kind, Phase
from pptrace.schedule.phases import phases_by_order
from pptrace.schedule.plan import Plan
from pptrace.timeline.windows import StepWindow


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """A phase of one rank in one step, ns. The three spans of a rank cover its window without overlap."""

    phase: Phase
    start_ns: int
    end_ns: int
    num_forward: int
    num_backward: int


def tag_ops(ops: pd.DataFrame, plan_of: Callable[[int], Plan | None]) -> pd.DataFrame:
    """The ops with ``phase`` filled: that of the same action in its step's plan, else its own label, else by order."""
    tagged = ops.copy()
    compute = tagged["kind"].isin(COMPUTE_KINDS)
    for step, rows in tagged[compute].groupby("step"):
        plan = plan_of(int(str(step)))
        if plan is not None:
            keys = zip(map(Kind, rows["kind"]), rows["stage"], rows["microbatch"], strict=True)
            tagged.loc[rows.index, "phase"] = [
                str(plan.phase_of.get(key, own)) for key, own in zip(keys, rows["phase"], strict=True)
            ]
    unknown = tagged[compute & (tagged["phase"] == "")]
    for rank, step in set(zip(unknown["rank"], unknown["step"], strict=True)):
        rows = tagged[compute & (tagged["rank"] == rank) & (tagged["step"] == step)].sort_values("start_ns")
        phases = phases_by_order([Kind(kind) for kind in rows["kind"]])
        tagged.loc[rows.index, "phase"] = np.where(rows["phase"] == "", [str(p) for p in phases], rows["phase"])
    return tagged


def phase_spans(ops: pd.DataFrame, window: StepWindow) -> tuple[PhaseSpan, ...]:
    """The phases of one rank in a window, from its tagged ops in that window.

    The window is cut at the start of the first steady op and at the end of the last one, so that waiting for the pipeline
    to fill counts as warmup and waiting for it to drain as cooldown. Without a steady phase it is cut after the last warmup op.
    """
    by_phase = {phase: ops[ops["phase"] == str(phase)] for phase in Phase}
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
            num_forward=int(by_phase[phase]["kind"].isin(("F", "OVERLAP_F_B")).sum()),
            num_backward=int(by_phase[phase]["kind"].isin(("B", "I", "OVERLAP_F_B")).sum()),
        )
        for phase, start, end in zip(Phase, edges[:-1], edges[1:], strict=True)
    )
