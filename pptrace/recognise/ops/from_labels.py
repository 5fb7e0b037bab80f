"""Ops, sends and receives of one rank from the labels of frameworks.

Where labels name messages or nothing at all, the ops are inferred (:mod:`pptrace.recognise.ops.infer_from_operators`). Ops
last as long as their
compute: the kernels launched inside the range by any thread, or on CPUs the operators in it.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from pptrace.model.device import DeviceWork
from pptrace.model.mesh import MeshInfo
from pptrace.model.tables import COMMS, DIRECTIONS, OPS, Int64, empty_table
from pptrace.model.traces import Events, Trace
from pptrace.recognise.labels import Label
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
from pptrace.recognise.ops.label_actions import num_sequences, steps_of_ranges, with_microbatches
from pptrace.recognise.ops.label_columns import Range, Ranges
from pptrace.recognise.ops.label_rows import CarriedMessages, LabelTimes, spans_table, tables_of_labels
from pptrace.recognise.ops.label_steps import num_outside_steps, spans_of_steps
from pptrace.recognise.ops.labelled_ranges import LabelledPhases, framework_of, labelled_ops, labelled_ranges
from pptrace.recognise.ops.tables import LaunchIndex, RankTables
from pptrace.schedule.actions import Kind
from pptrace.slices import last_like, rows_where


def tables_from_labels(trace: Trace, work: DeviceWork, calls: pd.DataFrame) -> RankTables | None:
    """The ops and comms of a trace with op labels or with messages between ops; None when it has neither.

    ``calls`` is all communication of the trace (:func:`pptrace.recognise.calls.find_calls.find_calls`): messages that order
    finds last
    as long as the kernels that carry them, which the end of a batch may have launched.
    The framework is "unlabelled" where order alone tells. Peers are -1 and wait for :func:`with_peers`; stages that no label
    tells are unknown until the ranks are joined (:mod:`pptrace.recognise.infer.locate`).
    """
    labelled = labelled_ranges(trace.events)
    framework = trace.framework or framework_of(labelled) or "unlabelled"
    ops_with_labels = labelled_ops(labelled)
    launches = LaunchIndex(work)
    others = _without_unlaunched_messages(labelled.where(~labelled.is_op), launches)
    if len(ops_with_labels):
        source, evidence = "label", tuple(_sequence_notes(labelled))
        if others.is_message.any():
            inferred = others.where(np.zeros(len(others), dtype=np.bool_))
        else:
            inferred = messages_in_ranges(trace.events, _without_stage(ops_with_labels), framework)
    else:
        inference = _inference(trace.events, labelled)
        source = "inferred"
        if not _is_pipeline(inference):
            times = LabelTimes(launches, HostCompute(trace.events))
            by_gaps = _by_gaps(trace, labelled, framework, times, calls)
            return by_gaps or _spans_alone(trace.framework, labelled)
        evidence = inference.evidence
        inferred = Ranges.of(_as_range(framework, entry) for entry in inference.ranges)
        if inferred.is_message.any():
            others = others.where(~others.is_message)
    ranges = Ranges.joined([ops_with_labels, others, inferred])
    times = LabelTimes(launches, HostCompute(trace.events))
    ops, comms, evidence = _tables(trace.events, ranges, evidence, source, times, calls)
    return RankTables(framework, ops, comms, evidence)


def _by_gaps(
    trace: Trace, labelled: Ranges, framework: str, times: LabelTimes, calls: pd.DataFrame
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
    ranges = Ranges.joined([Ranges.of(between.ops), labelled.where(~labelled.is_op)])
    ops, comms, evidence = _tables(trace.events, ranges, between.evidence, "inferred", times, calls)
    return RankTables(framework, ops, comms, evidence, by_gaps=True)


def _tables(
    events: Events, ranges: Ranges, evidence: tuple[str, ...], source: str, times: LabelTimes, calls: pd.DataFrame
) -> tuple[pd.DataFrame, pd.DataFrame, tuple[str, ...]]:
    """OPS, COMMS and warnings from ranges that still lack their steps and microbatches."""
    ranges, skipped = without_evaluations(events, ranges, times.launches)
    phases = LabelledPhases(ranges)
    if optimizers := _optimizers(events, ranges):
        ranges = Ranges.joined([ranges, Ranges.of(optimizers)])
    stepped = steps_of_ranges(ranges)
    if num_outside := num_outside_steps(ranges, stepped):
        what = "evaluation, or steps whose beginning is not in the trace"
        evidence = (*evidence, f"left out {_counted(num_outside, 'op')} outside all ranges of steps: {what}")
    evidence = (*evidence, *skipped)
    labelled = with_microbatches(stepped)
    return *tables_of_labels(labelled, source, times, CarriedMessages(events, calls), phases), evidence


def _spans_alone(framework: str, labelled: Ranges) -> RankTables | None:
    """Steps of a trace without ops, as torch.profiler's ranges or the reader tell them; None without any."""
    stepped = spans_of_steps(labelled)
    if not len(stepped.ranges):
        return None
    return RankTables(framework or "unlabelled", spans_table(stepped), empty_table(COMMS))


