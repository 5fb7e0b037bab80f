"""Peak memory of the steps of this process, by two small reads and without waiting for a device.

    process    peak resident memory (``VmHWM`` of ``/proc/self/status``, reset through ``clear_refs``): the interpreter, libraries
               and the profiler's buffers are part of it, other processes of the rank are not
    device     ``torch.cuda.memory_stats`` of the current device: most bytes that tensors took, and that its allocator reserved

Both peaks are reset when a recorded step begins. Behind a step that has emptied the caches the reads take up to half a
millisecond: steps that are not recorded are measured together until half a second has passed. What the script itself reads of
them stays as it would be without pptrace: peaks from before the resets are added to what its calls return
(:class:`DevicePeaks`, :func:`keep_maxrss`).
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

_KIB = 1024
_STATUS_BYTES = 4096
_PERIOD_NS = 500_000_000
"""Time after which peaks are read and reset where no step is recorded."""


@dataclass(frozen=True, slots=True)
class Level:
    """Memory at the start of a step and its peak in it, bytes."""

    start: int
    peak: int
    reserved_peak: int | None = None


@dataclass(frozen=True, slots=True)
class StepPeak:
    """A step's memory; None where it could not be measured."""

    step: int
    process: Level | None
    device: Level | None


class ProcessPeak:
    """The peak resident memory of this process since the last reset.

    ``reason`` is why it is not measured, None where it is.
    """

    def __init__(self, proc: Path = Path("/proc/self")) -> None:
        self.reason: str | None = None
        self.before_resets = 0
        """Peak before the last reset, bytes."""
        self._start = 0
        self._pid = os.getpid()
        self._status = self._clear = -1
        try:
            self._status = os.open(proc / "status", os.O_RDONLY | os.O_CLOEXEC)
            self._clear = os.open(proc / "clear_refs", os.O_WRONLY | os.O_CLOEXEC)
            self.begin()
        except (OSError, ValueError) as err:
            self.reason = f"the peak resident memory cannot be reset here ({err})"

    @property
    def is_measured(self) -> bool:
        """Return whether this process can measure it: the files are those of the one that opened them, no forked child's."""
        return self.reason is None and os.getpid() == self._pid

    def begin(self) -> None:
        """Reset the peak."""
        if not self.is_measured:
            return
        self._start, peak = self._read()
        self.before_resets = max(self.before_resets, peak)
        os.pwrite(self._clear, b"5", 0)  # proc(5): resets the peak resident set size to the current one

    def level(self) -> Level | None:
        """Since :meth:`begin`."""
        if not self.is_measured:
            return None
        _, peak = self._read()
        return Level(self._start, peak)

    def _read(self) -> tuple[int, int]:
        """(resident now, peak since the last reset), bytes."""
        text = os.pread(self._status, _STATUS_BYTES, 0)
        return _kib(text, b"VmRSS:"), _kib(text, b"VmHWM:")


def _kib(text: bytes, name: bytes) -> int:
    at = text.index(name) + len(name)
    return int(text[at : text.index(b"kB", at)]) * _KIB


def keep_maxrss(process: ProcessPeak) -> None:
    """Let ``resource.getrusage`` report the peak of the whole process in spite of the resets."""
    if process.reason is not None:
        return
    original = resource.getrusage

    def getrusage(who: int, /) -> resource.struct_rusage:
        usage = original(who)
        if who != resource.RUSAGE_SELF or not process.is_measured or usage.ru_maxrss * _KIB >= process.before_resets:
            return usage
        values = list(usage)
        values[2] = process.before_resets // _KIB  # ru_maxrss
        return resource.struct_rusage(values)

    resource.getrusage = getrusage


Statistics = dict[str, Any]
"""Statistics as torch's allocator gives them: nested, each with a current value and a peak."""

_BINDINGS = (
    ("_cuda_memoryStats", "_cuda_resetPeakMemoryStats"),
    ("_accelerator_getDeviceStats", "_accelerator_resetPeakStats"),
)
"""Functions that all of torch.cuda and of torch.accelerator that read or reset peaks call, with the index of a device."""


class DevicePeaks:
    """The peaks of the current device's allocator since :meth:`begin`.

    The script's own calls get the peaks since the script's own last reset; a reset by the script hides no peak here.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._read: Callable[[int], Statistics] | None = getattr(torch._C, _BINDINGS[0][0], None)
        self._reset: Callable[[int], None] | None = getattr(torch._C, _BINDINGS[0][1], None)
        self._before_resets: dict[int, Statistics] = {}
        """Peaks that our resets took from the script."""
        self._hidden: dict[int, tuple[int, int]] = {}
        """(allocated, reserved) peaks of this step that the script's resets took from us."""
        self._device: int | None = None
        self._start = 0
        if self._read is not None and self._reset is not None:
            for read, reset in _BINDINGS:
                self._wrap(read, reset)

    @property
    def name(self) -> str | None:
        """The device of the step that began last, as torch names it."""
        return None if self._device is None else f"cuda:{self._device}"

    @property
    def is_new(self) -> bool:
        """Return whether the process has begun to use a device since :meth:`begin`."""
        is_used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return self._device is None and self.reason is None and is_used

    def begin(self) -> None:
        """Reset the peaks of the current device, if this process uses one."""
        self._device = None
        if self._read is None or self._reset is None or self.reason is not None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return
        device = torch.cuda.current_device()
        try:
            statistics = self._read(device)
            self._reset(device)
        except RuntimeError as err:  # an allocator of the script's own that counts nothing
            self.reason = f"the allocator of the device has no statistics ({_first_line(err)})"
            return
        self._device = device
        self._start = _allocated(statistics)["current"]
        self._before_resets[device] = _with_peaks(statistics, self._before_resets.get(device, {}))
        self._hidden.pop(device, None)

    def level(self) -> Level | None:
        """Since :meth:`begin`; None where the process uses no device, or another one than then."""
        if self._read is None or self._device is None or torch.cuda.current_device() != self._device:
            return None
        return Level(self._start, *self._peaks(self._device))

    def _peaks(self, device: int) -> tuple[int, int]:
        assert self._read is not None
        statistics = self._read(device)
        hidden = self._hidden.get(device, (0, 0))
        reserved = statistics["reserved_bytes"]["all"]["peak"]
        return max(_allocated(statistics)["peak"], hidden[0]), max(reserved, hidden[1])

    def _wrap(self, read_name: str, reset_name: str) -> None:
        read, reset = getattr(torch._C, read_name, None), getattr(torch._C, reset_name, None)
        if read is None or reset is None:
            return

        def read_for_script(device: int) -> Statistics:
            return _with_peaks(read(device), self._before_resets.get(device, {}))

        def reset_for_script(device: int) -> None:
            if device == self._device:
                self._hidden[device] = self._peaks(device)
            self._before_resets.pop(device, None)
            reset(device)

        setattr(torch._C, read_name, read_for_script)
        setattr(torch._C, reset_name, reset_for_script)


