"""Ranges for profilers: NVTX (Nsight Systems) and record_function (PyTorch's profiler).

Without a profiler a range costs next to nothing: no mark is built, no name formatted, and one shared null range is
returned. So the methods take the fields of a mark, and build it only for a profiler. Nothing here waits for a
device.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any

import torch

from instrument.expert_counts import ExpertCounts
from instrument.live_rows import Carried, LiveRange, LiveRows
from instrument.nvtx_ranges import Domain, open_domain
from pptrace.marks import (
    DOMAIN,
    PART,
    AwaitMark,
    Axis,
    CallMark,
    Collective,
    CollectiveMark,
    ExchangeMark,
    Link,
    Mark,
    OpMark,
    P2PMark,
    SpanKind,
    SpanMark,
    Uneven,
    WaitMark,
    format_mark,
)
from pptrace.schedule.actions import Action


def _profiler_enabled() -> bool:
    """Return whether torch's profiler runs in this process, whichever threads it watches."""
    return torch.autograd.profiler._is_profiler_enabled


# The same user annotation as the record_function class, for a third of its cost.
_enter_record: Any = torch.autograd._record_function_with_args_enter  # type: ignore[attr-defined]
_exit_record: Any = torch.autograd._record_function_with_args_exit  # type: ignore[attr-defined]


Range = AbstractContextManager[None, None]
"""Opens and closes one range."""


