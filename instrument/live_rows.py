"""The ranges of the running step with their host times, for ``pptrace run --live``: no profiler, one short tuple per range.

The key of a range is its mark with step 0, one object for all steps, so that two steps are compared by identity; of an op that
the script marks itself it is the name of the range. Nothing here keeps a tensor alive, formats a name, or waits for a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from time import perf_counter_ns
from types import TracebackType
from typing import Any, Protocol

from pptrace.marks import (
    AwaitMark,
    Axis,
    CallMark,
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
from pptrace.schedule.actions import Action

Key = Mark | str
Row = tuple[Key, int, int]
"""Key, begin and end of a range, ns."""


class Carried(Protocol):
    """A message that is posted or awaited."""

    @property
    def action(self) -> Action: ...

    @property
    def index(self) -> int | None: ...

    def transfer(self) -> Transfer: ...


class LiveRange:
    """A range whose times become a row when it ends, inside ``inner`` where a profiler has one too."""

    __slots__ = ("_begin_ns", "_inner", "_key", "_rows")

    def __init__(self, rows: LiveRows, key: Key, inner: AbstractContextManager[object, None] | None) -> None:
        self._rows = rows
        self._key = key
        self._inner = inner
        self._begin_ns = 0

    def __enter__(self) -> None:
        if self._inner is not None:
            self._inner.__enter__()
        self._begin_ns = perf_counter_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._rows.rows.append((self._key, self._begin_ns, perf_counter_ns()))
        if self._inner is not None:
            self._inner.__exit__(kind, error, trace)


class LiveRows:
    """Rows of the step that runs. ``on`` is False between observed steps: then no range is made."""

    __slots__ = ("_counts", "_handles", "_known", "on", "rows")

    def __init__(self) -> None:
        self.on = False
        self.rows: list[Row] = []
        self._known: dict[Any, Mark] = {}
        self._handles: dict[int, int] = {}
        self._counts: dict[Any, int] = {}

    def begin(self) -> None:
        """An observed step begins."""
        self.rows = []
        self._handles.clear()
        self._counts.clear()
        self.on = True

    def op(self, action: Action) -> Mark:
        """Key of an op of a plan, whose actions live as long as it does."""
        return self._known.get(id(action)) or self._learn(id(action), OpMark(action, 0))

    def p2p(self, carried: Sequence[Carried], axis: Axis) -> Mark:
        """Key of a call that posts messages of a plan together; the same first message is always with the same others."""
        place = (id(carried[0].action), len(carried))
        return self._known.get(place) or self._learn(
            place, P2PMark(tuple(item.transfer() for item in carried), axis, 0)
        )

    def wait(self, carried: Carried) -> Mark:
        place = (id(carried.action), -(carried.index or 0))
        return self._known.get(place) or self._learn(place, WaitMark(carried.transfer(), 0))

    def of_mark(self, mark: Mark) -> Mark | None:
        """Key of any mark; None where it has none: a collection of garbage, a recompute, or the wait of another step."""
        match mark:
            case OpMark(action, _, has_phase):
                place: Any = (action, has_phase)
                return self._known.get(place) or self._learn(place, OpMark(action, 0, has_phase))
            case P2PMark(transfers, axis, _):
                return self._known.get(transfers) or self._learn(transfers, P2PMark(transfers, axis, 0))
            case WaitMark(transfer, _):
                return self._known.get(transfer) or self._learn(transfer, WaitMark(transfer, 0))
            case SpanMark(kind, _):
                if kind in (SpanKind.GC, SpanKind.RECOMPUTE):
                    return None
                return self._known.get(kind) or self._learn(kind, SpanMark(kind, 0))
            case CollectiveMark(kind, axis, size, num_bytes, _, handle, uneven):
                number = self._number(handle)
                place = (kind, axis, size, number)
                return self._known.get(place) or self._learn(
                    place, CollectiveMark(kind, axis, size, num_bytes, 0, number, uneven)
                )
            case ExchangeMark(links, axis, _, handle):
                number = self._number(handle)
                place = (links, axis, number)
                return self._known.get(place) or self._learn(place, ExchangeMark(links, axis, 0, number))
            case CallMark():
                return self._call(mark)
            case AwaitMark(axis, _, handle):
                posted = self._handles.get(handle)
                if posted is None:
                    return None
                place = (axis, posted)
                return self._known.get(place) or self._learn(place, AwaitMark(axis, 0, posted))

    def _call(self, call: CallMark) -> Mark:
        """Key of a watched call, which counts the calls of its group within the step."""
        stream = (call.group, *((call.kind, call.peer) if call.peer is not None else ()))
        count = self._counts.get(stream, 0)
        self._counts[stream] = count + 1
        number = self._number(call.handle)
        place = (call.kind, call.group, call.peer, count, number)
        return self._known.get(place) or self._learn(
            place, CallMark(call.kind, call.group, count, call.bytes, 0, call.peer, number)
        )

    def _number(self, handle: int | None) -> int | None:
        """The number within the step of what has a handle."""
        if handle is None:
            return None
        return self._handles.setdefault(handle, len(self._handles))

    def _learn(self, place: Any, key: Mark) -> Mark:
        self._known[place] = key
        return key
