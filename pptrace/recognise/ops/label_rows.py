"""The tables of ops and communication from labelled ranges whose steps and microbatches are known."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from msgspec import Struct
from msgspec.structs import replace

from pptrace.marks import P2P
from pptrace.model.tables import DIRECTIONS, UNKNOWN, Bool, Int64, category_of_codes, comms_table, ops_table
from pptrace.model.traces import Category, Events
from pptrace.recognise.labels import megatron
from pptrace.recognise.labels.label import stage_text
from pptrace.recognise.ops.host_compute import computing_spans
from pptrace.recognise.ops.label_actions import LabelledActions
from pptrace.recognise.ops.label_columns import IS_MESSAGE, NONE, LabelledPhases, Ranges
from pptrace.recognise.ops.label_steps import LaunchedWork, LaunchIndex
from pptrace.schedule.actions import KINDS, Kind, Phase
from pptrace.slices import Slice, distinct_rows, last_like, reduce_groups, rows_among

_IS_SEND = np.array([kind.is_send for kind in KINDS])
_IS_FORWARD = np.array([kind in (Kind.SEND_F, Kind.RECV_F) for kind in KINDS])
_READ_BY = np.full(len(KINDS) + 1, NONE)
"""Code of the receive whose message a kind reads, by the kind's code."""
_READ_BY[Kind.F.code], _READ_BY[[Kind.B.code, Kind.I.code]] = Kind.RECV_F.code, Kind.RECV_B.code


_GLOO = re.compile(r"^gloo:(?:send|recv)\Z")
_SOURCES = ("label", "inferred")
_NOBODY = np.iinfo(np.int64).min
"""The start of the op that reads a message, where none does."""


class CarriedMessages:
    """gloo's ranges, which last until a message was waited for, and the kernels and sizes of NCCL's calls."""

    def __init__(self, events: Events, calls: pd.DataFrame) -> None:
        carried = np.flatnonzero(rows_among(calls["kind"], P2P) & (calls["clock"] == "device"))
        self._carried = {name: calls[name].to_numpy()[carried] for name in ("host_ns", "start_ns", "end_ns", "stream")}
        gloo, rows = events.named(_GLOO), events.rows_named(_GLOO)
        self._starts, self._ends = events.start_ns[rows], events.ends_of(rows)
        event = events.comm_args["event"].to_numpy()
        is_named = (events.comm_args["collective"] != "").to_numpy()
        num_bytes = np.maximum(events.comm_args["in_bytes"].to_numpy(), events.comm_args["out_bytes"].to_numpy())
        is_call = is_named | gloo[events.name_id[event]] if len(event) else np.empty(0, dtype=bool)
        sized = np.flatnonzero(is_call & (events.category[event] < Category.HOST_LIMIT) & (num_bytes > 0))
        self._sized_at = events.start_ns[event[sized]]
        self._bytes = np.append(0, np.cumsum(num_bytes[sized]))

    def kernels(self, host_ns: Int64) -> LaunchedWork:
        """The kernels that carry the messages whose calls began then."""
        call = last_like([host_ns], [self._carried["host_ns"]])
        start_ns, end_ns, stream = (
            np.append(self._carried[name], 0)[call] for name in ("start_ns", "end_ns", "stream")
        )
        return LaunchedWork(call >= 0, start_ns, end_ns, stream, np.zeros_like(call))

    def arrivals(self, start_ns: Int64, end_ns: Int64) -> Int64:
        """Times at which the only message posted in each [start_ns, end_ns) had been waited for; −1 where no range shows it."""
        low, high = np.searchsorted(self._starts, start_ns), np.searchsorted(self._starts, end_ns)
        return np.where(high == low + 1, np.append(self._ends, 0)[low], -1)

    def sizes(self, start_ns: Int64, end_ns: Int64) -> Int64:
        """Bytes of the calls in each [start_ns, end_ns); -1 if not recorded."""
        low, high = np.searchsorted(self._sized_at, start_ns), np.searchsorted(self._sized_at, end_ns)
        return np.where(low < high, self._bytes[high] - self._bytes[low], -1)


