"""Decode the begin, end and complete events of a Chrome trace to columns, batch by batch: no event outlives its batch.

file  = { …, "traceEvents": [ event, … ], … } | [ event, … ]
event = { "ph", "ts" (µs), ["dur"], "pid", "tid", ["name"], ["cat"], ["args"] }

Of ``args`` the whole numbers of known names are kept (:data:`NUMBERS`), as numbers or as their digits. In the files that MegaScan
writes for a single rank (``rel_ts`` in ns within each iteration) they are members of the event itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from pptrace.axes import WITHIN_STAGE
from pptrace.ingest.common.byte_source import ByteSource
from pptrace.ingest.common.codes import Codes
from pptrace.ingest.common.json_texts import nanoseconds
from pptrace.ingest.kineto.event_stream import EventStream
from pptrace.ingest.kineto.event_types import ABSENT, Decoders
from pptrace.ingest.kineto.salvage import args_of, args_of_each
from pptrace.model.tables import Int64
from pptrace.model.wording import counted

Id = str | int

MICROBATCH = ("microbatch", "micro_batch_index", "micro_batch", "mb_id", "mb", "microbatch_id", "minibatch")
CHUNK = ("model_chunk", "chunk", "vpp_rank", "virtual_stage")
STEP = ("iteration", "step", "iter")
PP = ("pp_rank", "pp_rk", "pipeline_rank")
SIZE = ("data", "bytes")
RANK = ("g_rk", "rank")
AXES = {f"{axis}_rank": (f"{axis}_rank", f"{axis}_rk", str(axis)) for axis in WITHIN_STAGE} | {"pp_rank": (*PP, "pp")}
"""Names of a coordinate by its name in the facts of a trace."""
_COORDINATES = tuple(name for names in AXES.values() for name in names)
NUMBERS = tuple(
    dict.fromkeys((*MICROBATCH, *CHUNK, *STEP, *SIZE, *RANK, *_COORDINATES, "stage", "seq_id", "group", "correlation"))
)
"""Arguments that are kept; ``group`` is the peer of a message, a list of one rank."""
_MEGASCAN_IDS = ("microbatch", "micro_batch_index", "model_chunk", "pp_rk", "dp_rk", "tp_rk", "g_rk", "group", "data")
_DIGITS = re.compile(r"-?\d{1,9}")
_MOST = 2**63

_UNSET: Any = msgspec.UNSET
_Args: Any = msgspec.defstruct("_Args", [(name, Any, _UNSET) for name in NUMBERS], gc=False)


class _Label(msgspec.Struct):
    """The ``args`` of the name of a process or thread."""

    name: Any = ""


class _Event(msgspec.Struct):
    """An event; its times are the digits in the file."""

    ph: str = ""
    name: Any = None
    cat: Any = None
    ts: msgspec.Raw = ABSENT
    dur: msgspec.Raw = ABSENT
    pid: Any = 0
    tid: Any = 0
    args: msgspec.Raw = ABSENT
    rel_ts: Any = None
    pad_before: Any = None
    duration_wall: Any = None
    microbatch: Any = _UNSET
    micro_batch_index: Any = _UNSET
    model_chunk: Any = _UNSET
    pp_rk: Any = _UNSET
    dp_rk: Any = _UNSET
    tp_rk: Any = _UNSET
    g_rk: Any = _UNSET
    group: Any = _UNSET
    data: Any = _UNSET


_DECODERS = Decoders(msgspec.json.Decoder(_Event), msgspec.json.Decoder(list[_Event]), is_lax=True)
_PHASES = {"B": ord("B"), "E": ord("E"), "X": ord("X")}
_OF_ITERATIONS = ("relative", "before", "wall")
"""Columns of times, ns, by which MegaScan's iterations are placed; −1 where there is none."""


class EventColumns(Struct):
    """The events of a file, one entry per event in every array, in the order of the file.

    ``columns``: ``phase`` (its letter), ``name`` and ``category`` (indices into ``names`` and ``categories``), ``thread`` (into
    ``threads``: its process and its own id), ``start`` and ``length`` in ns, as they stand in the file: they may be no times.
    ``numbers`` are the arguments that any event has, −1 where one has none; ``arguments`` their names, also without numbers.
    """

    columns: Mapping[str, npt.NDArray[Any]]
    numbers: Mapping[str, Int64]
    names: Sequence[str]
    categories: Sequence[str]
    threads: Sequence[tuple[Id, Id]]
    process_names: Mapping[Id, str]
    thread_names: Mapping[tuple[Id, Id], str]
    arguments: frozenset[str]
    warnings: tuple[str, ...]


def read_events(source: ByteSource) -> tuple[EventColumns, int]:
    """Decode a document: the events of ranges, and how many events there are of any kind.

    Raises:
        TraceError: it is empty, no JSON, or has no list of events.
    """
    stream, gathered, count = EventStream(source, decoders=_DECODERS), _Gathered(), 0
    for batch in stream.batches():
        events = [event for event in batch if event.ph]
        count += len(events)
        gathered.add(events)
    warnings = [source.damage] if source.damage else []
    if stream.early_end:
        warnings.append(f"trace ends early (cut inside the list of events); kept {count} before it")
    if num_lost := stream.lost_events:
        warnings.append(f"left out {counted(num_lost, 'event')} that could not be read (damaged JSON)")
    return gathered.joined(warnings), count


