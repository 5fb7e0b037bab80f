"""Times at which the steps of a rank began and ended, recorded or not: what a step takes without a profiler.

Steps are stamped where they end and begin anyway, with the host's clock and, once the device is in use, with an event on its
current stream, so that a host that runs ahead of its device is not taken for the step. Nothing waits for an event: those that
have come are read at later boundaries. What pptrace itself does between two steps (the profiler is prepared, started, stopped,
its trace is written) lies between the end of one and the start of the next, and is part of neither.
"""

from __future__ import annotations

import time
from array import array
from bisect import bisect
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

_UNKNOWN = -1
_AROUND = 1_000
"""Steps before and after the recorded ones whose times are written down."""
_MOST_PENDING = 64
_SOON_NS = 1_000_000
"""A step that begins so soon after the one before it begins with its last event."""


class StepTimes:
    """The times of all steps until 1,000 after the recording.

    ``is_recording`` says whether a profiler, pptrace's or the script's, runs now.
    """

    def __init__(self, is_recording: Callable[[], bool]) -> None:
        self._is_recording = is_recording
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()
        self._start, self._end, self._device = array("q"), array("q"), array("q")
        self._recorded: list[int] = []
        self._disturbed: set[int] = set()
        self._began: Any = None
        self._ended: Any = None
        self._pending: deque[tuple[int, Any, Any]] = deque()

    def begin(self) -> None:
        """A step begins now; one that had begun and not ended begins anew."""
        if self._is_full:
            return
        if len(self._start) > len(self._end):
            self._start.pop()
            self._recorded = [step for step in self._recorded if step < len(self._start)]
        step = len(self._start)
        if self._is_recording():
            self._recorded.append(step)
        now = time.perf_counter_ns()
        is_soon = bool(self._end) and now - self._end[-1] < _SOON_NS
        self._began = self._ended if is_soon and self._ended is not None else _event()
        self._start.append(now)

    def end(self) -> None:
        """The step that began last ends now."""
        if len(self._start) == len(self._end):
            return
        self._end.append(time.perf_counter_ns())
        self._device.append(_UNKNOWN)
        self._ended = _event()
        if self._began is not None and self._ended is not None and len(self._pending) < _MOST_PENDING:
            self._pending.append((len(self._end) - 1, self._began, self._ended))
        self._read_events()

    def disturb(self, step: int) -> None:
        """A profiler is prepared or has just stopped: this step is not as the others."""
        self._disturbed.add(step)

    def steps_within(self, start_ns: int, end_ns: int) -> list[int]:
        """The steps whose middle is between two times of ``time.perf_counter_ns``; one that goes on ends now."""
        possible = range(max(bisect(self._start, start_ns) - 1, 0), bisect(self._start, end_ns))
        ends = (self._end[step] if step < len(self._end) else time.perf_counter_ns() for step in possible)
        return [
            step
            for step, end in zip(possible, ends, strict=True)
            if start_ns <= (self._start[step] + end) // 2 <= end_ns
        ]

    @property
    def _is_full(self) -> bool:
        return bool(self._recorded) and len(self._end) > self._recorded[-1] + _AROUND

    def _read_events(self) -> None:
        try:
            while self._pending and self._pending[0][2].query():
                step, began, ended = self._pending.popleft()
                self._device[step] = round(1e6 * began.elapsed_time(ended))
        except RuntimeError:  # the device has failed, as the script's own next call will say
            self._pending.clear()

    def facts(self, recorded: range) -> dict[str, object] | None:
        """The times as JSON; None without a whole step.

        Args:
            recorded: the steps of the trace; others that were recorded count as disturbed.
        """
        self._read_events()
        num = len(self._end)
        steps = [step for step in self._recorded if step in recorded and step < num]
        first = max(steps[0] - _AROUND, 0) if steps else max(num - _AROUND, 0)
        last = min(steps[-1] + 1 + _AROUND, num) if steps else num
        if first >= last:
            return None
        disturbed = self._disturbed | (set(self._recorded) - set(steps))
        device = self._device[first:last]
        return {
            "first_step": first,
            "start_ns": [self._epoch_ns + at for at in self._start[first:last]],
            "end_ns": [self._epoch_ns + at for at in self._end[first:last]],
            "device_ns": [None if ns == _UNKNOWN else ns for ns in device] if max(device) != _UNKNOWN else None,
            "recorded": [steps[0], steps[-1] + 1] if steps else None,
            "disturbed": sorted(step for step in disturbed if first <= step < last),
        }


def _event() -> Any:
    """An event on the device's current stream, recorded now; None while the device is not in use, or captures a graph."""
    if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        return None
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
