"""A measured step simulated by its plan: every op at the mean cost of its kind, and free messages."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from pptrace.model.tables import COMPUTE_KINDS
from pptrace.schedule.actions import Kind
from pptrace.simulator import IDEAL, Costs, simulate
from pptrace.timeline.windows import StepWindow
from pptrace.workflow.analyse import Analysis


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """The ops (schema OPS) of all pipelines, each beginning when its measured window does, and their windows."""

    ops: pd.DataFrame
    windows: tuple[StepWindow, ...]

    @property
    def span_ns(self) -> int:
        return max(window.span_ns for window in self.windows)


def plan_step(analysis: Analysis, step: int) -> PlannedStep | None:
    """Simulate the plan of a step; None where the run has no plan or no such step."""
    measured = [window for window in analysis.windows if window.step == step]
    step_plan = analysis.schedule.plan_of(step)
    if step_plan is None or not measured:
        return None
    plan = step_plan.compute_only()
    tables, windows = [], []
    for window in measured:
        simulation = simulate(plan, _mean_costs(analysis.data.ops, window))
        ranks = analysis.mesh.pipeline_of(window.ranks[0])
        if len(ranks) != plan.pp:
            ranks = tuple(range(plan.pp))
        ops = simulation.ops()
        ops["rank"] = ops["rank"].map(dict(enumerate(ranks)))
        ops["step"] = step
        ops["start_ns"] += window.start_ns
        ops["end_ns"] += window.start_ns
        tables.append(ops)
        windows.append(StepWindow(step, ranks, window.start_ns, window.start_ns + simulation.makespan_ns))
    return PlannedStep(pd.concat(tables, ignore_index=True), tuple(windows))


def _mean_costs(ops: pd.DataFrame, window: StepWindow) -> Costs:
    """Mean cost of each kind in the window; one that was not measured has its ideal proportion to the others."""
    window_ops = ops[ops["rank"].isin(window.ranks) & (ops["step"] == window.step) & ops["kind"].isin(COMPUTE_KINDS)]
    lengths = (window_ops["end_ns"] - window_ops["start_ns"]).groupby(window_ops["kind"]).mean()
    measured = {Kind(str(kind)): round(float(mean)) for kind, mean in lengths.items()}
    ideal_kinds = [kind for kind in measured if kind in IDEAL.kinds]
    scale = (
        sum(measured[kind] for kind in ideal_kinds) / sum(IDEAL.kinds[kind] for kind in ideal_kinds)
        if ideal_kinds
        else 1.0
    )
    return Costs(kinds={kind: round(cost * scale) for kind, cost in IDEAL.kinds.items()} | measured)
