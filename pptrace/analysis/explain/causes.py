"""Causes of a step's length beyond its compute spread evenly, each with what the step would be shorter by without it.

A step is replayed with all causes and without each of them: what a cause adds to the replay of all others is its part, never
below 0. What only several of them together add, because they happen at the same time or one behind the other, is a part of its
own, the *interaction*; below 0, the causes count some time twice. The parts sum to the difference between the replay with all and
with none, and depend on no order. What an op computes is a product: what its kind usually takes, times what is
special about its stage (``imbalance``), about its rank among the replicas of the stage (``straggler``) and about this very op
(``jitter``); to ops that are far shorter than others of their kind the latter two add what they measurably add. ``communication``
adds the transfers of the pipeline's messages, and what ops wait for inside them; ``host`` the time in which an op could have run
and its device was idle because the host had not launched it or, on a rank without a device, that between ops. ``routing`` is what
ops take longer because experts on some ranks have more rows than others (:mod:`pptrace.analysis.experts.routing`): all else
is that of equal rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from msgspec import Struct

from pptrace.analysis.explain.blame import part_of
from pptrace.analysis.explain.inner_waits import InnerWaits
from pptrace.analysis.explain.step_times import StepTimes
from pptrace.analysis.matrix.step_matrix import StepMatrix
from pptrace.analysis.whole_run import INTERACTION, UNEQUAL_ROUTES, Cause
from pptrace.model.tables import Bool, Floats, Int64
from pptrace.schedule.message_graph import spans_of
from pptrace.schedule.plan_table import PlanTable
from pptrace.slices import group_medians, group_sums, reduce_groups

IMBALANCE, STRAGGLER, JITTER = "imbalance", "straggler", "jitter"
"""Causes in what ops compute."""
MESSAGES, INNER = "pp", "inner"
"""The communication of the pipeline's messages, and that inside ops."""
HOST = "host"
ROUTING = "routing"
_MOST_GROWTH = 4
"""An op that is so many times as short as others of its kind, such as the embedding alone, varies by the time by which it varies,
not in proportion: of an op with layers a late millisecond would be hundreds.
"""


class CauseCosts(Struct, frozen=True, eq=False, dict=True):
    """Costs of some windows by cause.

    Args:
        matrix: of the windows; along its graph messages hold up ranks, without one they cost their readers time alone.
        levels: of causes in what ops compute the compute with the cause and without it, shape (windows, rows), ns; from that
            without the first of them, the mean of their kind, to that with the last one.
        added: what other causes add to columns of the matrix, ns.
    """

    matrix: StepMatrix
    levels: Mapping[str, tuple[Int64, Int64]]
    added: Mapping[str, Mapping[str, Int64]]

    @cached_property
    def players(self) -> tuple[str, ...]:
        """The causes that change anything in any of these steps."""
        changed = (name for name, (with_it, without) in self.levels.items() if (with_it != without).any())
        return (*changed, *(name for name, parts in self.added.items() if any(ns.any() for ns in parts.values())))

    def makespans(self, present: frozenset[str]) -> Int64:
        """The makespan of every window where only some causes are present, ns."""
        columns: dict[str, Any] = {}
        for name in self.added.keys() & present:
            for column, ns in self.added[name].items():
                columns[column] = columns.get(column, 0) + ns
        taken = self.computing(present)
        for column in columns.keys() & {"durations", "delays", "moving"}:
            taken = taken + columns[column]
        matrix = self.matrix
        return spans_of(matrix.table, matrix.graph, taken, columns.get("transfers"), columns.get("posted"))

    def computing(self, present: frozenset[str]) -> Int64:
        """Compute of ops where only some causes are present, ns."""
        changed = [name for name in self.players if name in self.levels]
        chosen = [name for name in changed if name in present]
        of_kind = self.levels[IMBALANCE][1]
        if not chosen:
            return of_kind
        if chosen == changed:
            return self.levels[chosen[-1]][0]
        taken = of_kind.astype(np.float64)
        for name in chosen:
            with_it, without = self.levels[name]
            factor = np.divide(with_it, without, out=np.ones(taken.shape), where=without != 0)
            taken = np.where(taken > _MOST_GROWTH * without, taken + with_it - without, taken * factor)
        return np.rint(taken).astype(np.int64)


