"""The tables that pptrace's rooms exchange: columns, dtypes and units.

Time is int64 nanoseconds (``_ns``), bytes are int64 (``_bytes``); ranks are global ranks. Events are columnar and stay
numpy, because a trace has millions of them; ops, comms and memory are pandas frames with one row per occurrence.
Where a value is unknown, integers are -1 and strings are "". Columns of few texts on many rows are categories, held as codes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import cache, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from pptrace.marks import P2P
from pptrace.schedule.actions import Kind
from pptrace.schedule.messages import Direction

Int8 = npt.NDArray[np.int8]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]

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
    "splits": "str",  # as in COMMS
}

OPS: Schema = {
    "rank": "int64",
    "step": "int64",
    "kind": "str",  # F, B, I, W, OVERLAP_F_B, OPTIMIZER, GRAD_SYNC, STEP, …
    "stage": "int64",
    "chunk": "int64",  # which of its rank's stages, also where labels name no stage (pptrace.recognise.labels.label)
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
    "received_bytes": "int64",  # of an all-to-all of uneven parts, where bytes is what is handed in
    "splits": "str",  # of an all-to-all: rows sent to each member, ">", rows received from each; "3,7>3,1"
    "algorithm": "str",  # algorithm and protocol in the name of NCCL's kernel, "RING_LL"; others may have run in it
}

CALLS: Schema = {
    "kind": "str",  # send, recv, all_reduce, …; send_recv where only a kernel for either was seen
    "group_id": "str",
    "description": "str",
    "group_ranks": "str",  # JSON list of global ranks, "" if unknown or elided
    "group_size": "int64",
    "peer": "int64",  # global rank; of a broadcast the root's
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
    "backward": "int64",  # 1: called inside autograd's engine, 0: not, -1: the trace has no engine; later a groups.usage.When
    "hint": "str",  # axis of its library or of the range around it: ep for DeepEP, tp for user buffers; "" for the others
    "functional": "int64",  # 1: posted by an operator such as _c10d_functional::all_reduce, 0: not
    "worker": "int64",  # thread that executed it, where the process group has worker threads (gloo)
    "splits": "str",  # as in COMMS
    "algorithm": "str",  # as in COMMS
}
"""Communication calls of one rank whose axis is not yet known, one row per call."""

MEMORY: Schema = {"rank": "int64", "t_ns": "int64", "allocated_bytes": "int64", "reserved_bytes": "int64"}


_OPTIONAL: Mapping[str, Any] = {"chunk": UNKNOWN, "received_bytes": UNKNOWN, "splits": "", "algorithm": ""}
"""Columns that a table may be made without, with the value of all rows."""


def make_table(schema: Schema, columns: Mapping[str, Sequence[Any] | npt.NDArray[Any]]) -> pd.DataFrame:
    """Make a frame with exactly the schema's columns and dtypes, in its order.

    Raises:
        KeyError: a column of the schema is missing, other than those that may be left out (``_OPTIONAL``).
        ValueError: a column is not in the schema, or lengths differ.
    """
    unexpected = set(columns) - set(schema)
    if unexpected:
        raise ValueError(f"columns not in the schema: {sorted(unexpected)}")
    size, missing = len(next(iter(columns.values()), ())), set(_OPTIONAL).intersection(schema) - set(columns)
    columns = {**columns, **{name: np.full(size, _OPTIONAL[name]) for name in missing}}
    frame = {name: _column(columns[name], dtype) for name, dtype in schema.items()}
    return pd.DataFrame(frame, copy=False)


_UNKNOWN: Mapping[str, Any] = {"axis": "unknown", "clock": "host", "source": "label"}


def ops_table(columns: Mapping[str, Any]) -> pd.DataFrame:
    """Make a table of schema OPS: one value stands for all rows; what is missing is unknown (-1, ""), host's clock, labelled."""
    return _completed(OPS, columns)


def comms_table(columns: Mapping[str, Any], schema: Schema | None = None) -> pd.DataFrame:
    """Make a table of schema COMMS, or of one with more columns, in the same way; missing times are the start or the end."""
    start, end = columns["start_ns"], columns["end_ns"]
    times = {"posted_ns": start, "asked_ns": start, "transfer_start_ns": start, "transfer_end_ns": end}
    return _completed(schema or COMMS, {**times, **columns})


def _completed(schema: Schema, columns: Mapping[str, Any]) -> pd.DataFrame:
    table: dict[str, Any] = {}
    size = len(columns["start_ns"])
    for name, dtype in schema.items():
        value = columns.get(name, _UNKNOWN.get(name, "" if dtype == "str" else -1))
        if isinstance(value, str):
            value = same_category(value, size)
        elif np.ndim(value) == 0:
            value = np.broadcast_to(np.int64(value), size)
        table[name] = value.array if isinstance(value, pd.Series) else value
    return make_table(schema, table)


def _column(values: Any, dtype: str) -> Any:
    """A column; texts that are categories stay so."""
    if isinstance(values, pd.Categorical) or (isinstance(values, np.ndarray) and values.dtype == dtype == "int64"):
        return values
    return pd.Series(values, dtype="object" if dtype == "str" else dtype, copy=False)


def empty_table(schema: Schema) -> pd.DataFrame:
    return _empty(tuple(schema.items())).copy(deep=False)  # there are no values that it could share


@cache
def _empty(columns: tuple[tuple[str, str], ...]) -> pd.DataFrame:
    """Cached: a small trace has more empty tables than others."""
    no_rows = {name: np.empty(0, "int64" if dtype == "int64" else object) for name, dtype in columns}
    return make_table(dict(columns), no_rows)


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

