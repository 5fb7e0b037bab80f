"""The last communication calls of a rank in a file that it maps into its memory: readable from outside whatever becomes of the
rank, also while it holds the interpreter lock, is stopped, or after it was killed.

    file    = header, calls, streams, texts
    header  = magic, version, calls kept, pid, time of the last event (ns, monotonic), bytes of texts, number of streams, time at
              which the script was seen to go from function to function
    calls   = ring of fixed size; the call of number n at n modulo the size: see ``CALL``
    streams = how many calls were made in each: a group's collectives, or its messages in one direction with one peer
    texts   = one line of JSON for each group: name, ranks, backend, description, whether a device runs its calls

A write into the map is a copy in memory: no system call, no lock, a microsecond.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import struct
import sys
import threading
import time
from pathlib import Path

from instrument.adapters.calls import SETUP, UNHOOKED, Call, CallGroup

MAGIC = b"PPTCALLS"
VERSION = 2
NUM_CALLS = 1024
NUM_STREAMS = 2048
TEXT_BYTES = 1 << 18
HEADER = struct.Struct("=8sIIqqqqq")
CALL = struct.Struct("=qqqqiiqHBBi4x")
"""number + 1, bytes, sequence, posted ns, peer, tag, changed ns, group, kind, state, batch."""
STREAM = struct.Struct("=HBxiiq")
"""group, class (index in ``CLASSES``), peer, tag, how many calls."""
CALLS_AT = 64
STREAMS_AT = CALLS_AT + NUM_CALLS * CALL.size
TEXTS_AT = STREAMS_AT + NUM_STREAMS * STREAM.size
FILE_BYTES = TEXTS_AT + TEXT_BYTES
KINDS = (
    "",
    "send",
    "recv",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
    SETUP,
    UNHOOKED,
)
CLASSES = ("collective", "send", "recv")
POSTED, RETURNED, WAITING, COMPLETED, FAILED = range(1, 6)

_KIND_OF = {kind: number for number, kind in enumerate(KINDS)}
_NO_GROUP = 0xFFFF
_LAST_EVENT_AT, _TEXTS_END_AT, _NUM_STREAMS_AT, _MOVED_AT = 24, 32, 40, 48
_STATE_AT = struct.calcsize("=qqqqiiqHB")
_CHANGED_AT = struct.calcsize("=qqqqii")
_TIME = struct.Struct("=q")
_COUNT_AT = struct.calcsize("=HBxii")


def call_log_path(control_dir: Path, local_rank: int) -> Path:
    return control_dir / f"rank{local_rank}.calls"


class CallLog:
    """Watches the calls of this process (:class:`instrument.adapters.calls.CallObserver`) and keeps the last ones in ``path``.

    Raises:
        OSError: there is no room for the file, all of which is taken at once: a later write to its pages would end the process.
    """

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            allocate = getattr(os, "posix_fallocate", None)  # macOS has none
            allocate(fd, 0, FILE_BYTES) if allocate else os.ftruncate(fd, FILE_BYTES)
            self._map = mmap.mmap(fd, FILE_BYTES)
        finally:
            os.close(fd)
        self._groups: dict[int, int] = {}
        self._kept: list[CallGroup] = []
        """Keeps the groups alive, so that no other gets the id of one."""
        self._streams: dict[tuple[int, int, int, int], _Count] = {}
        self._texts_end = 0
        self._lock = threading.Lock()
        HEADER.pack_into(self._map, 0, MAGIC, VERSION, NUM_CALLS, os.getpid(), time.monotonic_ns(), 0, 0, 0)
        os.register_at_fork(after_in_child=self._leave_child)

    def quiet_s(self) -> float:
        """Time since a call last went on, s."""
        last_event_ns: int = _TIME.unpack_from(self._map, _LAST_EVENT_AT)[0]
        return (time.monotonic_ns() - last_event_ns) / 1e9

    def note_motion(self) -> None:
        """The script goes from function to function."""
        _TIME.pack_into(self._map, _MOVED_AT, time.monotonic_ns())

    def posted(self, call: Call) -> None:
        group = self._groups.get(id(call.group))
        if group is None:
            group = self._add_group(call.group)
        kind = _KIND_OF.get(call.kind, 0)
        is_message = 1 <= kind <= 2
        tag = getattr(call, "tag", 0)
        key = (group, kind if is_message else 0, call.peer if is_message else -1, tag if is_message else 0)
        count = self._streams.get(key)
        if count is None:
            count = self._add_stream(key)
        sequence = count.next() if is_message else call.sequence
        now = time.monotonic_ns()
        CALL.pack_into(
            self._map,
            CALLS_AT + call.number % NUM_CALLS * CALL.size,
            call.number + 1,
            call.num_bytes,
            sequence,
            now,
            call.peer,
            tag,
            now,
            group,
            kind,
            POSTED,
            call.batch,
        )
        if count.offset:
            _TIME.pack_into(self._map, count.offset, sequence + 1)
        _TIME.pack_into(self._map, _LAST_EVENT_AT, now)

    def returned(self, call: Call) -> None:
        self._change(call, RETURNED if call.is_async else COMPLETED)

    def waiting(self, call: Call) -> None:
        self._change(call, WAITING)

    def completed(self, call: Call) -> None:
        self._change(call, COMPLETED)

    def failed(self, call: Call) -> None:
        self._change(call, FAILED)

    def _change(self, call: Call, state: int) -> None:
        at = CALLS_AT + call.number % NUM_CALLS * CALL.size
        if _TIME.unpack_from(self._map, at)[0] != call.number + 1:
            return  # so long ago that another call has its slot
        now = time.monotonic_ns()
        self._map[at + _STATE_AT] = state
        _TIME.pack_into(self._map, at + _CHANGED_AT, now)
        _TIME.pack_into(self._map, _LAST_EVENT_AT, now)

    def _add_group(self, group: CallGroup) -> int:
        with self._lock:
            if id(group) in self._groups:
                return self._groups[id(group)]
            self._kept.append(group)
            text = json.dumps(
                {
                    "name": group.name,
                    "ranks": _as_ranges(group.ranks),
                    "backend": group.backend,
                    "description": group.description,
                    "axis": group.axis,
                    "on_device": _runs_on_device(group.backend),
                }
            )
            line = text.encode() + b"\n"
            number = len(self._kept) - 1
            if self._texts_end + len(line) > TEXT_BYTES or number >= _NO_GROUP:
                number = _NO_GROUP
            else:
                begin = TEXTS_AT + self._texts_end
                self._map[begin : begin + len(line)] = line
                self._texts_end += len(line)
                _TIME.pack_into(self._map, _TEXTS_END_AT, self._texts_end)
            self._groups[id(group)] = number
            return number

    def _add_stream(self, key: tuple[int, int, int, int]) -> _Count:
        with self._lock:
            if key in self._streams:
                return self._streams[key]
            number = len(self._streams)
            offset = 0
            if number < NUM_STREAMS:
                begin = STREAMS_AT + number * STREAM.size
                STREAM.pack_into(self._map, begin, *key, 0)
                offset = begin + _COUNT_AT
                _TIME.pack_into(self._map, _NUM_STREAMS_AT, number + 1)
            self._streams[key] = _Count(offset)
            return self._streams[key]

    def _leave_child(self) -> None:
        """A forked child writes into memory of its own, not into what it shares with this rank."""
        self._map = mmap.mmap(-1, FILE_BYTES)


class _Count:
    """Number of calls of a stream, and the offset in the file where it stands: 0 for nowhere."""

    __slots__ = ("next", "offset")

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.next = itertools.count().__next__


def _as_ranges(ranks: tuple[int, ...]) -> list[list[int]]:
    """Runs of consecutive ranks as [first, count]; groups may have thousands."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][0] + runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([rank, 1])
    return runs


def _runs_on_device(backend: str) -> bool:
    """Return whether a call that has returned may still be under way on a device.

    ``backend`` as torch has it: ``gloo``, ``ncclx``, of a group for hosts and devices ``cpu:gloo,cuda:nccl`` or ``undefined``.
    """
    names = [part.rpartition(":")[2] for part in backend.lower().split(",")]
    if all(name in ("gloo", "mpi") for name in names):
        return False
    if all("ccl" in name for name in names):  # a library of collective communication of devices
        return True
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()
