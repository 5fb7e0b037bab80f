"""Delays of ops in probed steps (:mod:`pptrace.schedule.probe`): after an op that is no target's, its rank sleeps.

A rank sleeps inside the op's range, before what the op computed is passed on. What it slept too long, it sleeps less after the
next op, so that the sum is right. Nothing that is computed changes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType

import torch

from instrument.recorder import Range
from pptrace.schedule.actions import Action
from pptrace.schedule.probe import Probe, probe_of

_LEAST_NS = 50_000
"""A shorter sleep would be mostly its own overhead: it is put off until more is owed."""


class Delays:
    """The delays of one rank. ``is_on`` says whether steps are probed now: those that are recorded."""

    def __init__(self, probes: Sequence[Probe], is_on: Callable[[], bool]) -> None:
        self.probes = tuple(probes)
        self._is_on = is_on
        self._slept: Counter[int] = Counter()
        self._step = -1
        self._owed_ns = 0.0
        self._on_device = False

    def facts(self) -> dict[str, object]:
        """The probes, and how long this rank was delayed in each step, for its trace."""
        return {
            "probes": list(map(str, self.probes)),
            "delays_ns": {str(step): ns for step, ns in self._slept.items()},
            "on_device": self._on_device,
        }

    def around(self, opened: Range, action: Action, step: int) -> Range:
        """The range of an op; the op is delayed at its end if a probe delays it in this step."""
        probe = probe_of(self.probes, step)
        if probe is None or not probe.delays(action) or not self._is_on():
            return opened
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # the host only launches: what it sleeps may delay the device by nothing
            self._on_device = True
            return opened
        return _DelayedRange(opened, self, probe.epsilon, step)

    def sleep(self, step: int, delay_ns: float) -> None:
        """Sleep for so long, more or less by what is owed from ops of the step before this one."""
        if step != self._step:
            self._step, self._owed_ns = step, 0.0
        self._owed_ns += delay_ns
        if self._owed_ns < _LEAST_NS:
            return
        began = time.perf_counter_ns()
        time.sleep(self._owed_ns / 1e9)
        slept = time.perf_counter_ns() - began
        self._owed_ns -= slept
        self._slept[step] += slept


class _DelayedRange:
    """A range whose op is followed by a sleep of ``epsilon`` times its duration, unless the op raised."""

    __slots__ = ("_began_ns", "_delays", "_epsilon", "_opened", "_step")

    def __init__(self, opened: Range, delays: Delays, epsilon: float, step: int) -> None:
        self._opened = opened
        self._delays = delays
        self._epsilon = epsilon
        self._step = step
        self._began_ns = 0

    def __enter__(self) -> None:
        self._opened.__enter__()
        self._began_ns = time.perf_counter_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._delays.sleep(self._step, self._epsilon * (time.perf_counter_ns() - self._began_ns))
        self._opened.__exit__(kind, error, trace)
