"""The tables that pptrace's rooms exchange: columns, dtypes and units.

Time is int64 nanoseconds (``_ns``), bytes are int64 (``_bytes``); ranks are global ranks. Events are columnar and stay
numpy, because a trace has millions of them; ops, comms and memory are pandas frames with one row per occurrence.
Where a value is unknown, integers are -1 and strings are "".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from pandas.api.types import union_categoricals

from pptrace.intervals import NestedIntervals
from pptrace.marks import P2P
from pptrace.schedule.actions import Kind
from pptrace.schedule.messages import Direction

Int8 = npt.NDArray[np.int8]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


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


@dataclass(frozen=True, slots=True)
class Events:
    """All complete (duration) events of one rank, one entry per event in every array, sorted by ``start_ns``.

    ``name_id`` indexes ``names``. ``device`` and ``stream`` are -1 for host events, ``thread`` is -1 for device events.
    ``correlation`` joins a runtime call to the device work it launched. For a node of autograd's engine it is the node's sequence
    number, for a ``c10d`` send or receive that of the next node created on its thread; -1 where there is none.
    ``comm_args`` is sparse: one row per event that carries communication fields (schema :data:`COMM_ARGS`).
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
    comm_args: pd.DataFrame

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def end_ns(self) -> Int64:
        return self.start_ns + self.dur_ns

    def ends_of(self, rows: npt.NDArray[np.integer[Any]]) -> Int64:
        """End times of some rows, ns; computing only these saves memory: all ends of a large trace take as much as its starts."""
        ends: Int64 = self.start_ns[rows] + self.dur_ns[rows]
        return ends

    def rows_by_thread(self, rows: npt.NDArray[np.intp]) -> dict[int, npt.NDArray[np.intp]]:
        """Some rows by their thread, each in the order given."""
        threads = self.thread[rows]
        return {thread: rows[threads == thread] for thread in np.unique(threads).tolist()}

    def intervals_of(self, rows: npt.NDArray[np.intp]) -> NestedIntervals:
        """The times of some rows, which are in the order of the events."""
        return NestedIntervals(self.start_ns[rows], self.ends_of(rows))


SESSION = "session "
"""Prefix of ``one_clock`` for processes of one Nsight session: they share a clock, so messages do not correct offsets."""


HOST = "host "
"""Prefix of ``one_clock`` for processes with the same host name: they should share its clock; messages may disprove it."""
DEVICE_NAMES = "device_names"
"""Fact: the names of the devices of the rank's host, as the trace's producer wrote them."""
HOST_NAME = "host_name"
"""Fact: the host name as the trace's producer wrote it. Two hosts may have the same name."""


class InputFormat(StrEnum):
    """``inputs[].format`` of the report."""

    KINETO = "kineto"
    NSYS_SQLITE = "nsys-sqlite"
    CHROME = "chrome"
    OPLOG = "oplog"
    OTLP = "otlp"
    NCCL_INSPECTOR = "nccl-inspector"
    RUN = "run"


