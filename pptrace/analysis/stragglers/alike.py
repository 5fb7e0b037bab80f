"""Gains of steps if something cost what its like costs: a stage what others do, a rank what its replicas do, single
long ops what is typical of their rank.

These are replays of all that was measured but for that, so that a gain is that of a run without it, and not a share of causes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec.structs import replace

from pptrace.analysis.matrix.step_matrix import StepMatrix
from pptrace.analysis.stragglers.reason import (
    LEAST_ANYWHERE,
    Reason,
    gains,
    time_by_rank,
    where_most,
    with_following_waits,
)
from pptrace.model.tables import Floats, Int64
from pptrace.slices import group_sums

Place = tuple[str, int | str]
"""("stage", its number) or ("rank", its number)."""
LONG_OPS, SLOW_RANK = "long ops", "slow rank"
_LEAST_SLOWER = 0.15
"""Part by which all stages of a rank take longer, and half as much as the slowest of them does: else it is a stage that does."""
_FAR = 6.0
"""An op that takes this many scaled median deviations more than the median, and :data:`_LEAST_EXCESS` of it more, is long."""
_LEAST_EXCESS = 0.5
DEVIATION = 1.4826
"""The median deviation of a normal distribution times this is its standard deviation."""


def gains_of_places(plans: Sequence[StepMatrix]) -> Mapping[Place, Int64]:
    """Gain of each step if the slowest stage cost what the others do, and if the slowest rank cost what its replicas do, ns."""
    places: list[Place] = []
    if (rank := _slowest_rank(plans)) is not None:
        places.append(("rank", rank))
    num_stages = {costs.table.num_stages for costs in plans}
    if len(num_stages) == 1 and (stage := _slowest_stage(plans)) is not None:
        places.append(("stage", stage))
    return {place: gain_of_place(plans, place) for place in places}


def gain_of_place(plans: Sequence[StepMatrix], place: Place) -> Int64:
    """Gain of each step if a stage cost what the others do, or a rank what its replicas do, ns.

    What a stage costs more because the slowest rank is slower than its replicas is that rank's.
    """
    kind, number = place[0], int(place[1])
    rank = number if kind == "rank" else _slowest_rank(plans)
    base = plans
    holds_it = any((costs.ranks[:, costs.table.rank[costs.table.stage == number]] == rank).any() for costs in plans)
    if rank is not None and (kind == "rank" or holds_it):
        base = [_with_rank_as_replicas(costs, rank) for costs in plans]
        if kind == "rank":
            return gains(plans, base)
        base = [with_following_waits(costs, other) for costs, other in zip(plans, base, strict=True)]
    return gains(base, (_with_stage_as_others(*both, number) for both in zip(base, plans, strict=True)))


def slow_rank(plans: Sequence[StepMatrix]) -> Reason | None:
    """The rank of which each stage takes longer than those of other ranks, and what steps would get back if none did.

    None where ranks have one stage each, which may be heavier, and where there are replicas to compare a rank with.
    """
    if any(costs.table.num_stages == costs.table.pp or len(costs.of_pipelines()) > 1 for costs in plans):
        return None
    factors = [_of_slower_stages(costs) for costs in plans]
    ranks = np.concatenate(
        [costs.ranks[0, costs.table.rank[of[costs.table.stage] < 1]] for costs, of in zip(plans, factors, strict=True)]
    )
    if not all((of < 1).any() for of in factors) or len(np.unique(ranks)) > 1:
        return None
    rank, times = int(ranks[0]), 1 / float(np.concatenate([of[of < 1] for of in factors]).mean())
    as_others = (
        replace(costs, durations=np.rint(costs.durations * of[costs.table.stage]).astype(np.int64))
        for costs, of in zip(plans, factors, strict=True)
    )
    return Reason(
        SLOW_RANK,
        ("imbalance",),
        {"rank": rank},
        "Slow rank: {share} is lost to " + f"rank {rank}, of which each stage takes longer than those of other ranks",
        f"they take {times:.2f} times as long: look at its host, clocks and neighbours, if it has no more layers than others",
        gains(plans, as_others),
        {"times_usual": times},
        is_cause=True,
    )


def _of_slower_stages(costs: StepMatrix) -> Floats:
    """Factors of stages, shape (stages,): those of a rank become as short as the others' if each takes clearly longer; else 1."""
    table, (_, of_row) = costs.table, costs.cells
    typical = np.rint(costs.typical_cells[:1, of_row]).astype(np.int64)
    taken = group_sums(typical, table.stage, table.num_stages)[0]
    rank = np.empty(table.num_stages, dtype=np.int64)
    rank[table.stage] = table.rank
    usual = np.array([np.median(taken[rank != of]) for of in rank])
    for place in range(table.pp):
        slower = taken[rank == place] / np.maximum(usual[rank == place], 1) - 1
        is_longest = taken[rank == place].min() > taken[rank != place].max(initial=0)
        if len(slower) > 1 and is_longest and slower.min() > max(_LEAST_SLOWER, slower.max() / 2):
            return np.where(rank == place, usual / np.maximum(taken, 1), 1.0)
    return np.ones(table.num_stages)