def parts_of_causes(costs: CauseCosts) -> tuple[dict[str, Int64], Int64, Int64]:
    """Return (what each cause alone adds to the makespan of every step, and what several add together, the makespans without any
    cause, with all of them), ns.
    """
    every = frozenset(costs.players)
    with_all, without = costs.makespans(every), costs.makespans(frozenset())
    added = {
        player: np.maximum(with_all - (costs.makespans(every - {player}) if len(every) > 1 else without), 0)
        for player in costs.players
    }
    interaction = with_all - without - sum(added.values(), np.zeros_like(without))
    return {**added, INTERACTION: interaction}, without, with_all


def costs_of_causes(
    matrix: StepMatrix,
    levels: Sequence[Int64],
    inner: Int64,
    host: Int64,
    routing: Int64,
    late: Int64,
    posted: Int64 | None,
) -> CauseCosts:
    """The costs of windows by cause, ns.

    Args:
        matrix: of the windows; along its graph messages hold up ranks, without one they cost their readers time alone.
        levels: what ops compute, each of shape (windows, rows): the mean of their kind, the median of their kind and stage on all
            replicas, that on their rank, and as measured.
        inner: what they communicate inside without computing.
        host: how long the host kept them from their device, before and inside them.
        routing: what unequal rows of experts add to them.
        late: how late they begin where no device tells why.
        posted: how late calls are posted, of the shape of the matrix's; None without a graph.
    """
    transfers = np.maximum(matrix.transfers, 0)
    by_message = {"moving": matrix.moving, "transfers": np.where(matrix.sender_is_last, transfers, 0)}
    return CauseCosts(
        matrix,
        {name: (levels[number + 1], levels[number]) for number, name in enumerate((IMBALANCE, STRAGGLER, JITTER))},
        {
            MESSAGES: by_message if matrix.graph is None else {"transfers": transfers},
            INNER: {"durations": inner},
            HOST: {"durations": host, "delays": late, **({} if posted is None else {"posted": posted})},
            ROUTING: {"durations": routing},
        },
    )


