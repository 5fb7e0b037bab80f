"""All steps of a plan explained from one pass over their times: causes, critical path and blame."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pptrace.analysis.aligned import AlignedRun
from pptrace.analysis.explain.binding import Bindings, bindings_of
from pptrace.analysis.explain.blame import Charges, charge_bubbles, typical_of
from pptrace.analysis.explain.causes import HOST, INNER, MESSAGES, ROUTING, Costs, parts_of_causes
from pptrace.analysis.explain.critical_path import critical_paths
from pptrace.analysis.explain.equal_rows import EqualRows, equal_rows
from pptrace.analysis.explain.inner_waits import InnerWaits, inner_waits
from pptrace.analysis.explain.late_ops import LateOps, late_ops
from pptrace.analysis.explain.measured import costs_of_steps, posted_calls
from pptrace.analysis.explain.step_times import IndexedWindows, RankTimes, StepTimes, before_ops, step_times
from pptrace.analysis.matrix.step_matrix import StepMatrix, in_order, rows_of_windows
from pptrace.analysis.message_graph import Graph
from pptrace.analysis.step_parts import INTERACTION, UNEQUAL_ROUTES, Blame, BlamedOp, Cause, CriticalPath
from pptrace.model.tables import Int64
from pptrace.schedule.actions import Kind
from pptrace.schedule.plan_table import PlanTable
from pptrace.slices import Slice, group_medians, group_sums, slice_of
from pptrace.timeline.lanes import is_inner
from pptrace.timeline.windows import StepWindow

if TYPE_CHECKING:
    from pptrace.analysis.experts.routing import Routing

_CELLS = 60_000
"""Steps × ops that are explained together: more would take much memory."""
_LEAST_CELLS = 80_000
_MOST_PARTS = 16
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


def explain_steps(table: PlanTable, steps: Steps, data: AlignedRun, graph: Graph | None = None) -> list[Explanation]:
    """Explain steps of one plan; ``graph`` is that of the way in which the run's messages hold up ranks."""
    return [explanation for task in explanation_tasks(table, steps, data, graph) for explanation in task()]


