"""Ops, sends and receives of one rank from the labels of frameworks.

Where labels name messages or nothing at all, the ops are inferred (:mod:`pptrace.recognise.ops.infer_from_operators`). Ops
last as long as their
compute: the kernels launched inside the range by any thread, or on CPUs the operators in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from pptrace.model.device import DeviceWork
from pptrace.model.mesh import MeshInfo
from pptrace.model.tables import COMMS, OPS, Category, Events, Trace, empty_table
from pptrace.recognise.labels import Label, LabelledAction, megatron
from pptrace.recognise.labels.label import ActionKey
from pptrace.recognise.ops.evaluation_passes import without_evaluations
from pptrace.recognise.ops.host_compute import HostCompute
from pptrace.recognise.ops.infer_between_messages import ops_between_messages
from pptrace.recognise.ops.infer_from_launches import infer_from_launches, optimizer_ranges
from pptrace.recognise.ops.infer_from_operators import (
    Inference,
    Inferred,
    has_optimizer_ranges,
    infer_ops,
    messages_in_ranges,
)
from pptrace.recognise.ops.labelled_ranges import (
    LabelledPhases,
    Range,
    framework_of,
    labelled_ops,
    labelled_ranges,
    num_outside_steps,
    num_sequences,
    spans_of_steps,
    with_steps_and_microbatches,
)
from pptrace.recognise.ops.tables import LaunchIndex, RankTables, table_of
from pptrace.schedule.actions import Kind


def tables_from_labels(trace: Trace, work: DeviceWork, calls: pd.DataFrame) -> RankTables | None:
    """The ops and comms of a trace with op labels or with messages between ops; None when it has neither.

    ``calls`` is all communication of the trace (:func:`pptrace.recognise.calls.find_calls.find_calls`): messages that order
    finds last
    as long as the kernels that carry them, which the end of a batch may have launched.
    The framework is "unlabelled" where order alone tells. Peers are -1 and wait for :func:`with_peers`; stages that no label
    tells are below 0 and wait for :func:`pptrace.recognise.placement.assign_stages.place`.
    """
    labelled = labelled_ranges(trace.events)
    framework = trace.framework or framework_of(labelled) or "unlabelled"
    ops_with_labels = labelled_ops(labelled)
    launches = LaunchIndex(work)
    others = _without_unlaunched_messages([entry for entry in labelled if not entry.label.is_op], launches)
    if ops_with_labels:
        source, evidence = "label", tuple(_sequence_notes(labelled))
        inferred = (
            []
            if any(_is_message(entry) for entry in others)
            else messages_in_ranges(trace.events, _ops_without_stage(ops_with_labels))
        )
    else:
        inference = _inference(trace.events, labelled)
        source = "inferred"
        if not _is_pipeline(inference):
            times = _Times(launches, HostCompute(trace.events))
            by_gaps = _by_gaps(trace, labelled, framework, times, calls)
            return by_gaps or _spans_alone(trace.framework, labelled)
        evidence, inferred = inference.evidence, inference.ranges
        if any(entry.action.kind.is_p2p for entry in inferred):
            others = [entry for entry in others if not _is_message(entry)]
    ranges = [*ops_with_labels, *others, *(_as_range(framework, entry) for entry in inferred)]
    times = _Times(launches, HostCompute(trace.events))
    ops, comms, evidence = _tables(trace.events, ranges, evidence, source, times, calls)
    return RankTables(framework, ops, comms, evidence)


def _by_gaps(
    trace: Trace, labelled: Sequence[Range], framework: str, times: _Times, calls: pd.DataFrame
) -> RankTables | None:
    """Tables of a rank whose labels name messages or phases but no ops; without ops, and with the reason, where these cannot be
    inferred; None without labels of a pipeline.
    """
    between = ops_between_messages(labelled)
    if between is None:
        lengths = LabelledPhases(labelled).lengths()
        if not lengths:
            return None
        spans = ", ".join(
            f"{phase} {sum(lengths_of_phase) / len(lengths_of_phase) / 1e6:,.2f} ms"
            for phase, lengths_of_phase in lengths.items()
        )
        line = (
            f"labels name the phases of steps (means: {spans}), but no op or message in them: ops are null; "
            "record with ranges around forward_step and backward_step"
        )
        return RankTables(framework, empty_table(OPS), empty_table(COMMS), (line,))
    if not between.ops:
        return RankTables(framework, empty_table(OPS), empty_table(COMMS), between.evidence)
    ranges = [*between.ops, *(entry for entry in labelled if not entry.label.is_op)]
    ops, comms, evidence = _tables(trace.events, ranges, between.evidence, "inferred", times, calls)
    return RankTables(framework, ops, comms, evidence, by_gaps=True)


def _tables(
    events: Events, ranges: list[Range], evidence: tuple[str, ...], source: str, times: _Times, calls: pd.DataFrame
) -> tuple[pd.DataFrame, pd.DataFrame, tuple[str, ...]]:
    """OPS, COMMS and warnings from ranges that still lack their steps and microbatches."""
    ranges, skipped = without_evaluations(events, ranges, times.launches)
    phases = LabelledPhases(ranges)
    ranges += _optimizers(events, ranges)
    if num_outside := num_outside_steps(ranges):
        what = "evaluation, or steps whose beginning is not in the trace"
        evidence = (*evidence, f"left out {_counted(num_outside, 'op')} outside all ranges of steps: {what}")
    evidence = (*evidence, *skipped)
    ops, comms = _rows(with_steps_and_microbatches(ranges), source, times, _Messages(events, calls))
    for row in ops:
        row["phase"] = phases.of(row["start_ns"], row["end_ns"]) or ""
    return table_of(OPS, ops), table_of(COMMS, comms), evidence


def _spans_alone(framework: str, labelled: Sequence[Range]) -> RankTables | None:
    """Steps of a trace without ops whose reader names the framework; None otherwise."""
    rows = [_span_row(entry) for entry in spans_of_steps(labelled)] if framework else []
    return RankTables(framework, table_of(OPS, rows), empty_table(COMMS)) if rows else None


def _optimizers(events: Events, ranges: Sequence[Range]) -> list[Range]:
    """Optimizer steps by their kernels, where no range ends a step but ops or messages have to be counted within one."""
    if any(entry.label.span in ("STEP", "OPTIMIZER") for entry in ranges):
        return []
    counted = {
        entry.thread
        for entry in ranges
        for action in entry.label.actions
        if action.microbatch is None or not entry.label.is_op
    }
    return optimizer_ranges(events, counted) if counted else []


def _inference(events: Events, labelled: Sequence[Range]) -> Inference:
    """Infer ops by operators if these name their messages, else by launches."""
    has_ranges = has_optimizer_ranges(events)
    steps = [
        entry.start_ns for entry in labelled if entry.label.span == "STEP" and not entry.label.may_start_before_range
    ]
    by_operators = infer_ops(
        events, () if has_ranges else [(o.start_ns, o.end_ns) for o in optimizer_ranges(events)], steps
    )
    return by_operators if _is_pipeline(by_operators) else infer_from_launches(events, labelled)


def _is_message(entry: Range) -> bool:
    return entry.kind is not None and entry.kind.is_p2p


def _without_unlaunched_messages(ranges: Sequence[Range], launches: LaunchIndex) -> list[Range]:
    """Drop messages without a microbatch whose ranges launched no kernel, if those of others did."""
    counted = {r for r in ranges if _is_message(r) and r.label.actions[0].microbatch is None}
    moved = {r for r in counted if launches.span(r.start_ns, r.end_ns, communication=True)}
    return [r for r in ranges if not moved or r not in counted or r in moved]


def _sequence_notes(ranges: Sequence[Range]) -> list[str]:
    splits = num_sequences(ranges)
    return [f"each of the {splits} parts of a sequence is counted as a microbatch"] if splits > 1 else []


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _as_range(framework: str, entry: Inferred) -> Range:
    return Range(Label(framework, (entry.action,)), entry.start_ns, entry.end_ns, entry.thread)


def _ops_without_stage(ops: Iterable[Range]) -> list[Inferred]:
    """Ops without a stage, inside which their messages may lie."""
    return [
        Inferred(op.action, op.start_ns, op.end_ns, op.thread)
        for op in ops
        if op.action is not None and op.action.stage is None
    ]


def _is_pipeline(inference: Inference) -> bool:
    """Whether the inferred ops have forwards, about as many backwards, and messages between them."""
    kinds = [entry.action.kind for entry in inference.ranges]
    fewer, more = sorted((kinds.count(Kind.F), kinds.count(Kind.B)))
    return fewer > 0 and more <= 2 * fewer and inference.num_messages > 0


def _rows(
    ranges: Sequence[Range], source: str, times: _Times, messages: _Messages
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows of OPS and of COMMS."""
    readers = {(key, entry.step): entry for entry in ranges for key in _reads(entry.action)}
    times.calls_wait = megatron.calls_wait(entry.label for entry in ranges)
    arrivals = _arrivals(ranges, readers, messages)
    ops: list[dict[str, Any]] = []
    comms: list[dict[str, Any]] = []
    for entry in ranges:
        if _is_message(entry):
            for action in entry.label.actions:
                reader = readers.get((action.key, entry.step))
                comms.append(_comm_row(entry, action, reader, times, messages))
        elif entry.label.actions or entry.label.span:
            ops.append(_op_row(entry, times, source, arrivals.get(id(entry))))
    chunk_of = {stage: chunk for chunk, stage in enumerate(sorted({row["stage"] for row in ops if row["stage"] >= 0}))}
    for row in ops:
        row["chunk"] = chunk_of.get(row["stage"], -1)
    return ops, comms