def causes_of_windows(
    matrix: StepMatrix,
    times: StepTimes,
    step: Int64,
    chosen: Int64,
    host_before: Int64,
    equal: tuple[Int64, Int64, Int64],
    waits: InnerWaits,
    on_path: Int64,
    axes: Mapping[str, int],
) -> list[tuple[int, tuple[Cause, ...], bool]]:
    """(the ideal of each of some windows, its causes, whether it is known of them what hosts were late with).

    A rank usually takes the median of its ops of a kind and stage, so that single long ones are not the stage's cost. Several
    replicas of a stage usually take what the faster half of them takes at most (the lower median of theirs). What ops of the
    critical path communicate inside them is partly waiting for the members of collectives that come last: that part is due to
    these, up to what they are usually slower than their replicas to their being slow, beyond that to ops that vary.

    Args:
        matrix, times: of whole windows.
        step: the index of each window's step.
        chosen: the windows to explain.
        host_before: how long its host kept each op from its device before it, ns.
        equal: computing, communication and the cost of unequal rows (:func:`pptrace.analysis.explain.measured.equal_rows`).
        waits: inside ops, without those for ranks with more rows.
        on_path: how much of the critical path lies in each op of the chosen windows.
        axes: time of the communication of each axis inside the ops of all steps, ns.
    """
    table, of_chosen = times.table, matrix.of_windows(chosen)
    cells, of_row = matrix.cells
    medians = group_medians(equal[0], of_row, len(cells))
    of_stages = _lower_medians(medians, step)
    excess = group_sums(np.maximum(medians - of_stages, 0)[:, of_row], table.rank, table.pp)
    is_known = times.knows_lateness[chosen]
    late, posted, late_ranks = _lateness(of_chosen, is_known)
    computing, inner, routing = (part[chosen] for part in equal)
    host = (times.host + host_before)[chosen]
    of_stage, of_rank = of_stages[chosen][:, of_row], medians[chosen][:, of_row]
    of_kind = _means_of_kinds(of_stages[chosen], cells // table.num_stages, of_row)
    levels = (of_kind, of_stage, of_rank, computing)
    costs = costs_of_causes(of_chosen, levels, inner, host, routing, late, posted)
    added, without, with_all = parts_of_causes(costs)
    ideal = of_kind.sum(axis=1) // table.pp
    spans = (times.finish - times.begin)[chosen]
    added |= {"structural": without - ideal, "unexplained": spans - with_all}
    by_late_rank: list[tuple[Weights, Weights]] = []
    if INNER in added and len(waits.ns):
        on = np.where(on_path > 0, inner, 0)
        waited = np.minimum(waits.sums(times.start.shape)[chosen], on).sum(axis=1)
        added[_WAITING] = part_of(added[INNER], waited, np.maximum(on.sum(axis=1), 1))
        added[INNER] = added[INNER] - added[_WAITING]
        of_windows = late_members(waits, excess, times)
        by_late_rank = [of_windows[window] for window in chosen.tolist()]
        usual, rest = (
            np.array([sum(by_rank.values()) for by_rank in each]) for each in zip(*by_late_rank, strict=True)
        )
        added[_SLOW] = part_of(added[_WAITING], usual, np.maximum(usual + rest, 1))
        added[_WAITING] = added[_WAITING] - added[_SLOW]
    late_ranks += group_sums(host, table.rank, table.pp)  # of all ops: hosts that are slow alike are no rank's fault
    weights = _weights([times.windows[window].ranks for window in chosen.tolist()], table, levels, on_path, late_ranks)
    knows_host = (times.knows_host[chosen] | is_known).tolist()
    windows = []
    for index, of_window in enumerate(weights):
        of_window |= {INNER: {("axis", axis): weight for axis, weight in axes.items()}}
        if by_late_rank:
            of_window |= dict(zip((_SLOW, _WAITING), by_late_rank[index], strict=True))
        causes = merged(
            cause
            for name, ns in added.items()
            if ns[index] or name != HOST  # a step of which it is not known has none
            for cause in at_places(name, int(ns[index]), of_window.get(name, {}))
        )
        in_order = sorted(causes, key=lambda cause: (-cause.ns, cause.cause, str(cause.where)))
        windows.append((int(ideal[index]), tuple(in_order), knows_host[index]))
    return windows


def _weights(
    ranks: Sequence[tuple[int, ...]], table: PlanTable, levels: Sequence[Int64], on_path: Int64, late_ranks: Int64
) -> list[dict[str, Weights]]:
    """Weights of causes by place, for each window: by what ops of the critical path compute at the levels of
    :func:`costs_of_causes`, and by how late ranks are.
    """
    of_kind, of_stage, of_rank, computing = levels
    by_stage, slower, varying = (
        group_sums(np.where(on_path > 0, ns, 0), group, size).tolist()
        for ns, group, size in (
            (np.maximum(of_stage - of_kind, 0), table.stage, table.num_stages),
            (np.maximum(of_rank - of_stage, 0), table.rank, table.pp),
            (np.abs(computing - of_rank), table.rank, table.pp),
        )
    )

    def at_ranks(window: int, ns: Sequence[int]) -> Weights:
        return {("rank", rank): weight for rank, weight in zip(ranks[window], ns, strict=True)}

    return [
        {
            IMBALANCE: {("stage", stage): weight for stage, weight in enumerate(by_stage[window])},
            STRAGGLER: at_ranks(window, slower[window]),
            JITTER: at_ranks(window, varying[window]),
            HOST: at_ranks(window, late_ranks[window].tolist()),
            MESSAGES: {("axis", "pp"): 1},
            ROUTING: {("axis", "ep"): 1},
        }
        for window in range(len(ranks))
    ]


def _lower_medians(medians: Int64, step: Int64) -> Int64:
    """The lower median over all windows of a step, for each of its windows, of the medians of these."""
    usual = np.empty_like(medians)
    by_step = np.argsort(step, kind="stable")
    _, first, num_replicas = np.unique(step[by_step], return_index=True, return_counts=True)
    for number in np.unique(num_replicas).tolist():
        windows = by_step[first[num_replicas == number, np.newaxis] + np.arange(number)]
        usual[windows] = np.sort(medians[windows], axis=1)[:, [(number - 1) // 2]]
    return usual


def _means_of_kinds(of_stages: Int64, kind: Int64, of_row: Int64) -> Int64:
    """The mean over all ops of a kind of what its stages usually take, of each op, ns, from that of each kind and stage."""
    kinds, of_kind = np.unique(kind, return_inverse=True)
    weights = np.where(np.arange(len(kinds))[:, np.newaxis] == of_kind, np.bincount(of_row), 0)
    means: Floats = (of_stages @ (weights / weights.sum(axis=1, keepdims=True)).T)[:, of_kind[of_row]]
    return np.rint(means).astype(np.int64)


def _lateness(matrix: StepMatrix, is_known: Bool) -> tuple[Int64, Int64 | None, Int64]:
    """Lateness of ops beyond what keeps their ranks from their calls, of calls that are posted, and of each rank in
    all, shape (windows, pp), ns; 0 where that is not known: on ranks with devices, and where the transfer of a message, which
    would look the same, is not.

    What ranks waited for one that had run nothing in the step yet is that one's.
    """
    table, known = matrix.table, is_known[:, np.newaxis]
    waited = np.where(known, np.minimum(matrix.spread(matrix.held_by_starts), matrix.delays), 0)
    of_ranks = group_sums(np.where(known, matrix.lateness, 0) - waited, table.rank, table.pp)
    window, row = np.nonzero(waited)
    late = table.rank[matrix.spread(matrix.held_by_starts, "by")[window, row]]
    np.add.at(of_ranks, (window, late), waited[window, row])
    before_posting = 0 if matrix.before_posting is None else matrix.before_posting
    posted = None if matrix.posted is None else np.where(known, matrix.posted, 0)
    return np.where(known, matrix.delays - before_posting, 0), posted, of_ranks


_WAITING = "waiting"
_SLOW = "waiting for slower ranks"
"""The part of the communication inside ops in which they wait for members of collectives that come last, and what of it is due to
members that are slower than their replicas.
"""
Weights = Mapping[tuple[str, int | str], int]
"""Parts of a cause by where it is: ("rank", its number), ("stage", …) or ("axis", its name)."""


def late_members(waits: InnerWaits, excess: Int64, times: StepTimes) -> list[tuple[Weights, Weights]]:
    """For each window, the time for which its ops waited by global rank: due to ranks that are slower, and the rest.

    ``excess`` (windows, pp) is what the ops of each rank usually take longer than its replicas': up to so much a rank is late as
    it is slower than these, beyond that as its ops vary.
    """
    num_windows, pp = excess.shape
    key = (waits.step * num_windows + waits.late_step) * pp + times.table.rank[waits.late_row]
    keys, of_key = np.unique(key, return_inverse=True)
    waited = reduce_groups(np.add, waits.ns, of_key, len(keys))
    usual = np.minimum(waited, excess.reshape(-1)[keys % (num_windows * pp)])
    result: list[tuple[dict[tuple[str, int | str], int], ...]] = [({}, {}) for _ in range(num_windows)]
    for number, slower, rest in zip(keys.tolist(), usual.tolist(), (waited - usual).tolist(), strict=True):
        (window, late), pp_rank = divmod(number // pp, num_windows), number % pp
        rank = times.windows[late].ranks[pp_rank]
        for part, ns in zip(result[window], (slower, rest), strict=True):
            part["rank", rank] = part.get(("rank", rank), 0) + ns
    return [(slower, rest) for slower, rest in result]


def merged(causes: Iterable[Cause]) -> list[Cause]:
    """The causes, those of one name at one place as one."""
    sums: dict[tuple[str, tuple[tuple[str, int | str], ...], str | None], int] = {}
    for cause in causes:
        key = (cause.cause, tuple(cause.where.items()), cause.reason)
        sums[key] = sums.get(key, 0) + cause.ns
    return [Cause(name, dict(where), ns, reason) for (name, where, reason), ns in sums.items()]


_CAUSE_OF = {
    MESSAGES: "communication",
    INNER: "communication",
    _WAITING: JITTER,
    _SLOW: STRAGGLER,
    ROUTING: IMBALANCE,
}
_LEAST_SHARE = 0.05
"""A place with a smaller part of a cause is not named."""


def at_places(name: str, ns: int, weights: Weights) -> list[Cause]:
    """A cause at the places where it is, in proportion to their weights."""
    cause, reason = _CAUSE_OF.get(name, name), UNEQUAL_ROUTES if name == ROUTING else None
    total = sum(weights.values())
    named = {where: weight for where, weight in weights.items() if total and weight >= _LEAST_SHARE * total}
    if not named:
        return [Cause(cause, {}, ns, reason)]
    parts = in_proportion(ns, list(named.values()))
    return [Cause(cause, {kind: number}, part, reason) for (kind, number), part in zip(named, parts, strict=True)]


def in_proportion(ns: int, weights: Sequence[int]) -> list[int]:
    """``ns`` in parts of these weights, which sum to it: rounded down, but the largest remainders up."""
    total = sum(weights)
    divided = [divmod(weight * ns, total) for weight in weights]
    missing = ns - sum(part for part, _ in divided)
    up = sorted(range(len(weights)), key=lambda index: (-divided[index][1], index))[:missing]
    return [part + (index in up) for index, (part, _) in enumerate(divided)]
