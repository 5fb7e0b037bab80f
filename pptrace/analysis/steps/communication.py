"""Communication per axis and kind: count, bytes, time, overlap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from pptrace.analysis.result import CommSummary, CommTotal
from pptrace.intervals import Int64, intersect, length, lengths_within, union, union_by_group
from pptrace.model.predicted import Bytes
from pptrace.model.splits import are_uneven
from pptrace.model.tables import Bool
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
    columns = (
        key[firsts],
        counts,
        np.add.reduceat(comms["bytes"], firsts),
        np.minimum.reduceat(comms["bytes"], firsts) >= 0,
        np.add.reduceat(comms["end_ns"] - comms["start_ns"], firsts),
        np.add.reduceat(comms["transfer_end_ns"] - comms["transfer_start_ns"], firsts),
        busy,
        hidden,
        np.logical_and.reduceat((comms["match"] >= 0) | (comms["group_size"] == 1), firsts),
        np.maximum.reduceat(comms["group_size"], firsts),
        np.logical_or.reduceat(_are_uneven(comms), firsts),
        free,
    )
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for (
        number,
        count,
        num_bytes,
        has_bytes,
        total,
        transfer,
        busy_ns,
        hidden_ns,
        matched,
        size,
        uneven,
        free_ns,
    ) in rows:
        rest, kind_index = divmod(number, len(kinds))
        step_index, axis_index = divmod(rest, len(axes))
        name = axes[axis_index], kinds[kind_index]
        algorithm = num_bytes / transfer if transfer and matched and has_bytes else None
        factor = None if uneven else bus_factor(name[1], size)
        expected = None if predicted is None else predicted[step_index]
        yield (
            step_index,
            CommSummary(
                axis=name[0],
                kind=name[1],
                count=count,
                bytes=num_bytes if has_bytes else None,
                total_ns=total,
                wait_ns=total - transfer if matched else None,
                hidden_ns=hidden_ns if matched else None,
                exposed_ns=busy_ns - hidden_ns if matched else None,
                overlap_ratio=hidden_ns / busy_ns if busy_ns and matched else None,
                algbw_gbps=algorithm,
                busbw_gbps=None if algorithm is None or factor is None else algorithm * factor,
                predicted_bytes=None if expected is None else expected.get(name, 0),
                free_ns=(0 if name[0] == "pp" else free_ns) if matched and behind is not None else None,
            ),
        )


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
