"""The live file of a rank: written by the rank, followed by readers."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pptrace.live_records.codec import (
    NO_PROGRAM,
    Decoder,
    Encoder,
    Record,
    StepHead,
    encode_bounds,
    inflate,
    is_key,
    program_of,
)
from pptrace.live_records.frames import FACTS, PROGRAM, STEP, SUFFIX, frame, frames
from pptrace.regular import open_regular

MOST_PROGRAMS = 16
"""Programs that a rank writes; steps with yet another order of ranges have their bounds and totals alone."""
_MOST_READ = 16 << 20
_NAME = re.compile(r"rank(\d{1,9})\.live", re.ASCII)


def live_path(run_dir: Path, rank: int) -> Path:
    return run_dir / f"rank{rank}{SUFFIX}"


def live_files(run_dir: Path) -> dict[int, Path]:
    """The live files of a run directory by rank."""
    names = {path: _NAME.fullmatch(path.name) for path in run_dir.glob(f"rank*{SUFFIX}")}
    return dict(sorted((int(name[1]), path) for path, name in names.items() if name is not None))


class LiveWriter:
    """Appends facts, programs and steps. Every call writes whole frames, with one system call for each."""

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
        if self._fd >= 0:
            os.write(self._fd, data)


@dataclass(frozen=True, slots=True)
class LiveStep:
    """A step of one rank; ``names`` are those of its ranges (:mod:`pptrace.marks`) with step 0, () where they are not known."""

    rank: int
    record: Record
    names: tuple[str, ...]

    @property
    def step(self) -> int:
        return self.record.head.step


class LiveFile:
    """Follows the file of a rank: each :meth:`poll` reads what was added since the last one."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path = path
        self.rank = rank
        self.facts: Mapping[str, Any] = {}
        self._position = 0
        self._decoder = Decoder()
        self._programs: dict[int, tuple[str, ...]] = {}

    def poll(self, last: int | None = None) -> list[LiveStep]:
        """The steps that were added and are whole. A frame that is cut is left for the next call.

        With ``last`` only so many of them, at least: those before the key record that comes before them are not decoded.
        """
        steps: list[bytes] = []
        while True:
            data = self._read()
            end = self._position
            for kind, content, behind in frames(data):
                end = self._position + behind
                if kind == STEP:
                    steps.append(content)
                else:
                    self._take(kind, content)
            if end == self._position:
                break
            self._position = end
        return self._decoded(steps if last is None else _from_key(steps, last))

    def _read(self) -> bytes:
        try:
            with open_regular(self.path) as file:
                file.seek(self._position)
                return file.read(_MOST_READ)
        except OSError:
            return b""

    def _take(self, kind: bytes, content: bytes) -> None:
        try:
            if kind == FACTS:
                facts = json.loads(inflate(content, _MOST_READ))
                self.facts = facts if isinstance(facts, dict) else {}
            elif kind == PROGRAM:
                names = json.loads(inflate(content[2:], _MOST_READ))
                self._programs[int.from_bytes(content[:2], "little")] = tuple(map(str, names))
        except (ValueError, zlib.error):  # whole by its checksum, and not what this version writes
            return

    def _decoded(self, contents: Sequence[bytes]) -> list[LiveStep]:
        steps = []
        for content in contents:
            try:
                program = program_of(content)
                names = () if program == NO_PROGRAM else self._programs[program]
                record = self._decoder.decode(content, len(names))
            except (ValueError, KeyError, OverflowError):
                continue
            steps.append(LiveStep(self.rank, record, names))
        return steps


def _from_key(steps: list[bytes], last: int) -> list[bytes]:
    """The last steps, from the key record on that comes before them."""
    for index in range(max(len(steps) - last, 0), -1, -1):
        try:
            if index < len(steps) and is_key(steps[index]):
                return steps[index:]
        except ValueError:
            continue
    return steps
