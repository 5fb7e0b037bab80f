"""Waits inside ops: a rank that comes to a collective of tp or cp waits there for the member that comes last.

What it waits for is what that member did since both were last together, in the same collective or at the start of their ops: as
far as it computed longer, its op is to blame, else what made its op begin later.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from pptrace.intervals import Int64, lengths_within, merge, times_by_group
from pptrace.model.tables import Bool
from pptrace.slices import Slice, reduce_groups
from pptrace.timeline.lanes import Lane, is_inner

_COLUMNS = ("window", "row", "match", "start", "since", "wait")


class InnerWaits(Struct, frozen=True, eq=False):
    """Waits inside ops, a row each: of the op ``row`` in the window ``step`` for the op ``late_row`` in ``late_step``, ns.

    ``longer`` is the part of ``ns`` by which the late op computed longer until there; for the rest it was late already. Waits in
    one collective have one ``match``.
    """

    step: Int64
    row: Int64
    ns: Int64
    late_step: Int64
    late_row: Int64
    longer: Int64
    match: Int64

    def sums(self, shape: tuple[int, ...]) -> Int64:
        """The time for which each op waited, shape (steps, rows), ns."""
        total = np.zeros(shape, dtype=np.int64)
        np.add.at(total, (self.step, self.row), self.ns)
        return total


def no_inner_waits() -> InnerWaits:
    return InnerWaits(*(np.zeros(0, dtype=np.int64) for _ in range(7)))


def collectives_in_ops(comms: Slice, window: Int64, ops: Slice, lane: Lane) -> Slice:
    """The matched collectives inside a rank's ops, in order of window and start.

    ``since`` is how long the rank was busy before each: since the one before it in the op, or since the op began. ``wait`` is how
    long it then waited for others and nothing else filled the time.
    """
    chosen = is_inner(comms) & (comms["match"] >= 0) & (comms["group_size"] != 1)
    if not chosen.any() or not len(ops):
        return Slice.empty(*_COLUMNS)
    inner, window = comms.where(chosen), window[chosen]
    order = np.lexsort((inner["start_ns"], window))
    inner, window = inner.where(order), window[order]
    start, end, together = (inner[name] for name in ("start_ns", "end_ns", "transfer_start_ns"))
    begins, called = times_by_group((ops["window"], ops["start"]), (window, start))
    index = np.searchsorted(begins, called, side="right") - 1
    op = np.maximum(index, 0)
    is_inside = (index >= 0) & (ops["window"][op] == window) & (start < ops["end"][op])
    op, window, start, end = op[is_inside], window[is_inside], start[is_inside], end[is_inside]
    together, match = together[is_inside], inner["match"][is_inside]
    latest_before = np.maximum.accumulate(np.concatenate(([np.iinfo(np.int64).min], end)))[:-1]
    begun = np.maximum(ops["start"][op], latest_before)
    op_before = np.maximum.accumulate(np.concatenate(([np.iinfo(np.int64).min], ops["end"])))[:-1]
    begin, until = np.maximum(np.maximum(start, begun), op_before[op]), np.minimum(together, ops["end"][op])
    busy = merge(lane.compute, lane.exposed)
    wait = np.maximum(until - begin, 0) - lengths_within(busy, begin, until)
    columns = (window, ops["row"][op], match, start, np.maximum(start - begun, 0), wait)
    return Slice(dict(zip(_COLUMNS, columns, strict=True)))


def inner_waits(ranks: Sequence[Slice], is_whole: Bool) -> InnerWaits:
    """The waits in whole windows, numbered as these are, from the collectives inside the ops of each rank.

    Waits for members outside of whole windows are left out.
    """
    columns = Slice.joined(ranks)
    number = np.where(is_whole, np.cumsum(is_whole) - 1, -1)[columns["window"]]
    order = np.lexsort((columns["start"], columns["match"]))
    match = columns["match"][order]
    last = order[np.append(match[1:] != match[:-1], True)] if len(order) else order
    late = last[np.searchsorted(columns["match"][last], columns["match"])] if len(last) else last
    waited = np.flatnonzero(
        (columns["wait"] > 0) & (number >= 0) & (number[late] >= 0) & (late != np.arange(len(late)))
    )
    late = late[waited]
    ns = columns["wait"][waited]
    longer = np.clip(columns["since"][late] - columns["since"][waited], 0, ns)
    rows, match = columns["row"], columns["match"][waited]
    return InnerWaits(number[waited], rows[waited], ns, number[late], rows[late], longer, match)


def holds_of(waits: InnerWaits, ranks: Int64) -> Slice:
    """Rows of ops that collectives held up: by ``ns`` they would be shorter if the member that came last, a global rank, had
    computed no longer than the one before it. ``is_late`` are its own ops, the others waited.

    ``ranks`` (steps, rows) are the global ranks of all ops.
    """
    _, first, number = np.unique(waits.match, return_index=True, return_inverse=True)
    lead = reduce_groups(np.minimum, waits.longer, number, len(first))
    rank = ranks[waits.late_step, waits.late_row]
    columns = {
        "window": np.concatenate((waits.step, waits.late_step[first])),
        "row": np.concatenate((waits.row, waits.late_row[first])),
        "rank": np.concatenate((rank, rank[first])),
        "ns": np.concatenate((lead[number], lead)),
        "is_late": np.repeat([0, 1], [len(rank), len(first)]),
    }
    order = np.argsort(columns["window"], kind="stable")
    kept = order[columns["ns"][order] > 0]
    return Slice({name: column[kept] for name, column in columns.items()})