def long_ops(plans: Sequence[StepMatrix]) -> Reason | None:
    """Single ops that take far longer than is typical of their kind on their rank; None where there are none."""
    excess = [_excess(costs) for costs in plans]
    num_long = sum(int(np.count_nonzero(ns)) for ns in excess)
    if not num_long:
        return None
    share = num_long / sum(ns.size for ns in excess)
    ratio = np.median(
        np.concatenate(
            [costs.durations[ns > 0] / (costs.durations - ns)[ns > 0] for costs, ns in zip(plans, excess, strict=True)]
        )
    )
    where = where_most(time_by_rank(plans, excess))
    place = f" of rank {where['rank']}" if where else ""
    return Reason(
        LONG_OPS,
        ("jitter", "straggler"),
        where,
        "Long ops: {share} is lost to single ops" + f"{place} that take far longer than is usual",
        f"{num_long} ops ({share:.1%}) typically take {ratio:.1f} times what is usual of their kind on their rank: look for "
        "noise on the hosts, clock throttling, warm-up (compilation, allocator) and sequences of uneven length",
        gains(plans, (replace(costs, durations=costs.durations - ns) for costs, ns in zip(plans, excess, strict=True))),
        {"num_ops": num_long, "share_of_ops": share, "times_usual": float(ratio)},
        LEAST_ANYWHERE,
    )


def _usual_of_stage(costs: StepMatrix, stage: int) -> tuple[Floats, Floats]:
    """(typical cost of the cells of a stage, that of those of the other stages; NaN where there are none), each of a kind."""
    cells, _ = costs.cells
    kind, of_cell = np.divmod(cells, costs.table.num_stages)
    of_stage = np.flatnonzero(of_cell == stage)
    lowest = np.sort(costs.typical_cells, axis=0)[(len(costs.step) - 1) // 2]
    usual = [
        np.median(lowest[(kind == kind[cell]) & (of_cell != stage)]) if (kind == kind[cell]).sum() > 1 else np.nan
        for cell in of_stage.tolist()
    ]
    return lowest[of_stage], np.array(usual)


def _slowest_stage(plans: Sequence[StepMatrix]) -> int | None:
    """The stage whose ops exceed those of the others most; None where none does."""
    excess = np.zeros(plans[0].table.num_stages)
    for costs in plans:
        for stage in range(len(excess)):
            cost, usual = _usual_of_stage(costs, stage)
            excess[stage] += np.nansum(cost - usual) * len(costs.step)
    return int(excess.argmax()) if excess.max() > 0 else None


def _with_stage_as_others(costs: StepMatrix, measured: StepMatrix, stage: int) -> StepMatrix:
    """The costs, ops of a stage shortened as much as its typical ones exceed those of the others in what was ``measured``."""
    cells, of_row = costs.cells
    cost, usual = _usual_of_stage(measured, stage)
    factor = np.ones(len(cells))
    factor[cells % costs.table.num_stages == stage] = np.nan_to_num(
        np.divide(np.minimum(usual, cost), cost, out=np.ones(len(cost)), where=cost > 0), nan=1.0
    )
    return replace(costs, durations=costs.durations - np.rint(costs.own * (1 - factor[of_row])).astype(np.int64))


def _replicas(costs: StepMatrix) -> Floats:
    """Typical cost of each cell in the faster half of the pipelines at most, ns."""
    first = [int(windows[0]) for windows in costs.of_pipelines()]
    ordered: Floats = np.sort(costs.typical_cells[first], axis=0)[(len(first) - 1) // 2]
    return ordered


def _slowest_rank(plans: Sequence[StepMatrix]) -> int | None:
    """The rank whose ops exceed those of its replicas most; None where none does."""
    excess = [np.maximum(costs.typical_cells - _replicas(costs), 0)[:, costs.cells[1]] for costs in plans]
    of_rank = time_by_rank(plans, [(2 * ns).astype(np.int64) for ns in excess])  # medians are whole or half ns
    return max(of_rank, key=of_rank.__getitem__, default=None)


def _with_rank_as_replicas(costs: StepMatrix, rank: int) -> StepMatrix:
    """The costs, ops of a rank shortened as much as its typical ones exceed those of its replicas."""
    (_, of_row), typical = costs.cells, costs.typical_cells
    factor = np.divide(np.minimum(_replicas(costs), typical), typical, out=np.ones(typical.shape), where=typical > 0)
    is_of_rank = costs.ranks[:, costs.table.rank] == rank
    saved = np.where(is_of_rank, costs.own * (1 - factor[:, of_row]), 0)
    return replace(costs, durations=costs.durations - np.rint(saved).astype(np.int64))


def _excess(costs: StepMatrix) -> Int64:
    """Excess of long ops over what is typical, shape (windows, rows), ns; 0 of all others."""
    _, of_row = costs.cells
    typical = costs.typical_cells
    excess = np.zeros(costs.durations.shape, dtype=np.int64)
    for windows in costs.of_pipelines():
        durations = costs.own[windows]
        for cell in range(int(of_row.max()) + 1):
            rows = np.flatnonzero(of_row == cell)
            usual = typical[windows, cell][:, np.newaxis]
            beyond = durations[:, rows] - usual
            far = np.maximum(_FAR * DEVIATION * np.median(np.abs(beyond)), _LEAST_EXCESS * usual)
            excess[np.ix_(windows, rows)] = np.rint(np.where(beyond > far, beyond, 0)).astype(np.int64)
    return excess
