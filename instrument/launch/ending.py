"""Ends a rank on SIGTERM and SIGINT with its trace saved, also where its main thread is blocked.

A Python signal handler runs only between two bytecodes of the main thread, and none comes while that thread waits
inside a receive. Python's wakeup descriptor is written by the signal itself, though, so a thread that reads it learns
of the signal at once; and such a wait has released the interpreter lock.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

_ENDING = (signal.SIGTERM, signal.SIGINT)
_NOTICE_S = 0.5  # a main thread that runs Python at all runs its handler within this
_UNWIND_S = 4.0  # for the script's own `finally` blocks
_HANDLER_S = 20.0  # for a handler of the script's own: it may be writing a checkpoint
_ALONE_S = 30  # after that not even an unfinished exit is waited for

_kept: list[object] = []


def keep_until_exit(thing: object) -> None:
    """Keep a thing until Python clears its modules at the very end."""
    _kept.append(thing)


class Terminated(SystemExit):
    """SIGTERM reached the main thread."""


class Ending:
    """Watches for the end from outside. Make it in the main thread, before the script runs.

    ``save`` is called from the watching thread, and must be usable there; ``busy`` tells the launcher to be patient.
    ``with_parent``: the end of the parent process is an end from outside too.
    """

    def __init__(self, save: Callable[[], None], busy: Callable[[], None], *, with_parent: bool = True) -> None:
        self._save = save
        self._busy = busy
        self._pid = os.getpid()
        self._parent = os.getppid()
        self._with_parent = with_parent
        self._noticed = threading.Event()
        self._settling = threading.Event()
        self._held = 0
        self._pending: int | None = None

    def watch(self) -> None:
        read_fd, write_fd = os.pipe()
        os.set_blocking(write_fd, False)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        for signum in _ENDING:
            signal.signal(signum, self._handle)
        os.register_at_fork(after_in_child=self._leave_child)
        threading.Thread(target=self._watch, args=(read_fd,), name="pptrace-ending", daemon=True).start()

    def settle(self) -> None:
        """The script has ended. Signals interrupt nothing any more: what remains is to save what it left, and exit."""
        self._settling.set()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep signals from interrupting the main thread in the body; one that came is raised at its end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
        if self._held == 0 and self._pending is not None:
            signum, self._pending = self._pending, None
            _interrupt(signum)

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        self._noticed.set()
        if self._settling.is_set():
            return
        if self._held:
            self._pending = signum
            return
        _interrupt(signum)

    def _leave_child(self) -> None:
        """A forked child, such as a data loader's, dies of signals as any process does."""
        signal.set_wakeup_fd(-1)
        for signum in _ENDING:
            if signal.getsignal(signum) == self._handle:
                signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)

    def _watch(self, fd: int) -> None:
        seconds_alone = 0
        while True:
            ready, _, _ = select.select([fd], [], [], 1.0)
            if not ready and self._with_parent and os.getppid() != self._parent:  # the launcher is gone
                seconds_alone += 1
                if seconds_alone > _ALONE_S:
                    os._exit(128 + signal.SIGTERM)
                os.kill(self._pid, signal.SIGTERM)
            if not ready:
                continue
            for signum in os.read(fd, 64):
                if signum in _ENDING:
                    self._end(signum)

    def _end(self, signum: int) -> None:
        own_handler = signal.getsignal(signum) != self._handle
        if own_handler:
            self._busy()
            patience_s = _HANDLER_S
        else:
            patience_s = _UNWIND_S if self._noticed.wait(_NOTICE_S) else 0.0
        if not self._settling.wait(patience_s):
            self._save()
        if not self._settling.is_set():  # the main thread may have come free while the trace was being written
            os._exit(128 + signum)


def _interrupt(signum: int) -> NoReturn:
    if signum == signal.SIGINT:
        raise KeyboardInterrupt
    raise Terminated(128 + signum)
