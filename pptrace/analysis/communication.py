"""Communication per axis and kind: how much, how long, how well hidden."""

from __future__ import annotations

import pandas as pd

from pptrace.analysis.result import CommSummary
from pptrace.intervals import Int64, intersect, length, union

BUS_FACTORS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
}
"""Bus bandwidth over algorithm bandwidth, by group size n (nccl-tests, PERFORMANCE.md); 1 for every other kind."""


def summarise_comms(comms: pd.DataFrame, compute: Int64) -> tuple[CommSummary, ...]:
    """One summary per (axis, kind) of one rank's communication in one step.

    Args:
        comms: the rank's rows (schema COMMS) with transfer starts filled.
        compute: when the rank computes.
    """
    return tuple(
        _summarise(str(axis), str(kind), rows, compute)
        for (axis, kind), rows in comms.groupby(["axis", "kind"], sort=True)
    )


def _summarise(axis: str, kind: str, rows: pd.DataFrame, compute: Int64) -> CommSummary:
    transfer = union(rows["transfer_start_ns"], rows["transfer_end_ns"])
    transfer_ns = int((rows["transfer_end_ns"] - rows["transfer_start_ns"]).sum())
    total_ns = int((rows["end_ns"] - rows["start_ns"]).sum())
    num_bytes = int(rows["bytes"].sum())
    hidden, whole = length(intersect(transfer, compute)), length(transfer)
    matched = bool(((rows["match"] >= 0) | (rows["group_size"] == 1)).all())
    algorithm = num_bytes / transfer_ns if transfer_ns and matched else None
    factor = BUS_FACTORS[kind](int(rows["group_size"].max())) if kind in BUS_FACTORS else 1.0
    return CommSummary(
        axis=axis,
        kind=kind,
        count=len(rows),
        bytes=num_bytes,
        total_ns=total_ns,
        wait_ns=total_ns - transfer_ns if matched else None,
        hidden_ns=hidden if matched else None,
        exposed_ns=whole - hidden if matched else None,
        overlap_ratio=hidden / whole if whole and matched else None,
        algbw_gbps=algorithm,
        busbw_gbps=None if algorithm is None else algorithm * factor,
    )
