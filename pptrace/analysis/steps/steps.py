"""One step of one pipeline: partition of its window, phases, bubble and its ideal.

Parts of a step cannot be where one is longer than the step itself, since times in the traces contradict each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from msgspec import Struct
from msgspec.structs import replace

from pptrace.analysis.aligned import AlignedRun
from pptrace.analysis.explain.explain import Explanation, explanation_tasks, graph_of_run
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


from pptrace.model.wording import listed


class Ideal(Struct, frozen=True):
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


class PlannedStep(Struct, frozen=True):
    """A step's windows, one for each pipeline, and what its plan says, where one is known; ``lacking`` are the ranks whose trace
    lacks ops of it, ``unbounded`` the windows whose first or last op may be among these.
    """

    windows: tuple[StepWindow, ...]
    plan: Plan | None = None
    ideal: Ideal | None = None
    lacking: frozenset[int] = frozenset()
    unbounded: frozenset[StepWindow] = frozenset()


def report_steps(
    steps: Sequence[PlannedStep],
    data: AlignedRun,
    mesh: MeshInfo,
    jobs: int = 1,
    routing: Routing | None = None,
    *,
    are_explained: bool = True,
) -> tuple[tuple[StepReport, ...], tuple[StepMatrix, ...]]:
    """(each step over all its pipelines, by plan what the ops and messages of steps that are whole cost); those of many ops are
    explained in ``jobs`` processes.

    ``routing`` is what equal rows of experts would change of ops. Where steps are not to be explained, their causes, critical
    paths and blame are null, and there are no costs.
    """
    comparable = {
        window: data.is_comparable(window) and window not in step.unbounded for step in steps for window in step.windows
    }
    are_comparable = [all(comparable[window] for window in step.windows) for step in steps]
    parts = _plan_parts(steps, are_comparable, data) if are_explained else []
    tasks = [explanation_tasks(plan.table, windows, data, graph, routing) for plan, _, windows, graph in parts]
    with SharedTasks(list(chain.from_iterable(tasks)), jobs) as explained:
        ranks = _rank_steps(steps, comparable, data, mesh)
        results = iter(explained.results())
    give_back_freed_memory()  # what is kept of it lies in pieces, next to which what follows would take more
    explanations: dict[int, Explanation] = {}
    costs: list[StepMatrix] = []
    for (plan, indices, *_), of_plan in zip(parts, tasks, strict=True):
        entries = list(chain.from_iterable(islice(results, len(of_plan))))
        explanations |= zip(indices, entries, strict=True)
        # What other processes explained has a table of its own.
        costs += [replace(entry.costs, table=plan.table) for entry in entries if entry.costs is not None]
    reported = tuple(
        _report_step(step, ranks, are_comparable[index], explanations.get(index, Explanation()), mesh)
        for index, step in enumerate(steps)
    )
    of_table = {id(plan.table): {"plan": plan, "graph": graph} for plan, *_, graph in parts}
    return reported, tuple(replace(same, **of_table[id(same.table)]) for same in joined(costs))


def _plan_parts(
    steps: Sequence[PlannedStep], are_comparable: Sequence[bool], data: AlignedRun
) -> list[tuple[Plan, list[int], tuple[tuple[StepWindow, ...], ...], Graph | None]]:
    """(each plan, which steps of it have ranks whose times compare, the windows of each, the graph of the plan's messages)."""
    of_plan: dict[int, list[int]] = {}
    for index, step in enumerate(steps):
        if step.plan is not None and are_comparable[index]:
            of_plan.setdefault(id(step.plan), []).append(index)
    parts = []
    for indices in of_plan.values():
        plan, windows = steps[indices[0]].plan, tuple(steps[index].windows for index in indices)
        assert plan is not None
        parts.append((plan, indices, windows, graph_of_run(plan, windows, data)))
    return parts


def _rank_steps(
    steps: Sequence[PlannedStep], comparable: Mapping[StepWindow, bool], data: AlignedRun, mesh: MeshInfo
) -> dict[tuple[int, int], RankStep]:
    """The report of each rank in each step, by (rank, step)."""
    of_rank: dict[int, list[tuple[PlannedStep, StepWindow]]] = {}
    for step in steps:
        for window in step.windows:
            for rank in window.ranks:
                of_rank.setdefault(rank, []).append((step, window))
    reports: dict[tuple[int, int], RankStep] = {}
    for rank, entries in of_rank.items():
        windows, pp_rank = [window for _, window in entries], mesh.pp_rank(rank)
        ranks_of_plans = (
            () if step.ideal is None or pp_rank is None else step.ideal.ranks[pp_rank:] for step, _ in entries
        )
        of_windows = RankWindows.of(
            rank,
            windows,
            data,
            [comparable[window] for window in windows],
            [rank in data.lacking and (len(window.ranks) == 1 or not comparable[window]) for window in windows],
            [rank not in step.lacking for step, _ in entries],
            ideals=tuple(next(iter(ranks), None) for ranks in ranks_of_plans),
        )
        for window, report in zip(windows, report_rank_steps(of_windows, data, mesh), strict=True):
            reports[rank, window.step] = report
    return reports


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


def without_impossible(
    steps: Sequence[StepReport], costs: Sequence[StepMatrix]
) -> tuple[tuple[StepReport, ...], tuple[StepMatrix, ...], str]:
    """The steps, null of what those are made of that have an impossible part, the costs of the others, and a line that says so.

    The replay that takes a step apart runs its ops one after the other on each rank. Where a recorder has stretched them, or one
    rank's clock has another unit, it takes many times as long as the step did.
    """
    numbers = [
        step.step
        for step in steps
        if step.span_ns is not None and any(abs(ns) > step.span_ns for ns in (step.span_parts or {}).values())
    ]
    if not numbers:
        return tuple(steps), tuple(costs), ""
    kept = [costs_of.of_windows(np.flatnonzero(~np.isin(costs_of.step, numbers))) for costs_of in costs]
    line = (
        f"step {listed(map(str, numbers))}: parts would be longer than the step: times of ops and messages in the traces "
        "contradict each other, and what it is made of is null; pptrace doctor says what is known of the recording"
    )
    without = tuple(
        replace(step, ideal_ns=None, causes=None, bubble=replace(step.bubble, waterfall_ns=None))
        if step.step in numbers
        else step
        for step in steps
    )
    return without, tuple(costs_of for costs_of in kept if len(costs_of.step)), line
