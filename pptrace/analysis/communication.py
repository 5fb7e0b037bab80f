"""Communication per axis and kind: count, bytes, time, overlap."""

from __future__ import annotations

import pandas as pd

from pptrace.analysis.result import CommSummary, CommTotal
from pptrace.analysis.volume.transformer import Calls, Volume
from pptrace.intervals import Int64, intersect, length, union
from pptrace.slices import Slice

BUS_FACTORS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
}
"""Bus bandwidth over algorithm bandwidth, by group size n (nccl-tests, PERFORMANCE.md); 1 for every other kind."""


def summarise_comms(comms: Slice, compute: Int64, predicted: Volume | None = None) -> tuple[CommSummary, ...]:
    """One summary per (axis, kind) of one rank's communication in one step.

    Args:
        comms: the rank's rows (schema COMMS) with transfer starts filled.
        compute: when the rank computes.
        predicted: what the rank should communicate, where that is known; what is not in ``comms`` has a count of 0.
    """
    groups: dict[tuple[str, str], Slice] = {
        (axis, kind): rows
        for axis, axis_rows in comms.by("axis").items()
        for kind, rows in axis_rows.by("kind").items()
    }
    none = comms.where(slice(0))
    return tuple(
        _summarise(*key, groups.get(key, none), compute, None if predicted is None else predicted.get(key, Calls(0, 0)))
        for key in sorted(groups.keys() | (predicted or {}).keys())
    )


def _summarise(axis: str, kind: str, rows: Slice, compute: Int64, predicted: Calls | None) -> CommSummary:
    transfer = union(rows["transfer_start_ns"], rows["transfer_end_ns"])
    transfer_ns = int((rows["transfer_end_ns"] - rows["transfer_start_ns"]).sum())
    total_ns = int((rows["end_ns"] - rows["start_ns"]).sum())
    num_bytes = int(rows["bytes"].sum()) if (rows["bytes"] >= 0).all() else None
    hidden, transfer_length = length(intersect(transfer, compute)), length(transfer)
    matched = bool(((rows["match"] >= 0) | (rows["group_size"] == 1)).all())
    algorithm = num_bytes / transfer_ns if transfer_ns and matched and num_bytes is not None else None
    factor = BUS_FACTORS[kind](int(rows["group_size"].max())) if kind in BUS_FACTORS and len(rows) else 1.0
    return CommSummary(
        axis=axis,
        kind=kind,
        count=len(rows),
        bytes=num_bytes,
        total_ns=total_ns,
        wait_ns=total_ns - transfer_ns if matched else None,
        hidden_ns=hidden if matched else None,
        exposed_ns=transfer_length - hidden if matched else None,
        overlap_ratio=hidden / transfer_length if transfer_length and matched else None,
        algbw_gbps=algorithm,
        busbw_gbps=None if algorithm is None else algorithm * factor,
        predicted_bytes=None if predicted is None else predicted.bytes,
    )


def total_comms(comms: pd.DataFrame, compute: Int64 | None) -> tuple[CommTotal, ...]:
    """One total per (axis, kind) of one rank's communication in its whole trace.

    Args:
        comms: the rank's rows (schema COMMS).
        compute: when its device computes, on the same clock; None without device events.
    """
    groups = comms.groupby(["axis", "kind"], sort=True)
    return tuple(_total(str(axis), str(kind), rows, compute) for (axis, kind), rows in groups)


def _total(axis: str, kind: str, rows: pd.DataFrame, compute: Int64 | None) -> CommTotal:
    busy = union(rows["start_ns"], rows["end_ns"])
    total_ns = int((rows["end_ns"] - rows["start_ns"]).sum())
    num_bytes = int(rows["bytes"].sum()) if (rows["bytes"] >= 0).all() else None
    sizes = set(rows["group_size"].tolist())
    size = sizes.pop() if len(sizes) == 1 else -1
    is_placed = bool((rows["clock"] != "none").all())
    on_device = bool(rows["clock"].isin(("device", "none")).all())
    algorithm = num_bytes / total_ns if num_bytes is not None and total_ns and on_device else None
    factor = (BUS_FACTORS[kind](size) if size > 0 else None) if kind in BUS_FACTORS else 1.0
    return CommTotal(
        axis=axis,
        kind=kind,
        group_size=size if size > 0 else None,
        count=len(rows),
        bytes=num_bytes,
        total_ns=total_ns,
        busy_ns=length(busy) if is_placed else None,
        overlap_ratio=length(intersect(busy, compute)) / length(busy)
        if compute is not None and is_placed and on_device and len(busy)
        else None,
        algbw_gbps=algorithm,
        busbw_gbps=None if algorithm is None or factor is None else algorithm * factor,
    )
