"""Ranges of a trace that are pptrace's marks, by columns, and names that could not be read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from pptrace.axes import Axis
from pptrace.intervals import find_interval
from pptrace.marks import (
    PREFIX,
    AwaitMark,
    CallMark,
    Collective,
    CollectiveMark,
    ExchangeMark,
    Mark,
    OpMark,
    P2PMark,
    SpanKind,
    SpanMark,
    Transfer,
    WaitMark,
)
from pptrace.model.tables import Bool, Int64
from pptrace.model.traces import Category, Events
from pptrace.recognise.ops.mark_names import MarkShape, equal_marks, read_marks
from pptrace.slices import Slice, places_of_each

KINDS_OF_SPANS, KINDS_OF_COLLECTIVES, AXES = tuple(SpanKind), tuple(Collective), tuple(Axis)
"""Values that the codes in columns stand for."""

_TRANSFER = ("at", "step", "axis", "kind", "stage", "microbatch", "tensor", "peer", "bytes")
_COLUMNS = {
    OpMark: ("at", "step", "kind", "stage", "chunk", "microbatch", "phase", "pair"),
    SpanMark: ("at", "step", "kind"),
    P2PMark: _TRANSFER,
    WaitMark: _TRANSFER,
    CollectiveMark: ("at", "step", "axis", "kind", "size", "bytes", "handle", "received_bytes", "splits"),
    ExchangeMark: ("at", "step", "axis", "is_send", "peer", "bytes", "handle"),
    CallMark: ("at", "kind", "group", "sequence", "bytes", "peer", "handle"),
    AwaitMark: ("at", "handle"),
}
_OF_TEXTS = ("pair", "group", "splits")
_REPEATABLE = OpMark | P2PMark | WaitMark


class MarkedRanges(Struct, frozen=True):
    """Marked host ranges in time order, and unreadable names by reason.

    Each table has the ranges of one type of mark in time order; its ``at`` are their rows in the times. ``transfers`` and
    ``links`` have a row per message. Kinds, phases and axes are codes: of actions their own, of the others indices into
    :data:`KINDS_OF_SPANS`, :data:`KINDS_OF_COLLECTIVES` and :data:`AXES`. −1 is what a mark does not name.
    ``equal`` is the same number for equal ops, transfers and waits, −1 for other marks.
    """

    start_ns: Int64
    end_ns: Int64
    thread: Int64
    equal: Int64
    unreadable: Mapping[str, Sequence[str]]
    ops: Slice
    spans: Slice
    transfers: Slice
    waits: Slice
    collectives: Slice
    links: Slice
    calls: Slice
    awaits: Slice

    def __bool__(self) -> bool:
        return bool(len(self.start_ns) or self.unreadable)

    def __len__(self) -> int:
        return len(self.start_ns)

    def only(self, chosen: Bool) -> MarkedRanges:
        """Select some of the ops, transfers and waits, by the rows of their ranges; keep all of the other marks."""
        tables = {name: getattr(self, name) for name in ("ops", "transfers", "waits")}
        return replace(self, **{name: table.where(chosen[table["at"]]) for name, table in tables.items()})


def split_marks(events: Events) -> tuple[MarkedRanges, Events]:
    """(all marks of a trace, its events with one name for all marks but those of spans).

    Marks have a name each. Where the names of a trace are searched, there are few without them; spans are labels as well.
    """
    shapes, unread = read_marks(events.names)
    num_names = len(events.names)
    is_mark, is_searched = np.zeros(num_names, dtype=np.bool_), np.ones(num_names, dtype=np.bool_)
    is_mark[list(unread)] = True
    is_searched[list(unread)] = False
    for shape in shapes:
        is_mark[shape.names] = True
        is_searched[shape.names] = isinstance(shape.mark, SpanMark)
    rows = np.flatnonzero((events.category == Category.ANNOTATION) & is_mark[events.name_id])
    ids = events.name_id[rows]
    unreadable: dict[str, list[str]] = {}
    if unread:
        cannot_be_read = np.isin(ids, list(unread))
        for index in ids[cannot_be_read].tolist():
            mark = unread[index]
            unreadable.setdefault(mark.reason, []).append(mark.text)
        rows, ids = rows[~cannot_be_read], ids[~cannot_be_read]
    equal = equal_marks(shapes, num_names, _REPEATABLE)[ids]
    times = (events.start_ns[rows], events.ends_of(rows), events.thread[rows])
    marks = MarkedRanges(*times, equal, unreadable, *_tables(shapes, ids, num_names))
    if not is_searched.all():
        index_of = np.cumsum(is_searched, dtype=np.int32) - 1
        index_of[~is_searched] = index_of[-1] + 1
        searched = (*compress(events.names, is_searched), PREFIX)
        events = replace(events, names=searched, name_id=index_of[events.name_id])
    return marks, events


def without_evaluations(marks: MarkedRanges) -> MarkedRanges:
    """Leave out ops, messages and collectives of passes without backwards, which are no part of the schedule of a step."""
    spans = marks.spans["at"][marks.spans["kind"] == KINDS_OF_SPANS.index(SpanKind.EVAL)]
    if not len(spans):
        return marks
    is_training = find_interval(marks.start_ns[spans], marks.end_ns[spans], marks.start_ns) < 0
    collectives, links = (table.where(is_training[table["at"]]) for table in (marks.collectives, marks.links))
    equal = np.where(is_training, marks.equal, -1)
    return replace(marks.only(is_training), equal=equal, collectives=collectives, links=links)


def _tables(shapes: Sequence[MarkShape], ids: npt.NDArray[np.int32], num_names: int) -> list[Slice]:
    """The table of each type of mark, with the rows of all shapes in time order."""
    shape_of, row_of = np.full(num_names, -1), np.zeros(num_names, dtype=np.int64)
    for number, shape in enumerate(shapes):
        shape_of[shape.names], row_of[shape.names] = number, np.arange(len(shape.names))
    parts: dict[type[Mark], list[dict[str, Any]]] = {kind: [] for kind in _COLUMNS}
    for number, at in places_of_each(shape_of[ids]).items():
        parts[type(shapes[number].mark)].append(_rows(shapes[number], at, row_of[ids[at]]))
    tables = []
    for kind, columns in _COLUMNS.items():
        empty = {name: np.zeros(0, dtype=object if name in _OF_TEXTS else np.int64) for name in columns}
        of_kind = parts[kind] or [empty]
        table = Slice({name: np.concatenate([part[name] for part in of_kind]) for name in columns})
        tables.append(table.in_order_of("at") if len(of_kind) > 1 else table)
    return tables


def _rows(shape: MarkShape, at: Int64, row: Int64) -> dict[str, Any]:
    """The columns of the ranges ``at``, whose names are the shape's ``row``-th."""
    mark = shape.mark
    columns: dict[str, npt.NDArray[Any]]

    def numbers(tag: int | None) -> Int64:
        return shape.column(tag)[row]

    def same(code: int) -> Int64:
        return np.full(len(at), code)

    match mark:
        case OpMark(action, step, has_phase):
            pair = shape.texts(str(action), with_zeros=False)[row] if action.parts else np.full(len(at), "", object)
            columns = {"kind": same(action.kind.code), "stage": numbers(action.stage), "chunk": numbers(action.chunk)}
            phase = same(action.phase.code if has_phase else -1)
            columns |= {"step": numbers(step), "microbatch": numbers(action.microbatch), "phase": phase, "pair": pair}
        case SpanMark(kind, step):
            columns = {"step": numbers(step), "kind": same(KINDS_OF_SPANS.index(kind))}
        case P2PMark(transfers, axis, step):
            return _messages(
                at,
                [_transfer(transfer, numbers, same) for transfer in transfers],
                {"step": numbers(step), "axis": same(AXES.index(axis))},
            )
        case WaitMark(transfer, step):
            columns = _transfer(transfer, numbers, same) | {"step": numbers(step), "axis": same(-1)}
        case CollectiveMark(kind, axis, size, num_bytes, step, handle, uneven):
            columns = {"step": numbers(step), "axis": same(AXES.index(axis)), "handle": numbers(handle)}
            columns |= {
                "received_bytes": numbers(uneven.received_bytes if uneven else None),
                "splits": np.full(len(at), "", object) if uneven is None else shape.texts(uneven.splits, False)[row],
                "kind": same(KINDS_OF_COLLECTIVES.index(kind)),
                "size": numbers(size),
                "bytes": numbers(num_bytes),
            }
        case ExchangeMark(links, axis, step, handle):
            return _messages(
                at,
                [
                    {"is_send": same(link.sends), "peer": numbers(link.peer), "bytes": numbers(link.bytes)}
                    for link in links
                ],
                {"step": numbers(step), "axis": same(AXES.index(axis)), "handle": numbers(handle)},
            )
        case CallMark(kind, group, sequence, num_bytes, _, peer, handle):
            columns = {"kind": np.full(len(at), kind, object), "group": shape.texts(group, with_zeros=True)[row]}
            columns |= {"sequence": numbers(sequence), "bytes": numbers(num_bytes)}
            columns |= {"peer": numbers(peer), "handle": numbers(handle)}
        case AwaitMark(_, _, handle):
            columns = {"handle": numbers(handle)}
    return columns | {"at": at}


def _transfer(
    transfer: Transfer, numbers: Callable[[int | None], Int64], same: Callable[[int], Int64]
) -> dict[str, Int64]:
    action = transfer.action
    columns = {"kind": same(action.kind.code), "stage": numbers(action.stage), "microbatch": numbers(action.microbatch)}
    return columns | {
        name: numbers(value)
        for name, value in (("tensor", transfer.tensor), ("peer", transfer.peer), ("bytes", transfer.bytes))
    }


def _messages(at: Int64, messages: Sequence[Mapping[str, Int64]], shared: Mapping[str, Int64]) -> dict[str, Int64]:
    """The columns of several messages of each range, one behind the other."""
    columns = {name: np.stack([message[name] for message in messages], axis=1).reshape(-1) for name in messages[0]}
    return columns | {name: np.repeat(column, len(messages)) for name, column in {**shared, "at": at}.items()}
