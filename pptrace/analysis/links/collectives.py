"""Collectives by size: latency and bandwidth, the algorithm that their kernels are named after, and the steps that it takes.

A ring of n ranks takes 2(n − 1) steps for an all-reduce, n − 1 for an all-gather or a reduce-scatter, one after the other; a tree
takes 2·⌈log₂ n⌉ for an all-reduce, up and down. What latency a step has counts as often, so that trees are for small sizes on
many ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd
from msgspec.structs import replace

from pptrace.analysis.links.peaks import (
    CLASSES_PER_OCTAVE,
    FAST,
    Facts,
    LinkFit,
    fit_link,
    is_same_host,
    members_of,
    share_of_peak,
)
from pptrace.analysis.links.types import CollectiveSize, CollectiveSpeed, Interconnect
from pptrace.analysis.result import Finding, Severity, StepReport
from pptrace.axes import Axis
from pptrace.intervals import Int64
from pptrace.marks import P2P, Collective
from pptrace.model.known import common
from pptrace.model.mesh import MeshInfo
from pptrace.model.tables import Bool, are_uneven
from pptrace.sizes.transformer import bus_factor
from pptrace.slices import Slice, distinct_of, reduce_groups

TEXTS, NUMBERS = ("axis", "kind", "algorithm"), ("group_size", "size_class")
_NOT_RECORDED = "not all members are in the traces, so that how long a call waited is not known"
_UNEVEN = "parts have different sizes, so that bytes handed in do not tell how long a call takes"
ACROSS_HOSTS = "axis across hosts"
_LEAST_EXPOSED = 0.02
"""Share of the ranks' time from which on exposed communication that crosses hosts is a finding."""


def sizes_of_rank(comms: Slice) -> Slice:
    """Sums over one rank's collectives (schema COMMS, transfers filled), a row for each of ``TEXTS`` and ``NUMBERS``.

    ``count`` calls move ``moved`` bytes together (−1: not known of all); of ``matched`` of them, all of whose members are known,
    ``transfer`` is the sum of the transfers and ``fast`` one that a tenth are below, ns. ``uneven`` have parts of different size.
    """
    is_collective = ~comms.among("kind", (*P2P, Collective.BARRIER)) & (comms["group_size"] != 1)
    rows = comms.where(is_collective)
    sizes = rows["bytes"]
    size_class = np.where(sizes >= 0, np.floor(np.log2(np.maximum(sizes, 1)) * CLASSES_PER_OCTAVE), -1).astype(np.int64)
    keys, group, first = grouped(rows.with_columns({"size_class": size_class}), TEXTS, NUMBERS)
    number, matched = len(first), rows["match"] >= 0
    transfer = np.where(matched, rows["transfer_end_ns"] - rows["transfer_start_ns"], 0)
    of_splits, splits = rows.codes("splits")
    return Slice(
        {
            **keys,
            "count": np.bincount(group, minlength=number),
            "matched": np.bincount(group[matched], minlength=number),
            "moved": np.where(size_class[first] < 0, -1, reduce_groups(np.add, sizes, group, number)),
            "transfer": reduce_groups(np.add, transfer, group, number),
            "fast": fast_of_groups(transfer, group, number, matched),
            "uneven": reduce_groups(np.add, are_uneven(splits)[of_splits].astype(np.int64), group, number),
        }
    )


def grouped(
    rows: Slice, texts: Sequence[str], numbers: Sequence[str] = ()
) -> tuple[Mapping[str, npt.NDArray[np.generic]], Int64, Int64]:
    """(values of the columns in each group, the group of each row, the first row of each group)."""
    codes = {name: rows.codes(name) for name in texts}
    group, first = distinct_of([*(code for code, _ in codes.values()), *(rows[name] for name in numbers)])
    values: dict[str, npt.NDArray[np.generic]] = {
        name: np.array(of_code, dtype=object)[code[first]] for name, (code, of_code) in codes.items()
    }
    return values | {name: rows[name][first] for name in numbers}, group, first


