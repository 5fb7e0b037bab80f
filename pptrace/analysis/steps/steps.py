"""One step of one pipeline: partition of its window, phases, bubble and its ideal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from pptrace.analysis.aligned import AlignedRun
from pptrace.analysis.explain.explain import Explanation, explanation_tasks
from pptrace.analysis.explain.messaging import graph_of_run
from pptrace.analysis.matrix.step_matrix import StepMatrix, joined
from pptrace.analysis.result import MarkedStep, RankIdeal, RankStep, StepReport
from pptrace.analysis.steps.rank_steps import RankWindows, report_rank_steps
from pptrace.analysis.whole_run import Bubble, Waterfall
from pptrace.memory import give_back_freed_memory
from pptrace.model.mesh import MeshInfo
from pptrace.model.tables import COMPUTE_KINDS
from pptrace.processes import SharedTasks
from pptrace.schedule.actions import Phase
from pptrace.schedule.message_graph import Graph
from pptrace.schedule.plan import Plan
from pptrace.simulator import IDEAL, phase_lengths, simulate
from pptrace.slices import rows_among, slices
from pptrace.timeline.windows import StepWindow

if TYPE_CHECKING:
    from pptrace.analysis.experts.routing import Routing


@dataclass(frozen=True, slots=True)
class Ideal:
    """The bubble of a plan with F = I = W and free messages, and that of each of its ranks."""

    ratio: float
    share: float
    ranks: tuple[RankIdeal, ...]


def ideal_of(plan: Plan) -> Ideal:
    simulation = simulate(plan.compute_only(), IDEAL)
    return Ideal(
        simulation.bubble_ratio,
        simulation.bubble_share,
        tuple(
            RankIdeal(
                ratio=rank.bubble_ns / rank.compute_ns,
                share=rank.bubble_ns / simulation.makespan_ns,
                own_ratio=rank.inner_bubble_ns / rank.compute_ns,
                own_share=rank.inner_bubble_ns / (rank.inner_bubble_ns + rank.compute_ns),
                warmup_ratio=phases[Phase.WARMUP] / rank.compute_ns,
                steady_ratio=phases[Phase.STEADY] / rank.compute_ns,
                cooldown_ratio=phases[Phase.COOLDOWN] / rank.compute_ns,
            )
            for rank, phases in zip(simulation.ranks, phase_lengths(simulation), strict=True)
        ),
    )


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step's windows, one for each pipeline, and what its plan says, where one is known; ``lacking`` are the ranks whose trace
    lacks ops of it, ``unbounded`` the windows whose first or last op may be among these.
    """

    windows: tuple[StepWindow, ...]
    plan: Plan | None = None
    ideal: Ideal | None = None
    lacking: frozenset[int] = frozenset()
    unbounded: frozenset[StepWindow] = frozenset()


@dataclass(frozen=True, slots=True)
class PlanPart:
    """Steps of one plan that are explained together: which they are of the run's, and the windows of each."""

    plan: Plan
    indices: tuple[int, ...]
    steps: tuple[tuple[StepWindow, ...], ...]

    @property
    def windows(self) -> list[StepWindow]:
        """The windows of all steps, one step after the other."""
        return [window for of_step in self.steps for window in of_step]


@dataclass(frozen=True, slots=True)
class StepParts:
    """A run's steps, cut into what can be reported rank by rank and plan by plan; whether each step's times compare."""

    steps: Sequence[PlannedStep]
    are_comparable: tuple[bool, ...]
    of_rank: Mapping[int, RankWindows]
    of_plan: tuple[PlanPart, ...]

    @classmethod
    def of(cls, steps: Sequence[PlannedStep], data: AlignedRun, mesh: MeshInfo) -> StepParts:
        """The parts; of ``data`` only the device work, the clock and the ranks that lack others are used."""
        of_rank: dict[int, list[tuple[PlannedStep, StepWindow]]] = {}
        comparable = {
            window: data.is_comparable(window) and window not in step.unbounded
            for step in steps
            for window in step.windows
        }
        for step in steps:
            for window in step.windows:
                for rank in window.ranks:
                    of_rank.setdefault(rank, []).append((step, window))
        parts = {rank: _rank_windows(rank, entries, comparable, data, mesh) for rank, entries in of_rank.items()}
        are_comparable = tuple(all(comparable[window] for window in step.windows) for step in steps)
        return cls(steps, are_comparable, parts, _plan_parts(steps, are_comparable))

    def joined(
        self,
        ranks: Mapping[int, Sequence[RankStep]],
        explanations: Sequence[Sequence[Explanation]],
        graphs: Sequence[Graph | None],
        mesh: MeshInfo,
    ) -> ReportedSteps:
        """The steps, from the reports of each rank, and the explanations of each plan's steps with the graph of its messages.

        Where ranks of the mesh's pipelines are not in the windows, the step's bubble is not known.
        """
        reports = {
            (rank, step): report
            for rank, windows in self.of_rank.items()
            for step, report in zip(windows.steps.tolist(), ranks[rank], strict=True)
        }
        of_step: dict[int, Explanation] = {}
        costs: list[StepMatrix] = []
        for part, explained in zip(self.of_plan, explanations, strict=True):
            of_step |= zip(part.indices, explained, strict=True)
            # What other processes explained has a table of its own.
            costs += [replace(entry.costs, table=part.plan.table) for entry in explained if entry.costs is not None]
        reported = tuple(
            _report_step(step, reports, self.are_comparable[index], of_step.get(index, Explanation()), mesh)
            for index, step in enumerate(self.steps)
        )
        plans = {id(part.plan.table): (part.plan, graph) for part, graph in zip(self.of_plan, graphs, strict=True)}
        every = tuple(
            replace(same, plan=plan, graph=graph) for same in joined(costs) for plan, graph in (plans[id(same.table)],)
        )
        return ReportedSteps(reported, every)


