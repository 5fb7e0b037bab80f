"""Puts all ranks on one clock, and says how well that is known: :func:`estimate_clock`."""

from pptrace.clock.estimate import estimate_clock
from pptrace.clock.result import Clock, ClockMethod, shift

__all__ = ["Clock", "ClockMethod", "estimate_clock", "shift"]