@dataclass(frozen=True, slots=True)
class TraceInfo:
    """Header of a trace: all of :class:`Trace` but its tables.

    ``rank`` is None until it is known. ``metadata`` is the object under the trace's ``pptrace`` key (facts that pptrace's
    recorder wrote), {} in traces of other producers. ``distributed`` is the producer's description of the job (Kineto's
    ``distributedInfo``), {} where absent. ``warnings`` are lines for the user.
    """

    path: str
    format: InputFormat
    rank: int | None
    producer: str
    num_events: int
    metadata: Mapping[str, Any] = field(default_factory=dict)
    distributed: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """The contents of one trace file for one rank; fields shared with :class:`TraceInfo` mean the same.

    ``ops`` and ``comms`` (schemas OPS and COMMS, any rank) are set where the format itself lists ops, named by ``framework``;
    ``events`` are then empty. Where they are None, ops have to be recognised in the events. ``calls`` (schema CALLS) is set
    where the format lists communication only.
    """

    path: str
    format: InputFormat
    rank: int | None
    producer: str
    events: Events
    memory: pd.DataFrame
    metadata: Mapping[str, Any] = field(default_factory=dict)
    distributed: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    ops: pd.DataFrame | None = None
    comms: pd.DataFrame | None = None
    framework: str = ""
    calls: pd.DataFrame | None = None

    @property
    def num_events(self) -> int:
        rows = 0 if self.ops is None else len(self.ops)
        rows += 0 if self.calls is None else len(self.calls)
        return len(self.events) + rows + (0 if self.comms is None else len(self.comms))

    @property
    def info(self) -> TraceInfo:
        return TraceInfo(
            self.path,
            self.format,
            self.rank,
            self.producer,
            self.num_events,
            self.metadata,
            self.distributed,
            self.warnings,
        )

    def with_info(self, info: TraceInfo) -> Trace:
        """This trace with the rank and warnings of ``info``."""
        rank = -1 if info.rank is None else info.rank
        memory = self.memory.assign(rank=rank).astype({"rank": "int64"})
        return replace(self, rank=info.rank, memory=memory, warnings=info.warnings)

    def with_more(self, later: Trace) -> Trace:
        """This trace with the rows of another one of the same rank; facts that both have are those of this one."""
        return replace(
            self,
            memory=concat_tables([self.memory, later.memory]),
            metadata={**later.metadata, **self.metadata},
            warnings=(*self.warnings, *later.warnings),
            ops=concat_tables([self.ops, later.ops]),
            comms=concat_tables([self.comms, later.comms]),
        )


Schema = Mapping[str, str]

UNKNOWN = -1
"""Value of a column of numbers, such as a stage, a microbatch or a peer, where it is not known or there is none."""

COMM_ARGS: Schema = {
    "event": "int64",  # row in Events
    "collective": "str",  # as the producer names it
    "in_bytes": "int64",
    "out_bytes": "int64",
    "group_id": "str",
    "group_description": "str",
    "group_ranks": "str",  # JSON list of global ranks, "" if unknown or elided
    "group_size": "int64",
    "src": "int64",
    "dst": "int64",
    "seq": "int64",
    "in_elements": "int64",  # of a call without the name of a collective, whose tensor shapes were recorded
}

OPS: Schema = {
    "rank": "int64",
    "step": "int64",
    "kind": "str",  # F, B, I, W, OVERLAP_F_B, OPTIMIZER, GRAD_SYNC, STEP, …
    "stage": "int64",
    "chunk": "int64",  # which of its rank's stages, also where labels name no stage (pptrace.model.stage_texts)
    "microbatch": "int64",
    "phase": "str",
    "start_ns": "int64",
    "end_ns": "int64",
    "clock": "str",  # device or host
    "source": "str",  # label or inferred; simulated for a simulated run
    "pair": "str",  # of an OVERLAP_F_B: the action as text; the other columns are those of its forward half
}

SLACK: Schema = {
    "slack_ns": "int64",  # −1 where the step lacks ops of its plan, or ranks' times do not compare
    "on_critical_path": "boolean",  # <NA> there
}
"""Columns of ops in exports and in the API, found when they are asked for."""

COMMS: Schema = {
    "rank": "int64",
    "step": "int64",
    "kind": "str",  # send, recv, all_reduce, …
    "axis": "str",
    "peer": "int64",  # the other global rank of a send or receive
    "group_size": "int64",
    "bytes": "int64",
    "direction": "str",  # F or B for pipeline sends and receives
    "stage": "int64",
    "chunk": "int64",  # of a message whose label names a chunk and no stage; may be left out where a table is made
    "microbatch": "int64",
    "start_ns": "int64",  # this side has called and is ready
    "posted_ns": "int64",  # posted ahead: when the posting call returned; otherwise start_ns
    "asked_ns": "int64",  # when this side starts to wait for it; start_ns where it was not posted ahead
    "end_ns": "int64",  # this side is done
    "transfer_start_ns": "int64",  # both sides are ready; equals start_ns until the two sides are matched
    "transfer_end_ns": "int64",  # transfer over; before end_ns where this side still waited for other calls of its batch
    "stream": "int64",
    "match": "int64",  # the same number on both ends of a transfer or all members of a collective
    "clock": "str",  # device or host; none where only the duration end − start is known
}