class _Gathered(Struct):
    """The columns of the batches so far."""

    parts: list[dict[str, npt.NDArray[Any]]] = field(default_factory=list)
    names: Codes = field(default_factory=Codes)
    categories: Codes = field(default_factory=Codes)
    threads: dict[tuple[Id, Id], int] = field(default_factory=dict)
    process_names: dict[Id, str] = field(default_factory=dict)
    thread_names: dict[tuple[Id, Id], str] = field(default_factory=dict)
    arguments: set[str] = field(default_factory=set)

    def add(self, events: Sequence[_Event]) -> None:
        """Add a batch."""
        for event in events:
            if event.ph == "M" and event.name in ("process_name", "thread_name"):
                process, label = _id(event.pid), _text(args_of(_Label, bytes(event.args)).name)
                if event.name == "process_name":
                    self.process_names[process] = label
                else:
                    self.thread_names[process, _id(event.tid)] = label
        ranges = [event for event in events if event.ph in _PHASES]
        if not ranges:
            return
        keys = ((_id(event.pid), _id(event.tid)) for event in ranges)
        part: dict[str, npt.NDArray[Any]] = {
            "phase": np.fromiter((_PHASES[event.ph] for event in ranges), np.uint8, len(ranges)),
            "name": self.names.of([_text(event.name) for event in ranges]),
            "category": self.categories.of([_text(event.cat) for event in ranges]),
            "thread": np.array([self.threads.setdefault(key, len(self.threads)) for key in keys], dtype=np.int32),
            "start": nanoseconds([event.ts for event in ranges]),
            "length": nanoseconds([event.dur or b"-1" for event in ranges]),
        }
        if any(value is not None for event in ranges for value in (event.rel_ts, event.pad_before)):
            times = ("rel_ts", "pad_before", "duration_wall")
            for name, of_event in zip(_OF_ITERATIONS, times, strict=True):
                part[name] = _whole([getattr(event, of_event) for event in ranges])
            part |= self._numbers(_MEGASCAN_IDS, ranges)
        else:
            texts = [event.args for event in ranges]
            joined = b"".join(texts)
            present = [name for name in NUMBERS if f'"{name}"'.encode() in joined]
            part |= self._numbers(present, args_of_each(_Args, texts)) if present else {}
        self.parts.append(part)

    def _numbers(self, names: Sequence[str], objects: Sequence[Any]) -> dict[str, Int64]:
        """The columns of those arguments that some of these objects have."""
        columns = {}
        for name in names:
            values = [getattr(each, name) for each in objects]
            if any(value is not _UNSET for value in values):
                self.arguments.add(name)
                columns[name] = _whole([_peer(value) for value in values] if name == "group" else values)
        return columns

    def joined(self, warnings: Sequence[str]) -> EventColumns:
        """All batches as one; no columns where no batch has a range."""
        names = dict.fromkeys(name for part in self.parts for name in part)
        columns = {
            name: np.concatenate([part.pop(name, np.full(len(part["phase"]), -1)) for part in self.parts])
            for name in reversed(names)  # "phase" comes last: it tells how long the others are
        }
        threads = list(self.threads)
        if "relative" in columns and (columns["relative"] >= 0).any():
            columns, threads = _on_one_clock(columns, self.names.get("iteration", -1)), [(0, 0)]
        numbers = {name: columns[name] for name in NUMBERS if name in columns}
        return EventColumns(
            columns,
            numbers,
            self.names.texts,
            self.categories.texts,
            threads,
            self.process_names,
            self.thread_names,
            frozenset(self.arguments),
            tuple(warnings),
        )


def _on_one_clock(columns: dict[str, npt.NDArray[Any]], iteration: int) -> dict[str, npt.NDArray[Any]]:
    """The events of a MegaScan file of one rank on one clock: their ``rel_ts`` counts ns from the start of the iteration.

    ``pad_before`` of an iteration's begin and ``duration_wall`` of its end (ns) place the iterations.
    """
    begins, ends = ((columns["name"] == iteration) & (columns["phase"] == _PHASES[phase]) for phase in "BE")
    relative, before, wall = (np.maximum(columns[name], 0) for name in _OF_ITERATIONS)
    walls = np.where(ends, wall, 0)
    start = np.cumsum(np.where(begins, before, 0)) + np.cumsum(walls) - walls + relative
    steps = np.maximum(np.cumsum(begins) - 1, 0)
    nothing = np.full(len(start), -1)
    return {**columns, "start": start, "length": nothing, "thread": np.zeros_like(nothing), "iteration": steps}


def _whole(values: Sequence[Any]) -> Int64:
    """The whole numbers among some values, −1 for any other."""
    if set(map(type, values)) == {int}:
        try:
            return np.array(values, dtype=np.int64)
        except OverflowError:
            pass
    return np.fromiter(map(_number, values), np.int64, len(values))


def _number(value: Any) -> int:
    if type(value) is int:  # no bool
        return value if -_MOST <= value < _MOST else -1
    if type(value) is str and _DIGITS.fullmatch(value):
        return int(value)
    return int(value) if type(value) is float and value.is_integer() and abs(value) < _MOST else -1


def _peer(group: Any) -> Any:
    """The rank in a list of one."""
    if group is _UNSET:
        return group
    return group[0] if isinstance(group, list) and len(group) == 1 else -1


def first_number(numbers: Mapping[str, Int64], names: Sequence[str], size: int) -> Int64:
    """The first of some arguments that each event has, shape (size,); −1 without one."""
    found = np.full(size, -1, dtype=np.int64)
    for name in names:
        if name in numbers:
            found = np.where(found < 0, numbers[name], found)
    return found


def _id(value: object) -> Id:
    return value if type(value) is int else str(value)


def _text(value: object) -> str:
    return "" if value is None else str(value)
