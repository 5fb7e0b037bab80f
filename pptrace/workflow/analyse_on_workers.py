"""Analyse a run whose ranks lie on the workers of a cluster: the report of :func:`pptrace.workflow.analyse.analyse_ranks`, made
there as far as ranks and steps can be looked at by themselves.

    map      each file is read and recognised where a worker reads it; its header and ops come here
    here     the mesh, the stages, the schedule: of all ops, and of one row for each kind of communication
    shuffle  the communication, dealt out by blocks of steps, is matched and timed; what relates the clocks comes here
    here     the clocks, phases and windows
    reduce   for each rank its lane, its steps, its communication and its device, from its rows and what the blocks say of them

What decides here is the code that decides where all rows are here, given less: so a run in which that code changes what it is
given, or looks at more of it, is not analysed in this way (:class:`NotSplitError`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any

import numpy as np
import pandas as pd

from pptrace.analysis.aligned import AlignedRun, RowsByRank
from pptrace.analysis.experts.routing import Routing
from pptrace.analysis.explain.explain import Explanation, explain_ranks
from pptrace.analysis.explain.messaging import graph_of_ranks
from pptrace.analysis.explain.step_times import IndexedWindows, RankTimes
from pptrace.analysis.lost_steps import lost_steps
from pptrace.analysis.questions import experts_in
from pptrace.analysis.result import RankStep
from pptrace.analysis.steps.op_rows import OpRows
from pptrace.analysis.steps.outside_pipeline import inside_windows, with_periods
from pptrace.analysis.steps.rank_steps import RankWindows
from pptrace.analysis.steps.steps import StepParts
from pptrace.clock import Clock, estimate_clock, shift
from pptrace.model.categories import with_categories
from pptrace.model.join_tables import join_ranks
from pptrace.model.predicted import predictions_of
from pptrace.model.tables import COMMS, MEMORY, Int64, empty_table
from pptrace.recognise.messages.comms_from_calls import comms_of_calls
from pptrace.recognise.messages.match import steps_of_unmatched, warn_unmatched
from pptrace.recognise.run import Matched, RecognisedRun, Unmatched, recognise_ranks
from pptrace.schedule.message_graph import Graph
from pptrace.timeline.phases import tag_ops
from pptrace.timeline.windows import step_windows
from pptrace.workflow.analyse import (
    Analysis,
    Measured,
    execution_ops,
    input_info,
    lacking_ranks,
    only,
    routing_of,
)
from pptrace.workflow.dask_engine import DaskEngine
from pptrace.workflow.on_workers import (
    BlockFacts,
    GroupReport,
    RankReport,
    RunFacts,
    comms_of_ranks,
    dealt_by_step,
    facts_of_block,
    matched_block,
    report_of_group,
    rows_of_ranks,
    steps_of,
    timed_block,
)
from pptrace.workflow.planned_steps import planned_steps
from pptrace.workflow.remote_rank import RemoteRank

_BLOCKS_PER_WORKER = 2
_GROUPS_PER_WORKER = 4


class NotSplitError(Exception):
    """The run cannot be analysed rank by rank and step by step; the message is why, for who reads the code."""


def analyse_on_workers(
    taken: list[RemoteRank],
    engine: DaskEngine,
    schedule: str | None = None,
    step: int | None = None,
    num_ranks: int | None = None,
    warnings: Sequence[str] = (),
) -> Analysis:
    """The analysis of the ranks; its tables have the ops alone.

    Args:
        taken: the ranks in order of their numbers, which are set; taken out of this list, so that their ops are let go of.
        engine: where they are.
        schedule, step, num_ranks, warnings: as for :func:`~pptrace.workflow.analyse.analyse_ranks`.

    Raises:
        NotSplitError: all rows have to be in one process.
        UsageError: there is no such step or schedule.
    """
    if not all(rank.is_plain for rank in taken):
        raise NotSplitError("ops or communication are inferred from what all ranks did")
    inputs = tuple(input_info(rank.info) for rank in taken)
    shuffle = _Shuffle(tuple(taken), engine)
    taken.clear()
    run = recognise_ranks(shuffle.leans, schedule, num_ranks, shuffle.match)
    if any(run.work[rank.number].missing_device_events != rank.work.missing_device_events for rank in shuffle.leans):
        raise NotSplitError("a rank has no device events, but others have")
    relating, ops = shuffle.relating_rows(), execution_ops(run)
    clock = estimate_clock(relating, list(run.facts), run.facts, ops, run.mesh.pipelines, run.ops)
    data = _align_ops(run, clock)
    every_window = step_windows(data.ops, run.mesh)
    if not every_window:
        raise NotSplitError("there is no pipeline")
    windows = every_window if step is None else only(step, every_window)
    parts = StepParts.of(planned_steps(windows, data, run), data, run.mesh)
    of_run = (run.framework, run.mesh, run.schedule, clock, data.predicted, data.lacking)
    facts = RunFacts(*of_run, parts.of_plan, inside_windows(every_window), data.lost_steps)
    groups = shuffle.reports(facts, parts.of_rank)
    reports = {number: report for group in groups for number, report in sorted(group.ranks.items())}
    answers = {number: report.answers for number, report in reports.items()}
    experts = experts_in(answers, run, {number: steps_of(part) for number, part in parts.of_rank.items()})
    explanations, graphs = _explanations(reports, parts, routing_of(experts))
    reported = parts.joined(_rank_steps(reports, parts, data), explanations, graphs, run.mesh)
    outside = {number: report.outside for number, report in reports.items()}
    steps = with_periods(reported.steps, every_window, data, outside, run.mesh.num_ranks)
    run = replace(run, comms=with_categories(pd.concat([group.comms for group in groups])))
    device = tuple(report.device for _, report in sorted(reports.items()))
    measured = Measured(inputs, run, data, windows, step, steps, reported.costs, answers, experts, device)
    unknown = {number: report.unknown for number, report in reports.items()}
    num_nested = sum(group.num_nested for group in groups)
    return measured.analysis((*warnings, *run.warnings), unknown, num_nested=num_nested)


def _align_ops(run: RecognisedRun, clock: Clock) -> AlignedRun:
    """The ops on one clock with their phases, without communication and lanes."""
    ops = tag_ops(shift(run.ops, clock), run.schedule.plan_of, run.schedule.has_phases)
    comms = with_categories(empty_table(COMMS))
    predicted, incomplete = predictions_of(run.facts, run.schedule), lacking_ranks(run)
    rows = RowsByRank(ops, comms)
    lost = lost_steps(run.ops, run.work)
    return AlignedRun(
        ops, comms, empty_table(MEMORY), rows, {}, run.work, clock, predicted, incomplete, lost_steps=lost
    )


def _rank_steps(reports: Mapping[int, RankReport], parts: StepParts, data: AlignedRun) -> dict[int, Sequence[RankStep]]:
    """The steps of each rank, with the ops, which never left this process."""
    steps: dict[int, Sequence[RankStep]] = {}
    for rank, part in parts.of_rank.items():
        ops, window = part.index_of(data.rows.of_rank(rank).ops)
        first = np.searchsorted(window, np.arange(len(part.steps) + 1)).tolist()
        steps[rank] = [
            replace(step, ops=OpRows(ops, first[index], first[index + 1]))
            for index, step in enumerate(reports[rank].steps)
        ]
    return steps


def _explanations(
    reports: Mapping[int, RankReport], parts: StepParts, routing: Routing | None
) -> tuple[list[list[Explanation]], list[Graph | None]]:
    """The explanations of each plan's steps, and the graph of its messages."""
    axes: Counter[str] = Counter()
    for report in reports.values():
        axes.update(report.axes_inside_ops)
    explanations: list[list[Explanation]] = []
    graphs: list[Graph | None] = []
    for index, part in enumerate(parts.of_plan):
        ranks = [_of_plan(reports[rank], index) for rank in IndexedWindows.of(part.windows).of_rank]
        graph = graph_of_ranks(part.plan, part.steps, ranks)
        of_axes = dict(sorted(axes.items()))
        explanations.append(explain_ranks(part.plan.table, part.steps, ranks, of_axes, graph, routing))
        graphs.append(graph)
    return explanations, graphs


