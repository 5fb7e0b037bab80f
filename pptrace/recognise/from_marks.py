"""Traces with pptrace's own marks: every op and transfer says what it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from pptrace.marks import (
    AwaitMark,
    CollectiveMark,
    ExchangeMark,
    Mark,
    OpMark,
    P2PMark,
    SpanMark,
    UnknownMark,
    WaitMark,
    parse_mark,
)
from pptrace.recognise.devices import DeviceWork
from pptrace.schedule.actions import Action
from pptrace.tables import COMMS, OPS, Category, Trace, make_table


@dataclass(frozen=True, slots=True)
class RankTables:
    """What one rank did (schemas OPS and COMMS), unmatched and in its own clock."""

    ops: pd.DataFrame
    comms: pd.DataFrame
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Marked:
    """A marked range on the host."""

    mark: Mark
    start_ns: int
    end_ns: int


def tables_from_marks(trace: Trace, rank: int, work: DeviceWork) -> RankTables | None:
    """The ops and comms of a trace with marks; None when it has none."""
    ranges, unknown = _marked_ranges(trace)
    warnings = tuple(
        f"rank {rank}: {len(names)} ranges named like {names[0][:60]!r} are not read: {reason}"
        for reason, names in unknown.items()
    )
    if not ranges and not warnings:
        return None
    owner = _Owner(work)
    ops: list[dict[str, Any]] = []
    comms: list[dict[str, Any]] = []
    waits: _Waits = {}
    seen_done: dict[int, int] = {}
    for entry in ranges:
        if isinstance(entry.mark, WaitMark):
            waits[(entry.mark.transfer.action, entry.mark.transfer.peer, entry.mark.step)] = (entry.mark, entry.end_ns)
        elif isinstance(entry.mark, AwaitMark):
            seen_done[entry.mark.handle] = entry.end_ns
    for entry in ranges:
        match entry.mark:
            case OpMark() | SpanMark():
                ops.append(_op_row(rank, entry, owner))
            case P2PMark():
                comms += _p2p_rows(rank, entry, waits, owner)
            case CollectiveMark() | ExchangeMark():
                comms += _axis_rows(rank, entry, seen_done, owner)
            case WaitMark() | AwaitMark():
                pass
    return RankTables(_frame(OPS, ops), _frame(COMMS, comms), warnings)


def _frame(schema: Any, rows: list[dict[str, Any]]) -> pd.DataFrame:
    return make_table(schema, {name: [row[name] for row in rows] for name in schema})


def _marked_ranges(trace: Trace) -> tuple[list[_Marked], dict[str, list[str]]]:
    """Marked host ranges in time order, and by reason the names of those that could not be read."""
    events = trace.events
    parsed = [parse_mark(name) for name in events.names]
    unknown: dict[str, list[str]] = {}
    is_mark = np.array([mark is not None for mark in parsed], dtype=bool)
    if not is_mark.any():
        return [], unknown
    rows = np.flatnonzero((events.category == Category.ANNOTATION) & is_mark[events.name_id])
    found: list[_Marked] = []
    ends = events.end_ns
    for row in rows.tolist():
        mark = parsed[events.name_id[row]]
        if isinstance(mark, UnknownMark):
            unknown.setdefault(mark.reason, []).append(mark.text)
        elif mark is not None:
            found.append(_Marked(mark, int(events.start_ns[row]), int(ends[row])))
    return found, unknown


@dataclass(frozen=True, slots=True)
class _Wait:
    """When a transfer was seen complete, and its size, which a call that negotiates shapes does not know when it begins."""

    end_ns: int
    bytes: int


class _Owner:
    """Finds the device work that was launched inside a host range, by any thread of the process."""

    def __init__(self, work: DeviceWork) -> None:
        launched = np.flatnonzero(work.launch_ns >= 0)
        self._rows = launched[np.argsort(work.launch_ns[launched], kind="stable")]
        self._launch = work.launch_ns[self._rows]
        self._work = work

    def span(self, start_ns: int, end_ns: int, communication: bool) -> tuple[int, int, int] | None:
        """(start, end, stream) from the first to the last kernel launched in [start_ns, end_ns); None without any."""
        low, high = np.searchsorted(self._launch, (start_ns, end_ns))
        rows = self._rows[low:high]
        rows = rows[self._work.is_communication[rows] if communication else self._work.is_compute[rows]]
        if not len(rows):
            return None
        return (
            int(self._work.start_ns[rows].min()),
            int(self._work.end_ns[rows].max()),
            int(self._work.stream[rows[0]]),
        )


def _op_row(rank: int, entry: _Marked, owner: _Owner) -> dict[str, Any]:
    mark = entry.mark
    span = owner.span(entry.start_ns, entry.end_ns, communication=False)
    start, end, _ = span or (entry.start_ns, entry.end_ns, -1)
    row: dict[str, Any] = {
        "rank": rank,
        "step": mark.step,
        "stage": -1,
        "chunk": -1,
        "microbatch": -1,
        "phase": "",
        "start_ns": start,
        "end_ns": end,
        "clock": "device" if span else "host",
        "source": "label",
    }
    if isinstance(mark, OpMark):
        action = mark.action
        row |= {"kind": action.kind.value, "stage": action.stage, "chunk": action.chunk, "phase": action.phase.value}
        row["microbatch"] = action.microbatch if action.microbatch is not None else -1
    elif isinstance(mark, SpanMark):
        row["kind"] = mark.kind.value
        if mark.kind.value == "STEP":
            row |= {"start_ns": entry.start_ns, "end_ns": entry.end_ns, "clock": "host"}
    return row


_Waits = dict[tuple[Action, int, int], tuple[WaitMark, int]]
"""(action, peer, step) → the wait for that transfer, and when it ended."""


def _p2p_rows(rank: int, entry: _Marked, waits: _Waits, owner: _Owner) -> list[dict[str, Any]]:
    """A row per transfer. Its wait knows the bytes of a receive whose size was negotiated; the call gives 0."""
    mark = entry.mark
    assert isinstance(mark, P2PMark)
    span = owner.span(entry.start_ns, entry.end_ns, communication=True)
    rows = []
    for transfer in mark.transfers:
        wait, seen_done = waits.get((transfer.action, transfer.peer, mark.step), (None, entry.end_ns))
        start, end, stream = span or (entry.start_ns, seen_done, -1)
        action = transfer.action
        rows.append(
            _comm_row(rank, mark.step, mark.axis.value, start, end, stream)
            | {
                "kind": "send" if action.kind.is_send else "recv",
                "peer": transfer.peer,
                "group_size": 2,
                "bytes": transfer.bytes or (wait.transfer.bytes if wait else 0),
                "direction": action.kind.value[-1],
                "stage": action.stage,
                "microbatch": action.microbatch if action.microbatch is not None else -1,
            }
        )
    return rows


def _axis_rows(rank: int, entry: _Marked, seen_done: dict[int, int], owner: _Owner) -> list[dict[str, Any]]:
    """A row for a collective, or one per message of an exchange; a call with a handle lasts until it was awaited."""
    mark = entry.mark
    assert isinstance(mark, CollectiveMark | ExchangeMark)
    done = entry.end_ns if mark.handle is None else seen_done.get(mark.handle, entry.end_ns)
    span = owner.span(entry.start_ns, entry.end_ns, communication=True)
    start, end, stream = span or (entry.start_ns, done, -1)
    shared = _comm_row(rank, mark.step, mark.axis.value, start, end, stream)
    shared |= {"direction": "", "stage": -1, "microbatch": -1}
    if isinstance(mark, CollectiveMark):
        return [shared | {"kind": mark.kind.value, "peer": -1, "group_size": mark.size, "bytes": mark.bytes}]
    return [
        shared | {"kind": "send" if link.sends else "recv", "peer": link.peer, "group_size": 2, "bytes": link.bytes}
        for link in mark.links
    ]


def _comm_row(rank: int, step: int, axis: str, start: int, end: int, stream: int) -> dict[str, Any]:
    return {
        "rank": rank,
        "step": step,
        "axis": axis,
        "start_ns": start,
        "end_ns": end,
        "transfer_start_ns": start,
        "transfer_end_ns": end,
        "stream": stream,
        "match": -1,
        "clock": "device" if stream >= 0 else "host",
    }