def _arrivals(
    ranges: Sequence[Range], readers: Mapping[tuple[ActionKey, int], Range], messages: _Messages
) -> dict[int, int]:
    """By the id of an op's range the time at which its last received message had been waited for, where a range shows it."""
    arrivals: dict[int, int] = {}
    for entry in ranges:
        for action in entry.label.actions if _is_message(entry) else ():
            reader = readers.get((action.key, entry.step)) if action.kind.is_recv else None
            arrival = None if reader is None else messages.arrival(entry.start_ns, entry.end_ns)
            if reader is not None and arrival is not None:
                arrivals[id(reader)] = max(arrival, arrivals.get(id(reader), arrival))
    return arrivals


def with_peers(comms: pd.DataFrame, ops: pd.DataFrame, mesh: MeshInfo) -> pd.DataFrame:
    """Fill in the peers of sends and receives: the rank of the same pipeline that holds the other stage."""
    holders: dict[tuple[tuple[int, ...], int], int] = {}
    for rank, stage in ops.loc[ops["stage"] >= 0, ["rank", "stage"]].drop_duplicates().itertuples(index=False):
        holders[mesh.pipeline_of(rank), stage] = rank
    lacking = (comms["peer"] < 0) & (comms["stage"] >= 0) & comms["direction"].isin(("F", "B"))
    if not lacking.any():
        return comms
    filled, rows = comms.copy(), comms[lacking]
    next_or_previous = np.where((rows["kind"] == "send") == (rows["direction"] == "F"), 1, -1)
    wanted = zip(rows["rank"], rows["stage"] + next_or_previous, strict=True)
    filled.loc[lacking, "peer"] = [holders.get((mesh.pipeline_of(rank), stage), -1) for rank, stage in wanted]
    return filled


