"""The windows of a run by step, each with its plan, and the ranks whose traces lack ops of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from msgspec import Struct

from pptrace.analysis.aligned import AlignedRun
from pptrace.analysis.notes import is_plan_of_all
from pptrace.analysis.steps.steps import Ideal, PlannedStep, ideal_of
from pptrace.model.mesh import MeshInfo
from pptrace.model.schedule_info import WithPlan
from pptrace.schedule.needs import ranks_at_ends
from pptrace.schedule.plan import Plan
from pptrace.timeline.windows import StepWindow


def _ranks_of(windows: Sequence[StepWindow]) -> set[int]:
    """The ranks of some windows."""
    return {rank for window in windows for rank in window.ranks}


def planned_steps(windows: tuple[StepWindow, ...], data: AlignedRun, run: WithPlan) -> list[PlannedStep]:
    """The windows by step, each with its plan and ideal, where these are known."""
    is_plan_of_all_ranks = is_plan_of_all(run)
    shapes: dict[int, _Shape] = {}
    by_step: dict[int, list[StepWindow]] = {}
    for window in windows:
        by_step.setdefault(window.step, []).append(window)
    num_ops = {rank: data.rows.of_rank(rank).num_ops_by_step() for rank in _ranks_of(windows)}
    traced = {rank for pipeline in run.mesh.pipelines for rank in pipeline} & data.work.keys()
    steps = []
    for number, of_step in sorted(by_step.items()):
        plan = run.schedule.plan_of(number) if is_plan_of_all_ranks else None
        if plan is not None and plan.num_microbatches not in shapes:
            shapes[plan.num_microbatches] = _Shape.of(plan)
        shape = None if plan is None else shapes[plan.num_microbatches]
        is_complete = shape is not None and all(shape.has_ops_of(window, num_ops, run.mesh) for window in of_step)
        ideal = shape.ideal if shape is not None and is_complete else None
        lacking = set() if shape is None or is_complete else shape.ranks_that_lack_ops(of_step, num_ops)
        unbounded = frozenset[StepWindow]()
        if shape is not None:
            without_ops = lacking | (traced - _ranks_of(of_step))
            unbounded = shape.unbounded(of_step, without_ops, run.mesh) if without_ops else unbounded
        steps.append(PlannedStep(tuple(of_step), shape.plan if shape else None, ideal, frozenset(lacking), unbounded))
    return steps


class _Shape(Struct, frozen=True):
    """Figures that all steps of a plan share; ``num_ops`` is the number of ops of each pipeline rank."""

    plan: Plan
    ideal: Ideal
    num_ops: tuple[int, ...]

    @classmethod
    def of(cls, plan: Plan) -> _Shape:
        plan = plan.compute_only()
        return cls(plan, ideal_of(plan), tuple(map(len, plan.ranks)))

    def has_ops_of(self, window: StepWindow, num_ops: Mapping[int, Mapping[int, int]], mesh: MeshInfo) -> bool:
        """Return whether the step has the plan's number of ops on every rank, so that it has as many microbatches.

        Not checked where several ranks, but not all, have a trace.
        """
        counts = tuple(num_ops[rank][window.step] for rank in window.ranks)
        if len(counts) == 1 and (pp_rank := mesh.pp_rank(window.ranks[0])) is not None:
            return pp_rank >= len(self.num_ops) or counts[0] == self.num_ops[pp_rank]
        return len(counts) != len(self.num_ops) or counts == self.num_ops

    def ranks_that_lack_ops(self, windows: Sequence[StepWindow], num_ops: Mapping[int, Mapping[int, int]]) -> set[int]:
        """The ranks with fewer ops than the plan, in a step of which other ranks have as many as it."""
        of_ranks = [
            (rank, num_ops[rank][window.step] - planned)
            for window in windows
            if len(window.ranks) == len(self.num_ops)
            for rank, planned in zip(window.ranks, self.num_ops, strict=True)
        ]
        is_followed = any(more == 0 for _, more in of_ranks)
        return {rank for rank, more in of_ranks if more < 0} if is_followed else set()

    def unbounded(self, windows: Sequence[StepWindow], lacking: Set[int], mesh: MeshInfo) -> frozenset[StepWindow]:
        """The windows of which a rank lacks ops that begins or ends the plan: when they begin or end is not known."""
        ends = ranks_at_ends(self.plan)
        pipelines = {window: mesh.pipeline_of(window.ranks[0]) for window in windows}
        return frozenset(
            window
            for window, pipeline in pipelines.items()
            if len(pipeline) == len(self.num_ops) and any(pipeline[index] in lacking for index in ends)
        )
