"""Time for which this process was ready to run and the machine gave it no core: what other work on the machine cost it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

_TASKS = Path("/proc/self/task")


@dataclass(frozen=True, slots=True)
class CoreWait:
    """One moment: what all threads have waited for a core until then, ns (None where the system does not say), and the time."""

    wait_ns: int | None
    monotonic_ns: int

    @staticmethod
    def now() -> CoreWait:
        return CoreWait(_read_wait_ns(), time.monotonic_ns())

    def until(self, later: CoreWait) -> dict[str, int] | None:
        """The wait from this moment to a later one as JSON; None where it is not known."""
        if self.wait_ns is None or later.wait_ns is None or later.monotonic_ns <= self.monotonic_ns:
            return None
        waited = max(later.wait_ns - self.wait_ns, 0)  # a thread that ended takes its own with it
        return {"wait_ns": waited, "elapsed_ns": later.monotonic_ns - self.monotonic_ns}


def _read_wait_ns() -> int | None:
    """The second field of every thread's schedstat (Linux, Documentation/scheduler/sched-stats.rst)."""
    waits = [_wait_of_thread(task) for task in _TASKS.iterdir()] if _TASKS.is_dir() else []
    known = [wait for wait in waits if wait is not None]
    return sum(known) if known else None


def _wait_of_thread(task: Path) -> int | None:
    """None where the thread has just ended, or the system keeps no account."""
    try:
        return int((task / "schedstat").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
