"""All steps of a plan explained from one pass over their times: causes, critical path and blame.

The way in which a run sends and receives is that by whose replay its steps are as long as they were. Replays take over what ranks
were measured to wait for messages, beyond the ops that these need. That is right as long as nobody else is late: where a send
blocks until its reader has posted the receive, or a receive begins when its rank comes to it, such waits change with what ranks
are busy with. Where some of the steps are clearly closer to a replay in which messages hold up ranks in one of these ways, all of
them are explained along its graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from pptrace.analysis.aligned import AlignedRun
from pptrace.analysis.explain.blame import charge_bubbles, part_of, typical_of
from pptrace.analysis.explain.causes import causes_of_windows
from pptrace.analysis.explain.critical_path import Bindings, bindings_of, critical_paths
from pptrace.analysis.explain.inner_waits import InnerWaits, inner_waits, no_inner_waits
from pptrace.analysis.explain.measured import along_graph, costs_of_windows, equal_rows, waits_with_equal_rows
from pptrace.analysis.explain.step_times import UNKNOWN, IndexedWindows, RankTimes, StepTimes, before_ops, step_times
from pptrace.analysis.matrix.step_matrix import StepMatrix, in_order, longest_of_steps, rows_of_windows
from pptrace.analysis.whole_run import Blame, BlamedOp, Cause, CriticalPath
from pptrace.errors import ScheduleError
from pptrace.model.tables import Int64
from pptrace.schedule.actions import KINDS
from pptrace.schedule.message_graph import Graph, Messaging, make_graph
from pptrace.schedule.plan import Plan
from pptrace.schedule.plan_table import PlanTable
from pptrace.slices import Slice, group_sums, slice_of
from pptrace.timeline.lanes import is_inner
from pptrace.timeline.windows import StepWindow

if TYPE_CHECKING:
    from pptrace.analysis.experts.routing import Routing

_CELLS = 60_000
"""Steps × ops that are explained together: more would take much memory."""
_LEAST_CELLS = 80_000
_MOST_PARTS = 16
_LEAST_SHARED = 500_000
"""Steps × ops from which other processes help to explain them: each needs memory of its own, and fewer take a second or two."""
_LEAST_SHARED_OF_RANK = 1_000
"""The same of each rank: in every part that is explained by itself a rank takes its time, however few ops it has there."""
_MOST_OPS = 10
"""Ops that a step's blame names."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """``causes`` sum to the span minus ``ideal_ns``, the step's usual compute spread evenly over the ranks.

    They and the path are those of the longest window, None where it lacks an op of the plan; ``knows_host`` tells whether it is
    known of them what hosts were late with. ``blame`` is over all windows, None where one of them does or where its bubble is not
    known. ``costs`` are those of a whole step, of which no window lacks an op.
    """

    ideal_ns: int | None = None
    causes: tuple[Cause, ...] | None = None
    critical_path: CriticalPath | None = None
    blame: Blame | None = None
    knows_host: bool = False
    costs: StepMatrix | None = field(default=None, compare=False)


Steps = Sequence[Sequence[StepWindow]]
"""Windows of every pipeline, for each step."""


def explanation_tasks(
    table: PlanTable, steps: Steps, data: AlignedRun, graph: Graph | None = None, routing: Routing | None = None
) -> list[Callable[[], list[Explanation]]]:
    """Tasks that explain steps of one plan, each some of the steps, one behind the other.

    ``graph`` is that of the way in which the run's messages hold up ranks, ``routing`` is what equal rows of experts change.
    """
    axes = inner_time_by_axis(slice_of(data.comms))
    size = sum(map(len, steps)) * len(table)
    num_ranks = len({rank for windows in steps for window in windows for rank in window.ranks})
    are_few = size < max(_LEAST_SHARED, _LEAST_SHARED_OF_RANK * num_ranks)
    parts = _parts(table, steps, size if are_few else max(_LEAST_CELLS, size // _MOST_PARTS))
    return [partial(_explain_together, table, steps[first:last], data, axes, graph, routing) for first, last in parts]


def inner_time_by_axis(comms: Slice) -> dict[str, int]:
    """The time of the communication that is a part of ops in steps, but for the pipeline's own, by its axis, ns."""
    inner = comms.where(is_inner(comms) & (comms["axis"] != "pp") & (comms["step"] >= 0))
    by_axis = inner.by("axis") if len(inner) else {}
    return {axis: int((rows["end_ns"] - rows["start_ns"]).sum()) for axis, rows in by_axis.items()}


