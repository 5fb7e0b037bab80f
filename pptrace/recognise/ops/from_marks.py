"""Ops and communication from pptrace's own marks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pptrace.marks import (
    AwaitMark,
    CallMark,
    CollectiveMark,
    ExchangeMark,
    Mark,
    OpMark,
    P2PMark,
    SpanMark,
    WaitMark,
)
from pptrace.model.device import DeviceWork
from pptrace.model.tables import COMMS, OPS
from pptrace.recognise.ops.mark_ranges import MarkedRange, MarkedRanges
from pptrace.recognise.ops.tables import LaunchIndex, RankTables, table_of
from pptrace.schedule.actions import Action

_NAMED_LIKE = "ranges named like"


def warnings_of_marks(warnings: Iterable[str]) -> tuple[str, ...]:
    """Those of a rank's warnings that are about marks which could not be read, however its ops were recognised."""
    return tuple(line for line in warnings if f" {_NAMED_LIKE} " in line)


def tables_from_marks(marks: MarkedRanges, work: DeviceWork) -> RankTables:
    """Ops and comms fully described by marks; ``call`` marks are left to :mod:`pptrace.recognise.calls.marked_calls`.

    The framework is "" where the marks name no op: then they say how the script goes on, and labels or order tell the ops.
    """
    warnings = tuple(
        f"{len(names)} {_NAMED_LIKE} {names[0][:60]!r} are left out: {reason}"
        for reason, names in marks.unreadable.items()
    )
    ranges, rolled_back = _without_rolled_back(marks.ranges)
    if rolled_back:
        warnings += (_rolled_back_warning(rolled_back),)
    launches = LaunchIndex(work)
    ops: list[dict[str, Any]] = []
    comms: list[dict[str, Any]] = []
    waits: _Waits = {}
    awaits: dict[int, MarkedRange] = {}
    for entry in ranges:
        if isinstance(entry.mark, WaitMark):
            waits[(entry.mark.transfer.action, entry.mark.transfer.peer, entry.mark.step)] = entry
        elif isinstance(entry.mark, AwaitMark):
            awaits[entry.mark.handle] = entry
    for entry in ranges:
        match entry.mark:
            case OpMark() | SpanMark():
                ops.append(_op_row(entry, launches))
            case P2PMark():
                comms += _p2p_rows(entry, waits, launches)
            case CollectiveMark() | ExchangeMark():
                comms += _axis_rows(entry, awaits, launches)
            case WaitMark() | AwaitMark() | CallMark():
                pass
    has_ops = any(isinstance(entry.mark, OpMark) for entry in ranges)
    return RankTables("pptrace" if has_ops else "", table_of(OPS, ops), table_of(COMMS, comms), warnings)


def _without_rolled_back(ranges: Sequence[MarkedRange]) -> tuple[list[MarkedRange], list[MarkedRange]]:
    """The ranges without those rolled back, and the rolled-back ops.

    A rank whose optimizer step turns out to be wrong begins the next one anew (zero bubble's post-validation): the same
    ops and transfers occur twice in a step, and the last ones count.
    """
    repeatable = OpMark | P2PMark | WaitMark
    last: dict[Mark, int] = {e.mark: index for index, e in enumerate(ranges) if isinstance(e.mark, repeatable)}
    kept, rolled_back = [], []
    for index, entry in enumerate(ranges):
        if last.get(entry.mark, index) == index:
            kept.append(entry)
        elif isinstance(entry.mark, OpMark):
            rolled_back.append(entry)
    return kept, rolled_back


def _rolled_back_warning(ops: list[MarkedRange]) -> str:
    steps = sorted({entry.mark.step for entry in ops})
    total_ms = sum(entry.end_ns - entry.start_ns for entry in ops) / 1e6
    return (
        f"{len(ops)} ops of step {', '.join(map(str, steps))} ({total_ms:.2f} ms) ran again in the same step, "
        "as after an optimizer step that was rolled back; only the last runs count"
    )


