"""The record of one rank's step: its ranges as deviations from what is expected of each.

A *program* is the list of a step's ranges, which the plan fixes: the same ops, messages and waits in the same order, step after
step. It is written once. A record then has two numbers for each range of its program, in the order of their ends: the time since
the end before, and the range's own length. Both are counted in quanta and written as deviations from what that place of the
program took so far (a moving mean that writer and reader keep alike), as zigzag numbers in planes of bytes under zlib.

Begins and ends are quantised, not lengths, so that errors do not add up and a range lies within another as before. The quantum is
1 µs; where a record would be larger than :data:`MOST_BYTES`, it is doubled until the record fits.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from enum import IntFlag

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from pptrace.live_records.frames import HEAD_BYTES, STEP, frame

Int64 = npt.NDArray[np.int64]

MOST_BYTES = 4096
"""Most bytes of a step's record, its frame included."""
QUANTUM_NS = 1000
KEY_EVERY = 64
"""Records from one key record to the next; nothing before a key record needs to be read."""
NO_PROGRAM = 0xFFFF
"""Program of a record without ranges: the step's bounds alone."""
_STEP = struct.Struct("<IBHqqIQQQqB")
_SHARE = 2
"""The moving mean takes a quarter (a right shift by 2) of each new deviation."""


class Flag(IntFlag):
    OBSERVED = 1
    KEY = 2
    """The expectations are forgotten before this record."""
    PROFILED = 4
    """A profiler recorded the step."""


class StepHead(Struct, frozen=True):
    """Head of a record, the same for every step. Times are on the rank's own monotonic clock, ns.

    ``op_ns`` and ``comm_ns`` are the sums of its ops' ranges and of its communication's, 0 where they are not observed.
    ``own_ns`` is what the record before it cost its rank: its ranges, and writing it. ``core_wait_ns`` is for how long the thread
    that runs the steps was ready to run and had no core, −1 where the system does not say.
    """

    step: int
    flags: Flag
    begin_ns: int
    dur_ns: int
    op_ns: int = 0
    comm_ns: int = 0
    own_ns: int = 0
    core_wait_ns: int = -1


class LiveStep(Struct, frozen=True):
    """A step of one rank as it was read, with the begin and end of each range. ``names`` are those of its ranges
    (:mod:`pptrace.marks`) with step 0, () where they are not known.
    """

    head: StepHead
    names: tuple[str, ...]
    begin_ns: Int64
    end_ns: Int64
    quantum_ns: int