def _allocated(statistics: Statistics) -> dict[str, int]:
    counts: dict[str, int] = statistics["allocated_bytes"]["all"]
    return counts


def _with_peaks(statistics: Statistics, earlier: Statistics) -> Statistics:
    """The statistics with the larger of their peaks and the earlier ones."""
    merged: Statistics = {}
    for name, value in statistics.items():
        before = earlier.get(name)
        if isinstance(value, dict) and isinstance(before, dict):
            merged[name] = _with_peaks(value, before)
        else:
            merged[name] = max(value, before) if name == "peak" and before is not None else value
    return merged


def _first_line(err: BaseException) -> str:
    lines = str(err).strip().splitlines()
    return lines[0] if lines else type(err).__name__


@dataclass(slots=True)
class StepMemory:
    """The memory of this process by step. Steps that are recorded are measured each for itself, others together."""

    process: ProcessPeak = field(default_factory=ProcessPeak)
    device: DevicePeaks = field(default_factory=DevicePeaks)
    _kept: list[StepPeak] = field(default_factory=list)
    _last: StepPeak | None = None
    _most_process: int = 0
    _most_device: int = 0
    _device_name: str | None = None
    _step: int | None = None
    _is_open: bool = False
    _is_read: bool = True
    _reset_ns: int = 0

    def begin(self, step: int, *, is_recorded: bool = True) -> None:
        """A step begins."""
        is_due = is_recorded or self._step is None or self._is_due or self.device.is_new
        if is_due:
            self._read()
        self._step, self._is_open = step, True
        if is_due:
            self._reset_ns = time.perf_counter_ns()
            self.process.begin()
            self.device.begin()

    def end(self, *, keep: bool) -> None:
        """The step that began last ends; ``keep``: it is recorded."""
        if not self._is_open:
            return
        self._is_open = self._is_read = False
        if keep or self._is_due:
            self._read()
        if keep and self._last is not None:
            self._kept.append(self._last)
            self._reset_ns = 0  # the next step is measured without this one

    @property
    def _is_due(self) -> bool:
        return time.perf_counter_ns() - self._reset_ns >= _PERIOD_NS

    def _read(self) -> None:
        """Read the peaks of the steps that have ended since they were read."""
        if self._is_read or self._step is None:
            return
        self._is_read = True
        self._last = peak = StepPeak(self._step, self.process.level(), self.device.level())
        self._most_process = max(self._most_process, peak.process.peak if peak.process else 0)
        self._most_device = max(self._most_device, peak.device.peak if peak.device else 0)
        if peak.device is not None:
            self._device_name = self.device.name

    def now(self) -> StepPeak | None:
        """The step that runs now, so far; None between steps."""
        if self._step is None or not self._is_open:
            return None
        return StepPeak(self._step, self.process.level(), self.device.level())

    def facts(self) -> dict[str, object] | None:
        """The recorded steps as a trace's metadata holds them, one list per quantity; None where there are none."""
        if not self._kept:
            return None
        facts: dict[str, object] = {"steps": [peak.step for peak in self._kept]}
        if self.process.reason is None:
            facts["process"] = _columns([peak.process for peak in self._kept])
        if any(peak.device is not None for peak in self._kept):
            devices = [peak.device for peak in self._kept]
            reserved = [None if level is None else level.reserved_peak for level in devices]
            facts["device"] = {"name": self._device_name, **_columns(devices), "reserved_peak_bytes": reserved}
        notes = [reason for reason in (self.process.reason, self.device.reason) if reason is not None]
        return facts | ({"notes": notes} if notes else {})

    def summary(self, *, running: bool) -> dict[str, object] | None:
        """The most of all steps, and the step that ended last or is ``running``, for ``run.json``; None before the first."""
        if not self._is_open:
            self._read()
        last = (self.now() if running else None) or self._last
        if last is None:
            return None
        process, device = last.process, last.device
        return {
            "step": last.step,
            "process_bytes": None if process is None else process.peak,
            "device_bytes": None if device is None else device.peak,
            "most_process_bytes": max(self._most_process, process.peak if process else 0) or None,
            "most_device_bytes": max(self._most_device, device.peak if device else 0) or None,
        }


def _columns(levels: Sequence[Level | None]) -> dict[str, object]:
    return {
        "peak_bytes": [None if level is None else level.peak for level in levels],
        "start_bytes": [None if level is None else level.start for level in levels],
    }