def explanation_tasks(
    table: PlanTable, steps: Steps, data: AlignedRun, graph: Graph | None = None, routing: Routing | None = None
) -> list[Callable[[], list[Explanation]]]:
    """The same in parts, one behind the other, each with some of the steps; ``routing`` is what equal rows of experts change."""
    axes = axes_inside_ops(slice_of(data.comms))
    size = sum(map(len, steps)) * len(table)
    parts = _parts(table, steps, max(_LEAST_CELLS, size // _MOST_PARTS))
    return [partial(_explain_together, table, steps[first:last], data, axes, graph, routing) for first, last in parts]


def _explain_together(
    table: PlanTable,
    steps: Steps,
    data: AlignedRun,
    axes: Mapping[str, int],
    graph: Graph | None,
    routing: Routing | None,
) -> list[Explanation]:
    ranks = list(times_of_ranks(table, steps, data, with_calls=graph is not None))
    return explain_ranks(table, steps, ranks, axes, graph, routing)


def times_of_ranks(table: PlanTable, steps: Steps, data: AlignedRun, *, with_calls: bool = True) -> Iterator[RankTimes]:
    """The measurements of every rank in the windows of some steps; ``with_calls`` as :meth:`RankTimes.of` has it."""
    windows = IndexedWindows.of([window for of_step in steps for window in of_step])
    return (RankTimes.of(table, windows, rank, data, with_calls=with_calls) for rank in windows.of_rank)


def explain_ranks(
    table: PlanTable,
    steps: Steps,
    ranks: Sequence[RankTimes],
    axes: Mapping[str, int],
    graph: Graph | None = None,
    routing: Routing | None = None,
) -> list[Explanation]:
    """The same from what each rank measured in all windows, in the order of the steps, and :func:`axes_inside_ops`."""
    before = np.cumsum([0, *map(len, steps)]).tolist()
    explanations = []
    for first, last in _parts(table, steps, _CELLS):
        of_part = [rank.of_windows(before[first], before[last]) for rank in ranks]
        explanations += _explain_part(table, steps[first:last], of_part, axes, graph, routing)
    return explanations


def axes_inside_ops(comms: Slice) -> dict[str, int]:
    """Time of the communication of each axis inside the ops of steps, ns."""
    inner = comms.where(is_inner(comms) & (comms["axis"] != "pp") & (comms["step"] >= 0))
    return (
        {axis: int((rows["end_ns"] - rows["start_ns"]).sum()) for axis, rows in inner.by("axis").items()}
        if len(inner)
        else {}
    )


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
    step = np.repeat(np.arange(len(steps)), [len(windows) for windows in steps])
    spans = times.finish - times.begin
    longest = np.array([np.flatnonzero(step == index)[spans[step == index].argmax()] for index in range(len(steps))])
    explained = np.flatnonzero(times.is_whole[longest] & (spans[longest] > 0))  # of no time nothing is a part
    explanations = [Explanation()] * len(steps)
    if not len(explained):
        return explanations
    outside = rows_of_windows(in_order([rank.outside for rank in ranks]), np.flatnonzero(times.is_whole))
    chosen = (np.cumsum(times.is_whole) - 1)[longest[explained]]
    is_whole = times.is_whole
    step, times = step[is_whole], times.whole()
    bindings = bindings_of(times, lambda ready: before_ops(ranks, RankTimes.exposed_before, ready, is_whole))
    before = before_ops([rank for rank in ranks if len(rank.starved)], RankTimes.host_before, bindings.ready, is_whole)
    before = np.where(times.knows_host[:, np.newaxis], before, 0)
    moving = bindings.moving if graph is None else np.zeros_like(bindings.moving)
    transfers = times.latency if graph is None else times.transfer
    paths, on_path = critical_paths(times, bindings, chosen, before)
    waits = inner_waits([rank.inner for rank in ranks], is_whole)
    equal = equal_rows(times, routing)
    posted = posted_calls(graph, times, bindings, [rank.calls for rank in ranks], is_whole) if graph else None
    late = late_ops(times, bindings, chosen, posted)
    costs_of_causes = replace(
        _costs(equal, moving, step, explained, chosen, before),
        transfers=transfers[chosen],
        late=late.before_ops,
        posted=late.posted,
        graph=graph,
    )
    lateness = _Lateness(equal.left_of(waits), _excess_over_replicas(equal, step))
    causes = _causes(times, chosen, costs_of_causes, on_path, axes, lateness, late)
    blames = _blames(times, bindings, waits, step, list(map(len, steps)), before, graph)
    collecting = [rank for rank in ranks if len(rank.collections)]
    collected = before_ops(collecting, RankTimes.collected_before, bindings.ready, is_whole)
    costs = costs_of_steps(times, bindings, waits, outside, step, list(map(len, steps)), collected, posted)
    knows_host = (times.knows_host[chosen] | late.is_known).tolist()
    for index, number in enumerate(explained.tolist()):
        explained_parts = (*causes[index], paths[index], blames[number], knows_host[index], costs[number])
        explanations[number] = Explanation(*explained_parts)
    return explanations


def _costs(equal: EqualRows, moving: Int64, step: Int64, explained: Int64, chosen: Int64, host_before: Int64) -> Costs:
    """The costs of the ops of the windows ``chosen``, compared with those of the other pipelines of their steps.

    A rank usually takes the median of its ops of a kind and stage, so that single long ones are not the stage's cost. Several
    replicas of a stage usually take what the faster half of them takes at most (the lower median of theirs).
    """
    times, table = equal.times, equal.times.table
    key, of_key = np.unique(table.kind * np.int64(table.num_stages) + table.stage, return_inverse=True)
    kind = key // table.num_stages
    counts = np.bincount(of_key)
    computing = equal.computing
    medians = group_medians(computing, of_key, len(key))
    of_stage = np.empty((len(chosen), len(key)), dtype=np.int64)
    for index, number in enumerate(explained.tolist()):
        replicas = np.sort(medians[step == number], axis=0)
        of_stage[index] = replicas[(len(replicas) - 1) // 2]
    kinds, of_kind = np.unique(kind, return_inverse=True)
    weights = np.where(np.arange(len(kinds))[:, np.newaxis] == of_kind, counts, 0)
    mean_of_kind = of_stage @ (weights / weights.sum(axis=1, keepdims=True)).T
    return Costs(
        own=computing[chosen],
        of_rank=medians[chosen][:, of_key],
        of_stage=of_stage[:, of_key],
        of_kind=_rounded(mean_of_kind[:, of_kind[of_key]]),
        inner=equal.communication[chosen],
        transfers=times.latency[chosen],
        moving=moving[chosen],
        host=(times.host + host_before)[chosen],
        routing=equal.routing[chosen],
    )


def _excess_over_replicas(equal: EqualRows, step: Int64) -> Int64:
    """Time by which the ops of each rank usually take longer than its replicas' in every window, shape (steps, pp), ns."""
    table = equal.times.table
    key, of_key = np.unique(table.kind * np.int64(table.num_stages) + table.stage, return_inverse=True)
    medians = group_medians(equal.computing, of_key, len(key))
    excess = np.zeros_like(medians)
    by_step = np.argsort(step, kind="stable")
    _, first, num_replicas = np.unique(step[by_step], return_index=True, return_counts=True)
    for number in np.unique(num_replicas).tolist():
        windows = by_step[first[num_replicas == number, np.newaxis] + np.arange(number)]
        replicas = medians[windows]
        excess[windows] = np.maximum(replicas - np.sort(replicas, axis=1)[:, [(number - 1) // 2]], 0)
    return group_sums(excess[:, of_key], table.rank, table.pp)


def _rounded(values: npt.NDArray[np.float64]) -> Int64:
    rounded: Int64 = np.rint(values).astype(np.int64)
    return rounded


def _causes(
    times: StepTimes,
    chosen: Int64,
    costs: Costs,
    on_path: Int64,
    axes: Mapping[str, int],
    lateness: _Lateness,
    late: LateOps,
) -> list[tuple[int, tuple[Cause, ...]]]:
    """(the ideal of each step, its causes).

    What ops of the critical path communicate inside them is partly waiting for the members of collectives that come last: that
    part is due to these, as :class:`_Lateness` says.
    """
    waits = lateness.waits
    table = times.table
    parts = parts_of_causes(costs, table)
    ideal = costs.of_kind.sum(axis=1) // table.pp
    spans = (times.finish - times.begin)[chosen]
    beyond = {INTERACTION: parts.interaction, "unexplained": spans - parts.with_all}
    added = {**parts.added, "structural": parts.without - ideal, **beyond}
    if INNER in added and len(waits.ns):
        inner = np.where(on_path > 0, costs.inner, 0)
        held = np.minimum(waits.sums(times.start.shape)[chosen], inner).sum(axis=1)
        added[_WAITING] = _part_of(added[INNER], held, inner.sum(axis=1))
        added[INNER] = added[INNER] - added[_WAITING]
        of_windows = lateness.of_ranks(times)
        of_ranks = [of_windows[window] for window in chosen.tolist()]
        usual, rest = (np.array([sum(by_rank.values()) for by_rank in each]) for each in zip(*of_ranks, strict=True))
        added[_SLOW] = _part_of(added[_WAITING], usual, usual + rest)
        added[_WAITING] = added[_WAITING] - added[_SLOW]
    by_stage = group_sums(
        np.where(on_path > 0, np.maximum(costs.of_stage - costs.of_kind, 0), 0), table.stage, table.num_stages
    )
    slower, varying = np.maximum(costs.of_rank - costs.of_stage, 0), np.abs(costs.own - costs.of_rank)
    of_slower, of_varying = (
        group_sums(np.where(on_path > 0, part, 0), table.rank, table.pp) for part in (slower, varying)
    )
    # Of all ops: hosts that are slow alike are no rank's fault.
    of_host = group_sums(costs.host, table.rank, table.pp) + late.of_ranks
    steps = []
    for index, window in enumerate(chosen.tolist()):
        ranks = times.windows[window].ranks
        places: dict[str, Mapping[tuple[str, int | str], int]] = {
            "imbalance": {("stage", stage): weight for stage, weight in enumerate(by_stage[index].tolist())},
            "straggler": {
                ("rank", rank): weight for rank, weight in zip(ranks, of_slower[index].tolist(), strict=True)
            },
            "jitter": {("rank", rank): weight for rank, weight in zip(ranks, of_varying[index].tolist(), strict=True)},
            HOST: {("rank", rank): weight for rank, weight in zip(ranks, of_host[index].tolist(), strict=True)},
            MESSAGES: {("axis", "pp"): 1},
            INNER: {("axis", axis): weight for axis, weight in axes.items()},
            ROUTING: {("axis", "ep"): 1},
            **(dict(zip((_SLOW, _WAITING), of_ranks[index], strict=True)) if _WAITING in added else {}),
        }
        causes = _merged(
            cause
            for name, values in added.items()
            if values[index] or name != HOST  # a step of which it is not known has none
            for cause in _placed(name, int(values[index]), places.get(name, {}))
        )
        steps.append(
            (int(ideal[index]), tuple(sorted(causes, key=lambda cause: (-cause.ns, cause.cause, str(cause.where)))))
        )
    return steps


_WAITING = "waiting"
_SLOW = "waiting for slower ranks"
"""The part of the communication inside ops in which they wait for members of collectives that come last, and what of it is due to
members that are slower than their replicas.
"""


def _part_of(amount: Int64, part: Int64, whole: Int64) -> Int64:
    """``amount · part / whole``, rounded down; 0 of nothing."""
    share = np.divide(part, whole, out=np.zeros(len(whole)), where=whole > 0)
    parts: Int64 = np.floor(amount * share).astype(np.int64)
    return parts


@dataclass(frozen=True, slots=True, eq=False)
class _Lateness:
    """Waits for members that come last, and by how much the ops of each rank usually exceed its replicas' in each window
    (:func:`_excess_over_replicas`): up to so much a rank is late as it is slower than its replicas, beyond that as its ops vary.
    """

    waits: InnerWaits
    excess: Int64

    def of_ranks(self, times: StepTimes) -> list[tuple[_Places, _Places]]:
        """For each window, the time for which its ops waited by global rank: due to ranks that are slower, and the rest."""
        waits, (num_windows, pp) = self.waits, self.excess.shape
        by_place = (waits.step * num_windows + waits.late_step) * pp + times.table.rank[waits.late_row]
        places, of_place = np.unique(by_place, return_inverse=True)
        waited = np.zeros(len(places), dtype=np.int64)
        np.add.at(waited, of_place, waits.ns)
        usual = np.minimum(waited, self.excess.reshape(-1)[places % (num_windows * pp)])
        result: list[tuple[dict[tuple[str, int | str], int], ...]] = [({}, {}) for _ in range(num_windows)]
        for place, slower, rest in zip(places.tolist(), usual.tolist(), (waited - usual).tolist(), strict=True):
            (window, late), pp_rank = divmod(place // pp, num_windows), place % pp
            rank = times.windows[late].ranks[pp_rank]
            for part, ns in zip(result[window], (slower, rest), strict=True):
                part["rank", rank] = part.get(("rank", rank), 0) + ns
        return [(slower, rest) for slower, rest in result]


_Places = Mapping[tuple[str, int | str], int]


def _merged(causes: Iterable[Cause]) -> list[Cause]:
    """The causes, those of one name at one place as one."""
    merged: dict[tuple[str, tuple[tuple[str, int | str], ...], str | None], int] = {}
    for cause in causes:
        key = (cause.cause, tuple(cause.where.items()), cause.reason)
        merged[key] = merged.get(key, 0) + cause.ns
    return [Cause(name, dict(where), ns, reason) for (name, where, reason), ns in merged.items()]


_CAUSE_OF = {
    MESSAGES: "communication",
    INNER: "communication",
    _WAITING: "jitter",
    _SLOW: "straggler",
    ROUTING: "imbalance",
}
_LEAST_PLACE = 0.05
"""A place with a smaller part of a cause is not named."""


def _placed(name: str, ns: int, places: Mapping[tuple[str, int | str], int]) -> list[Cause]:
    """A cause at the places where it is, in proportion to their weights."""
    cause, reason = _CAUSE_OF.get(name, name), UNEQUAL_ROUTES if name == ROUTING else None
    total = sum(places.values())
    named = {place: weight for place, weight in places.items() if total and weight >= _LEAST_PLACE * total}
    if not named:
        return [Cause(cause, {}, ns, reason)]
    parts = _proportional(ns, list(named.values()))
    return [Cause(cause, {kind: place}, part, reason) for (kind, place), part in zip(named, parts, strict=True)]


def _proportional(ns: int, weights: Sequence[int]) -> list[int]:
    """``ns`` in parts of these weights, which sum to it: rounded down, but the largest remainders up."""
    total = sum(weights)
    divided = [divmod(weight * ns, total) for weight in weights]
    missing = ns - sum(part for part, _ in divided)
    up = sorted(range(len(weights)), key=lambda index: (-divided[index][1], index))[:missing]
    return [part + (index in up) for index, (part, _) in enumerate(divided)]


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
    table, names = times.table, {kind.code: str(kind) for kind in Kind}
    total = charges.total
    by_rank, by_stage = group_sums(total, table.rank, table.pp), group_sums(total, table.stage, table.num_stages)
    by_kind = group_sums(charges.work, table.kind.astype(np.int64), len(Kind))
    others = {name: getattr(charges, of).sum(axis=1) for name, of in _OTHER_CHARGES.items()}
    of_host = _host_of_idle(charges.idle, times.start - bindings.ready - bindings.moving, host_before).sum(axis=1)
    inside = np.minimum(times.host, charges.inner).sum(axis=1)
    blames: list[Blame | None] = []
    for number, size in enumerate(sizes):
        windows = np.flatnonzero(step == number)
        if len(windows) < size:
            blames.append(None)
            continue
        kinds = {
            names[code]: int(ns) for code, ns in enumerate(by_kind[windows].sum(axis=0).tolist()) if code in table.kind
        }
        of_others = {name: int(of_windows[windows].sum()) for name, of_windows in others.items()}
        if times.knows_host[windows].all():
            before, within = int(of_host[windows].sum()), int(inside[windows].sum())
            of_others |= {
                "idle": of_others["idle"] - before,
                "wait": of_others["wait"] - within,
                "host": before + within,
            }
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
                kinds | of_others,
                _most_blamed(charges, times, windows),
            )
        )
    return blames


def _host_of_idle(charged: Int64, idle: Int64, host_before: Int64) -> Int64:
    """The host's part of what is charged to idle times, in proportion, rounded down, ns."""
    share = np.minimum(host_before, idle) / np.maximum(idle, 1)
    return np.minimum(np.floor(charged * share).astype(np.int64), charged)


_OTHER_CHARGES = {"transfer": "transfer", "idle": "idle", "wait": "inner"}
"""Kinds of blame other than those of ops, and the charges that they are."""


def _most_blamed(charges: Charges, times: StepTimes, windows: Int64) -> tuple[BlamedOp, ...]:
    """The ops of some windows with the largest charges."""
    table, work = times.table, charges.work[windows]
    most = np.argsort(-work, axis=None, kind="stable")[:_MOST_OPS]
    window, row = np.unravel_index(most, work.shape)
    names = {kind.code: str(kind) for kind in Kind}
    return tuple(
        BlamedOp(
            rank=times.windows[windows[index]].ranks[table.rank[op]],
            kind=names[int(table.kind[op])],
            stage=int(table.stage[op]),
            microbatch=int(table.microbatch[op]),
            ns=int(work[index, op]),
        )
        for index, op in zip(window.tolist(), row.tolist(), strict=True)
        if work[index, op]
    )
