"""Costs of ops by stage and kind: how much a microbatch computes in each stage, and how much that varies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pptrace.analysis.aligned import AlignedRun
from pptrace.intervals import lengths_within
from pptrace.model.tables import Int64


@dataclass(frozen=True, slots=True)
class OpCost:
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
    return tuple(
        _cost(stage, kind, {rank: np.concatenate(parts) for rank, parts in ranks.items()})
        for (stage, kind), ranks in sorted(computed_by_op(data).items())
    )


def computed_by_op(data: AlignedRun) -> dict[tuple[int, str], dict[int, list[Int64]]]:
    """The compute in each op, ns, in parts: by (stage, kind) and rank."""
    lists: dict[tuple[int, str], dict[int, list[Int64]]] = {}
    for rank in sorted(data.lanes):
        for stage, kind, computed in _of_rank(rank, data):
            lists.setdefault((stage, kind), {}).setdefault(rank, []).append(computed)
    return lists


def _of_rank(rank: int, data: AlignedRun) -> Iterator[tuple[int, str, Int64]]:
    ops = data.rows.of_rank(rank).ops
    if lost := data.lost_steps.get(rank):
        ops = ops.where(~np.isin(ops["step"], list(lost)))
    if data.work[rank].missing_device_events or not len(ops):
        return
    computed = lengths_within(data.lanes[rank].compute, ops["start_ns"], ops["end_ns"])
    kind, kinds = ops.codes("kind")
    for stage in np.unique(ops["stage"][ops["stage"] >= 0]).tolist():
        for code, name in enumerate(kinds):
            chosen = (ops["stage"] == stage) & (kind == code)
            if chosen.any():
                yield stage, str(name), computed[chosen]


def _cost(stage: int, kind: str, of_ranks: dict[int, Int64]) -> OpCost:
    values = np.sort(np.concatenate(list(of_ranks.values())))
    p10, median, p90 = (int(values[round(share * (len(values) - 1))]) for share in (0.1, 0.5, 0.9))
    medians = {rank: float(np.median(of_rank)) for rank, of_rank in of_ranks.items()}
    slowest = max(medians, key=lambda rank: (medians[rank], -rank))
    return OpCost(
        stage, kind, len(values), round(values.mean()), p10, median, p90, int(values[-1]),
        len(of_ranks), slowest, round(medians[slowest]),
    )  # fmt: skip
