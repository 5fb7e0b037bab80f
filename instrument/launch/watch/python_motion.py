"""Tells from inside a rank whether its script goes from function to function, while it makes no call of communication.

From outside, a stack now and then looks the same for minutes where most of the time goes into one line, as in the evaluation of a
model. This looks ten times a second, at what costs no more than a few microseconds.
"""

from __future__ import annotations

import atexit
import sys
import threading
from types import FrameType

from instrument.launch.watch.call_log import CallLog
from pptrace.garbage import paused_gc

_EVERY_S = 0.1
_QUIET_S = 0.5
"""A rank that makes calls moves, which its log says already."""


class PythonMotion:
    """Watches the main thread, and writes into ``log`` when it was in other functions than before."""

    def __init__(self, log: CallLog) -> None:
        self._log = log
        self._main = threading.main_thread().ident
        self._functions: tuple[int, ...] = ()
        self._stopped = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._watch, name="pptrace-motion", daemon=True).start()
        atexit.register(self._stopped.set)

    def look(self) -> None:
        """Compare the functions that the main thread is in with those of the last time."""
        functions: list[int] = []
        # Up to Python 3.11 a collection within f_back lets the other thread leave the frame that is being read.
        with paused_gc():
            frame: FrameType | None = sys._current_frames().get(self._main or 0)
            while frame is not None:
                functions.append(id(frame.f_code))
                frame = frame.f_back
        if tuple(functions) != self._functions:
            self._functions = tuple(functions)
            self._log.note_motion()

    def _watch(self) -> None:
        while not self._stopped.wait(_EVERY_S):
            if self._log.quiet_s() > _QUIET_S:
                self.look()
