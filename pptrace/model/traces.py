"""The contents of one trace file: its events in columns, the tables that its format lists, and the facts in its header."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import IntEnum, StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from msgspec import Struct, field
from msgspec.structs import replace

from pptrace.intervals import NestedIntervals
from pptrace.model.damage import RankDamage
from pptrace.model.tables import COMM_ARGS, MEMORY, Int8, Int32, Int64, empty_table

Bool = npt.NDArray[np.bool_]


class Category(IntEnum):
    """Category of an event, independent of its producer's name for it. Everything below HOST_LIMIT ran on the host."""

    CPU_OP = 0
    ANNOTATION = 1  # a range set by the program: record_function, NVTX
    RUNTIME = 2  # driver or runtime call; launches device work with the same correlation
    PYTHON = 3
    OVERHEAD = 4  # of the profiler itself
    OTHER = 5
    HOST_LIMIT = 16
    KERNEL = 17
    MEMCPY = 18
    MEMSET = 19
    DEVICE_ANNOTATION = 20  # a range projected onto a stream by the producer: not work
    DEVICE_SYNC = 21  # waiting recorded on a stream: not work


_OF_FORWARDS = re.compile(
    "aten::(?:linear|addmm|(?:native_)?layer_norm|(?:_fused_)?rms_norm|scaled_dot_product_attention|embedding|gelu|silu|relu|softmax|"
    "dropout|conv[12]d|batch_norm)"
)
_NODE_FUNCTION = re.compile(r"Backward\d*$")
_NUMBERS = re.compile(r"\s\w+=\S+|\d+")
_MANY_NAMES = 2_000
"""Searching more takes longer than finding those of the rows in question."""


def is_of_forward(name: str) -> bool:
    """Return whether forwards run operators of this name: torch's usual ones, and a program's functions, without "::"."""
    return bool(_OF_FORWARDS.fullmatch(name)) or ("::" not in name and not _NODE_FUNCTION.search(name))


