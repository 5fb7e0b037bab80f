"""The last steps of a run that goes on, shared by all pages that show it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pptrace.analysis.live_cost import LiveCosts
from pptrace.live_records.file import live_files
from pptrace.workflow.live.follow import LiveRun, LiveStepFigures, status_of

WINDOW = 200
"""Steps that the page shows."""


@dataclass(frozen=True, slots=True)
class LiveWindow:
    """The last steps of a run, in order. ``status`` is that of run.json, "" where it has none; ``state`` is another text whenever
    anything changed. ``early_end``: a line, where the records of a run that is over end before its ranks did.
    """

    steps: tuple[LiveStepFigures, ...]
    status: str
    cost: LiveCosts
    early_end: str | None = None

    @property
    def is_over(self) -> bool:
        return self.status not in ("", "running")

    @property
    def state(self) -> str:
        return f"{self.steps[-1].step if self.steps else ''} {self.status}"


class LiveSteps:
    """Follows the first of some paths that has live files. Usable from any thread."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)
        self._lock = threading.Lock()
        self._run: LiveRun | None = None
        self._steps: deque[LiveStepFigures] = deque(maxlen=WINDOW)

    def get(self) -> LiveWindow | None:
        """The last steps as they are now; None where there are no live files (yet)."""
        with self._lock:
            if self._run is None or not self._run.run_dir.is_dir():
                folder = next((path for path in self._paths if path.is_dir() and live_files(path)), None)
                if folder is None:
                    return None
                self._run = LiveRun(folder, last=WINDOW)
                self._steps.clear()
            status = status_of(self._run.run_dir) or ""
            self._steps.extend(self._run.poll())
            window = LiveWindow(tuple(self._steps), status, self._run.cost)
            return replace(window, early_end=self._run.early_end) if window.is_over else window