def _op_row(entry: MarkedRange, launches: LaunchIndex) -> dict[str, Any]:
    mark = entry.mark
    span = launches.span(entry.start_ns, entry.end_ns, communication=False)
    start, end, _ = span or (entry.start_ns, entry.end_ns, -1)
    row: dict[str, Any] = {
        "rank": -1,
        "step": mark.step,
        "pair": "",
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
        phase = action.phase.value if mark.has_phase else ""
        row |= {"kind": action.kind.value, "stage": action.stage, "chunk": action.chunk, "phase": phase}
        row["microbatch"] = action.microbatch if action.microbatch is not None else -1
        row["pair"] = str(action) if action.parts else ""
    elif isinstance(mark, SpanMark):
        row["kind"] = mark.kind.value
        if mark.kind.value == "STEP":
            row |= {"start_ns": entry.start_ns, "end_ns": entry.end_ns, "clock": "host"}
    return row


_Waits = dict[tuple[Action, int, int], MarkedRange]
"""(action, peer, step) → the wait for that transfer."""


@dataclass(frozen=True, slots=True)
class _Times:
    """Times of one side of a transfer: ready, posted, waiting, done (schema COMMS)."""

    start_ns: int
    posted_ns: int
    wait_start_ns: int
    end_ns: int
    stream: int = -1


def _times(call: MarkedRange, wait: MarkedRange | None, launches: LaunchIndex) -> _Times:
    """Of the device work where the call launched any, else of the host, which a call that holds its wait keeps throughout."""
    if span := launches.span(call.start_ns, call.end_ns, communication=True):
        start, end, stream = span
        return _Times(start, start, start, end, stream)
    if wait is None or wait.end_ns <= call.end_ns:
        return _Times(call.start_ns, call.start_ns, call.start_ns, wait.end_ns if wait else call.end_ns)
    return _Times(call.start_ns, call.end_ns, wait.start_ns, wait.end_ns)


def _p2p_rows(entry: MarkedRange, waits: _Waits, launches: LaunchIndex) -> list[dict[str, Any]]:
    """A row per transfer. Its wait knows the bytes of a receive whose size was negotiated; the call gives 0."""
    mark = entry.mark
    assert isinstance(mark, P2PMark)
    rows = []
    for transfer in mark.transfers:
        action = transfer.action
        wait = waits.get((action, transfer.peer, mark.step))
        rows.append(
            _comm_row(mark.step, mark.axis.value, _times(entry, wait, launches))
            | {
                "kind": "send" if action.kind.is_send else "recv",
                "peer": transfer.peer,
                "group_size": 2,
                "bytes": transfer.bytes or _awaited_bytes(wait),
                "direction": action.kind.value[-1],
                "stage": action.stage,
                "microbatch": action.microbatch if action.microbatch is not None else -1,
            }
        )
    return rows


def _awaited_bytes(wait: MarkedRange | None) -> int:
    return wait.mark.transfer.bytes if wait and isinstance(wait.mark, WaitMark) else 0


def _axis_rows(entry: MarkedRange, awaits: Mapping[int, MarkedRange], launches: LaunchIndex) -> list[dict[str, Any]]:
    """A row for a collective, or one per message of an exchange; a call with a handle lasts until it was awaited."""
    mark = entry.mark
    assert isinstance(mark, CollectiveMark | ExchangeMark)
    awaited = None if mark.handle is None else awaits.get(mark.handle)
    shared = _comm_row(mark.step, mark.axis.value, _times(entry, awaited, launches))
    shared |= {"direction": "", "stage": -1, "microbatch": -1}
    if isinstance(mark, CollectiveMark):
        return [shared | {"kind": mark.kind.value, "peer": -1, "group_size": mark.size, "bytes": mark.bytes}]
    return [
        shared | {"kind": "send" if link.sends else "recv", "peer": link.peer, "group_size": 2, "bytes": link.bytes}
        for link in mark.links
    ]


def _comm_row(step: int, axis: str, times: _Times) -> dict[str, Any]:
    return {
        "rank": -1,
        "step": step,
        "axis": axis,
        "start_ns": times.start_ns,
        "posted_ns": times.posted_ns,
        "asked_ns": times.wait_start_ns,
        "end_ns": times.end_ns,
        "transfer_start_ns": times.start_ns,
        "transfer_end_ns": times.end_ns,
        "stream": times.stream,
        "match": -1,
        "clock": "device" if times.stream >= 0 else "host",
    }