CALLS: Schema = {
    "kind": "str",  # send, recv, all_reduce, …; send_recv where only a kernel for either was seen
    "group_id": "str",
    "description": "str",
    "group_ranks": "str",  # JSON list of global ranks, "" if unknown or elided
    "group_size": "int64",
    "peer": "int64",  # global rank
    "local_peer": "int64",  # the peer's rank within the group, where its global rank is unknown
    "bytes": "int64",  # of the larger of input and output
    "seq": "int64",
    "host_ns": "int64",  # start of the call on the host; of the kernel where the call was not recorded
    "start_ns": "int64",  # the following as in COMMS
    "posted_ns": "int64",
    "asked_ns": "int64",
    "end_ns": "int64",
    "stream": "int64",
    "clock": "str",  # as in COMMS
    "backward": "int64",  # 1: called inside autograd's engine, 0: not, -1: the trace has no engine
    "hint": "str",  # axis that the library serves: ep for DeepEP, tp for user buffers; "" for the others
    "functional": "int64",  # 1: posted by an operator such as _c10d_functional::all_reduce, 0: not
    "worker": "int64",  # thread that executed it, where the process group has worker threads (gloo)
}
"""Communication calls of one rank whose axis is not yet known, one row per call."""

MEMORY: Schema = {"rank": "int64", "t_ns": "int64", "allocated_bytes": "int64", "reserved_bytes": "int64"}


def concat_tables(tables: Sequence[pd.DataFrame | None]) -> pd.DataFrame:
    """Concatenate tables of one schema; None and empty ones are skipped, since empty columns would become floats."""
    present = [table for table in tables if table is not None]
    filled = [table for table in present if len(table)] or present[:1]
    return filled[0].reset_index(drop=True) if len(filled) == 1 else _joined(filled, [str(name) for name in filled[0]])


def _joined(tables: Sequence[pd.DataFrame], names: Sequence[str]) -> pd.DataFrame:
    """Some columns of tables one behind the other; what are categories in all of them stay so."""
    joined: dict[Any, Any] = {}
    for name in names:
        parts = [table[name] for table in tables]
        whole = _concatenated([part.array for part in parts])
        if whole is not None:
            joined[name] = whole
            continue
        is_category = [isinstance(part.dtype, pd.CategoricalDtype) for part in parts]
        if not any(is_category) or all(part.dtype == parts[0].dtype for part in parts):
            joined[name] = pd.concat(parts, ignore_index=True)
        elif all(is_category):
            joined[name] = union_categoricals([part.array for part in parts], sort_categories=True)
        else:
            joined[name] = pd.concat([part.astype(object) for part in parts], ignore_index=True)
    return pd.DataFrame(joined, copy=False)


def _concatenated(parts: Sequence[Any]) -> npt.NDArray[np.int64] | pd.Categorical[Any] | None:
    """Integers, or texts with the same categories, one behind the other; None of other columns."""
    first = parts[0].dtype
    if isinstance(first, pd.CategoricalDtype):
        categories = first.categories
        if not all(isinstance(part, pd.Categorical) and categories.equals(part.categories) for part in parts):
            return None
        codes = np.concatenate([part.codes for part in parts])
        return pd.Categorical.from_codes(codes, dtype=first, validate=False)
    if any(part.dtype != np.int64 for part in parts):
        return None
    return np.concatenate([part.to_numpy() for part in parts])