HOST_ORDER: Schema = {
    "what": "str",  # a What
    "name": "int64",  # equal numbers for equal names of operators
    "number": "int64",  # of a step, of a node, of the node after an operator or message; 0 of a new gradient, 1 of one added
    "start_ns": "int64",
    "end_ns": "int64",
}
"""Host activity of one rank in order of start: a row per outermost operator, engine node, gradient, message or step bound;
their number is -1 if they have none."""


class What(StrEnum):
    OPERATOR = "operator"
    ENGINE = "engine"  # a node that autograd's engine ran
    GRADIENT = "gradient"  # that it accumulated
    MESSAGE = "message"  # its posting call
    BOUND = "bound"  # no op spans it: zero_grad, a barrier
    OPTIMIZER = "OPTIMIZER"
    STEP = "STEP"
    DATA = "DATA"


TEXTS = ("kind", "axis", "direction", "phase", "clock", "source", "pair", "splits", "algorithm")
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
    texts = {}
    for name, dtype in table.dtypes.items():
        if isinstance(dtype, pd.CategoricalDtype):
            values = dtype.categories.to_numpy(dtype=object)[table[name].array.codes]
            texts[str(name)] = pd.Series(values, index=table.index, dtype=object, copy=False)
    return table.assign(**texts)


def as_category(
    texts: pd.Series[Any] | npt.NDArray[Any] | Sequence[str], others: Sequence[str] = ()
) -> pd.Categorical[Any]:
    """A column of texts as categories, those of ``others`` among them."""
    codes, distinct = pd.factorize(np.asarray(texts, dtype=object))
    return category_of_codes(codes, distinct.tolist(), others)


def category_of_codes(
    codes: npt.NDArray[np.integer[Any]], texts: Sequence[str], others: Sequence[str] = ()
) -> pd.Categorical[Any]:
    """A column of indices into ``texts``, as :func:`as_category` makes it of the texts themselves."""
    present = np.flatnonzero(np.bincount(codes, minlength=len(texts)))
    categories = sorted({*(texts[code] for code in present.tolist()), *others})
    index = np.full(len(texts), -1, dtype=np.int64)
    place = {text: code for code, text in enumerate(categories)}  # of splits there may be as many as calls
    index[present] = [place[texts[code]] for code in present.tolist()]
    codes = index[codes] if len(texts) else codes
    return pd.Categorical.from_codes(codes, dtype=_dtype_of(categories), validate=False)


def _dtype_of(categories: Sequence[str]) -> pd.CategoricalDtype[Any]:
    """The type of a column; short ones are made once, since making one takes longer than a small column."""
    return _short_dtype(tuple(categories)) if len(categories) <= _SHORT else pd.CategoricalDtype(list(categories))


@lru_cache(maxsize=256)
def _short_dtype(categories: tuple[str, ...]) -> pd.CategoricalDtype[Any]:
    return pd.CategoricalDtype(list(categories))


_SHORT = 16


def same_category(text: str, num_rows: int) -> pd.Categorical[Any]:
    """A column with one text, as :func:`as_category` makes it."""
    dtype = _dtype_of(sorted({"", text}))
    return pd.Categorical.from_codes(np.full(num_rows, bool(text), dtype=np.int8), dtype=dtype)


def parse_splits(text: str) -> tuple[Sequence[int], Sequence[int]]:
    """(rows sent to each member, rows received from each); empty where nothing is known."""
    if not text:
        return (), ()
    sent, received = (tuple(map(int, side.split(","))) for side in text.split(">"))
    return sent, received


def rows_of_splits(texts: npt.NDArray[np.object_]) -> tuple[Int64, Int64]:
    """(rows sent, rows received) of each call; −1 where its splits are not known."""
    codes, distinct = pd.factorize(texts)
    sums = [tuple(map(sum, parse_splits(str(text)))) if text else (-1, -1) for text in distinct.tolist()]
    columns = np.array(sums or [(-1, -1)], dtype=np.int64)[codes]
    return columns[:, 0], columns[:, 1]


def splits_by_size(texts: Sequence[str]) -> dict[int, tuple[Int64, Int64]]:
    """(places, rows) of the texts of each number of members: ``places`` (n,) among ``texts``, ``rows`` (2, n, members), those
    sent first, then those received.

    Texts without splits, or with what is none (sides of different length, other signs than digits), have no place.
    """
    places: dict[int, list[int]] = {}
    for place, text in enumerate(texts):
        sent, _, received = text.partition(">")
        if _SPLITS.fullmatch(text) and (size := sent.count(",") + 1) == received.count(",") + 1:
            places.setdefault(size, []).append(place)
    found = {}
    for size, chosen in places.items():
        numbers = ",".join([texts[place] for place in chosen]).replace(">", ",")
        rows = np.fromstring(numbers, dtype=np.int64, sep=",").reshape(len(chosen), 2, size)
        found[size] = np.array(chosen, dtype=np.int64), np.ascontiguousarray(rows.swapaxes(0, 1))
    return found


def are_uneven(texts: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Return which texts have parts of different size."""
    return np.array([len(set(text.replace(">", ",").split(","))) > 1 for text in texts], dtype=np.bool_)


_SPLITS = re.compile(r"\d{1,15}(?:,\d{1,15})*>\d{1,15}(?:,\d{1,15})*", re.ASCII)