@dataclass(frozen=True, slots=True, eq=False)
class ReportedSteps:
    """A run's steps, and by plan what the ops and messages of those that are whole cost."""

    steps: tuple[StepReport, ...]
    costs: tuple[StepMatrix, ...] = ()


def report_steps(
    steps: Sequence[PlannedStep], data: AlignedRun, mesh: MeshInfo, jobs: int = 1, routing: Routing | None = None
) -> ReportedSteps:
    """Each step over all its pipelines; those of many ops are explained in ``jobs`` processes.

    ``routing`` is what equal rows of experts would change of ops.
    """
    parts = StepParts.of(steps, data, mesh)
    graphs = [graph_of_run(part.plan, part.steps, data) for part in parts.of_plan]
    tasks = [
        explanation_tasks(part.plan.table, part.steps, data, graph, routing)
        for part, graph in zip(parts.of_plan, graphs, strict=True)
    ]
    with SharedTasks(list(chain.from_iterable(tasks)), jobs) as explained:
        ranks = {rank: report_rank_steps(windows, data, mesh) for rank, windows in parts.of_rank.items()}
        results = iter(explained.results())
    explanations = [list(chain.from_iterable(islice(results, len(of_plan)))) for of_plan in tasks]
    give_back_freed_memory()  # what is kept of it lies in pieces, next to which what follows would take more
    return parts.joined(ranks, explanations, graphs, mesh)


def _plan_parts(steps: Sequence[PlannedStep], are_comparable: Sequence[bool]) -> tuple[PlanPart, ...]:
    """The steps of each plan whose ranks' times compare."""
    of_plan: dict[int, list[int]] = {}
    for index, step in enumerate(steps):
        if step.plan is not None and are_comparable[index]:
            of_plan.setdefault(id(step.plan), []).append(index)
    parts = []
    for indices in of_plan.values():
        plan = steps[indices[0]].plan
        assert plan is not None
        parts.append(PlanPart(plan, tuple(indices), tuple(steps[index].windows for index in indices)))
    return tuple(parts)


def _rank_windows(
    rank: int,
    entries: Sequence[tuple[PlannedStep, StepWindow]],
    comparable: Mapping[StepWindow, bool],
    data: AlignedRun,
    mesh: MeshInfo,
) -> RankWindows:
    windows, pp_rank = [window for _, window in entries], mesh.pp_rank(rank)
    ranks_of_plans = (
        () if step.ideal is None or pp_rank is None else step.ideal.ranks[pp_rank:] for step, _ in entries
    )
    return RankWindows(
        rank,
        steps=np.array([window.step for window in windows], dtype=np.int64),
        start_ns=np.array([window.start_ns for window in windows], dtype=np.int64),
        end_ns=np.array([window.end_ns for window in windows], dtype=np.int64),
        comparable=np.array([comparable[window] for window in windows], dtype=np.bool_),
        is_alone=np.array(
            [rank in data.lacking and (len(window.ranks) == 1 or not comparable[window]) for window in windows],
            dtype=np.bool_,
        ),
        is_whole=np.array([rank not in step.lacking for step, _ in entries], dtype=np.bool_),
        ideals=tuple(next(iter(ranks), None) for ranks in ranks_of_plans),
    )


def _report_step(
    step: PlannedStep,
    rank_steps: Mapping[tuple[int, int], RankStep],
    are_comparable: bool,
    explanation: Explanation,
    mesh: MeshInfo,
) -> StepReport:
    windows, ideal = step.windows, step.ideal
    ranks = [rank_steps[rank, window.step] for window in windows for rank in window.ranks]
    compute = sum(rank.compute_ns or 0 for rank in ranks)
    bubbles = [rank.bubble_ns for rank in ranks if rank.bubble_ns is not None]
    complete = len(bubbles) == len(ranks) == mesh.num_pipeline_ranks
    bubble = sum(bubbles)
    total_window = sum(rank.window_ns for rank in ranks)
    return StepReport(
        step=windows[0].step,
        start_ns=min(window.start_ns for window in windows),
        end_ns=max(window.end_ns for window in windows),
        span_ns=max(window.span_ns for window in windows) if are_comparable else None,
        bubble=Bubble(
            ratio=bubble / compute if complete and compute else None,
            share=bubble / total_window if complete and total_window else None,
            ideal_ratio=ideal.ratio if ideal else None,
            ideal_share=ideal.share if ideal else None,
            waterfall_ns=Waterfall.of(explanation.ideal_ns, explanation.causes, knows_host=explanation.knows_host),
        ),
        ranks=tuple(sorted(ranks, key=lambda rank: rank.rank)),
        ideal_ns=explanation.ideal_ns,
        causes=explanation.causes,
        critical_path=explanation.critical_path,
        blame=explanation.blame if complete else None,
    )


def marked_steps(ops: pd.DataFrame) -> tuple[MarkedStep, ...]:
    """The STEP ranges of every rank, with the time of the other marked ranges in each."""
    marked = []
    for (rank, step), rows in sorted(slices(ops[~rows_among(ops["kind"], COMPUTE_KINDS)], ("rank", "step")).items()):
        is_step = rows["kind"] == "STEP"
        if is_step.any():
            start, end = int(rows["start_ns"][is_step].min()), int(rows["end_ns"][is_step].max())
            by_kind = rows.where(~is_step).by("kind").items()
            others = {kind: int((spans["end_ns"] - spans["start_ns"]).sum()) for kind, spans in by_kind}
            marked.append(MarkedStep(rank, step, start, end, others))
    return tuple(marked)
