"""Decode one large file on several cores: blocks of text are sent to worker processes, which return columns at the end.

The reader cuts the text into blocks, copies each into the shared memory of a worker with a free slot, and decodes the block
itself if there is none. Workers start while it reads. They accept only valid lists of events: if a worker refuses a block or
dies, the reader reads the file again alone, and salvages damaged events. A worker's

    argument          is the file descriptor of the shared memory, which is divided into slots
    standard input    has one line per block: its slot, its length in bytes
    standard output   has READY, then DONE for each block decoded, in order; after the end of the input a pickled DecodedPart.
                      REFUSED, and nothing after it, for a block that is no list of events
"""

from __future__ import annotations

import gc
import io
import mmap
import os
import pickle
import selectors
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType

from pptrace.ingest.kineto.event_columns import Collected
from pptrace.ingest.kineto.event_stream import decode_block

SLOT_BYTES = 512 * 1024
NUM_SLOTS = 4
READY, DONE, REFUSED = b"r", b".", b"x"
DecodedPart = tuple[Collected, int, int]
"""The events that one worker decoded, and how many were lost and repaired."""

MIN_TEXT_BYTES = 48 * 1000**2
"""Least size of a file's text; smaller files are read before a worker has started."""
MAX_WORKERS = 7
"""One reader, which copies and cuts at some 2 GB/s, keeps no more workers busy."""

_PROGRAM = "import sys; sys.path[:] = {path!r}; from pptrace.ingest.kineto.decode_pool import main; main()"


class WorkerError(Exception):
    """A worker refused a block or died; the results of all workers are lost."""


class _Worker:
    """A worker process and its shared memory."""

    def __init__(self) -> None:
        with tempfile.TemporaryFile() as shared:
            size = NUM_SLOTS * SLOT_BYTES
            os.posix_fallocate(shared.fileno(), 0, size)  # writing to unallocated shared memory would kill this process
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
        self.free_slots: deque[int] = deque()
        self._busy_slots: deque[int] = deque()
        self.started = False

    def read_answers(self) -> None:
        """Handle its answers; only call when there are some."""
        answer = os.read(self.answers.fileno(), 2 * NUM_SLOTS)
        if not answer and not self.started:
            raise OSError("did not start")
        self._handle_answers(answer)

    def _handle_answers(self, answers: bytes) -> None:
        for answer in (answers[index : index + 1] for index in range(len(answers))):
            if answer == READY:
                self.started = True
                self.free_slots.extend(range(NUM_SLOTS))
            elif answer == DONE and self._busy_slots:
                self.free_slots.append(self._busy_slots.popleft())
            else:
                raise WorkerError
        if not answers:
            raise WorkerError

    def send(self, text: memoryview) -> None:
        slot = self.free_slots.popleft()
        self._busy_slots.append(slot)
        start = slot * SLOT_BYTES
        self._slots[start : start + len(text)] = text
        try:
            self._orders.write(b"%d %d\n" % (slot, len(text)))
        except BrokenPipeError as err:
            raise WorkerError from err

    def close_input(self) -> None:
        with suppress(BrokenPipeError):
            self._orders.close()

    def result(self) -> DecodedPart:
        """Wait for its result."""
        with io.BufferedReader(self.answers, SLOT_BYTES) as answers:  # type: ignore[type-var]
            while self._busy_slots:
                self._handle_answers(answers.read(1))
            try:
                part = pickle.load(answers)
            except (EOFError, pickle.UnpicklingError) as err:
                raise WorkerError from err
        collected, num_lost, num_repaired = part
        assert isinstance(collected, Collected)
        return collected, num_lost, num_repaired

    def stop(self) -> None:
        self.close_input()
        self._process.kill()
        self._process.wait()
        self.answers.close()
        self._slots.close()


class DecodePool:
    """``number`` worker processes, or fewer where the system cannot start them."""

    def __init__(self, number: int) -> None:
        self._workers: list[_Worker] = []
        self._answers_ready = selectors.DefaultSelector()
        if not hasattr(os, "posix_fallocate") or not sys.executable:  # Linux has it, and inherits file descriptors
            return
        with suppress(OSError):
            for _ in range(min(number, MAX_WORKERS)):
                worker = _Worker()
                self._workers.append(worker)
                self._answers_ready.register(worker.answers, selectors.EVENT_READ, worker)

    def __enter__(self) -> DecodePool:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        for worker in self._workers:
            worker.stop()
        self._answers_ready.close()

    def offer(self, text: memoryview) -> bool:
        """Send a block to a worker with a free slot; False if there is none.

        Raises:
            WorkerError: a worker refused a block or died.
        """
        if not self._workers or len(text) > SLOT_BYTES:
            return False
        for key, _ in self._answers_ready.select(0):
            self._read_answers(key.data)
        least_busy = max(self._workers, key=lambda worker: len(worker.free_slots), default=None)
        if least_busy is None or not least_busy.free_slots:
            return False
        least_busy.send(text)
        return True

    def _read_answers(self, worker: _Worker) -> None:
        try:
            worker.read_answers()
        except OSError:
            self._discard(worker)

    def _discard(self, worker: _Worker) -> None:
        self._answers_ready.unregister(worker.answers)
        self._workers.remove(worker)
        worker.stop()

    def results(self) -> Sequence[DecodedPart]:
        """Collect the result of each worker; those that never started are discarded.

        Raises:
            WorkerError: a worker refused a block or died.
        """
        for worker in [worker for worker in self._workers if not worker.started]:
            self._discard(worker)
        for worker in self._workers:
            worker.close_input()
        return [worker.result() for worker in self._workers]


def main() -> None:
    """Decode blocks in a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the reader gets it too, and closes the input
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    gc.disable()
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # other output must not appear among the answers
    slots = mmap.mmap(int(sys.argv[1]), NUM_SLOTS * SLOT_BYTES, access=mmap.ACCESS_READ)
    answers.write(READY)
    collected, num_lost, num_repaired = Collected(), 0, 0
    for line in sys.stdin.buffer:
        slot, length = map(int, line.split())
        start = slot * SLOT_BYTES
        read = decode_block(b"".join((b"[", slots[start : start + length], b"]")))
        if read is None:
            answers.write(REFUSED)
            return
        collected.add(read.events)
        num_lost += read.num_lost
        num_repaired += read.repaired
        answers.write(DONE)
    with os.fdopen(answers.fileno(), "wb", closefd=False) as buffered:
        pickle.dump((collected, num_lost, num_repaired), buffered, pickle.HIGHEST_PROTOCOL)
