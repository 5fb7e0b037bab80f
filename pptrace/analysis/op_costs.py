"""Costs of ops by stage and kind: how much a microbatch computes in each stage, and how much that varies.

Samples of what ops cost in each stage, and whether they are of two groups, which no median describes.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from pptrace.analysis.aligned import AlignedRun
from pptrace.intervals import lengths_within
from pptrace.model.tables import Int64


class OpCost(Struct, frozen=True):
    """Compute in the ops of one ``kind`` and ``stage``, ns, over all microbatches, steps and replicas; percentiles are of ops.

    ``slowest_rank`` is the rank with the largest median, ``slowest_ns`` that median, among ``num_ranks``.
    """

    stage: int
    kind: str
    count: int
    mean_ns: int
    p10_ns: int
    median_ns: int
    p90_ns: int
    max_ns: int
    num_ranks: int
    slowest_rank: int
    slowest_ns: int


def op_costs(data: AlignedRun) -> tuple[OpCost, ...]:
    """The costs by stage, then kind; ops of unknown stage are left out, and ranks whose device was not recorded.

    Compute is kernels where there are any, else the op without the communication nested in it.
    """
    return tuple(_cost(stage, kind, of_ranks) for (stage, kind), of_ranks in sorted(computed_by_op(data).items()))


def computed_by_op(data: AlignedRun) -> dict[tuple[int, str], dict[int, Int64]]:
    """The compute in each op, ns: by (stage, kind) and rank."""
    computed: dict[tuple[int, str], dict[int, Int64]] = {}
    for rank in sorted(data.lanes):
        ops, compute = data.rows.of_rank(rank).ops, data.lanes[rank].compute
        ops = ops.where(~np.isin(ops["step"], list(data.lost_steps.get(rank, ()))) & (ops["stage"] >= 0))
        if data.work[rank].missing_device_events:
            continue
        for stage, of_stage in ops.by("stage").items():
            for kind, rows in of_stage.by("kind").items():
                lengths = lengths_within(compute, rows["start_ns"], rows["end_ns"])
                computed.setdefault((stage, str(kind)), {})[rank] = lengths
    return computed


def _cost(stage: int, kind: str, of_ranks: dict[int, Int64]) -> OpCost:
    values = np.sort(np.concatenate(list(of_ranks.values())))
    p10, median, p90 = (_percentile(values, share) for share in (0.1, 0.5, 0.9))
    medians = {rank: _percentile(np.sort(of_rank), 0.5) for rank, of_rank in of_ranks.items()}
    slowest = max(medians, key=lambda rank: (medians[rank], -rank))
    return OpCost(
        stage, kind, len(values), round(values.mean()), p10, median, p90, int(values[-1]),
        len(of_ranks), slowest, medians[slowest],
    )  # fmt: skip


def _percentile(ascending: Int64, share: float) -> int:
    """The length of the op that is longer than this share of the others, ns."""
    return int(ascending[round(share * (len(ascending) - 1))])


MOST_POINTS = 3_000
"""Costs that all samples have together, at most, but for :data:`_FEWEST_POINTS` of each."""
_FEWEST_POINTS = 20
_FEWEST_OPS = 16
_LEAST_SHARE = 0.1
"""Share of all ops that the smaller group has at least, and three ops."""
_LEAST_APART = 1.1
"""Ratio of the medians of two groups, at least."""
_MOST_BETWEEN = 0.04
"""Share of all ops in the middle third between both medians, at most: of one group a sixth of them are there."""


class OpGroup(Struct, frozen=True):
    """The ops of one of two groups: how many, and their median, ns."""

    count: int
    median_ns: int


class OpSample(Struct, frozen=True):
    """The compute in ops of a ``stage`` and ``kind``, ns, ascending: all ops, or of many as many quantiles.

    ``groups`` are the two that the costs fall into, cheap ops first; () where they are one.
    """

    stage: int
    kind: str
    costs_ns: Int64
    groups: tuple[OpGroup, ...]


def op_samples(data: AlignedRun) -> tuple[OpSample, ...]:
    """The samples by stage, then kind, of the ops whose costs :func:`pptrace.analysis.op_costs.op_costs` sums up."""
    costs = {
        key: np.sort(np.concatenate(list(of_ranks.values()))) for key, of_ranks in sorted(computed_by_op(data).items())
    }
    most = max(MOST_POINTS // max(len(costs), 1), _FEWEST_POINTS)
    samples = []
    for (stage, kind), all_ns in costs.items():
        quantiles = np.linspace(0, len(all_ns) - 1, min(len(all_ns), most)).round().astype(np.int64)
        samples.append(OpSample(stage, kind, all_ns[quantiles], two_groups(all_ns)))
    return tuple(samples)


def two_groups(costs_ns: Int64) -> tuple[OpGroup, ...]:
    """The two groups of ascending costs; () of one.

    They are cut where that explains most of the variance (Otsu's criterion). They are two if each has three ops and a tenth of
    all, their medians differ by a tenth, and next to nothing lies in the middle third between these: a dip, where one group has
    its most. Of one group this says two for one in ten of 16 ops, one in fifty of 25, and none of hundreds.
    """
    count = len(costs_ns)
    if count < _FEWEST_OPS:
        return ()
    values = costs_ns.astype(np.float64)
    below = np.arange(1, count)
    sums = np.cumsum(values)[:-1]
    between = below * (count - below) * (sums / below - (values.sum() - sums) / (count - below)) ** 2
    cut = int(np.argmax(between)) + 1
    low, high = (float(np.median(part)) for part in (values[:cut], values[cut:]))
    third = (high - low) / 3
    in_the_middle = int(((values > low + third) & (values < high - third)).sum())
    is_large = min(cut, count - cut) >= max(3, _LEAST_SHARE * count)
    if not is_large or high < _LEAST_APART * low or in_the_middle > _MOST_BETWEEN * count:
        return ()
    return OpGroup(cut, round(low)), OpGroup(count - cut, round(high))
