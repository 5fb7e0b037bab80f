"""Lateness of a busy machine, by which limits of time for what a test starts are extended."""

from __future__ import annotations

import threading
import time
from types import TracebackType

_EACH_S = 0.02


class Lateness:
    """Sleeps again and again in a thread, and adds up by how much each sleep took too long: near 0 on an idle machine."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Lateness:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        begun = time.monotonic()
        while not self._ended.wait(_EACH_S):
            now = time.monotonic()
            self.total_s += now - begun - _EACH_S
            begun = now
