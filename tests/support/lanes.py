"""The bubble of a rank between any two moments."""

from __future__ import annotations

import numpy as np

from pptrace.analysis.steps.rank_steps import TimesInWindows
from pptrace.timeline.lanes import Lane


def bubble_ns(lane: Lane, start_ns: int, end_ns: int) -> int | None:
    """Part of [start, end) that is neither compute nor exposed communication, ns; None if unknown."""
    times = TimesInWindows(lane, np.array([start_ns]), np.array([end_ns]))
    return int(times.bubble_ns[0]) if times.is_known[0] else None
