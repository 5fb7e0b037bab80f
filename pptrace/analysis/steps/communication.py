"""Communication per axis and kind: count, bytes, time, overlap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from msgspec.structs import replace

from pptrace.analysis.result import CommSummary, CommTotal
from pptrace.intervals import Int64, intersect, length, lengths_within, union, union_by_group
from pptrace.model.known import masked
from pptrace.model.predicted import Bytes
from pptrace.model.tables import Bool, are_uneven
from pptrace.sizes.transformer import bus_factor
from pptrace.slices import Slice, reduce_groups


def summarise_steps(
    comms: Slice,
    step: Int64,
    num_steps: int,
    compute: Int64,
    predicted: Sequence[Bytes | None] | None = None,
    behind: tuple[Int64, Int64] | None = None,
) -> list[tuple[CommSummary, ...]]:
    """Summaries of one rank's communication, one per (axis, kind), for each step.

    Args:
        comms: the rank's rows (schema COMMS) with transfer starts filled.
        step: the index of each row's step, 0 … ``num_steps`` − 1, ascending.
        num_steps: how many there are.
        compute: when the rank computes.
        predicted: bytes that the rank should send in each step, None where not known; what is not in ``comms`` has a count of 0.
        behind: (end of the rank's last op, end of the pipeline) in each step; None without a pipeline.
    """
    summaries: list[dict[tuple[str, str], CommSummary]] = [{} for _ in range(num_steps)]
    for index, summary in _summaries(comms, step, compute, predicted, behind):
        summaries[index][summary.axis, summary.kind] = summary
    if predicted is not None:
        for present, expected in zip(summaries, predicted, strict=True):
            for (axis, kind), num_bytes in (expected or {}).items():
                if (axis, kind) not in present:
                    present[axis, kind] = CommSummary(axis, kind, 0, 0, 0, 0, 0, 0, None, None, None, num_bytes)
    return [tuple(of_step[key] for key in sorted(of_step)) for of_step in summaries]


def _summaries(
    comms: Slice,
    step: Int64,
    compute: Int64,
    predicted: Sequence[Bytes | None] | None,
    behind: tuple[Int64, Int64] | None,
) -> Iterator[tuple[int, CommSummary]]:
    """(index of the step, summary) of each step's communication of one axis and kind."""
    if not len(comms):
        return
    (axis, axes), (kind, kinds) = comms.codes("axis"), comms.codes("kind")
    key = (step * len(axes) + axis) * len(kinds) + kind
    if (key[1:] < key[:-1]).any():
        order = np.argsort(key, kind="stable")
        comms, key = comms.where(order), key[order]
    firsts = np.flatnonzero(np.concatenate(([True], key[1:] != key[:-1])))
    group = np.repeat(np.arange(len(firsts)), counts := np.diff(np.append(firsts, len(key))))
    of_row, transfers = union_by_group(group, comms["transfer_start_ns"], comms["transfer_end_ns"])
    busy = reduce_groups(np.add, transfers[:, 1] - transfers[:, 0], of_row, len(firsts))
    hidden = reduce_groups(np.add, lengths_within(compute, transfers[:, 0], transfers[:, 1]), of_row, len(firsts))
    free = np.zeros_like(busy)
    if behind is not None:
        of_step = (key[firsts] // (len(axes) * len(kinds)))[of_row]
        start, end = np.maximum(transfers[:, 0], behind[0][of_step]), np.minimum(transfers[:, 1], behind[1][of_step])
        unneeded = np.maximum(end - start, 0) - lengths_within(compute, start, end)
        free = reduce_groups(np.add, unneeded, of_row, len(firsts))
    num_bytes, total, transfer = (
        np.add.reduceat(values, firsts)
        for values in (
            comms["bytes"],
            comms["end_ns"] - comms["start_ns"],
            comms["transfer_end_ns"] - comms["transfer_start_ns"],
        )
    )
    has_bytes = np.minimum.reduceat(comms["bytes"], firsts) >= 0
    matched = np.logical_and.reduceat((comms["match"] >= 0) | (comms["group_size"] == 1), firsts)
    uneven = np.logical_or.reduceat(_are_uneven(comms), firsts)
    rest, of_kind = np.divmod(key[firsts], len(kinds))
    of_step, of_axis = np.divmod(rest, len(axes))
    names = [(axes[row], kinds[column]) for row, column in zip(of_axis.tolist(), of_kind.tolist(), strict=True)]
    sizes = np.maximum.reduceat(comms["group_size"], firsts).tolist()
    factors = [None if odd else bus_factor(name[1], size) for name, size, odd in zip(names, sizes, uneven, strict=True)]
    rates = masked(num_bytes / np.where(transfer == 0, 1, transfer), matched & has_bytes & (transfer != 0))
    expected = [None if predicted is None else predicted[index] for index in of_step.tolist()]
    columns = (
        *zip(*names, strict=True),
        counts.tolist(),
        masked(num_bytes, has_bytes),
        total.tolist(),
        masked(total - transfer, matched),
        masked(hidden, matched),
        masked(busy - hidden, matched),
        masked(hidden / np.maximum(busy, 1), matched & (busy > 0)),
        rates,
        [None if None in both else both[0] * both[1] for both in zip(rates, factors, strict=True)],
        [None if of is None else of.get(name, 0) for of, name in zip(expected, names, strict=True)],
        masked(np.where([axis == "pp" for axis, _ in names], 0, free), matched & (behind is not None)),
    )
    yield from zip(of_step.tolist(), map(CommSummary, *columns), strict=True)


def total_comms(comms: Slice, compute: Int64 | None) -> tuple[CommTotal, ...]:
    """One total per (axis, kind) of one rank's communication in its whole trace.

    Args:
        comms: the rank's rows (schema COMMS).
        compute: when its device computes, on the same clock; None without device events.
    """
    return tuple(
        _total(str(axis), str(kind), rows, compute)
        for axis, of_axis in comms.by("axis").items()
        for kind, rows in of_axis.by("kind").items()
    )


def with_waits(totals: Sequence[CommTotal], comms: Slice) -> tuple[CommTotal, ...]:
    """The totals of a rank with what its calls waited, by its rows on the common clock with transfers filled."""
    waits: dict[tuple[str, str], int] = {}
    for axis, of_axis in comms.by("axis").items():
        for kind, rows in of_axis.by("kind").items():
            if (rows["match"] >= 0).all():
                transfer = rows["transfer_end_ns"] - rows["transfer_start_ns"]
                waits[str(axis), str(kind)] = int((rows["end_ns"] - rows["start_ns"] - transfer).sum())
    return tuple(replace(total, wait_ns=waits.get((total.axis, total.kind))) for total in totals)


def _total(axis: str, kind: str, rows: Slice, compute: Int64 | None) -> CommTotal:
    busy = union(rows["start_ns"], rows["end_ns"])
    total_ns = int((rows["end_ns"] - rows["start_ns"]).sum())
    num_bytes = int(rows["bytes"].sum()) if (rows["bytes"] >= 0).all() else None
    sizes = rows["group_size"]
    size = int(sizes[0]) if (sizes == sizes[0]).all() else -1
    is_placed = not (rows["clock"] == "none").any()
    on_device = bool(rows.among("clock", ("device", "none")).all())
    algorithm = num_bytes / total_ns if num_bytes is not None and total_ns and on_device else None
    factor = None if _are_uneven(rows).any() else bus_factor(kind, size)
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


def _are_uneven(comms: Slice) -> Bool:
    """Return which calls have parts of different size."""
    codes, texts = comms.codes("splits")
    return are_uneven(texts)[codes]
