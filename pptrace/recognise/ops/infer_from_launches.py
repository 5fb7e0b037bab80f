"""Infer forwards and backwards by the threads that launch kernels, in traces without operators: Nsight, kernels-only Kineto.

The thread that launches the send/receive kernels runs the forwards itself; autograd launches those of backwards from threads of
its own, while the first one waits for it. What one of them launches from one message to the next, or until the other takes
over, is one op. The k-th forward of a step is that of microbatch k, and so is the k-th backward; steps are separated by their
optimizer and by step ranges. Send/receive kernels of all-to-alls (the kernel is the same) are recognised by their record, by the
thread (autograd's posts no pipeline messages) and by their stream.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pptrace.model.tables import Int64
from pptrace.model.traces import Category, Events
from pptrace.recognise.device.communication_names import COMMUNICATION_KERNEL
from pptrace.recognise.labels import Label
from pptrace.recognise.ops.confidence import confidence
from pptrace.recognise.ops.infer_from_operators import (
    Inference,
    Inferred,
    Segment,
    SegmentKind,
    assign_microbatches,
    drop_incidental_segments,
)
from pptrace.recognise.ops.label_columns import Range

_P2P_KERNEL = re.compile(r"(?:nccl|rccl)\w*SendRecv", re.IGNORECASE)
_OPTIMIZER_KERNEL = re.compile(r"multi_tensor_apply|adam|lamb(?!da)|\blion_|adafactor|sgd_", re.IGNORECASE)
_ALL_TO_ALL = re.compile(r"all_?to_?all", re.IGNORECASE)


def optimizer_ranges(events: Events, threads: Collection[int] = ()) -> list[Range]:
    """Launch times of runs of optimizer kernels, recognised by name.

    ``threads`` are those that may launch it (autograd's use kernels of the same name), () for any.
    """
    launches = _launches(events)
    computes = ~launches.is_communication
    chosen = launches.is_optimizer[computes]
    if threads:
        chosen &= np.isin(launches.thread[computes], list(threads))
    if not chosen.any():
        return []
    starts, ends, launch_threads = (
        column[computes] for column in (launches.launch_ns, launches.end_ns, launches.thread)
    )
    opens = np.flatnonzero(chosen & ~np.concatenate(([False], chosen[:-1])))
    closes = np.flatnonzero(chosen & ~np.concatenate((chosen[1:], [False])))
    label = Label("", span="OPTIMIZER", inferred=True)
    return [
        Range(label, int(starts[low]), int(ends[high]), int(launch_threads[low]))
        for low, high in zip(opens, closes, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Launches:
    """The kernels of a rank by the time of their launches: one entry per kernel in every array."""

    launch_ns: Int64
    end_ns: Int64
    thread: Int64
    stream: Int64
    is_p2p: npt.NDArray[np.bool_]
    is_communication: npt.NDArray[np.bool_]
    is_optimizer: npt.NDArray[np.bool_]


def infer_from_launches(events: Events, ranges: Sequence[Range]) -> Inference:
    """Ops in time order; nothing where no thread launches both send/receive kernels and others."""
    if not any(map(_P2P_KERNEL.search, events.names)):
        return Inference([])
    launches = _launches(events)
    message = _pipeline_messages(launches, events, ranges)
    if not message.any():
        return Inference([])
    threads, counts = np.unique(launches.thread[message], return_counts=True)
    main = int(threads[counts.argmax()])
    message &= launches.thread == main
    segments = _segments(launches, message, main, ranges)
    inferred = [
        entry for entry in assign_microbatches(drop_incidental_segments(segments), main) if entry.action.kind.is_compute
    ]
    return Inference(inferred, int(message.sum()), _evidence(inferred, launches, message, main))


def _launches(events: Events) -> _Launches:
    kernels = np.flatnonzero((events.category == Category.KERNEL) & (events.correlation >= 0))
    calls = np.flatnonzero((events.category == Category.RUNTIME) & (events.correlation >= 0))
    calls = calls[np.argsort(events.correlation[calls], kind="stable")]
    correlations = events.correlation[calls]
    at = np.searchsorted(correlations, events.correlation[kernels])
    has_call = at < len(correlations)
    has_call[has_call] = correlations[at[has_call]] == events.correlation[kernels][has_call]
    kernels, calls = kernels[has_call], calls[at[has_call]]
    order = np.argsort(events.start_ns[calls], kind="stable")
    kernels, calls = kernels[order], calls[order]

    def named(pattern: re.Pattern[str]) -> npt.NDArray[np.bool_]:
        codes, code_index = np.unique(events.name_id[kernels], return_inverse=True)
        matches = np.array([bool(pattern.search(events.names[code])) for code in codes.tolist()], dtype=bool)
        return matches[code_index]

    return _Launches(
        launch_ns=events.start_ns[calls],
        end_ns=events.start_ns[calls] + events.dur_ns[calls],
        thread=events.thread[calls],
        stream=events.stream[kernels],
        is_p2p=named(_P2P_KERNEL),
        is_communication=named(COMMUNICATION_KERNEL),
        is_optimizer=named(_OPTIMIZER_KERNEL),
    )


def _pipeline_messages(launches: _Launches, events: Events, ranges: Sequence[Range]) -> npt.NDArray[np.bool_]:
    """Mark the launches that are pipeline messages: those in ranges of messages if there are any, else all but all-to-alls."""
    labelled = [(r.start_ns, r.end_ns) for r in ranges if r.kind is not None and r.kind.is_p2p]
    inside = launches.is_p2p & _within(launches.launch_ns, labelled)
    if inside.any():
        return inside
    messages = launches.is_p2p & ~_within(launches.launch_ns, _all_to_alls(events))
    if not messages.any():
        return messages
    senders, counts = np.unique(launches.thread[messages], return_counts=True)
    main = senders[counts.argmax()]
    foreign = np.unique(launches.stream[messages & (launches.thread != main)])
    pipeline_messages: npt.NDArray[np.bool_] = messages & (launches.thread == main) & ~np.isin(launches.stream, foreign)
    return pipeline_messages


def _all_to_alls(events: Events) -> list[tuple[int, int]]:
    """Host ranges of calls that are all-to-alls by name or record."""
    by_name = np.array([bool(_ALL_TO_ALL.search(name)) for name in events.names], dtype=bool)
    chosen = by_name[events.name_id] & (events.category < Category.HOST_LIMIT)
    rows = set(np.flatnonzero(chosen).tolist())
    args = events.comm_args
    rows |= set(
        args.loc[args["collective"].str.contains(_ALL_TO_ALL.pattern, case=False, regex=True), "event"].tolist()
    )
    return [(int(events.start_ns[row]), int(events.start_ns[row] + events.dur_ns[row])) for row in rows]


def _within(times: Int64, ranges: Sequence[tuple[int, int]]) -> npt.NDArray[np.bool_]:
    """Mark the times that lie in any of the ranges."""
    if not ranges:
        return np.zeros(len(times), dtype=bool)
    starts = np.sort(np.array([start for start, _ in ranges], dtype=np.int64))
    ends = np.sort(np.array([end for _, end in ranges], dtype=np.int64))
    inside: npt.NDArray[np.bool_] = np.searchsorted(starts, times, "right") > np.searchsorted(ends, times, "right")
    return inside


_CODES = (SegmentKind.FORWARD, SegmentKind.BACKWARD, SegmentKind.MESSAGE, SegmentKind.OPTIMIZER)


def _segments(launches: _Launches, message: npt.NDArray[np.bool_], main: int, ranges: Sequence[Range]) -> list[Segment]:
    """Unbroken runs of launches of one kind, and the boundaries between steps."""
    code = np.where(launches.thread == main, 0, 1)
    code[launches.is_optimizer & (launches.thread == main)] = 3
    code[message] = 2
    kept = message | ~launches.is_communication
    starts, ends, code = launches.launch_ns[kept], launches.end_ns[kept], code[kept]
    spans = [r.start_ns for r in ranges if r.label.span in ("STEP", "OPTIMIZER") and not r.label.may_start_before_range]
    starts = np.concatenate((starts, np.array(spans, dtype=np.int64)))
    ends = np.concatenate((ends, np.array(spans, dtype=np.int64)))
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


def _evidence(
    inferred: Sequence[Inferred], launches: _Launches, message: npt.NDArray[np.bool_], main: int
) -> tuple[str, ...]:
    computes = ~launches.is_communication
    is_main_thread = computes & (launches.thread == main)
    kinds = [str(entry.action.kind) for entry in inferred]
    covered = _within(launches.launch_ns, [(e.start_ns, e.end_ns) for e in inferred]) & computes
    explained, total = int(covered.sum()), int((computes & ~launches.is_optimizer).sum())
    confidence_text = confidence(explained, total, kinds.count("F"), kinds.count("B"), agree=False)
    return (
        f"{kinds.count('F')} forwards by order of {int(message.sum())} send/receive kernels and "
        f"{int(is_main_thread.sum())} others of "
        f"thread {main}, {kinds.count('B')} backwards by {int((computes & ~is_main_thread).sum())} kernels of "
        "autograd's threads; "
        f"{explained} of {int(computes.sum())} kernels lie in them ({confidence_text})",
    )
