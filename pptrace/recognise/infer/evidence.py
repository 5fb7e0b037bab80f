"""The evidence of a rank without labelled ops: what its host did, in order, by which ranks are matched to a pipeline.

Of a trace with operators and without labels of ops: the outermost operators of the thread that posts the messages, the nodes of
autograd's engine in any thread, and what bounds a step; the messages themselves are in the rank's calls. Which operators are a
forward, and which a program runs between its ops, no rank knows alone: :mod:`pptrace.recognise.infer.match_chain` decides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt
import pandas as pd
from msgspec import Struct

from pptrace.model.join_tables import concat_tables
from pptrace.model.tables import HOST_ORDER, Bool, Int64, What, empty_table
from pptrace.model.traces import Category, Events
from pptrace.recognise.groups.broadcast_links import two_way_broadcasts
from pptrace.recognise.ops.infer_from_operators import ENGINE, message_rows, thread_of_most
from pptrace.recognise.ops.label_columns import labelled_ops, labelled_ranges
from pptrace.recognise.ops.named_ranges import DATA, found_ranges

_ENGINE = re.compile(rf"^(?:{ENGINE}|torch\.distributed\.ddp\.reducer::copy_bucket_to_grad\Z)")
"""Nodes of the engine, and DDP's operator at the end of a backward, behind the waits for its buckets."""
_COMMUNICATION = re.compile(r"^(?:_?c10d(?:_functional)?::|record_param_comms|(?:gloo|nccl|mpi|ucc):)")
_ACCUMULATE = re.compile(rf"{ENGINE}: torch::autograd::AccumulateGrad\Z")
_ADD = re.compile(r"aten::add_\Z")
_VIEW = re.compile(
    r"^aten::(?:detach|alias|lift_fresh|resolve_(?:conj|neg)|requires_grad|set|as_strided|view|view_as|reshape|flatten|unflatten|t|"
    r"transpose|permute|expand|select|slice|narrow|squeeze|unsqueeze|unbind|chunk|split|tensor_split|"
    r"ones_like|empty|empty_like|empty_strided|new_empty|new_empty_strided|result_type|is_\w+)_?\Z"
)
"""Operators that name, shape or allocate a tensor, or begin a backward: a program does that around its ops as well."""
_BROADCAST = re.compile(r"c10d::broadcast_\Z")
_OPTIMIZER_STEP = re.compile(r"Optimizer\.step#")
_ZERO_GRAD = re.compile(r"^Optimizer\.zero_grad#")
_BARRIER = re.compile(r"^c10d::barrier\Z")


def find_host_order(events: Events, calls: pd.DataFrame) -> pd.DataFrame:
    """The schema :data:`HOST_ORDER`; empty where labels tell the ops, or no operator posts a message. Without any, broadcasts
    in groups of two, of the rank's ``calls``, may be messages.
    """
    messages = message_rows(events)
    if not len(messages):
        messages = _posts_of_broadcasts(events, calls)
    thread = thread_of_most(events, messages)
    ranges = None if thread is None else labelled_ranges(events)
    if ranges is None or len(labelled_ops(ranges)):
        return empty_table(HOST_ORDER)

    on_thread = events.thread == thread
    engine = events.named(_ENGINE)[events.name_id]
    rows = np.flatnonzero((events.category == Category.CPU_OP) & (engine | on_thread))
    rows = np.sort(np.concatenate([rows[:0], *events.outermost_of_threads(rows)]))
    rows = rows[~(events.named(_COMMUNICATION) | events.named(_VIEW))[events.name_id[rows]]]
    messages = messages[on_thread[messages]]
    barriers = events.rows_named(_BARRIER, Category.CPU_OP)
    barriers = barriers[on_thread[barriers]]  # others may be part of an op
    bounds = np.union1d(events.rows_named(_ZERO_GRAD, Category.ANNOTATION), barriers)
    data = found_ranges(events, DATA)
    data = data[on_thread[data]]  # what others load ahead keeps this one from nothing
    spans = ranges.where(ranges.has_span(What.STEP, What.OPTIMIZER) & ~ranges.table.leads[ranges.label])
    labels = spans.table
    # (what, name, number, start, end); what is one for all is not repeated
    parts: list[tuple[Any, ...]] = [
        (
            np.where(engine[rows], What.ENGINE.value, What.OPERATOR.value),
            events.name_id[rows],
            events.correlation[rows],
            events.start_ns[rows],
            events.ends_of(rows),
        ),
        (What.MESSAGE.value, -1, events.correlation[messages], events.start_ns[messages], events.ends_of(messages)),
        (What.GRADIENT.value, -1, *_gradients(events)),
        (What.BOUND.value, -1, -1, events.start_ns[bounds], events.ends_of(bounds)),
        (labels.span[spans.label], -1, labels.step[spans.label], spans.start_ns, spans.end_ns),
        (What.DATA.value, -1, -1, events.start_ns[data], events.ends_of(data)),
    ]
    dtypes = {column: "object" if dtype == "str" else dtype for column, dtype in HOST_ORDER.items()}
    columns = ("what", "name", "number", "start_ns", "end_ns")
    tables = [
        pd.DataFrame(dict(zip(columns, part, strict=True)), columns=list(HOST_ORDER)).astype(dtypes) for part in parts
    ]
    return concat_tables(tables).sort_values("start_ns", kind="stable", ignore_index=True)


def _gradients(events: Events) -> tuple[Int64, Int64, Int64]:
    """(1 where it is added to the gradient before it, 0 where there is none; start; end) of each gradient accumulated."""
    gradients, adds = (events.rows_named(name, Category.CPU_OP) for name in (_ACCUMULATE, _ADD))
    starts, ends, added_ns = events.start_ns[gradients], events.ends_of(gradients), np.sort(events.start_ns[adds])
    added = np.searchsorted(added_ns, ends) > np.searchsorted(added_ns, starts)
    return added.astype(np.int64), starts, ends


