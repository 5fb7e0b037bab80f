"""The live file of a rank: written by the rank, followed by readers."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from pptrace.live_records.codec import Decoder, Encoder, LiveStep, StepHead, encode_bounds, inflate, is_key
from pptrace.live_records.frames import FACTS, PROGRAM, STEP, SUFFIX, frame, frames
from pptrace.regular import open_regular

MOST_PROGRAMS = 16
"""Programs that a rank writes; steps with yet another order of ranges have their bounds and totals alone."""
_MOST_READ = 16 << 20
_DAMAGE = (ValueError, TypeError, OverflowError, RecursionError, zlib.error)
_NAME = re.compile(r"rank(\d{1,9})\.live", re.ASCII)


def live_path(run_dir: Path, rank: int) -> Path:
    return run_dir / f"rank{rank}{SUFFIX}"


def live_files(run_dir: Path) -> dict[int, Path]:
    """The live files of a run directory by rank."""
    names = {path: _NAME.fullmatch(path.name) for path in run_dir.glob(f"rank*{SUFFIX}")}
    return dict(sorted((int(name[1]), path) for path, name in names.items() if name is not None))


class LiveWriter:
    """Appends facts, programs and steps. Every call writes whole frames, with one system call for each.

    Raises:
        OSError: of every call, the file cannot be written, as on a full disk; what it holds may end within a frame.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._encoder = Encoder()
        self.num_programs = 0

    def facts(self, facts: Mapping[str, Any]) -> None:
        self._write(frame(FACTS, zlib.compress(json.dumps(facts).encode())))

    def program(self, names: Sequence[str]) -> int | None:
        """Number of a new program; None where there are too many."""
        if self.num_programs >= MOST_PROGRAMS:
            return None
        number, self.num_programs = self.num_programs, self.num_programs + 1
        self._write(frame(PROGRAM, number.to_bytes(2, "little") + zlib.compress(json.dumps(list(names)).encode())))
        return number

    def step(self, head: StepHead, program: int, begin_ns: Sequence[int], end_ns: Sequence[int]) -> None:
        self._write(self._encoder.encode(head, program, begin_ns, end_ns))

    def bounds(self, head: StepHead) -> None:
        self._write(encode_bounds(head))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, data: bytes) -> None:
        while self._fd >= 0 and data:
            data = data[os.write(self._fd, data) :]  # less than all of it where a disk is full; the next call says so


class LiveFile:
    """Follows the file of a rank: each :meth:`poll` reads what was added since the last one.

    With ``last`` it begins with the key record before so many steps that are there at first. ``last_step`` is the number of the
    last step that was read, −1 before the first; ``is_cut``: more is there, and no whole frame.
    """

    def __init__(self, path: Path, last: int | None = None) -> None:
        self.path = path
        self.facts: Mapping[str, Any] = {}
        self.last_step, self.is_cut = -1, False
        self._last = last
        self._position = 0
        self._decoder = Decoder()

    def poll(self) -> Iterator[LiveStep]:
        """Yield the steps that were added and are whole. A frame that is cut is left for the next call."""
        with suppress(OSError), open_regular(self.path) as file:
            end = os.fstat(file.fileno()).st_size
            if self._last is not None:
                self._position, self._last = self._start_of(self._last, file, end), None
            file.seek(self._position)
            for kind, content, behind in frames(file, end):
                self._position = behind
                if (step := self._take(kind, content)) is not None:
                    self.last_step = step.head.step
                    yield step
            self.is_cut = self._position < end

    def _start_of(self, last: int, file: BinaryIO, end: int) -> int:
        """The place of the key record before the last steps; what comes before it is taken, but for the steps."""
        places, num_steps, position = [(0, 0)], 0, 0
        for kind, content, behind in frames(file, end):
            if kind == STEP:
                if is_key(content):
                    places.append((num_steps, position))
                num_steps += 1
            else:
                self._take(kind, content)
            position = behind
        return max(place for before, place in places if before <= max(num_steps - last, 0))

    def _take(self, kind: bytes, content: bytes) -> LiveStep | None:
        """Take what a frame says; the step, of one that has one."""
        with suppress(*_DAMAGE):  # whole by its checksum, and not what this version writes
            if kind == STEP:
                return self._decoder.decode(content)
            if kind == FACTS:
                facts = json.loads(inflate(content, _MOST_READ))
                self.facts = facts if isinstance(facts, dict) else {}
            elif kind == PROGRAM:
                names = json.loads(inflate(content[2:], _MOST_READ))
                self._decoder.programs[int.from_bytes(content[:2], "little")] = tuple(map(str, names))
        return None