def tables_of_labels(
    labelled: LabelledActions,
    source: str,
    launches: LaunchIndex,
    events: Events,
    calls: pd.DataFrame,
    phases: LabelledPhases,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """OPS and COMMS. Ops last as long as the kernels that they launched, or the operators that ran in them, from when their
    message had been waited for; those that nothing else shows begin then.
    """
    ranges, actions = labelled.ranges, labelled.in_time_order()
    is_message = IS_MESSAGE[ranges.kind][actions["range"]]
    ops, moved = actions.where(~is_message), actions.where(is_message)
    of_ops = ranges.where(ops["range"])
    readers, messages = _readers(ops, moved), CarriedMessages(events, calls)
    arrivals = messages.arrivals(ranges.start_ns[moved["range"]], ranges.end_ns[moved["range"]])
    is_read = (readers >= 0) & (arrivals >= 0)  # when the last message of an op had been waited for
    posted, arrived = (
        reduce_groups(np.maximum, times[is_read], readers[is_read], len(ops))
        for times in (ranges.start_ns[moved["range"]], arrivals)
    )
    # The second half of an overlapped pair waits after operators of the first.
    is_shared = (ops["part"] > 0) | (ops["second_kind"] >= 0)
    whole = _computing(events, launches, of_ops)
    computing, late = _behind_waits(whole, (posted, np.where(is_shared, -1, arrived)), events, launches, of_ops)
    start, end, is_shown = computing.start_ns, computing.end_ns, computing.is_shown
    # An op may wait inside its range, which then begins before its message is there.
    begin = np.append(start + (end - start) * ops["part"] // ops["parts"], 0)[readers]
    waits_inside = np.append(~is_shown | is_shared | late, False)[readers]
    read_at = np.where(waits_inside, arrivals, np.minimum(arrivals, begin))
    asked = np.append(of_ops.start_ns, _NOBODY)[readers]
    computes_before = np.append(late, False)[readers] & (arrivals >= 0)
    asked[computes_before] = _last_ends(
        events, of_ops.thread[readers[computes_before]], asked[computes_before], arrivals[computes_before]
    )
    reading = (asked, arrivals, np.where(arrivals < 0, begin, read_at))
    comms = _comms(ranges, moved, reading, launches, messages)
    start = np.where(is_shown, start, np.minimum(np.maximum(start, arrived), end))
    return _ops(labelled, ops, source, (start, end, computing.launched), phases), comms


class _Computing(Struct, frozen=True):
    """From when to when each op computed: on its device where it ``launched`` anything, else its operators; if either
    ``is_shown``, else its range.
    """

    start_ns: Int64
    end_ns: Int64
    launched: Bool
    is_shown: Bool


def _computing(events: Events, launches: LaunchIndex, ranges: Ranges) -> _Computing:
    work = launches.spans(ranges.start_ns, ranges.end_ns, communication=False)
    ran, start, end = computing_spans(events, ranges.thread, ranges.start_ns, ranges.end_ns)
    start = np.where(ran, start, np.minimum(np.maximum(start, 0), end))
    start, end = np.where(work.launched, work.start_ns, start), np.where(work.launched, work.end_ns, end)
    return _Computing(start, end, work.launched, work.launched | ran)


def _behind_waits(
    whole: _Computing, messages: tuple[Int64, Int64], events: Events, launches: LaunchIndex, ranges: Ranges
) -> tuple[_Computing, Bool]:
    """(the times without what ran before the op's message was there, such as copies of gathered parameters; which ops ran any).

    The receive of an op that posts it after the larger part of its own compute lies in the op, whose times stay.

    Args:
        whole: the times in all of the ranges.
        messages: when the op's last message was posted, and when it had been waited for.
    """
    posted, arrived = messages
    late = whole.is_shown & (whole.start_ns < arrived) & (arrived < np.minimum(whole.end_ns, ranges.end_ns))
    rows = np.flatnonzero(late)
    if not len(rows):
        return whole, late
    behind = _computing(events, launches, replace(ranges.where(rows), start_ns=arrived[rows]))
    late[rows] = behind.launched | ~whole.launched[rows]  # else all was launched before the message was there
    start = whole.start_ns.copy()
    begins = late[rows] & (posted[rows] - start[rows] < whole.end_ns[rows] - behind.start_ns)
    start[rows[begins]] = behind.start_ns[begins]
    return replace(whole, start_ns=start), late


def _last_ends(events: Events, threads: Int64, starts_ns: Int64, ends_ns: Int64) -> Int64:
    """The end of the last operator or range, messages apart, that ended in each stretch of a thread; its start without any."""
    last = starts_ns.copy()
    is_message = events.named(_GLOO)[events.name_id]
    others = np.flatnonzero(events.is_of(Category.CPU_OP, Category.ANNOTATION) & ~is_message)
    for thread, rows in events.rows_by_thread(others).items():
        chosen = np.flatnonzero(threads == thread)
        ended = np.append(_NOBODY, np.sort(events.ends_of(rows)))
        before = ended[np.searchsorted(ended, ends_ns[chosen], side="right") - 1]
        last[chosen] = np.maximum(last[chosen], before)
    return last


def _readers(ops: Slice, moved: Slice) -> Int64:
    """The op that reads each received message; −1 for what is sent, and where none reads it."""
    halves = [
        np.stack((_READ_BY[first], ops["step"], *(ops[f"{prefix}{name}"] for name in ("stage", "chunk", "microbatch"))))
        for prefix, first in (
            ("", np.where(ops["second_kind"] >= 0, Kind.F.code, ops["kind"])),
            ("second_", ops["second_kind"]),
        )
    ]
    rows = np.stack(halves, axis=2).reshape(5, -1)  # both halves of an op side by side
    reads = np.flatnonzero(rows[0] >= 0)
    received = [moved[name] for name in ("kind", "step", "stage", "chunk", "microbatch")]
    reader = last_like(received, list(rows[:, reads]))
    return np.where(reader >= 0, np.append(reads // 2, 0)[reader], NONE)


def _ops(
    labelled: LabelledActions, ops: Slice, source: str, times: tuple[Int64, Int64, Bool], phases: LabelledPhases
) -> pd.DataFrame:
    """The table of ops, and of the spans between them, in time order; ``times`` are starts, ends and whether on the device."""
    ranges = labelled.ranges
    (start, end, on_device), part, parts = times, ops["part"], ops["parts"]
    pair, pairs = _pairs(ops)
    # The index of each known stage among those of the rank; where labels name chunks in place of stages, these.
    has_stage = ops["stage"] >= 0
    stages = np.unique(ops["stage"][has_stage])
    chunk = ops["chunk"] if (ops["chunk"][~has_stage] > 0).any() else UNKNOWN
    columns: dict[str, Any] = {
        **{name: ops[name] for name in ("step", "kind", "stage", "microbatch")},
        "chunk": np.where(has_stage, np.searchsorted(stages, ops["stage"]), chunk),
        "start_ns": start + (end - start) * part // parts,
        "end_ns": start + (end - start) * (part + 1) // parts,
        "clock": on_device.astype(np.int64),
        "source": np.full(len(ops), _SOURCES.index(source)),
        "pair": pair,
    }
    rows = np.flatnonzero(~ranges.has_actions & ranges.has_span())
    of_spans = _span_columns(ranges.where(rows))
    none, one = np.zeros(len(rows), dtype=np.int64), np.ones(len(rows), dtype=np.int64)
    at = np.append(ops["range"], rows)
    order = np.lexsort((at, np.append(parts, one), np.append(part, none), ranges.start_ns[at]))
    joined = {name: np.concatenate((column, of_spans[name]))[order] for name, column in columns.items()}
    return _ops_table(joined, ranges, pairs, phases)


def spans_table(ranges: Ranges) -> pd.DataFrame:
    """The OPS table of spans alone."""
    return _ops_table(_span_columns(ranges), ranges, ("",), None)


def _span_columns(ranges: Ranges) -> dict[str, Any]:
    """Parts of a step that are no ops: of the OPS table they have a kind and times alone. Texts are codes."""
    kind = len(KINDS) + pd.factorize(ranges.table.span)[0]
    is_inferred = ranges.table.of(lambda label: label.inferred, np.int64)
    unknown = dict.fromkeys(("stage", "chunk", "microbatch"), np.full(len(ranges), -1))
    return {
        **unknown,
        "step": ranges.step,
        "kind": kind[ranges.label],
        "start_ns": ranges.start_ns,
        "end_ns": ranges.end_ns,
        "clock": np.zeros(len(ranges), dtype=np.int64),
        "source": is_inferred[ranges.label],
        "pair": np.zeros(len(ranges), dtype=np.int64),
    }


def _ops_table(
    columns: Mapping[str, Any], ranges: Ranges, pairs: Sequence[str], phases: LabelledPhases | None
) -> pd.DataFrame:
    """The OPS table of columns whose texts are codes: of kinds, then of the spans of the ranges' labels, and of ``pairs``."""
    start, end = columns["start_ns"], columns["end_ns"]
    phase = np.full(len(start), NONE) if phases is None else phases.of(start, end)
    kinds = (*(kind.value for kind in KINDS), *pd.unique(ranges.table.span))
    texts = {"kind": kinds, "source": _SOURCES, "pair": pairs, "clock": ("host", "device")}
    categories: dict[str, Any] = {name: category_of_codes(columns[name], of_name) for name, of_name in texts.items()}
    categories["phase"] = category_of_codes(phase + 1, ("", *Phase))
    return ops_table({**columns, **categories})


def _pairs(ops: Slice) -> tuple[Int64, tuple[str, ...]]:
    """(index of each op's text, the texts): those of overlapped pairs, and first "" for other ops."""
    pair, texts = np.zeros(len(ops), dtype=np.int64), [""]
    rows = np.flatnonzero(ops["second_kind"] >= 0)
    if len(rows):
        halves = [
            [ops[f"{prefix}{name}"][rows] for name in ("stage", "chunk", "microbatch")] for prefix in ("", "second_")
        ]
        columns = np.stack([*halves[0], ops["second_kind"][rows], *halves[1]], axis=1)
        distinct, index = distinct_rows(columns)
        pair[rows] = 1 + index
        for *first, second_kind, stage, chunk, microbatch in distinct:
            backward = _action(KINDS[second_kind], stage, chunk, microbatch)
            texts.append(f"({_action(Kind.F, *first)};{backward}){Kind.OVERLAP_F_B}")
    return pair, tuple(texts)


def _action(kind: Kind, stage: int, chunk: int, microbatch: int) -> str:
    return f"{stage_text(stage, chunk)}{kind}{'' if microbatch < 0 else microbatch}"


def _comms(
    ranges: Ranges, moved: Slice, reading: tuple[Int64, Int64, Int64], launches: LaunchIndex, messages: CarriedMessages
) -> pd.DataFrame:
    """The table of communication, in time order.

    ``reading`` has for each message the start of the op that reads it (:data:`_NOBODY` without one), until when it had been
    waited for where a range shows that (−1: none), and when its reader had it.
    """
    reader_start, arrival, read_at = reading
    start, end = ranges.start_ns[moved["range"]], ranges.end_ns[moved["range"]]
    is_send = _IS_SEND[moved["kind"]]
    # A send lies in a buffer when its posting is over; a receive is over when its reader has it.
    returns_with_it = ~is_send & megatron.calls_wait(ranges.present()) & (arrival < 0)
    is_read = ~is_send & ~returns_with_it & (reader_start != _NOBODY)
    over = np.where(is_read, np.maximum(end, read_at), end)
    stays = returns_with_it | (is_read & (over == end))  # the message was there: nobody left
    asked = np.where(stays, start, np.where(is_read, np.maximum(end, reader_start), end))
    on_host = {
        "start_ns": start,
        "posted_ns": np.where(stays, start, end),
        "asked_ns": np.minimum(asked, over),
        "end_ns": over,
    }
    of_call, launched = messages.kernels(start), launches.spans(start, end, communication=True)
    on_device = of_call.launched | launched.launched
    kernels = {
        name: np.where(of_call.launched, getattr(of_call, name), getattr(launched, name))
        for name in ("start_ns", "end_ns", "stream")
    }
    kernels |= dict.fromkeys(("posted_ns", "asked_ns"), kernels["start_ns"])
    columns: dict[str, Any] = {name: np.where(on_device, kernels[name], column) for name, column in on_host.items()}
    is_alone = ranges.table.num_actions[ranges.label[moved["range"]]] == 1
    columns |= {
        "step": moved["step"],
        "kind": category_of_codes((~is_send).astype(np.int64), P2P),
        "axis": "pp",
        "group_size": 2,
        "bytes": np.where(is_alone, messages.sizes(start, end), -1),
        "direction": category_of_codes((~_IS_FORWARD[moved["kind"]]).astype(np.int64), DIRECTIONS),
        "stage": moved["stage"],
        "chunk": np.where(moved["stage"] < 0, moved["chunk"], UNKNOWN),
        "microbatch": moved["microbatch"],
        "stream": np.where(on_device, kernels["stream"], -1),
        "clock": category_of_codes(on_device.astype(np.int64), ("host", "device")),
    }
    return comms_table(columns)