def join_adjacent(tables: Sequence[pd.DataFrame], without: Sequence[str] = ()) -> pd.DataFrame:
    """Concatenate tables of one schema without some columns; where they are parts of one table, one behind the other, nothing
    is copied.
    """
    names = [str(name) for name in tables[0] if name not in without]
    if len(tables) == 1:
        return tables[0][names].reset_index(drop=True)
    columns: dict[Any, Any] = {}
    for name in names:
        parts = [table[name].array for table in tables]
        categories = parts[0].dtype
        if isinstance(categories, pd.CategoricalDtype) and all(part.dtype is categories for part in parts):
            codes = _joined_view([part.codes for part in parts])
            columns[name] = (
                None if codes is None else pd.Categorical.from_codes(codes, dtype=categories, validate=False)
            )
        else:
            columns[name] = _joined_view([part.to_numpy() for part in parts])
        if columns[name] is None:
            return _joined(tables, names)
    return pd.DataFrame(columns, copy=False)


def _joined_view(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any] | None:
    """The array of which these arrays are the parts, one behind the other; None where they are not."""
    first = parts[0]
    if not all(part.flags.c_contiguous and part.dtype == first.dtype and part.dtype != object for part in parts):
        return None
    begins = np.array([part.__array_interface__["data"][0] for part in parts])
    sizes = np.array([part.nbytes for part in parts])
    base = _owner(first)
    if (
        base is None
        or (begins[:-1] + sizes[:-1] != begins[1:]).any()
        or any(_owner(part) is not base for part in parts)
    ):
        return None
    offset = int(begins[0] - base.__array_interface__["data"][0])
    count = int(sizes.sum()) // first.itemsize
    view: npt.NDArray[Any] = (
        base.reshape(-1).view(np.uint8)[offset : offset + int(sizes.sum())].view(first.dtype)[:count]
    )
    return view


