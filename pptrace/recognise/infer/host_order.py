"""Ordered host activity of a rank: the evidence by which the ranks of an unlabelled pipeline are matched.

Of a trace with operators and without labels of ops: the outermost operators of the thread that posts the messages, the nodes of
autograd's engine in any thread, and what bounds a step; the messages themselves are in the rank's calls. Which operators are a
forward, and which a program runs between its ops, no rank knows alone: :mod:`pptrace.recognise.infer.match_chain` decides.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from pptrace.model.tables import HOST_ORDER, What, empty_table
from pptrace.model.traces import Category, Events
from pptrace.recognise.ops.infer_from_operators import ENGINE, is_message, pipeline_thread
from pptrace.recognise.ops.label_columns import Ranges
from pptrace.recognise.ops.labelled_ranges import labelled_ops, labelled_ranges
from pptrace.recognise.ops.named_ranges import DATA, found_ranges

_COMMUNICATION = re.compile(r"_?c10d(?:_functional)?::|record_param_comms|(?:gloo|nccl|mpi|ucc):")
_VIEW = re.compile(
    r"aten::(?:detach|alias|lift_fresh|resolve_(?:conj|neg)|requires_grad|set|as_strided|view|view_as|reshape|flatten|unflatten|t|"
    r"transpose|permute|expand|select|slice|narrow|squeeze|unsqueeze|unbind|chunk|split|tensor_split|"
    r"ones_like|empty|empty_like|empty_strided|new_empty|new_empty_strided|result_type|is_\w+)_?"
)
"""Operators that name, shape or allocate a tensor, or begin a backward: a program does that around its ops as well."""
_ZERO_GRAD = re.compile(r"Optimizer\.zero_grad#")


def shows_operators(host: pd.DataFrame) -> bool:
    """Return whether the table includes activity between messages."""
    return bool(host["what"].isin((What.OPERATOR.value, What.ENGINE.value)).any())


def find_host_order(events: Events) -> pd.DataFrame:
    """The schema :data:`HOST_ORDER`; empty where labels tell the ops, or no operator posts a message."""
    thread = pipeline_thread(events)
    if thread is None:
        return empty_table(HOST_ORDER)
    ranges = labelled_ranges(events)
    if len(labelled_ops(ranges)):
        return empty_table(HOST_ORDER)
    parts = [
        _operators(events, thread),
        _messages(events, thread),
        _bounds(events, thread),
        _spans(ranges),
        _data(events),
    ]
    table = pd.concat([part for part in parts if len(part)] or [empty_table(HOST_ORDER)], ignore_index=True)
    return table.sort_values("start_ns", kind="stable", ignore_index=True)


def _named(events: Events, test: Callable[[str], object]) -> npt.NDArray[np.bool_]:
    return np.array([bool(test(name)) for name in events.names], dtype=bool)[events.name_id]


def _operators(events: Events, thread: int) -> pd.DataFrame:
    """The outermost operators of the thread that compute, and the engine's nodes of all threads."""
    is_operator = events.category == Category.CPU_OP
    engine = _named(events, lambda name: name.startswith(ENGINE))
    rows = np.flatnonzero(is_operator & (engine | (events.thread == thread)))
    rows = _outermost(events, rows)
    rows = rows[~_named(events, _COMMUNICATION.match)[rows] & ~_named(events, _VIEW.fullmatch)[rows]]
    what = np.where(engine[rows], What.ENGINE.value, What.OPERATOR.value)
    number = np.where(engine[rows], events.correlation[rows], -1)
    return _table(what, events.name_id[rows], number, events.start_ns[rows], events.ends_of(rows))


def _messages(events: Events, thread: int) -> pd.DataFrame:
    """The postings of the thread's sends and receives."""
    rows = np.flatnonzero(is_message(events) & (events.thread == thread))
    return _table(What.MESSAGE.value, -1, events.correlation[rows], events.start_ns[rows], events.ends_of(rows))


def _outermost(events: Events, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """Select the rows (in the order of their starts) that do not begin inside an earlier one of their thread."""
    kept = [
        thread_rows[~events.intervals_of(thread_rows).are_inside_another()]
        for thread_rows in events.rows_by_thread(rows).values()
    ]
    return np.sort(np.concatenate(kept)) if kept else rows


def _bounds(events: Events, thread: int) -> pd.DataFrame:
    """Gradients set to zero, and barriers: other collectives may be part of an op (tensor parallelism)."""
    zero = _named(events, _ZERO_GRAD.match) & (events.category == Category.ANNOTATION)
    barrier = _named(events, lambda name: name == "c10d::barrier") & (events.category == Category.CPU_OP)
    rows = np.flatnonzero(zero | (barrier & (events.thread == thread)))
    return _table(What.BOUND.value, -1, -1, events.start_ns[rows], events.ends_of(rows))


def _spans(ranges: Ranges) -> pd.DataFrame:
    """The ranges of steps and of optimizers."""
    leads = ranges.table.leads[ranges.label]
    spans = ranges.where(ranges.has_span(What.STEP, What.OPTIMIZER) & ~leads)
    table = spans.table
    return _table(table.span[spans.label], -1, table.step[spans.label], spans.start_ns, spans.end_ns)


def _data(events: Events) -> pd.DataFrame:
    """The loading of data."""
    rows = found_ranges(events, DATA)
    return _table(What.DATA.value, -1, -1, events.start_ns[rows], events.ends_of(rows))


def _table(what: Any, name: Any, number: Any, start_ns: Any, end_ns: Any) -> pd.DataFrame:
    """Rows of :data:`HOST_ORDER`; what is one for all need not be repeated."""
    columns = {"what": what, "name": name, "number": number, "start_ns": start_ns, "end_ns": end_ns}
    dtypes = {column: "object" if dtype == "str" else dtype for column, dtype in HOST_ORDER.items()}
    return pd.DataFrame(columns, columns=list(HOST_ORDER)).astype(dtypes)