def _of_plan(report: RankReport, index: int) -> RankTimes:
    times = report.times[index]
    assert times is not None
    return times


@dataclass(frozen=True, slots=True)
class _Group:
    """Ranks that are looked at by one call, since a worker holds them; ``files`` and ``comms`` are what it holds of them."""

    numbers: tuple[int, ...]
    files: list[list[Any]]
    comms: Any

    @property
    def name(self) -> str:
        """Name for a line about workers that die of it."""
        return f"ranks {self.numbers[0]} to {self.numbers[-1]}" if len(self.numbers) > 1 else f"rank {self.numbers[0]}"


class _Shuffle:
    """Deals the communication of all ranks out by blocks of steps and back."""

    def __init__(self, ranks: Sequence[RemoteRank], engine: DaskEngine) -> None:
        self._ranks = tuple(rank.without_ops() for rank in ranks)
        self.leans = [rank.lean for rank in ranks]
        self._engine = engine
        self._groups: list[_Group] = []
        self._blocks: list[Any] = []
        self._facts: list[BlockFacts] = []

    def match(self, run: Unmatched) -> Matched:
        """Match the rows on the workers: what :func:`pptrace.recognise.run.match_here` does with all of them.

        Raises:
            NotSplitError: the ranks' rows are changed or chosen by what all of them hold.
        """
        self._require_unchanged(run)
        unnamed, lines = comms_of_calls(
            run.calls, run.groups, run.placed.ops, run.placed.comms, run.placed.mesh, run.schedule
        )
        if len(unnamed):
            raise NotSplitError("there are calls that no label names")
        engine, mesh = self._engine, run.placed.mesh
        first_steps = _first_steps(run.placed.ops, engine.num_workers * _BLOCKS_PER_WORKER)
        holders = run.placed.ops.loc[run.placed.ops["stage"] >= 0, ["rank", "stage"]].drop_duplicates()
        shared = engine.submit(_same, (holders, mesh))
        parts_of = {rank.number: [list(part) for part in rank.parts] for rank in self._ranks}
        for numbers in self._numbers_by_worker():
            files = [parts_of[number] for number in numbers]
            comms = engine.submit(_comms, numbers, files, shared)
            self._groups.append(_Group(numbers, files, comms))
        dealt = [engine.submit(dealt_by_step, group.comms, first_steps) for group in self._groups]
        self._blocks = [
            engine.submit(_matched, shared, *(engine.submit(getitem, rows, index) for rows in dealt))
            for index in range(len(first_steps) + 1)
        ]
        without_devices = [rank.number for rank in self._ranks if rank.lean.work.missing_device_events]
        lost = lost_steps(run.placed.ops, {rank.number: rank.lean.work for rank in self._ranks})
        lacking = (engine.submit(_same, without_devices), engine.submit(_same, lost))
        facts = [engine.submit(facts_of_block, block, *lacking) for block in self._blocks]
        del dealt  # a worker lets go of what no later call needs
        self._facts = engine.results(facts, [f"block {index} of the steps" for index in range(len(facts))])
        if not all(block.by_name for block in self._facts):
            raise NotSplitError("messages are matched in an order that goes on from block to block")
        unmatched_rows = pd.concat([block.lacking for block in self._facts], ignore_index=True)
        unmatched, ranks = with_categories(unmatched_rows), [rank.number for rank in self._ranks]
        unanswered = warn_unmatched(unmatched, ranks)
        return Matched(empty_table(COMMS), lines, unanswered, steps_of_unmatched(unmatched, ranks))

    def _require_unchanged(self, run: Unmatched) -> None:
        leans = self.leans
        if run.is_partial or run.spanned or list(map(id, run.ranks)) != list(map(id, leans)):
            raise NotSplitError("ranks are cut or renumbered by what the others hold, or others have no trace")
        comms = join_ranks([(lean.number, lean.comms) for lean in leans], COMMS)
        if not comms.equals(run.placed.comms):
            raise NotSplitError("stages and microbatches of messages follow from those of others")
        with_ops = [lean for lean in leans if len(lean.ops)]
        for name in ("step", "stage", "chunk", "microbatch", "start_ns"):
            columns = [lean.ops[name].to_numpy() for lean in with_ops] or [np.zeros(0, dtype=np.int64)]
            if not np.array_equal(np.concatenate(columns), run.placed.ops[name].to_numpy()):
                raise NotSplitError("stages and microbatches of ops follow from those of others")
        self.leans = []

    def _numbers_by_worker(self) -> Iterator[tuple[int, ...]]:
        """The numbers of the ranks, in groups that a worker holds."""
        holder = self._engine.holders([rank.parts[0][0] for rank in self._ranks])
        by_worker: defaultdict[str, list[int]] = defaultdict(list)
        for rank, worker in zip(self._ranks, holder, strict=True):
            by_worker[worker].append(rank.number)
        size = -(-len(self._ranks) // (self._engine.num_workers * _GROUPS_PER_WORKER))
        for _, numbers in sorted(by_worker.items()):
            for first in range(0, len(numbers), size):
                yield tuple(numbers[first : first + size])

    def relating_rows(self) -> pd.DataFrame:
        """Rows that relate the clocks, in the order in which the rows of all ranks stand, with numbers of matches for the
        run; let go of afterwards.
        """
        tables = []
        next_message, next_collective = 0, sum(block.num_messages for block in self._facts)
        for block in self._facts:
            match = block.matched["match"].to_numpy()
            of_run = np.where(
                match < block.num_messages, match + next_message, match - block.num_messages + next_collective
            )
            tables.append(block.matched.assign(match=np.where(match >= 0, of_run, -1)))
            next_message, next_collective = next_message + block.num_messages, next_collective + block.num_collectives
        self._facts.clear()
        rows = with_categories(pd.concat(tables, ignore_index=True))
        del tables
        return rows.sort_values(["rank", "row"], kind="stable", ignore_index=True).drop(columns="row")

    def reports(self, run: RunFacts, of_rank: Mapping[int, RankWindows]) -> list[GroupReport]:
        """The reports of all ranks."""
        engine = self._engine
        shared = engine.submit(_same, run)
        clock = engine.submit(_same, run.clock)
        without = [rank.number for rank in self._ranks if rank.lean.work.missing_device_events]
        lacking = (engine.submit(_same, without), engine.submit(_same, run.lost))
        timed = [engine.submit(timed_block, block, clock, *lacking) for block in self._blocks]
        self._blocks.clear()
        futures = []
        for group in self._groups:
            of_group = [engine.submit(rows_of_ranks, block, group.numbers) for block in timed]
            parts = {number: of_rank[number] for number in group.numbers if number in of_rank}
            futures.append(
                engine.submit(report_of_group, group.numbers, group.files, group.comms, of_group, parts, shared)
            )
        timed.clear()
        return engine.results(futures, [group.name for group in self._groups])


def _first_steps(ops: pd.DataFrame, num_blocks: int) -> Int64:
    """The first step of each block but the first one, for about as many ops in each."""
    steps, counts = np.unique(ops["step"].to_numpy(), return_counts=True)
    block = np.cumsum(counts) * num_blocks // (len(ops) + 1)
    firsts: Int64 = steps[np.flatnonzero(block[1:] != block[:-1]) + 1]
    return firsts


# What workers call besides :mod:`pptrace.workflow.on_workers`: results that several calls share come as one future.


def _same(value: Any) -> Any:
    return value


def _comms(numbers: Sequence[int], files: Any, shared: Any) -> pd.DataFrame:
    return comms_of_ranks(numbers, files, *shared)


def _matched(shared: Any, *parts: pd.DataFrame) -> pd.DataFrame:
    return matched_block(shared[1], *parts)
