"""Align the clocks of all ranks, with an uncertainty: :func:`estimate_clock`."""

from pptrace.clock.estimate import estimate_clock
from pptrace.clock.result import Clock, ClockMethod, shift

__all__ = ["Clock", "ClockMethod", "estimate_clock", "shift"]
