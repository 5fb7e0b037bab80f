"""``pptrace run --live``: each step's ranges go into the rank's live file when the step ends.

Every :data:`SKIP_EVERY`-th step is not observed, on all ranks the same one: the steps around it say what observing costs. Of such
a step the bounds alone are kept, and written with the next one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from threading import get_native_id
from time import perf_counter_ns
from typing import Any

from instrument.live_rows import Key, LiveRange, LiveRows, Row
from pptrace.live_records.codec import NO_PROGRAM, Flag, StepHead
from pptrace.live_records.file import LiveWriter, live_path
from pptrace.marks import OpMark, SpanMark, format_mark
from pptrace.schedule.actions import Action, Kind

SKIP_EVERY = 5
_CALIBRATION = 256
_OPS = (OpMark, str)
"""Types of the keys of ops: the plan's or a hook's, and those that the script marks itself."""

Facts = Callable[[], Mapping[str, Any]]


class LiveRecorder:
    """Writes the live file of this rank. What cannot be written, as on a full disk, ends the file with a line, not the script."""

    def __init__(self, run_dir: Path, rank: int, facts: Facts, state: Callable[[], object]) -> None:
        """``facts`` gives what a trace's metadata would have. It is asked again where ``state`` gives another object than before,
        or a step had ranges that none had before.
        """
        self.rows = LiveRows()
        self._path = live_path(run_dir, rank)
        self._writer: LiveWriter | None = LiveWriter(self._path)
        self._facts = facts
        self._state = state
        self._seen_state: object = None
        self._written_facts: Mapping[str, Any] = {}
        self._programs: list[tuple[list[Key], int]] = []
        self._skipped: list[StepHead] = []
        self._begin_ns = 0
        self._range_ns = _range_cost_ns()
        self._own_ns = 0
        self._core = _ThreadWait()
        self._core_wait_ns: int | None = None

    def begin_step(self, step: int) -> None:
        """A step begins: observed, or not."""
        if self._writer is None:
            return
        if step % SKIP_EVERY != SKIP_EVERY - 1:
            self.rows.begin()
        self._core_wait_ns = self._core.read_ns()
        self._begin_ns = perf_counter_ns()

    def end_step(self, step: int, *, profiled: bool) -> None:
        """The step has ended; ``profiled``: a profiler recorded it."""
        end_ns = perf_counter_ns()
        writer = self._writer
        if writer is None or not self._begin_ns:
            return
        flags = Flag.PROFILED if profiled else Flag(0)
        begin_ns, self._begin_ns = self._begin_ns, 0
        # The counter is read a moment before the step begins and after it has ended, in which the thread may wait too.
        waited_ns = min(self._core.since_ns(self._core_wait_ns), end_ns - begin_ns)
        if not self.rows.on:
            self._skipped.append(StepHead(step, flags, begin_ns, end_ns - begin_ns))
            return
        self.rows.on = False
        rows = self.rows.rows
        op_ns = sum(end - begin for key, begin, end in rows if type(key) in _OPS)
        comm_ns = sum(end - begin for key, begin, end in rows if type(key) not in _OPS and type(key) is not SpanMark)
        head = StepHead(
            step, flags | Flag.OBSERVED, begin_ns, end_ns - begin_ns, op_ns, comm_ns, self._own_ns, waited_ns
        )
        with self._writing(writer):
            self._flush(writer)
            program = self._program(writer, rows)
            if program == NO_PROGRAM:
                writer.bounds(head)
            else:
                writer.step(head, program, [row[1] for row in rows], [row[2] for row in rows])
        self._own_ns = perf_counter_ns() - end_ns + int(self._range_ns * len(rows))

    def close(self) -> None:
        """The script has ended; the step that runs is not written."""
        writer, self._writer, self.rows.on = self._writer, None, False
        if writer is not None:
            with self._writing(writer):
                self._flush(writer)
            writer.close()
        self._core.close()

    @contextmanager
    def _writing(self, writer: LiveWriter) -> Iterator[None]:
        """End the records, with a line, where what is done inside cannot be written."""
        try:
            yield
        except OSError as err:
            line = f"pptrace: {self._path}: cannot be written ({err.strerror}): its records end; the script goes on"
            print(line, file=sys.stderr, flush=True)
            writer.close()
            self._writer = None

    def leave_child(self) -> None:
        """A forked child is no rank of the run."""
        self._writer, self.rows.on = None, False

    def _flush(self, writer: LiveWriter) -> None:
        for head in self._skipped:
            writer.bounds(head)
        self._skipped.clear()

    def _program(self, writer: LiveWriter, rows: list[Row]) -> int:
        """The number of the program that these rows follow, which is written when it is new, and so are the facts."""
        keys = [row[0] for row in rows]
        state = self._state()
        if state is not self._seen_state:
            self._seen_state = state
            self._write_facts(writer)
        for index, (known, number) in enumerate(self._programs):
            if known == keys:
                self._programs.insert(0, self._programs.pop(index))
                return number
        new = writer.program([key if isinstance(key, str) else format_mark(key) for key in keys])
        if new is None:
            return NO_PROGRAM
        self._write_facts(writer)
        self._programs.insert(0, (keys, new))
        return new

    def _write_facts(self, writer: LiveWriter) -> None:
        """Write the facts, unless the last ones say the same: a plan of many ranks takes some 10 KB."""
        facts = self._facts()
        if facts != self._written_facts:
            writer.facts(facts)
            self._written_facts = facts


class _ThreadWait:
    """Time for which the thread that runs the steps was ready to run and had no core.

    Source: the second field of schedstat (Linux, Documentation/scheduler/sched-stats.rst). The file stays open: reading it again
    takes some microseconds.
    """

    def __init__(self) -> None:
        self._thread: int | None = None
        self._fd = -1

    def read_ns(self) -> int | None:
        """The wait until now; None where the system does not say."""
        try:
            if self._thread != get_native_id():
                self.close()
                self._thread = get_native_id()
                self._fd = os.open(f"/proc/self/task/{self._thread}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            return int(os.pread(self._fd, 100, 0).split()[1])
        except (OSError, ValueError, IndexError):
            return None

    def since_ns(self, before: int | None) -> int:
        """The wait since a reading; −1 where it is not known."""
        now = None if before is None else self.read_ns()
        return -1 if now is None or before is None else max(now - before, 0)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _range_cost_ns() -> float:
    """Cost of one range whose mark is made for it, as hooks do, ns, measured now."""
    rows = LiveRows()
    took = []
    for _ in range(_CALIBRATION):
        began = perf_counter_ns()
        key = rows.of_mark(OpMark(Action(Kind.F, 0, 0), 0))
        assert key is not None
        with LiveRange(rows, key, None):
            pass
        took.append(perf_counter_ns() - began)
    return median(took)