def _explain_together(
    table: PlanTable,
    steps: Steps,
    data: AlignedRun,
    axes: Mapping[str, int],
    graph: Graph | None,
    routing: Routing | None,
) -> list[Explanation]:
    ranks = [rank.compact() for rank in times_of_ranks(table, steps, data, with_calls=graph is not None)]
    before = np.cumsum([0, *map(len, steps)]).tolist()
    explanations = []
    for first, last in _parts(table, steps, _CELLS):
        of_part = [rank.of_windows(before[first], before[last]) for rank in ranks]
        explanations += _explain_part(table, steps[first:last], of_part, axes, graph, routing)
    return explanations


def times_of_ranks(table: PlanTable, steps: Steps, data: AlignedRun, *, with_calls: bool = True) -> Iterator[RankTimes]:
    """The measurements of every rank in the windows of some steps; ``with_calls`` as :meth:`RankTimes.of` has it."""
    windows = IndexedWindows.of([window for of_step in steps for window in of_step])
    return (RankTimes.of(table, windows, rank, data, with_calls=with_calls) for rank in windows.of_rank)


def _parts(table: PlanTable, steps: Steps, cells: int) -> Iterator[tuple[int, int]]:
    """(first, last) of steps that have about so many cells together."""
    most = max(cells // max(len(table), 1), 1)
    first = size = 0
    for index, windows in enumerate(steps):
        if size and size + len(windows) > most:
            yield first, index
            first, size = index, 0
        size += len(windows)
    if size:
        yield first, len(steps)


def _explain_part(
    table: PlanTable,
    steps: Steps,
    ranks: Sequence[RankTimes],
    axes: Mapping[str, int],
    graph: Graph | None,
    routing: Routing | None,
) -> list[Explanation]:
    times = step_times(table, [window for windows in steps for window in windows], ranks)
    sizes = list(map(len, steps))
    step = np.repeat(np.arange(len(steps)), sizes)
    spans = times.finish - times.begin
    longest = np.array([np.flatnonzero(step == index)[spans[step == index].argmax()] for index in range(len(steps))])
    explained = np.flatnonzero(times.is_whole[longest] & (spans[longest] > 0))  # of no time nothing is a part
    explanations = [Explanation()] * len(steps)
    if not len(explained):
        return explanations
    is_whole = times.is_whole
    outside = rows_of_windows(in_order([rank.outside for rank in ranks]), np.flatnonzero(is_whole))
    chosen = (np.cumsum(is_whole) - 1)[longest[explained]]
    step, times = step[is_whole], times.whole()
    bindings = bindings_of(times, partial(before_ops, ranks, "exposed", is_whole))
    starved = before_ops(ranks, "starved", is_whole, bindings.ready)
    host_before = np.where(times.knows_host[:, np.newaxis], starved, 0)
    collected = before_ops(ranks, "collections", is_whole, bindings.ready)
    waits = inner_waits([rank.inner for rank in ranks], is_whole)
    costs = costs_of_windows(times, bindings, waits, outside, collected)
    if graph is not None:
        costs = along_graph(costs, graph, times, bindings, [rank.calls for rank in ranks], is_whole, collected)
    paths, on_path = critical_paths(times, bindings, chosen, host_before)
    equal = equal_rows(times, costs, routing)
    equal_waits = waits_with_equal_rows(waits, times.communication - equal[1])
    causes = causes_of_windows(costs, times, step, chosen, host_before, equal, equal_waits, on_path, axes)
    blames = _blames(times, bindings, waits, step, sizes, host_before, graph)
    costs = replace(costs.compact(), graph=None)  # of all steps the same
    for number, (ideal, of_step, knows_host), path in zip(explained.tolist(), causes, paths, strict=True):
        windows = np.flatnonzero(step == number)
        of_windows = costs.of_windows(windows) if len(windows) == sizes[number] else None
        explanations[number] = Explanation(ideal, of_step, path, blames[number], knows_host, of_windows)
    return explanations


def _blames(
    times: StepTimes,
    bindings: Bindings,
    waits: InnerWaits,
    step: Int64,
    sizes: Sequence[int],
    host_before: Int64,
    graph: Graph | None = None,
) -> list[Blame | None]:
    """The blame of each step over all its windows, as many as ``sizes`` has for it; None where some lack an op.

    Of what is charged to the idle time before an op, the host's share of that time is the host's (``host_before``); so is the
    bubble inside ops whose device had nothing launched. Where that is not known of all windows, nothing is.
    """
    charges = charge_bubbles(times, bindings, typical_of(times, bindings, waits, graph), waits)
    table, total = times.table, sum(charges.values(), np.zeros_like(times.start))
    by_rank, by_stage = group_sums(total, table.rank, table.pp), group_sums(total, table.stage, table.num_stages)
    by_kind = group_sums(charges["work"], table.kind.astype(np.int64), len(KINDS))
    others = {name: charges[name].sum(axis=1) for name in ("transfer", "idle", "wait")}
    # the host's part of what is charged to idle times, in proportion, rounded down
    idle = times.start - bindings.ready - bindings.moving
    of_host = part_of(charges["idle"], np.minimum(host_before, idle), np.maximum(idle, 1)).sum(axis=1)
    inside = np.minimum(times.host, charges["wait"]).sum(axis=1)
    blames: list[Blame | None] = []
    for number, size in enumerate(sizes):
        windows = np.flatnonzero(step == number)
        if len(windows) < size:
            blames.append(None)
            continue
        kinds = {
            KINDS[code].value: ns for code, ns in enumerate(by_kind[windows].sum(axis=0).tolist()) if code in table.kind
        }
        kinds |= {name: int(of_windows[windows].sum()) for name, of_windows in others.items()}
        if times.knows_host[windows].all():
            before, within = int(of_host[windows].sum()), int(inside[windows].sum())
            kinds |= {"idle": kinds["idle"] - before, "wait": kinds["wait"] - within, "host": before + within}
        ranks = [
            (rank, ns)
            for window in windows.tolist()
            for rank, ns in zip(times.windows[window].ranks, by_rank[window].tolist(), strict=True)
        ]
        blames.append(
            Blame(
                int(total[windows].sum()),
                dict(sorted(ranks)),
                dict(enumerate(by_stage[windows].sum(axis=0).tolist())),
                kinds,
                _most_blamed(charges["work"], times, windows),
            )
        )
    return blames


def _most_blamed(charged: Int64, times: StepTimes, windows: Int64) -> tuple[BlamedOp, ...]:
    """The ops of some windows with the largest charges."""
    table, work = times.table, charged[windows]
    most = np.argsort(-work, axis=None, kind="stable")[:_MOST_OPS]
    window, row = np.unravel_index(most, work.shape)
    return tuple(
        BlamedOp(
            rank=times.windows[windows[index]].ranks[table.rank[op]],
            kind=KINDS[table.kind[op]].value,
            stage=int(table.stage[op]),
            microbatch=int(table.microbatch[op]),
            ns=int(work[index, op]),
        )
        for index, op in zip(window.tolist(), row.tolist(), strict=True)
        if work[index, op]
    )


_MOST_CELLS = 40_000
"""Steps × ops that are looked at: the way is the same in all steps."""
_CLEARLY = 0.005
"""Share of a step by which another way has to come closer to the measured steps."""
_WAYS = (
    (Messaging.BLOCKING_RECEIVES, 0),
    (Messaging.BLOCKING_RECEIVES, 1),
    (Messaging.RENDEZVOUS, 0),
    (Messaging.ONE_CALL_AT_A_TIME, 0),
)
"""Ways other than the measured waits, with how many ops ahead receives are posted."""


def graph_of_run(plan: Plan, steps: Steps, data: AlignedRun) -> Graph | None:
    """Find the graph of a run: that of the way of sending and receiving with which replays come closest to its steps; None where
    none comes clearly closer than measured waits, as with receives that were posted ahead.
    """
    num = min(len(steps), max(1, _MOST_CELLS // (len(plan.table) * max(map(len, steps)))))
    first = (len(steps) - num) // 2
    steps = steps[first : first + num]  # from the middle of the run
    ranks = list(times_of_ranks(plan.table, steps, data))
    times = step_times(plan.table, [window for windows in steps for window in windows], ranks)
    is_whole = times.is_whole
    if plan.table.num_messages == 0 or not is_whole.any() or (times.arrival[is_whole] == UNKNOWN).all():
        return None
    sizes = list(map(len, steps))
    step, times = np.repeat(np.arange(len(steps)), sizes)[is_whole], times.whole()
    complete = np.flatnonzero((np.bincount(step, minlength=len(steps)) == sizes)[step])
    if not len(complete):
        return None
    bindings = bindings_of(times, partial(before_ops, ranks, "exposed", is_whole))
    nothing, outside = np.zeros_like(times.start), ranks[0].outside.where(slice(0))  # neither changes the way
    costs, calls = costs_of_windows(times, bindings, no_inner_waits(), outside, nothing), [rank.calls for rank in ranks]
    error = _error_of(costs.of_windows(complete))
    if error <= _CLEARLY:
        return None
    errors: list[tuple[float, Graph | None]] = [(error - _CLEARLY, None)]
    for messaging, prefetch in _WAYS:
        with suppress(ScheduleError):
            graph = make_graph(plan, messaging, prefetch)
            along = along_graph(costs, graph, times, bindings, calls, is_whole, nothing)
            errors.append((_error_of(along.of_windows(complete)), graph))
    return min(errors, key=lambda entry: entry[0])[1]


def _error_of(costs: StepMatrix) -> float:
    """Distance of replayed steps from the measured ones, as a part of them: the median of the steps."""
    measured = longest_of_steps(costs.step, costs.spans)
    return float(np.median(np.abs(costs.lengths - measured) / np.maximum(measured, 1)))