class _NullRange:
    """Python's own is one whose methods torch.compile cannot trace."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


_NULL = _NullRange()


def null_range() -> Range:
    """A range that is not recorded."""
    return _NULL


class _NamedRange:
    """One open range. It closes what it opened, even where the profiler starts or stops in between."""

    __slots__ = ("_domain", "_listens", "_name", "_record")

    def __init__(self, name: str, domain: Domain | None, listens: Callable[[], bool]) -> None:
        self._name = name
        self._domain = domain
        self._listens = listens
        self._record: Any = None

    def __enter__(self) -> None:
        if self._domain is not None:
            self._domain.push_range(self._domain.get_event_attributes(message=self._name))
        if self._listens():
            self._record = _enter_record(self._name)

    def __exit__(self, *_: object) -> None:
        if self._record is not None:
            _exit_record(self._record)
            self._record = None
        if self._domain is not None:
            self._domain.pop_range()


class _Communicating(threading.local):
    depth = 0


_communicating = _Communicating()


class _CommunicationRange(_NamedRange):
    """A range of a call: while it is open, its thread is communicating."""

    __slots__ = ()

    def __enter__(self) -> None:
        super().__enter__()
        _communicating.depth += 1

    def __exit__(self, *_: object) -> None:
        _communicating.depth -= 1
        super().__exit__()


class _LiveCommunicationRange(LiveRange):
    """The same for live records alone."""

    __slots__ = ()

    def __enter__(self) -> None:
        _communicating.depth += 1
        super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        _communicating.depth -= 1


_OF_COMMUNICATION = (P2PMark, WaitMark, CollectiveMark, ExchangeMark, AwaitMark, CallMark)


class Recorder:
    """Opens ranges; usable from any thread.

    A profiler that watches some threads only (torch's default) does not record ranges opened in others; NVTX has them.
    ``step`` is the running step, set by the runtime for layers that communicate and do not count steps.
    ``listens`` returns whether PyTorch's profiler gets ranges: by default whenever one runs in this process. ``live`` takes
    the times of ranges while it is on.
    ``expert_counts`` gets the routes of layers with experts.
    """

    __slots__ = ("_counts_always", "_domain", "_handles", "_listens", "_live", "expert_counts", "step")

    def __init__(
        self,
        listens: Callable[[], bool] = _profiler_enabled,
        live: LiveRows | None = None,
    ) -> None:
        self.step = 0
        self.expert_counts = ExpertCounts()
        self._counts_always = False
        self._live = live or LiveRows()
        self._listens = listens
        self._handles = itertools.count()
        self._domain = open_domain(DOMAIN)

    @property
    def listening(self) -> bool:
        """Return whether a range opened now, in this thread, would be recorded."""
        return self._domain is not None or self._live.on or self._listens()

    @property
    def counts_routes(self) -> bool:
        """Return whether routes are counted: while a profiler records, as live records alone keep nothing until the end."""
        return self._counts_always or self._domain is not None or self._listens()

    @contextmanager
    def counting_routes(self) -> Iterator[ExpertCounts]:
        """Count the routes inside by themselves, whether a profiler records or not; in its trace they are as well."""
        before, self.expert_counts, self._counts_always = self.expert_counts, ExpertCounts(), True
        try:
            yield self.expert_counts
        finally:
            inside, self.expert_counts, self._counts_always = self.expert_counts, before, False
            if self.counts_routes:
                before.extend(inside)

    @property
    def communicating(self) -> bool:
        """Return whether a range of a communication call or wait is open in this thread; calls inside are part of it."""
        return _communicating.depth > 0

    def part(self, name: str) -> Range:
        """A range of PyTorch's profiler that names a part of the model, inside an op."""
        return _NamedRange(f"{PART}{name}", None, self._listens) if self._listens() else _NULL

    def op(self, action: Action, step: int) -> Range:
        """The range of a schedule op."""
        if self._domain is None and not self._listens():
            live = self._live
            return LiveRange(live, live.op(action), None) if live.on else _NULL
        return self.mark(OpMark(action, step))

    def p2p(self, carried: Sequence[Carried], axis: Axis, step: int) -> Range:
        """The range of a P2P call, from the posting of its transfers until all are complete."""
        if self._domain is None and not self._listens():
            live = self._live
            return _LiveCommunicationRange(live, live.p2p(carried, axis), None) if live.on else _NULL
        return self.mark(P2PMark(tuple(item.transfer() for item in carried), axis, step))

    def wait(self, carried: Carried, step: int) -> Range:
        """The range of the wait for one transfer; it lies inside that of its P2P call."""
        if self._domain is None and not self._listens():
            live = self._live
            return _LiveCommunicationRange(live, live.wait(carried), None) if live.on else _NULL
        return self.mark(WaitMark(carried.transfer(), step))

    def new_handle(self) -> int:
        """A handle that is unique on this rank, for a call that is awaited later."""
        return next(self._handles)

    def collective(
        self, kind: Collective, axis: Axis, size: int, num_bytes: int, step: int, handle: int | None = None
    ) -> Range:
        """The range of a collective over ``size`` ranks; ``num_bytes`` is this rank's message.

        With a ``handle`` the range ends with the posting, and one of :meth:`awaiting` follows.
        """
        if not self.listening:
            return _NULL
        return self.mark(CollectiveMark(kind, axis, size, num_bytes, step, handle))

    def uneven_all_to_all(
        self,
        axis: Axis,
        sent_rows: Sequence[int],
        received_rows: Sequence[int],
        row_bytes: int,
        step: int,
        handle: int | None = None,
    ) -> Range:
        """The range of an all-to-all that sends and receives so many rows to and from each rank; ``handle`` as above."""
        if not self.listening:
            return _NULL
        sent, received = tuple(sent_rows), tuple(received_rows)
        uneven = Uneven(sum(received) * row_bytes, sent, received)
        num_bytes = sum(sent) * row_bytes
        return self.mark(CollectiveMark(Collective.ALL_TO_ALL, axis, len(sent), num_bytes, step, handle, uneven))

    def exchange(self, links: Sequence[Link], axis: Axis, step: int, handle: int | None = None) -> Range:
        """The range of point-to-point messages that carry no microbatch, posted together; ``handle`` as above."""
        if not self.listening:
            return _NULL
        return self.mark(ExchangeMark(tuple(links), axis, step, handle))

    def awaiting(self, axis: Axis, step: int, handle: int) -> Range:
        """The range of the wait for a collective or an exchange that was posted before."""
        if not self.listening:
            return _NULL
        return self.mark(AwaitMark(axis, step, handle))

    def span(self, kind: SpanKind, step: int) -> Range:
        """The range of a step, an optimizer step, a gradient synchronisation or the loading of a batch."""
        if not self.listening:
            return _NULL
        return self.mark(SpanMark(kind, step))

    def named(self, name: str) -> Range:
        """A range with a name that is no mark."""
        if self._domain is None and not self._listens():
            return _NULL
        return _NamedRange(name, self._domain, self._listens)

    def named_op(self, name: str) -> Range:
        """The range of an op that the script names itself."""
        opened = self.named(name)
        return LiveRange(self._live, name, opened) if self._live.on else opened

    def mark(self, mark: Mark) -> Range:
        """The range of a mark that exists already."""
        key = self._live.of_mark(mark) if self._live.on else None
        communicates = isinstance(mark, _OF_COMMUNICATION)
        if self._domain is None and not self._listens():
            if key is None:
                return _NULL
            return (_LiveCommunicationRange if communicates else LiveRange)(self._live, key, None)
        kind = _CommunicationRange if communicates else _NamedRange
        opened: Range = kind(format_mark(mark), self._domain, self._listens)
        return opened if key is None else LiveRange(self._live, key, opened)