def drop_messages_beyond_ends(comms: pd.DataFrame, ops: pd.DataFrame, mesh: MeshInfo) -> pd.DataFrame:
    """Drop messages from before the first stage or beyond the last one: combined send-receive functions are called on all
    ranks, and move nothing there.
    """
    compute = ops[ops["stage"] >= 0]
    if compute.empty or mesh.pp is None:
        return comms
    last = max(int(compute["stage"].max()), mesh.pp * (mesh.vpp or 1) - 1)
    ordered = (
        (comms["axis"] == "pp") & (comms["peer"] < 0) & (comms["stage"] >= 0) & comms["direction"].isin(("F", "B"))
    )
    other_stage = comms["stage"] + np.where((comms["kind"] == "send") == (comms["direction"] == "F"), 1, -1)
    absent = ordered & ((other_stage < 0) | (other_stage > last))
    return comms[~absent] if absent.any() else comms


def _reads(action: LabelledAction | None) -> Iterator[ActionKey]:
    """Keys of the receives whose messages an op reads."""
    if action is None or not action.kind.is_compute:
        return
    kinds = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B, Kind.I: Kind.RECV_B}
    for half in action.halves:
        if half.kind in kinds:
            yield half.key_of(kinds[half.kind])


class _Times:
    """Execution times of ops, and transfer times of messages."""

    def __init__(self, launches: LaunchIndex, host: HostCompute) -> None:
        self.launches = launches
        self._host = host
        self.calls_wait = False
        """Whether what is received is there when its labelled call returns."""

    def of_op(self, entry: Range, arrival_ns: int | None = None) -> tuple[int, int, str]:
        """(start, end, clock) of the compute inside a range; where nothing shows it of the range itself, from when its message
        had been waited for (``arrival_ns``): a first stage has no input gradient to compute, and waits for its output's.
        """
        if span := self.launches.span(entry.start_ns, entry.end_ns, communication=False):
            start, end, clock = span[0], span[1], "device"
        else:
            inside = self._host.span(entry.thread, entry.start_ns, entry.end_ns)
            start, end = inside or (min(max(entry.start_ns, arrival_ns or 0), entry.end_ns), entry.end_ns)
            clock = "host"
        part, parts = entry.part
        length = end - start
        return start + length * part // parts, start + length * (part + 1) // parts, clock

    def read_at(self, reader: Range, arrival_ns: int | None) -> int:
        """When an op had the message that it reads, which had been waited for by ``arrival_ns`` where that is known.

        An op may wait inside its range, which then begins before its message is there, unlike the first operator in it; the
        second half of an overlapped pair waits after operators of the first.
        """
        op_start = self.of_op(reader)[0]
        if arrival_ns is None:
            return op_start
        if reader.part[0] or (reader.action is not None and reader.action.parts):
            return arrival_ns
        is_seen = self.launches.span(reader.start_ns, reader.end_ns, communication=False) or self._host.span(
            reader.thread, reader.start_ns, reader.end_ns
        )
        return min(arrival_ns, op_start) if is_seen else arrival_ns