class Events(Struct, frozen=True):
    """All complete (duration) events of one rank, one entry per event in every array, sorted by ``start_ns``.

    ``name_id`` indexes ``names``. ``device`` and ``stream`` are -1 for host events, ``thread`` is -1 for device events.
    ``correlation`` joins a runtime call to the device work it launched. For a node of autograd's engine it is the node's sequence
    number, for other operators that of the next node created on their thread; -1 where there is none.
    ``comm_args`` is sparse: one row per event that carries communication fields (schema :data:`COMM_ARGS`).
    So is ``flops``, shape (2, n): the events whose floating-point operations are counted, ascending, and their number, -1 where
    the shapes do not tell it.
    """

    category: Int8
    name_id: Int32
    start_ns: Int64
    dur_ns: Int64
    device: Int32
    stream: Int64
    thread: Int64
    correlation: Int64
    names: tuple[str, ...]
    comm_args: pd.DataFrame = field(default_factory=lambda: empty_table(COMM_ARGS))
    flops: Int64 = field(default_factory=lambda: np.zeros((2, 0), dtype=np.int64))

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def end_ns(self) -> Int64:
        return self.start_ns + self.dur_ns

    @property
    def host_span_ns(self) -> tuple[int, int] | None:
        """(the begin of the host's first event, the latest end of one); None without any."""
        on_host = self.category < Category.HOST_LIMIT
        first = int(on_host.argmax()) if len(self) else 0
        if not on_host[first : first + 1].any():
            return None
        return int(self.start_ns[first]), int(self.end_ns.max(where=on_host, initial=self.start_ns[first]))

    def ends_of(self, rows: npt.NDArray[np.integer[Any]]) -> Int64:
        """End times of some rows, ns; computing only these saves memory: all ends of a large trace take as much as its starts."""
        ends: Int64 = self.start_ns[rows] + self.dur_ns[rows]
        return ends

    def middles_of(self, rows: npt.NDArray[np.integer[Any]]) -> Int64:
        """Times in the middle of some rows, ns."""
        middles: Int64 = self.start_ns[rows] + self.dur_ns[rows] // 2
        return middles

    def rows_by_thread(self, rows: npt.NDArray[np.intp]) -> dict[int, npt.NDArray[np.intp]]:
        """Some rows by their thread, each in the order given."""
        threads = self.thread[rows]
        return {thread: rows[threads == thread] for thread in np.unique(threads).tolist()}

    def intervals_of(self, rows: npt.NDArray[np.intp]) -> NestedIntervals:
        """The times of some rows, which are in the order of the events."""
        return NestedIntervals(self.start_ns[rows], self.ends_of(rows))

    def take(self, rows: npt.NDArray[np.integer[Any]]) -> Events:
        """Some of the events in the order given, with the arguments of their communication."""
        names = ("category", "name_id", "start_ns", "dur_ns", "device", "stream", "thread", "correlation")
        new = np.full(len(self), -1, dtype=np.int64)
        new[rows] = np.arange(len(rows))
        event = new[self.comm_args["event"].to_numpy()]
        comm_args = self.comm_args.assign(event=event)[event >= 0].reset_index(drop=True)
        columns = {name: getattr(self, name)[rows] for name in names}
        return replace(self, **columns, comm_args=comm_args, flops=moved_flops(self.flops, new[self.flops[0]]))

    def named(self, pattern: re.Pattern[str], of_rows: npt.NDArray[np.integer[Any]] | None = None) -> Bool:
        """Mark those of ``names`` in which a pattern is found; with ``of_rows`` no others than theirs are searched."""
        found, search = np.zeros(len(self.names), dtype=np.bool_), pattern.search
        if of_rows is None:
            found[:] = [search(name) is not None for name in self.names]
        else:
            codes = np.flatnonzero(np.bincount(self.name_id[of_rows], minlength=len(found)))
            found[codes] = [search(self.names[code]) is not None for code in codes.tolist()]
        return found

    def rows_named(self, pattern: re.Pattern[str], *categories: Category) -> npt.NDArray[np.intp]:
        """The rows of some categories, of all without any, in whose name a pattern is found."""
        if categories and len(self.names) > _MANY_NAMES:
            rows = np.flatnonzero(self.is_of(*categories))
            return rows[self.named(pattern, rows)[self.name_id[rows]]]
        named = self.named(pattern)
        if not named.any():
            return np.empty(0, dtype=np.intp)
        chosen = named[self.name_id]
        return np.flatnonzero(chosen & self.is_of(*categories) if categories else chosen)

    def codes_without_numbers(self, rows: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.intp]:
        """A code of each row's name without numbers and settings: ranges of other microbatches and steps have the same."""
        ids, name = np.unique(self.name_id[rows], return_inverse=True)
        _, code = np.unique([_NUMBERS.sub("", self.names[number]) for number in ids.tolist()], return_inverse=True)
        codes: npt.NDArray[np.intp] = code[name]
        return codes

    def numbers_of_names(self) -> Int64:
        """A random number for each of ``names``: sums of them tell apart sets of names, also where they overflow."""
        return np.random.default_rng(0).integers(np.iinfo(np.int64).max >> 1, size=len(self.names))

    def is_of(self, *categories: Category) -> Bool:
        """Mark the rows of some categories."""
        chosen: Bool = self.category == categories[0]
        for category in categories[1:]:
            chosen |= self.category == category
        return chosen

    def are_within(self, rows: npt.NDArray[np.intp], threads: Int64, times_ns: Int64) -> Bool:
        """Mark the times that lie within one of some rows on their own thread."""
        within = np.zeros(len(threads), dtype=np.bool_)
        for thread, of_thread in self.rows_by_thread(rows).items():
            chosen = np.flatnonzero(threads == thread)
            within[chosen] = self.intervals_of(of_thread).hold(times_ns[chosen])
        return within

    def outermost(self, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """The outermost of some rows, of the thread that has most of them."""
        return max(self.outermost_of_threads(rows), key=len, default=rows)

    def outermost_of_threads(self, rows: npt.NDArray[np.intp]) -> list[npt.NDArray[np.intp]]:
        """The outermost of some rows, which are in the order of the events, of each thread."""
        by_thread = self.rows_by_thread(rows).values()
        return [of_thread[~self.intervals_of(of_thread).are_inside_another()] for of_thread in by_thread]


def moved_flops(flops: Int64, event: Int64) -> Int64:
    """``flops`` of :class:`Events` whose events are others now, in their order; -1 are left out."""
    flops = np.stack((event, flops[1]))[:, event >= 0]
    return flops[:, np.argsort(flops[0], kind="stable")]


SESSION = "session "
"""Prefix of ``one_clock`` for processes of one Nsight session: they share a clock, so messages do not correct offsets."""

HOST = "host "
"""Prefix of ``one_clock`` for processes with the same host name: they should share its clock; messages may disprove it."""

DEVICE_NAMES = "device_names"
"""Fact: the names of the devices of the rank's host, as the trace's producer wrote them."""

HOST_NAME = "host_name"
"""Fact: the host name as the trace's producer wrote it. Two hosts may have the same name."""

BOOT_NS = "boot_ns"
"""Fact: when the rank's host set its monotonic clock to 0, ns since 1970, from one reading of this and of the wall clock."""

COMMUNICATORS = "communicators"
"""Fact of NCCL Inspector's files and NCCL's ranges in Nsight's: (the rank's place, size) of each of its communicators."""

PARALLEL = "parallel"
"""Fact of spans: sizes of the axes, {"pp", "tp", "dp", "cp"}, and ``pp_rank`` if known; the ranks' coordinates are not known."""

SPANS_DEVICE = "device"
"""Fact of a process of spans with a GPU: its name, or the attribute that shows it. Device work is not in the spans."""


class InputFormat(StrEnum):
    """``inputs[].format`` of the report."""

    KINETO = "kineto"
    NSYS_SQLITE = "nsys-sqlite"
    CHROME = "chrome"
    OPLOG = "oplog"
    OTLP = "otlp"
    ASCEND = "ascend"
    ROCPD = "rocpd"
    XPLANE = "xplane"
    NCCL_INSPECTOR = "nccl-inspector"
    RUN = "run"

    @property
    def has_all_calls(self) -> bool:
        """Return whether a trace has every call that launched work of its device, and none for another's."""
        return self in (InputFormat.KINETO, InputFormat.ROCPD)


class TraceHeader(Struct, frozen=True):
    """Facts of a trace file for one rank.

    ``rank`` is None until it is known. ``metadata`` is the object under the trace's ``pptrace`` key (facts that pptrace's
    recorder wrote), {} in traces of other producers. ``distributed`` is the producer's description of the job (Kineto's
    ``distributedInfo``), {} where absent. ``warnings`` are lines for the user.
    """

    path: str
    format: InputFormat
    rank: int | None
    producer: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    distributed: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


class TraceInfo(TraceHeader, frozen=True, kw_only=True):
    """Facts of a trace without its tables. ``begins_ns`` is when its first and last event begin, None without events."""

    num_events: int
    begins_ns: tuple[int, int] | None = None


class Trace(TraceHeader, frozen=True):
    """The contents of one trace file for one rank.

    ``ops`` and ``comms`` (schemas OPS and COMMS, any rank) are set where the format itself lists ops, named by ``framework``;
    ``events`` are then empty. Where they are None, ops have to be recognised in the events. ``calls`` (schema CALLS) is set
    where the format lists communication only. ``damage`` is what was found damaged while it was read.
    """

    events: Events = field(default_factory=lambda: no_events())
    memory: pd.DataFrame = field(default_factory=lambda: empty_table(MEMORY))
    ops: pd.DataFrame | None = None
    comms: pd.DataFrame | None = None
    framework: str = ""
    calls: pd.DataFrame | None = None
    damage: RankDamage = field(default_factory=RankDamage)

    @property
    def info(self) -> TraceInfo:
        """The facts, and the number of events or rows of all tables that the format lists."""
        tables = (self.events, self.ops, self.comms, self.calls)
        return TraceInfo(
            *(getattr(self, name) for name in TraceHeader.__struct_fields__),
            num_events=sum(len(table) for table in tables if table is not None),
            begins_ns=(int(self.events.start_ns[0]), int(self.events.start_ns[-1])) if len(self.events) else None,
        )


def no_events() -> Events:
    """Empty events, for a trace that lists ops instead."""
    none, narrow = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32)
    return Events(np.zeros(0, dtype=np.int8), narrow, none, none, narrow, none, none, none, ())


ONE_CLOCK = "one_clock"
"""Fact of ranks whose times are on one clock: what they share, such as the path of the table that lists them all."""

OP_TABLE = "oplog"
"""Name of the framework of tables with pptrace's documented columns."""
