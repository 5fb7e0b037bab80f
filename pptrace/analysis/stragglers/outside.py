"""Work of ranks in a step before and after the ops of the pipeline: gradient synchronisation, the optimizer, collectives.

Each rank does one thing after the other; a collective goes on when the last of its members is there.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from pptrace.model.tables import MESSAGES, Int64
from pptrace.slices import Slice

BEFORE, AFTER, AMONG = 0, 1, 2
_ROUNDING_BITS = 21
"""Times of a trace may be rounded, to 23 bits in tables of floats: what follows an op may begin a little before its end."""
_AROUND = "EVAL"
"""Kind of ranges around other work."""
_AMONG_OPS = ("DATA", "CHECKPOINT", "LOGGING", "EVAL", "GRAD_SYNC")
"""Kinds of ranges that say what a host does between two ops, as between two calls of a schedule before one update."""


def outside_of(spans: tuple[Slice, Int64], comms: tuple[Slice, Int64], ops: tuple[Slice, int], pp_rank: int) -> Slice:
    """Work of one rank outside its ops, in order of window and start.

    What lies among its ops is left out, but for ranges that say what the host did there. The name of a collective is its axis and
    kind; what it works is what it takes when all members are there, ns.

    Args:
        spans, comms: rows, and the window of each.
        ops: the rank's ops with their windows, and the number of windows.
    """
    most = np.iinfo(np.int64).max // 4  # of a window without ops
    first, last = np.full(ops[1], most), np.full(ops[1], -most)
    np.minimum.at(first, ops[0]["window"], ops[0]["start"])
    np.maximum.at(last, ops[0]["window"], ops[0]["end"])
    is_work, is_collective = ~spans[0].among("kind", ("STEP",)), ~comms[0].among("kind", MESSAGES)
    works, of_spans = spans[0].where(is_work), spans[1][is_work]
    collectives, of_comms = comms[0].where(is_collective), comms[1][is_collective]
    start, end = (np.concatenate((works[name], collectives[name])) for name in ("start_ns", "end_ns"))
    window = np.concatenate((of_spans, of_comms))
    middle = start + (end - start) // 2
    rounding = np.maximum((last - first)[window] >> _ROUNDING_BITS, 1_000)
    is_before, is_after = middle <= first[window] + rounding, middle >= last[window] - rounding
    of_collectives = np.zeros(len(collectives), dtype=np.bool_)
    is_around = np.append(works.among("kind", (_AROUND,)), of_collectives)
    is_among = np.append(works.among("kind", _AMONG_OPS), of_collectives) & ~is_before & ~is_after
    together = np.concatenate((works["start_ns"], collectives["transfer_start_ns"]))
    begun = np.maximum(start, np.where(is_after, last[window], start))
    called = zip(collectives["axis"].tolist(), collectives["kind"].tolist(), strict=True)
    columns = {
        "window": window,
        "pp_rank": np.full(len(window), pp_rank, dtype=np.int64),
        "side": np.where(is_before, BEFORE, np.where(is_among, AMONG, AFTER)),
        "name": np.array([*works["kind"].tolist(), *(f"{axis} {kind}" for axis, kind in called)], dtype=np.str_),
        "match": np.concatenate((np.full(len(works), -1, dtype=np.int64), collectives["match"].astype(np.int64))),
        "start": begun,
        "end": np.maximum(end, begun),
        "work": np.maximum(end - np.maximum(together, begun), 0),
    }
    chosen = np.flatnonzero((is_before | is_after) & ~is_around | is_among)
    chosen = chosen[np.lexsort((begun[chosen], window[chosen]))]
    return Slice({name: column[chosen] for name, column in columns.items()})


def is_collective(name: str) -> bool:
    """Return whether a name is that of a collective, which has an axis and a kind."""
    return " " in name


class Chains(Struct, frozen=True, eq=False):
    """Work of all ranks of a step on one side of the pipeline, the same in every step: items, in the order of ranks and start.

    ``rank`` (items,) is the index of the rank among those of the step, ``name`` what the item is, ``work`` (steps, items) what
    it takes, ns. ``levels`` are items that begin after those of earlier levels: (item, the item before it on its rank or −1,
    where each group of items that wait for one another begins among them).
    """

    rank: Int64
    name: np.typing.NDArray[np.str_]
    work: Int64
    levels: tuple[tuple[Int64, Int64, Int64], ...]

    def ends(self, ready: Int64, work: Int64) -> Int64:
        """Times at which each rank has done it all, shape (…, ranks), if they are ready to begin at ``ready``, of that shape."""
        ends = np.zeros(work.shape, dtype=np.int64)
        done = ready.copy()
        for items, before, groups in self.levels:
            begun = np.where(before >= 0, ends[..., before], ready[..., self.rank[items]])
            together = np.maximum.reduceat(begun, groups, axis=-1)
            sizes = np.diff(groups, append=len(items))
            ends[..., items] = np.repeat(together, sizes, axis=-1) + work[..., items]
            done[..., self.rank[items]] = ends[..., items]  # an item of a later level is later on its rank
        return done


def chains_of(rows: Slice, step: Int64, num_pp_ranks: int, side: int) -> Chains | None:
    """The chains of one side of all steps; None where steps or ranks differ in what they do, or do several things at once.

    ``step`` is the number of each window's step; the windows of a step stand one after the other.
    """
    rows = rows.where(rows["side"] == side)
    steps, first_window, num_windows = np.unique(step, return_index=True, return_counts=True)
    of_step = np.searchsorted(steps, step[rows["window"]])
    rank = (rows["window"] - first_window[of_step]) * num_pp_ranks + rows["pp_rank"]
    order = np.lexsort((rows["end"], rows["start"], rank, of_step))
    if (num_windows != num_windows[0]).any() or len(order) % len(steps):
        return None
    shape = (len(steps), len(order) // len(steps))
    ranks, names, match, start, end, work, index = (
        column[order].reshape(shape)
        for column in (rank, rows["name"], rows["match"], rows["start"], rows["end"], rows["work"], of_step)
    )
    # for each item the first one of its step that has the same match, itself where it has none
    at = np.broadcast_to(np.arange(match.shape[1]), match.shape)
    first = at.copy()
    for row in range(len(match)):
        known = np.flatnonzero(match[row] >= 0)
        _, begins, inverse = np.unique(match[row, known], return_index=True, return_inverse=True)
        first[row, known] = known[begins][inverse]
    if (index != np.arange(len(steps))[:, np.newaxis]).any() or any(
        (column != column[:1]).any() for column in (ranks, names, first)
    ):
        return None
    follows = ranks[0, 1:] == ranks[0, :-1]
    overlap = np.where(follows, end[:, :-1] - start[:, 1:], 0)
    if (overlap > _MOST_OVERLAP * np.maximum(end - start, 1)[:, 1:]).any():
        return None
    groups, named = first[0].copy(), names[0].astype(object)
    for items in _barriers(ranks[0], names[0], match, start, end):
        groups[items], named[items] = items.min(), f"{names[0][items[0]]} {_OF_ALL}"
        work[:, items] = np.maximum(end[:, items] - start[:, items].max(axis=1, keepdims=True), 0)
    levels = _levels(ranks[0], groups)
    return None if levels is None else Chains(ranks[0], named.astype(np.str_), work, levels)


_OF_ALL = "(all ranks)"
_SAME_END = 1 / 3
"""Share of the spread of starts: with a smaller spread of ends, the ranks wait for one another."""


def _barriers(rank: Int64, name: np.typing.NDArray[np.str_], match: Int64, start: Int64, end: Int64) -> list[Int64]:
    """The items of each range in which all ranks wait for the last one, as an optimizer does that clips by the global norm.

    The trace has no collective for it, but the ranks begin at different times and end it together.
    """
    ranks = np.unique(rank)
    ordinals = np.zeros(len(rank), dtype=np.int64)
    for key in np.unique(name).tolist():
        items = np.flatnonzero(name == key)
        begins = np.flatnonzero(np.diff(rank[items], prepend=-1))
        ordinals[items] = np.arange(len(items)) - np.repeat(begins, np.diff(begins, append=len(items)))
    barriers = []
    for key, ordinal in sorted(set(zip(name.tolist(), ordinals.tolist(), strict=True))):
        items = np.flatnonzero((name == key) & (ordinals == ordinal) & (match < 0).all(axis=0))
        if len(items) == len(ranks) > 1 and end[:, items].size:
            starts, ends = (np.ptp(times[:, items], axis=1).sum() for times in (start, end))
            if ends < _SAME_END * starts:
                barriers.append(items)
    return barriers


_MOST_OVERLAP = 0.05
"""Share of an item: more of it at the time of the one before it means that a rank does several things at once."""


def _levels(rank: Int64, first: Int64) -> tuple[tuple[Int64, Int64, Int64], ...] | None:
    """The levels of items, None where they wait for one another in a circle."""
    before = np.where(np.concatenate(([False], rank[1:] == rank[:-1])), np.arange(len(rank)) - 1, -1)[: len(rank)]
    members = np.bincount(first, minlength=len(rank))
    done = np.zeros(len(rank), dtype=np.bool_)
    levels: list[tuple[Int64, Int64, Int64]] = []
    while not done.all():
        is_ready = ~done & ((before < 0) | done[before])
        is_met = is_ready & (np.bincount(first[is_ready], minlength=len(rank)) == members)[first]
        items = np.flatnonzero(is_met)
        if not len(items):
            return None
        items = items[np.argsort(first[items], kind="stable")]
        groups = np.flatnonzero(np.diff(first[items], prepend=-1))
        levels.append((items, before[items], groups))
        done[items] = True
    return tuple(levels)