class Encoder:
    """Writes the records of one rank."""

    def __init__(self) -> None:
        self._expected: dict[int, Int64] = {}
        self._since_key = KEY_EVERY
        self._quantum_ns = QUANTUM_NS

    def encode(self, head: StepHead, program: int, begin_ns: Sequence[int], end_ns: Sequence[int]) -> bytes:
        """The frame of a step with the ranges of a program."""
        flags = head.flags
        if self._since_key >= KEY_EVERY:
            self._expected.clear()
            self._since_key, flags = 0, flags | Flag.KEY
        self._since_key += 1
        begins = np.asarray(begin_ns, dtype=np.int64) - head.begin_ns
        ends = np.asarray(end_ns, dtype=np.int64) - head.begin_ns
        expected = self._expected.get(program)
        quantum_ns = self._quantum_ns
        while True:
            values = _values(begins // quantum_ns, ends // quantum_ns)
            num_planes, packed = _pack(values - _in_quanta(expected, quantum_ns))
            if len(packed) + _STEP.size + HEAD_BYTES + 1 <= MOST_BYTES:
                break
            quantum_ns *= 2
        self._quantum_ns = max(QUANTUM_NS, quantum_ns // 2 if len(packed) * 3 < MOST_BYTES else quantum_ns)
        self._expected[program] = _moved_mean(expected, values * quantum_ns)
        return _step_frame(head, flags, (program, quantum_ns, num_planes), packed)


def encode_bounds(head: StepHead) -> bytes:
    """The frame of a step without ranges."""
    return _step_frame(head, head.flags, (NO_PROGRAM, QUANTUM_NS, 0), b"")


class Decoder:
    """Reads the records that one :class:`Encoder` wrote, in their order, from the first or a key record on.

    ``programs`` are the names of the ranges of each program, which comes before the records that follow it.
    """

    def __init__(self) -> None:
        self.programs: dict[int, tuple[str, ...]] = {}
        self._expected: dict[int, Int64] = {}

    def decode(self, content: bytes) -> LiveStep:
        """The step of a frame.

        Raises:
            ValueError: the content is none, or its program is not known.
        """
        head, program, quantum_ns, num_planes, packed = _read_head(content)
        if program == NO_PROGRAM:
            none = np.zeros(0, dtype=np.int64)
            return LiveStep(head, (), none, none, quantum_ns)
        if program not in self.programs:
            raise ValueError(f"a step record of the program {program}, which the file does not have")
        if Flag.KEY in head.flags:
            self._expected.clear()
        names, expected = self.programs[program], self._expected.get(program)
        values = _unpack(packed, num_planes, 2 * len(names)) + _in_quanta(expected, quantum_ns)
        self._expected[program] = _moved_mean(expected, values * quantum_ns)
        ends = np.cumsum(values[: len(names)])
        begins = ends - values[len(names) :]
        shift = head.begin_ns
        return LiveStep(head, names, begins * quantum_ns + shift, ends * quantum_ns + shift, quantum_ns)


def is_key(content: bytes) -> bool:
    """Return whether a step frame needs none before it."""
    return len(content) >= _STEP.size and Flag.KEY in _read_head(content)[0].flags


def _step_frame(head: StepHead, flags: Flag, layout: tuple[int, int, int], packed: bytes) -> bytes:
    program, quantum_ns, num_planes = layout
    totals = (head.op_ns, head.comm_ns, head.own_ns, head.core_wait_ns)
    fields = (head.step, int(flags), program, head.begin_ns, head.dur_ns, quantum_ns, *totals, num_planes)
    return frame(STEP, _STEP.pack(*fields) + packed)


def _read_head(content: bytes) -> tuple[StepHead, int, int, int, bytes]:
    """(head, program, quantum, planes, the rest)."""
    try:
        step, flags, program, begin_ns, dur_ns, quantum_ns, *totals, num_planes = _STEP.unpack_from(content)
    except struct.error as err:
        raise ValueError(f"a step record of {len(content)} bytes: {err}") from err
    head = StepHead(step, Flag(flags), begin_ns, dur_ns, *totals)
    return head, program, quantum_ns, num_planes, content[_STEP.size :]


def _values(begins: Int64, ends: Int64) -> Int64:
    return np.concatenate((np.diff(ends, prepend=0), ends - begins))


def _in_quanta(expected: Int64 | None, quantum_ns: int) -> Int64 | int:
    return 0 if expected is None else (expected + quantum_ns // 2) // quantum_ns


def _moved_mean(expected: Int64 | None, measured: Int64) -> Int64:
    """Times that are expected of a program's places after a record; writer and reader keep the same."""
    return measured if expected is None else expected + ((measured - expected) >> _SHARE)


def _pack(deviations: Int64) -> tuple[int, bytes]:
    """(number of planes, bytes): plane k has the k-th byte of every zigzag number."""
    zigzag = ((deviations << 1) ^ (deviations >> 63)).astype("<u8")
    num_planes = (int(zigzag.max()).bit_length() + 7) // 8 if len(zigzag) else 0
    planes = zigzag.view(np.uint8).reshape(-1, 8)[:, :num_planes].T.tobytes()
    return num_planes, zlib.compress(planes, 1)


def inflate(packed: bytes, most: int) -> bytes:
    """Decompress content whose length has a limit, bytes.

    Raises:
        ValueError, zlib.error: it is longer, or damaged.
    """
    stream = zlib.decompressobj()
    content = stream.decompress(packed, most + 1)
    if len(content) > most or not stream.eof:
        raise ValueError(f"a record that is cut or has more than {most} bytes")
    return content


def _unpack(packed: bytes, num_planes: int, num_values: int) -> Int64:
    try:
        planes = np.frombuffer(inflate(packed, 8 * num_values), dtype=np.uint8)
    except zlib.error as err:
        raise ValueError(f"a step record: {err}") from err
    if num_planes > 8 or len(planes) != num_planes * num_values:
        raise ValueError(f"a step record of {len(planes)} bytes for {num_values} numbers of {num_planes}")
    numbers = np.zeros((num_values, 8), dtype=np.uint8)
    numbers[:, :num_planes] = planes.reshape(num_planes, num_values).T
    zigzag = numbers.reshape(-1).view("<u8")
    return (zigzag >> np.uint64(1)).astype(np.int64) ^ -(zigzag & np.uint64(1)).astype(np.int64)