def _optimizers(events: Events, ranges: Ranges) -> list[Range]:
    """Optimizer steps by their kernels, where no range ends a step but ops or messages have to be counted within one."""
    if ranges.has_span("STEP", "OPTIMIZER").any():
        return []
    actions = ranges.actions()
    is_counted = (actions["microbatch"] < 0) | ~ranges.is_op[actions["range"]]
    counted = set(ranges.thread[actions["range"][is_counted]].tolist())
    return optimizer_ranges(events, counted) if counted else []


def _inference(events: Events, labelled: Ranges) -> Inference:
    """Infer ops by operators if these name their messages, else by launches."""
    has_ranges = has_optimizer_ranges(events)
    leads = labelled.table.leads[labelled.label]
    steps = labelled.start_ns[labelled.has_span("STEP") & ~leads].tolist()
    by_operators = infer_ops(
        events, () if has_ranges else [(o.start_ns, o.end_ns) for o in optimizer_ranges(events)], steps
    )
    return by_operators if _is_pipeline(by_operators) else infer_from_launches(events, labelled.objects())


def _without_unlaunched_messages(ranges: Ranges, launches: LaunchIndex) -> Ranges:
    """Drop messages without a microbatch whose ranges launched no kernel, if those of others did."""
    is_counted = ranges.is_message & ~ranges.names_microbatch
    moved = launches.spans(ranges.start_ns, ranges.end_ns, communication=True).launched & is_counted
    return ranges.where(moved | ~is_counted) if moved.any() else ranges


def _sequence_notes(ranges: Ranges) -> list[str]:
    splits = num_sequences(ranges)
    return [f"each of the {splits} parts of a sequence is counted as a microbatch"] if splits > 1 else []


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _as_range(framework: str, entry: Inferred) -> Range:
    return Range(Label(framework, (entry.action,)), entry.start_ns, entry.end_ns, entry.thread)


def _without_stage(ops: Ranges) -> Ranges:
    """Ops without a stage, inside which their messages may lie."""
    return ops.where(ops.table.actions["stage"][ops.table.first_action[ops.label]] < 0)


def _is_pipeline(inference: Inference) -> bool:
    """Return whether the inferred ops have forwards, about as many backwards, and messages between them."""
    kinds = [entry.action.kind for entry in inference.ranges]
    fewer, more = sorted((kinds.count(Kind.F), kinds.count(Kind.B)))
    return fewer > 0 and more <= 2 * fewer and inference.num_messages > 0


def with_peers(comms: pd.DataFrame, ops: pd.DataFrame, mesh: MeshInfo) -> pd.DataFrame:
    """Fill in the peers of sends and receives: the rank of the same pipeline that holds the other stage."""
    lacking = (comms["peer"] < 0) & (comms["stage"] >= 0) & comms["direction"].isin(DIRECTIONS)
    if not lacking.any():
        return comms
    rows = rows_where(comms[["rank", "kind", "direction", "stage"]], lacking)
    holders = rows_where(ops[["rank", "stage"]], ops["stage"] >= 0).drop_duplicates().to_numpy()
    is_onward = (rows["kind"] == "send").to_numpy() == (rows["direction"] == "F").to_numpy()
    other_stage = rows["stage"].to_numpy() + np.where(is_onward, 1, -1)
    holder = last_like(
        [_pipelines(rows["rank"].to_numpy(), mesh), other_stage], [_pipelines(holders[:, 0], mesh), holders[:, 1]]
    )
    peers = comms["peer"].to_numpy(copy=True)
    peers[lacking.to_numpy()] = np.append(holders[:, 0], -1)[holder]
    return comms.assign(peer=peers)


def _pipelines(ranks: Int64, mesh: MeshInfo) -> Int64:
    """A number for the pipeline of each rank, the same for all whose pipeline is unknown."""
    index, present = pd.factorize(ranks)
    numbers: dict[tuple[int, ...], int] = {}
    of_present = [numbers.setdefault(mesh.pipeline_of(rank), len(numbers)) for rank in present.tolist()]
    return np.array(of_present, dtype=np.int64)[index]


def drop_messages_beyond_ends(comms: pd.DataFrame, ops: pd.DataFrame, mesh: MeshInfo) -> pd.DataFrame:
    """Drop messages from before the first stage or beyond the last one: combined send-receive functions are called on all
    ranks, and move nothing there.
    """
    compute = ops[ops["stage"] >= 0]
    if compute.empty or mesh.pp is None:
        return comms
    last = max(int(compute["stage"].max()), mesh.pp * (mesh.vpp or 1) - 1)
    ordered = (
        (comms["axis"] == "pp") & (comms["peer"] < 0) & (comms["stage"] >= 0) & comms["direction"].isin(DIRECTIONS)
    )
    other_stage = comms["stage"] + np.where((comms["kind"] == "send") == (comms["direction"] == "F"), 1, -1)
    absent = ordered & ((other_stage < 0) | (other_stage > last))
    return comms[~absent] if absent.any() else comms