class _Messages:
    """gloo's ranges, which last until a message was waited for, and the kernels and sizes of NCCL's calls."""

    def __init__(self, events: Events, calls: pd.DataFrame) -> None:
        carried = calls[calls["kind"].isin(("send", "recv")) & (calls["clock"] == "device")]
        spans = zip(*(carried[name].tolist() for name in ("start_ns", "end_ns", "stream")), strict=True)
        self._kernels = dict(zip(carried["host_ns"].tolist(), spans, strict=True))
        gloo = np.array([name in ("gloo:send", "gloo:recv") for name in events.names], dtype=bool)
        rows = np.flatnonzero(gloo[events.name_id]) if gloo.any() else np.empty(0, dtype=np.intp)
        self._starts, self._ends = events.start_ns[rows], events.ends_of(rows)
        args = events.comm_args[events.category[events.comm_args["event"].to_numpy()] < Category.HOST_LIMIT]
        args = args[(args["collective"] != "") | gloo[events.name_id[args["event"].to_numpy()]]]
        sized = args[args[["in_bytes", "out_bytes"]].max(axis=1) > 0]
        self._sized_at = events.start_ns[sized["event"].to_numpy()] if len(sized) else self._starts[:0]
        self._bytes = sized[["in_bytes", "out_bytes"]].max(axis=1).to_numpy(dtype=np.int64)

    def kernel(self, host_ns: int) -> tuple[int, int, int] | None:
        """(start, end, stream) of the kernel that carries the message whose call began then."""
        return self._kernels.get(host_ns)

    def arrival(self, start_ns: int, end_ns: int) -> int | None:
        """Time at which the only message posted in [start_ns, end_ns) had been waited for; None where no range shows it."""
        low, high = np.searchsorted(self._starts, (start_ns, end_ns))
        return int(self._ends[low]) if high == low + 1 else None

    def size(self, start_ns: int, end_ns: int) -> int:
        """Bytes of the calls in [start_ns, end_ns); -1 if not recorded."""
        low, high = np.searchsorted(self._sized_at, (start_ns, end_ns))
        return int(self._bytes[low:high].sum()) if low < high else -1