def fast_of_groups(values: Int64, group: Int64, num_groups: int, counts: Bool | None = None) -> Int64:
    """The value of each group that a tenth of its values is below, of those of them that a mask ``counts``; else 0."""
    is_counted = np.ones(len(values), dtype=np.bool_) if counts is None else counts
    order = np.lexsort((values, ~is_counted, group))
    first = np.searchsorted(group[order], np.arange(num_groups))
    number = np.bincount(group[is_counted], minlength=num_groups)
    fast: Int64 = values[order][first + np.maximum(number - 1, 0) // FAST]
    return fast


def collectives_of(
    sizes: Iterable[Slice], ranks: Sequence[int], facts: Facts, mesh: MeshInfo
) -> tuple[CollectiveSpeed, ...]:
    """The collectives of each axis, kind, size of group and algorithm, from the sums of all ranks; without their peaks."""
    frames = [pd.DataFrame(dict(of_rank.columns)) for of_rank in sizes if len(of_rank)]
    if not frames:
        return ()
    every = pd.concat(frames, ignore_index=True)
    keys = [*TEXTS, "group_size"]
    hosts = {
        axis: common(is_same_host(group, facts) for group in groups_of_axis(axis, ranks, facts, mesh))
        for axis in every["axis"].unique()
    }
    return tuple(_speed(rows, hosts[rows["axis"].iloc[0]]) for _, rows in every.groupby(keys))


def _speed(rows: pd.DataFrame, same_host: bool | None) -> CollectiveSpeed:
    """The speed of collectives that have all of the keys in common."""
    axis, kind, algorithm = (str(rows[name].iloc[0]) for name in TEXTS)
    size = int(rows["group_size"].iloc[0])
    by_size = rows.groupby("size_class")
    sums = by_size[["count", "matched", "moved", "transfer"]].sum()
    known = sums.index.to_numpy() >= 0
    is_matched = sums["matched"].to_numpy() > 0
    sizes = np.where(known, sums["moved"] // sums["count"], -1)
    fast = rows[rows["matched"] > 0].groupby("size_class")["fast"].median().reindex(sums.index, fill_value=0)
    times = np.rint(fast.to_numpy()).astype(np.int64)
    factor = None if rows["uneven"].any() else bus_factor(kind, size)
    named, protocol = algorithm.rpartition("_")[::2] if algorithm else ("", "")
    fit = fit_link(sizes, times, sums["matched"].to_numpy(), "calls")
    if not is_matched.all() or factor is None:
        fit = LinkFit(reason=_UNEVEN if is_matched.all() else _NOT_RECORDED)
    return CollectiveSpeed(
        axis=axis,
        kind=kind,
        group_size=size if size > 0 else None,
        kernel_algorithm=named.lower() or None,
        kernel_protocol=protocol or None,
        is_same_host=same_host,
        count=int(sums["count"].sum()),
        transfer_ns=int(sums["transfer"].sum()) if is_matched.all() else None,
        sizes=tuple(
            CollectiveSize(
                bytes=int(num_bytes) if num_bytes >= 0 else None,
                count=int(count),
                fast_ns=int(ns) if matched else None,
                algbw_gbps=(rate := num_bytes / ns if matched and num_bytes >= 0 and ns > 0 else None),
                busbw_gbps=None if rate is None or factor is None else rate * factor,
            )
            for num_bytes, count, ns, matched in zip(
                sizes.tolist(), sums["count"], times.tolist(), is_matched, strict=True
            )
        ),
        latency_ns=fit.latency_ns,
        bandwidth_gbps=None if fit.bandwidth_gbps is None else fit.bandwidth_gbps * (factor or 1.0),
        fit_reason=fit.reason,
        ring_steps=ring_steps(kind, size),
        tree_steps=tree_steps(kind, size),
    )


def ring_steps(kind: str, size: int) -> int | None:
    """Steps that a ring of so many ranks takes one after the other; None of a kind that has none, or of unknown size."""
    turns = {Collective.ALL_REDUCE: 2, Collective.ALL_GATHER: 1, Collective.REDUCE_SCATTER: 1}
    return turns[Collective(kind)] * (size - 1) if size > 1 and kind in turns else None


def tree_steps(kind: str, size: int) -> int | None:
    """The same of a binary tree, up and down again; None of all but all-reduces."""
    return 2 * (size - 1).bit_length() if size > 1 and kind == Collective.ALL_REDUCE else None


def with_peaks(speeds: Iterable[CollectiveSpeed], interconnect: Interconnect | None) -> tuple[CollectiveSpeed, ...]:
    """The collectives with the peaks of their links, where those are known.

    LL has a flag in every second word, so that it moves half of a peak at most: what moves more ran another protocol.
    """
    rates = {} if interconnect is None else {(rate.axis, rate.kind): rate for rate in interconnect.collectives}

    def compared(speed: CollectiveSpeed) -> CollectiveSpeed:
        rate = rates.get((speed.axis, speed.kind))
        peak = None if rate is None else rate.peak_gbps
        best = max((size.busbw_gbps for size in speed.sizes if size.busbw_gbps is not None), default=None)
        share = None if peak is None or best is None else share_of_peak(best, peak, speed.is_same_host)
        may_tell = share is not None and speed.kernel_protocol == "LL" and speed.is_same_host
        return replace(
            speed, peak_gbps=peak, share_of_peak=share, exceeds_ll=share > 0.5 if may_tell and share else None
        )

    return tuple(map(compared, speeds))


def groups_of_axis(axis: str, ranks: Sequence[int], facts: Facts, mesh: MeshInfo) -> list[tuple[int, ...]]:
    """The groups of an axis, on one host all ranks as one; [] where they are not known."""
    return ([tuple(ranks)] if is_same_host(ranks, facts) else members_of(axis, mesh, ranks)) or []


def findings_on_hosts(
    speeds: Sequence[CollectiveSpeed], steps: Sequence[StepReport], ranks: Sequence[int], facts: Facts, mesh: MeshInfo
) -> Iterator[Finding]:
    """The finding that tensor parallelism crosses hosts, where what it has exposed takes a share of the ranks' time."""
    groups = groups_of_axis(Axis.TP, ranks, facts, mesh) if any(speed.axis == Axis.TP for speed in speeds) else []
    num_across = [is_same_host(group, facts) for group in groups].count(False)
    of_ranks = [rank for step in steps for rank in step.ranks]
    exposed = [comm.exposed_ns for rank in of_ranks for comm in rank.comms if comm.axis == Axis.TP]
    share = sum(ns or 0 for ns in exposed) / max(sum(rank.window_ns for rank in of_ranks), 1)
    if not num_across or (share < _LEAST_EXPOSED and None not in exposed):
        return
    yield Finding(
        Severity.WARNING,
        f"Placement: tp crosses hosts ({num_across} of {len(groups)} groups), and {share:.1%} of the ranks' time is its exposed "
        "communication",
        "every layer communicates along tp, a stage sends along pp once: keep tp inside a host and let pp or dp cross; `pptrace "
        "whatif --collective-speed tp=X` says what links X times as fast would give",
        evidence={
            "cause": "communication",
            "where": {"axis": str(Axis.TP)},
            "reason": ACROSS_HOSTS,
            "share": share,
            "num_groups": len(groups),
            "num_across": num_across,
        },
    )