def _owner(array: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
    """The contiguous array that owns the memory of a view; None where no array does."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array if array.base is None and array.flags.c_contiguous else None


def make_table(schema: Schema, columns: Mapping[str, Sequence[Any] | npt.NDArray[Any]]) -> pd.DataFrame:
    """Make a frame with exactly the schema's columns and dtypes, in its order.

    Raises:
        KeyError: a column of the schema is missing, other than the chunk of messages.
        ValueError: a column is not in the schema, or lengths differ.
    """
    unexpected = set(columns) - set(schema)
    if unexpected:
        raise ValueError(f"columns not in the schema: {sorted(unexpected)}")
    if schema is COMMS and "chunk" not in columns:
        columns = {**columns, "chunk": np.full(len(columns["stage"]), UNKNOWN)}
    frame = {name: _column(columns[name], dtype) for name, dtype in schema.items()}
    return pd.DataFrame(frame, copy=False)


def _column(values: Any, dtype: str) -> Any:
    """A column; texts that are categories stay so."""
    if isinstance(values, pd.Categorical) or (isinstance(values, np.ndarray) and values.dtype == dtype == "int64"):
        return values
    return pd.Series(values, dtype="object" if dtype == "str" else dtype, copy=False)


TEXTS = ("kind", "axis", "direction", "phase", "clock", "source", "pair")
"""Columns of the tables of ops and communication with few texts on many rows: of a whole run they are categories (codes)."""

_USUAL_TEXTS: Mapping[str, tuple[str, ...]] = {
    "direction": ("", "B", "F"),
    "phase": ("", "cooldown", "steady", "warmup"),
    "clock": ("", "device", "host", "none"),
}


def with_categories(table: pd.DataFrame) -> pd.DataFrame:
    """The table with its texts as categories, in alphabetical order, the usual ones of each column among them."""
    columns = {}
    for name in [name for name in TEXTS if name in table]:
        usual = _USUAL_TEXTS.get(name, ("",))
        if not isinstance(table[name].dtype, pd.CategoricalDtype):
            columns[name] = as_category(table[name], usual)
        elif not set(usual) <= set(table[name].cat.categories):
            columns[name] = table[name].array.set_categories(sorted({*table[name].cat.categories, *usual}))
    return table.assign(**columns)


def without_categories(table: pd.DataFrame) -> pd.DataFrame:
    """The table with its categories as texts."""
    names = [name for name in table if isinstance(table[name].dtype, pd.CategoricalDtype)]
    return table.assign(**{str(name): table[name].astype(object) for name in names})


def as_category(texts: pd.Series[Any] | npt.NDArray[Any], others: Sequence[str] = ()) -> pd.Categorical[Any]:
    """A column of texts as categories, those of ``others`` among them."""
    codes, present = pd.factorize(np.asarray(texts, dtype=object))
    categories = sorted({*present.tolist(), *others})
    code_of = np.array([categories.index(text) for text in present.tolist()], dtype=np.int64)
    dtype: pd.CategoricalDtype[Any] = pd.CategoricalDtype(categories)
    return pd.Categorical.from_codes(code_of[codes] if len(present) else codes, dtype=dtype)


def category_of_codes(
    codes: npt.NDArray[np.integer[Any]], texts: Sequence[str], others: Sequence[str] = ()
) -> pd.Categorical[Any]:
    """A column of indices into ``texts``, as :func:`as_category` makes it of the texts themselves."""
    present = np.flatnonzero(np.bincount(codes, minlength=len(texts)))
    categories = sorted({*(texts[code] for code in present.tolist()), *others})
    index = np.full(len(texts), -1, dtype=np.int64)
    index[present] = [categories.index(texts[code]) for code in present.tolist()]
    dtype: pd.CategoricalDtype[Any] = pd.CategoricalDtype(categories)
    return pd.Categorical.from_codes(index[codes] if len(texts) else codes, dtype=dtype, validate=False)


def same_category(text: str, num_rows: int) -> pd.Categorical[Any]:
    """A column with one text, as :func:`as_category` makes it."""
    dtype: pd.CategoricalDtype[Any] = pd.CategoricalDtype(sorted({"", text}))
    code = dtype.categories.tolist().index(text)
    return pd.Categorical.from_codes(np.full(num_rows, code, dtype=np.int8), dtype=dtype)


def no_events() -> Events:
    """Empty events, for a trace that lists ops instead."""
    none, narrow = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32)
    category = np.zeros(0, dtype=np.int8)
    return Events(category, narrow, none, none, narrow, none, none, none, (), empty_table(COMM_ARGS))


def empty_table(schema: Schema) -> pd.DataFrame:
    return _empty(tuple(schema.items())).copy()


@cache
def _empty(columns: tuple[tuple[str, str], ...]) -> pd.DataFrame:
    """Cached: a small trace has more empty tables than others."""
    return make_table(dict(columns), {name: [] for name, _ in columns})


COMPUTE_KINDS = tuple(str(kind) for kind in Kind if kind.is_compute)
FORWARD_KINDS = ("F", "OVERLAP_F_B")
BACKWARD_KINDS = ("B", "I", "OVERLAP_F_B")
"""Kinds of ops that compute; those with a forward, and with a backward that others wait for."""


DIRECTIONS = tuple(str(direction) for direction in Direction)
"""Directions of the pipeline's messages."""

MESSAGE_CALLS = (*P2P, "send_recv")
"""Kinds of calls and kernels that carry messages, or may."""
GARBAGE_COLLECTION = "GC"
"""Kind of the rows of OPS that are garbage collections of the host's Python, within and between other rows."""

MESSAGES = (*MESSAGE_CALLS, "unknown")
"""Kinds that are, or may be, messages between two ranks."""


ONE_CLOCK = "one_clock"
"""Fact of ranks whose times are on one clock: what they share, such as the path of the table that lists them all."""


OP_TABLE = "oplog"
"""Name of the framework of tables with pptrace's documented columns."""


HOST_ORDER: Schema = {
    "what": "str",  # a What
    "name": "int64",  # equal numbers for equal names of operators
    "number": "int64",  # a step's number, a node's sequence number, a message's next node; -1 if none
    "start_ns": "int64",
    "end_ns": "int64",
}
"""Host activity of one rank in order of start: a row per outermost operator, engine node, message or step bound."""


class What(StrEnum):
    OPERATOR = "operator"
    ENGINE = "engine"  # a node that autograd's engine ran
    MESSAGE = "message"  # its posting call
    BOUND = "bound"  # no op spans it: zero_grad, a barrier
    OPTIMIZER = "OPTIMIZER"
    STEP = "STEP"