def _posts_of_broadcasts(events: Events, calls: pd.DataFrame) -> npt.NDArray[np.intp]:
    """The operators that post the broadcasts which may be messages: each the first one since the call began."""
    begins = calls["host_ns"].to_numpy()[two_way_broadcasts(calls)]
    rows = events.rows_named(_BROADCAST, Category.CPU_OP)
    first = np.searchsorted(events.start_ns[rows], begins)
    rows = np.unique(rows[first[first < len(rows)]])
    optimizers = events.rows_named(_OPTIMIZER_STEP, Category.ANNOTATION)  # copies of parameters
    return rows[~events.are_within(optimizers, events.thread[rows], events.start_ns[rows])]


class _Columns(Struct, frozen=True):
    """Columns of equal length."""

    def where(self, chosen: Bool | Int64) -> Self:
        return type(self)(*(getattr(self, name)[chosen] for name in self.__struct_fields__))


class Messages(_Columns, frozen=True):
    """Sends or receives of one rank in the order of their posting.

    ``row`` is the row in the rank's calls; ``peer`` the global rank and ``num_bytes`` the size, -1 if unknown. ``ready_ns`` is
    when the host knew a receive to be complete, or was done with its posting where nothing tells that.
    """

    row: Int64
    peer: Int64
    num_bytes: Int64
    post_ns: Int64
    ready_ns: Int64

    def __len__(self) -> int:
        return len(self.row)


class Rows(_Columns, frozen=True):
    """Operators, nodes of autograd's engine, gradients or postings of messages in time order; columns as in ``HOST_ORDER``."""

    start_ns: Int64
    end_ns: Int64
    name: Int64
    number: Int64


class Evidence(Struct, frozen=True):
    """Evidence of one rank's trace for the match; ``bounds`` are the starts of what no op goes over, ``inputs`` when data was
    loaded, and messages of no op had come (:mod:`pptrace.recognise.infer.one_way`).
    """

    rank: int
    sends: Messages
    recvs: Messages
    operators: Rows
    engine: Rows
    gradients: Rows
    postings: Rows
    bounds: Int64
    optimizers: Int64
    inputs: Int64

    def between(self, begin_ns: int, end_ns: int) -> Evidence:
        """Evidence that began in a stretch of time."""

        def inside(part: Any) -> Any:
            at = part.post_ns if isinstance(part, Messages) else part.start_ns if isinstance(part, Rows) else part
            chosen = (at >= begin_ns) & (at < end_ns)
            return part[chosen] if part is at else part.where(chosen)

        return Evidence(self.rank, *(inside(getattr(self, name)) for name in self.__struct_fields__[1:]))


def evidence_of(rank: int, host: pd.DataFrame, calls: pd.DataFrame, peers: Int64) -> Evidence:
    """The evidence of a rank.

    Args:
        host: what its thread did (schema ``HOST_ORDER``).
        calls: its communication (schema ``CALLS``).
        peers: for each call the other global rank of a message, -1 where unknown.
    """
    what = host["what"].to_numpy()
    posted, on_host = calls["host_ns"].to_numpy(), (calls["clock"] == "host").to_numpy()

    def rows(kind: What) -> Rows:
        rows_of_kind = host[what == kind.value]
        return Rows(*(rows_of_kind[name].to_numpy() for name in ("start_ns", "end_ns", "name", "number")))

    def messages(kind: str) -> Messages:
        index = np.flatnonzero((calls["kind"] == kind).to_numpy())
        index = index[np.argsort(posted[index], kind="stable")].astype(np.int64)
        ready = np.where(on_host[index], calls["end_ns"].to_numpy()[index], posted[index])
        num_bytes = calls["bytes"].to_numpy()[index]
        return Messages(index, peers[index], num_bytes, posted[index], ready)

    bounds = np.isin(what, [What.BOUND.value, What.OPTIMIZER.value, What.STEP.value])
    return Evidence(
        rank,
        messages("send"),
        messages("recv"),
        rows(What.OPERATOR),
        rows(What.ENGINE),
        rows(What.GRADIENT),
        rows(What.MESSAGE),
        host.loc[bounds, "start_ns"].to_numpy(),
        rows(What.OPTIMIZER).start_ns,
        rows(What.DATA).end_ns,
    )


def name_peers(evidence: Iterable[Evidence]) -> bool:
    """Return whether all messages name the ranks that they go to and come from."""
    return all((messages.peer >= 0).all() for rank in evidence for messages in (rank.sends, rank.recvs))


class MismatchError(Exception):
    """Reason for which the order of a rank, or of several, cannot be that of a pipeline with one stage on each rank; whatever
    matches or checks may raise it.
    """


Option = TypeVar("Option")
Result = TypeVar("Result")


def outcome_of(hypothesis: Callable[[Option], Result], option: Option) -> Result | MismatchError:
    """The result of a hypothesis on the evidence, or the reason against it."""
    try:
        return hypothesis(option)
    except MismatchError as err:
        return err


def first_match(hypothesis: Callable[[Option], Result], options: Iterable[Option]) -> Result:
    """The result of a hypothesis on the first option that the evidence allows.

    Raises:
        MismatchError: it allows none; the reason is that against the first.
    """
    reasons = []
    for option in options:
        outcome = outcome_of(hypothesis, option)
        if not isinstance(outcome, MismatchError):
            return outcome
        reasons.append(outcome)
    raise reasons[0]
