"""Infer forwards and backwards by the threads that launch kernels, in traces without operators: Nsight, kernels-only Kineto.

The thread that launches the send/receive kernels runs the forwards itself; autograd launches those of backwards from threads of
its own, while the first one waits for it. What one of them launches from one message to the next, or until the other takes
over, is one op. The k-th forward of a step is that of microbatch k, and so is the k-th backward; steps are separated by their
optimizer and by step ranges. Send/receive kernels of all-to-alls (the kernel is the same) are recognised by their record, by the
thread (autograd's posts no pipeline messages) and by their stream.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection

import numpy as np

from pptrace.model.tables import Bool, Int64
from pptrace.model.traces import Category, Events
from pptrace.recognise.device.work import COMMUNICATION_KERNEL, launch_calls
from pptrace.recognise.labels import Label
from pptrace.recognise.ops.infer_from_operators import (
    Inference,
    Segment,
    SegmentKind,
    confidence,
    drop_incidental_segments,
    with_microbatches,
)
from pptrace.recognise.ops.label_columns import Range, Ranges
from pptrace.schedule.actions import Kind
from pptrace.slices import Slice

_P2P_KERNEL = re.compile(r"(?:nccl|rccl)\w*SendRecv", re.IGNORECASE)
_OPTIMIZER_KERNEL = re.compile(r"multi_tensor_apply|adam|lamb(?!da)|\blion_|adafactor|sgd_", re.IGNORECASE)
_ALL_TO_ALL = re.compile(r"all_?to_?all", re.IGNORECASE)


def optimizer_ranges(events: Events, threads: Collection[int] = ()) -> list[Range]:
    """Launch times of runs of optimizer kernels, recognised by name.

    ``threads`` are those that may launch it (autograd's use kernels of the same name), () for any.
    """
    launches = _launches(events)
    computing = launches.where(~launches["is_communication"])
    start_ns, end_ns, thread, chosen = (computing[name] for name in ("launch_ns", "end_ns", "thread", "is_optimizer"))
    if threads:
        chosen = chosen & np.isin(thread, list(threads))
    opens = np.flatnonzero(chosen & ~np.concatenate(([False], chosen[:-1])))
    closes = np.flatnonzero(chosen & ~np.concatenate((chosen[1:], [False])))
    label = Label("", span="OPTIMIZER", inferred=True)
    return [
        Range(label, int(start_ns[low]), int(end_ns[high]), int(thread[low]))
        for low, high in zip(opens, closes, strict=True)
    ]


def infer_from_launches(events: Events, ranges: Ranges) -> Inference:
    """Ops in time order; nothing where no thread launches both send/receive kernels and others."""
    if not any(map(_P2P_KERNEL.search, events.names)):
        return Inference()
    launches = _launches(events)
    message = _pipeline_messages(launches, events, ranges)
    if not message.any():
        return Inference()
    threads, counts = np.unique(launches["thread"][message], return_counts=True)
    main = int(threads[counts.argmax()])
    message &= launches["thread"] == main
    segments = drop_incidental_segments(_segments(launches, message, main, ranges))
    ops = [(segment, action) for segment, action in with_microbatches(segments) if action.kind.is_compute]
    kinds = Counter(action.kind for _, action in ops)
    computes = ~launches["is_communication"]
    on_main = computes & (launches["thread"] == main)
    starts, ends = (
        np.array([getattr(segment, name) for segment, _ in ops], dtype=np.int64) for name in ("start_ns", "end_ns")
    )
    inside = _within(launches["launch_ns"], starts, ends) & computes
    explained, total = int(inside.sum()), int((computes & ~launches["is_optimizer"]).sum())
    line = (
        f"{kinds[Kind.F]} forwards by order of {message.sum()} send/receive kernels and {on_main.sum()} others of "
        f"thread {main}, {kinds[Kind.B]} backwards by {(computes & ~on_main).sum()} kernels of autograd's threads; "
        f"{explained} of {computes.sum()} kernels lie in them "
        f"({confidence(explained, total, kinds[Kind.F], kinds[Kind.B], agree=False)})"
    )
    return Inference(ops, main, int(message.sum()), (line,))


def _launches(events: Events) -> Slice:
    """The kernels of a rank by the time of their launches."""
    kernels = np.flatnonzero(events.category == Category.KERNEL)
    calls = launch_calls(events, kernels)
    kernels, calls = kernels[calls >= 0], calls[calls >= 0]
    order = np.argsort(events.start_ns[calls], kind="stable")
    kernels, calls = kernels[order], calls[order]

    def named(pattern: re.Pattern[str]) -> Bool:
        return events.named(pattern, kernels)[events.name_id[kernels]]

    return Slice(
        {
            "launch_ns": events.start_ns[calls],
            "end_ns": events.ends_of(calls),
            "thread": events.thread[calls],
            "stream": events.stream[kernels],
            "is_p2p": named(_P2P_KERNEL),
            "is_communication": named(COMMUNICATION_KERNEL),
            "is_optimizer": named(_OPTIMIZER_KERNEL),
        }
    )


def _pipeline_messages(launches: Slice, events: Events, ranges: Ranges) -> Bool:
    """Mark the launches that are pipeline messages: those in ranges of messages if there are any, else all but all-to-alls."""
    labelled = ranges.where(ranges.is_message)
    inside: Bool = launches["is_p2p"] & _within(launches["launch_ns"], labelled.start_ns, labelled.end_ns)
    if inside.any():
        return inside
    named = events.rows_named(_ALL_TO_ALL)
    args = events.comm_args
    by_record = args["collective"].str.contains(_ALL_TO_ALL.pattern, case=False, regex=True)
    calls = np.union1d(named[events.category[named] < Category.HOST_LIMIT], args.loc[by_record, "event"].to_numpy())
    messages: Bool = launches["is_p2p"] & ~_within(launches["launch_ns"], events.start_ns[calls], events.ends_of(calls))
    if not messages.any():
        return messages
    senders, counts = np.unique(launches["thread"][messages], return_counts=True)
    main = senders[counts.argmax()]
    foreign = np.unique(launches["stream"][messages & (launches["thread"] != main)])
    pipeline_messages: Bool = messages & (launches["thread"] == main) & ~np.isin(launches["stream"], foreign)
    return pipeline_messages


def _within(times: Int64, starts: Int64, ends: Int64) -> Bool:
    """Mark the times that lie in any of some stretches."""
    begun, ended = np.searchsorted(np.sort(starts), times, "right"), np.searchsorted(np.sort(ends), times, "right")
    inside: Bool = begun > ended
    return inside


_CODES = (SegmentKind.FORWARD, SegmentKind.BACKWARD, SegmentKind.MESSAGE, SegmentKind.OPTIMIZER)


def _segments(launches: Slice, message: Bool, main: int, ranges: Ranges) -> list[Segment]:
    """Unbroken runs of launches of one kind, and the boundaries between steps."""
    code = np.where(launches["thread"] == main, 0, 1)
    code[launches["is_optimizer"] & (launches["thread"] == main)] = 3
    code[message] = 2
    chosen = message | ~launches["is_communication"]
    starts, ends, code = launches["launch_ns"][chosen], launches["end_ns"][chosen], code[chosen]
    leads = ranges.table.leads[ranges.label]
    spans = ranges.start_ns[ranges.has_span("STEP", "OPTIMIZER") & ~leads]
    starts, ends = np.concatenate((starts, spans)), np.concatenate((ends, spans))
    code = np.concatenate((code, np.full(len(spans), 3, dtype=code.dtype)))
    order = np.argsort(starts, kind="stable")
    starts, ends, code = starts[order], ends[order], code[order]
    first = np.flatnonzero(np.concatenate(([True], code[1:] != code[:-1])))
    after = np.append(first[1:], len(code))
    latest = np.maximum.reduceat(ends, first)
    return [
        Segment(_CODES[int(code[low])], int(starts[low]), int(end), int(high - low))
        for low, high, end in zip(first, after, latest, strict=True)
    ]
