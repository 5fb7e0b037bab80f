"""Decode one large file with several cores: blocks of its text go to other processes, their columns come back at the end.

The reader cuts the text into blocks, lays each into memory that it shares with a helper that has room for it, and decodes a
block itself where none has. Helpers start while it already reads. They take only blocks that are whole lists of events: a
file in which one is not, or of which a helper dies, is read again by the reader alone, which salvages what there is.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import selectors
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType

from pptrace.ingest.kineto.decode_worker import DONE, NUM_SLOTS, READY, SLOT_BYTES, Helped

MIN_TEXT_BYTES = 48 * 1000**2
"""Of a file's text; below, it is read before a helper has started."""
MOST_HELPERS = 7
"""More are not kept busy by one reader, which copies and cuts at some 2 GB/s."""

_PROGRAM = "import sys; sys.path[:] = {path!r}; from pptrace.ingest.kineto.decode_worker import main; main()"


class HelperError(Exception):
    """A helper refused a block or died; what the helpers have read is lost."""


class _Helper:
    """One process; ``room`` are the slots that it does not use."""

    def __init__(self) -> None:
        with tempfile.TemporaryFile() as shared:
            size = NUM_SLOTS * SLOT_BYTES
            os.posix_fallocate(shared.fileno(), 0, size)  # writing to memory that is not there would kill this process
            self._slots = mmap.mmap(shared.fileno(), size)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM.format(path=sys.path), str(shared.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                pass_fds=[shared.fileno()],
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders, self.answers = self._process.stdin, self._process.stdout
        self.room: deque[int] = deque()
        self._at_work: deque[int] = deque()
        self.started = False

    def hear(self) -> None:
        """Take note of what it says; only where it has said something."""
        said = os.read(self.answers.fileno(), 2 * NUM_SLOTS)
        if not said and not self.started:
            raise OSError("did not start")
        self._note(said)

    def _note(self, said: bytes) -> None:
        for answer in (said[place : place + 1] for place in range(len(said))):
            if answer == READY:
                self.started = True
                self.room.extend(range(NUM_SLOTS))
            elif answer == DONE and self._at_work:
                self.room.append(self._at_work.popleft())
            else:
                raise HelperError
        if not said:
            raise HelperError

    def give(self, text: memoryview) -> None:
        slot = self.room.popleft()
        self._at_work.append(slot)
        start = slot * SLOT_BYTES
        self._slots[start : start + len(text)] = text
        try:
            self._orders.write(b"%d %d\n" % (slot, len(text)))
        except BrokenPipeError as err:
            raise HelperError from err

    def no_more(self) -> None:
        with suppress(BrokenPipeError):
            self._orders.close()

    def take(self) -> Helped:
        """What it read; waits for it."""
        with io.BufferedReader(self.answers, SLOT_BYTES) as answers:  # type: ignore[type-var]
            while self._at_work:
                self._note(answers.read(1))
            try:
                helped = pickle.load(answers)
            except (EOFError, pickle.UnpicklingError) as err:
                raise HelperError from err
        assert isinstance(helped, Helped)
        return helped

    def stop(self) -> None:
        self.no_more()
        self._process.kill()
        self._process.wait()
        self.answers.close()
        self._slots.close()


class Helpers:
    """``number`` processes, or fewer where the system has no room for them."""

    def __init__(self, number: int) -> None:
        self._helpers: list[_Helper] = []
        self._said = selectors.DefaultSelector()
        if not hasattr(os, "posix_fallocate") or not sys.executable:  # Linux has it, and can share memory by its number
            return
        with suppress(OSError):
            for _ in range(min(number, MOST_HELPERS)):
                helper = _Helper()
                self._helpers.append(helper)
                self._said.register(helper.answers, selectors.EVENT_READ, helper)

    def __enter__(self) -> Helpers:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        for helper in self._helpers:
            helper.stop()
        self._said.close()

    def offer(self, text: memoryview) -> bool:
        """Whether a helper took the block.

        Raises:
            HelperError
        """
        if not self._helpers or len(text) > SLOT_BYTES:
            return False
        for key, _ in self._said.select(0):
            self._hear(key.data)
        free = max(self._helpers, key=lambda helper: len(helper.room), default=None)
        if free is None or not free.room:
            return False
        free.give(text)
        return True

    def _hear(self, helper: _Helper) -> None:
        try:
            helper.hear()
        except OSError:
            self._let_go(helper)

    def _let_go(self, helper: _Helper) -> None:
        self._said.unregister(helper.answers)
        self._helpers.remove(helper)
        helper.stop()

    def gather(self) -> Sequence[Helped]:
        """What each helper read; those that never started are let go of.

        Raises:
            HelperError
        """
        for helper in [helper for helper in self._helpers if not helper.started]:
            self._let_go(helper)
        for helper in self._helpers:
            helper.no_more()
        return [helper.take() for helper in self._helpers]