def _op_row(entry: Range, times: _Times, source: str, arrival_ns: int | None) -> dict[str, Any]:
    action = entry.action
    if action is None:
        return _span_row(entry)
    row: dict[str, Any] = {"rank": -1, "step": entry.step, "stage": -1, "chunk": -1, "microbatch": -1, "phase": ""}
    row["pair"] = str(action) if action.parts else ""
    start, end, clock = times.of_op(entry, arrival_ns)
    microbatch = -1 if action.microbatch is None else action.microbatch
    row |= {"kind": action.kind.value, "stage": action.stage_column, "microbatch": microbatch}
    return row | {"start_ns": start, "end_ns": end, "clock": clock, "source": source}


def _span_row(entry: Range) -> dict[str, Any]:
    """A part of a step that is no op: of the OPS table it has a kind and times alone."""
    none = dict.fromkeys(("rank", "stage", "chunk", "microbatch"), -1) | dict.fromkeys(("phase", "pair"), "")
    times = {"start_ns": entry.start_ns, "end_ns": entry.end_ns, "clock": "host"}
    source = "inferred" if entry.label.inferred else "label"
    return {**none, **times, "step": entry.step, "kind": entry.label.span, "source": source}


def _comm_row(
    entry: Range, action: LabelledAction, reader: Range | None, times: _Times, messages: _Messages
) -> dict[str, Any]:
    """A send lies in a buffer when its posting is over; a receive is over when its reader has it."""
    start, posted, stream, clock = entry.start_ns, entry.end_ns, -1, "host"
    wait_start = end = posted
    if span := messages.kernel(start) or times.launches.span(start, posted, communication=True):
        start, end, stream = span
        posted, wait_start, clock = start, start, "device"
    elif action.kind.is_recv and times.calls_wait and messages.arrival(entry.start_ns, entry.end_ns) is None:
        posted = wait_start = start
    elif action.kind.is_recv and reader is not None:
        wait_start = max(posted, reader.start_ns)
        arrival = messages.arrival(entry.start_ns, entry.end_ns)
        end = max(posted, times.read_at(reader, arrival))
        if end == posted:  # the message was there: nobody left
            posted = wait_start = start
    size = messages.size(entry.start_ns, entry.end_ns)
    return {
        "rank": -1,
        "step": entry.step,
        "kind": "send" if action.kind.is_send else "recv",
        "axis": "pp",
        "peer": -1,
        "group_size": 2,
        "bytes": size if len(entry.label.actions) == 1 else -1,
        "direction": action.kind.value[-1],
        "stage": action.stage_column,
        "microbatch": -1 if action.microbatch is None else action.microbatch,
        "start_ns": start,
        "posted_ns": posted,
        "asked_ns": min(wait_start, end),
        "end_ns": end,
        "transfer_start_ns": start,
        "transfer_end_ns": end,
        "stream": stream,
        "match": -1,
        "clock": clock,
    }
