"""Ops, sends and receives of one rank from the labels of frameworks.

Where labels name messages or nothing at all, the ops are inferred (:mod:`pptrace.recognise.ops.infer_from_operators`). Ops
last as long as their compute: the kernels launched inside the range by any thread, or on CPUs the operators in it.

Where labels name messages alone, an op is the host thread's work between two of them:

    … recv_forward │ forward │ send_forward_recv_backward │ backward │ send_backward_recv_forward │ …

A message range that receives something is followed by the op that reads it, and one that sends something comes after the op that
made it. Both sides have to tell the same op; where they do not, as where receives are posted ahead of other ops, the send tells
it. Where both a forward and a backward lie in one gap (Megatron-LM's interleaved steady phase without overlap), the forward
comes first. Times are the host's: they hold everything that the thread did there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median

import numpy as np
import pandas as pd
from msgspec.structs import replace

from pptrace.model.device import DeviceWork
from pptrace.model.tables import COMMS, MESSAGES, OPS, empty_table
from pptrace.model.traces import Events, Trace
from pptrace.model.wording import counted
from pptrace.recognise.labels import Label, LabelledAction
from pptrace.recognise.labels.torch_pipelining import TORCH
from pptrace.recognise.ops.host_compute import without_evaluations
from pptrace.recognise.ops.infer_from_launches import infer_from_launches, optimizer_ranges
from pptrace.recognise.ops.infer_from_operators import (
    Inference,
    has_optimizer_ranges,
    infer_ops,
    messages_in_ranges,
)
from pptrace.recognise.ops.label_actions import num_sequences, steps_of_ranges, with_microbatches
from pptrace.recognise.ops.label_columns import (
    LabelledPhases,
    Range,
    Ranges,
    framework_of,
    labelled_ops,
    labelled_ranges,
)
from pptrace.recognise.ops.label_rows import spans_table, tables_of_labels
from pptrace.recognise.ops.label_steps import LaunchIndex, RankTables, num_outside_steps, spans_of_steps
from pptrace.recognise.ops.named_ranges import EVAL, with_spans
from pptrace.schedule.actions import Kind, Phase
from pptrace.slices import rows_among


def tables_from_labels(trace: Trace, work: DeviceWork, calls: pd.DataFrame) -> RankTables | None:
    """The ops and comms of a trace with op labels or with messages between ops; None when it has neither.

    ``calls`` is all communication of the trace (:func:`pptrace.recognise.calls.find_calls.find_calls`): messages that order
    finds last as long as the kernels that carry them, which the end of a batch may have launched.
    The framework is "unlabelled" where order alone tells. Peers are -1 and wait for :func:`with_peers`; stages that no label
    tells are unknown until the ranks are joined (:mod:`pptrace.recognise.infer.locate`).
    """
    labelled = labelled_ranges(trace.events)
    framework = trace.framework or framework_of(labelled) or "unlabelled"
    ops_with_labels = _with_losses(labelled_ops(labelled), framework, calls)
    launches = LaunchIndex(work)
    others = labelled.where(~labelled.is_op)
    is_counted = others.is_message & ~others.names_microbatch
    moved = launches.spans(others.start_ns, others.end_ns, communication=True).launched & is_counted
    if moved.any():  # other ranges of messages launched no kernel
        others = others.where(moved | ~is_counted)
    if len(ops_with_labels):
        source, splits = "label", num_sequences(labelled)
        evidence: tuple[str, ...] = ()
        if splits > 1:
            evidence = (f"each of the {splits} parts of a sequence is counted as a microbatch",)
        if others.is_message.any():
            inferred = others.where(np.zeros(len(others), dtype=np.bool_))
        else:  # they may lie inside ops without a stage
            labels = ops_with_labels.table
            has_stage = labels.actions["stage"][labels.first_action[ops_with_labels.label]] >= 0
            inferred = messages_in_ranges(trace.events, ops_with_labels.where(~has_stage), framework)
    else:
        inference = _inference(trace.events, labelled)
        source = "inferred"
        if not _is_pipeline(inference):
            by_gaps = _by_gaps(trace, labelled, framework, launches, calls)
            if by_gaps is not None:
                return by_gaps
            spans = spans_of_steps(labelled)  # steps, as torch.profiler's ranges or the reader tell them
            if not len(spans):
                return None
            return RankTables(trace.framework or "unlabelled", spans_table(spans), empty_table(COMMS))
        evidence = inference.evidence
        inferred = Ranges.of(
            Range(Label(framework, (action,)), segment.start_ns, segment.end_ns, inference.thread)
            for segment, action in inference.ops
        )
        if inferred.is_message.any():
            others = others.where(~others.is_message)
    ranges = Ranges.joined([ops_with_labels, others, inferred])
    return _tables(framework, trace.events, ranges, evidence, source, launches, calls)


def _with_losses(ops: Ranges, framework: str, calls: pd.DataFrame) -> Ranges:
    """The ranges of ops; those of torch's GPipe, whose forwards end before their loss, up to the next op of the pass.

    Where a forward sends on, or a message is posted behind one, labels are of another stage, or of a loop by hand that may do
    anything between them: there they are ops.
    """
    actions = ops.actions()
    if framework != TORCH or len(actions["range"]) < len(ops) or (actions["stage"] >= 0).any():
        return ops
    order = np.lexsort((ops.start_ns, ops.thread))
    kind, microbatch, starts, thread = (
        ops.kind[order],
        actions["microbatch"][order],
        ops.start_ns[order],
        ops.thread[order],
    )
    is_forward = kind == Kind.F.code
    follows = (thread[1:] == thread[:-1]) & is_forward[:-1] & (~is_forward[1:] | (microbatch[1:] > microbatch[:-1]))
    before, next_ns, ends = order[:-1][follows], starts[1:][follows], ops.end_ns.copy()
    for kinds, begin_ns in ((("send",), ops.start_ns), (MESSAGES, ends)):
        posts = np.sort(calls.loc[rows_among(calls["kind"], kinds), "host_ns"])
        if (np.searchsorted(posts, begin_ns[before]) < np.searchsorted(posts, next_ns)).any():
            return ops
    ends[before] = np.maximum(ends[before], next_ns)
    return replace(ops, end_ns=ends)


def _by_gaps(
    trace: Trace, labelled: Ranges, framework: str, launches: LaunchIndex, calls: pd.DataFrame
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
    ops_between, evidence = between
    if not ops_between:
        return RankTables(framework, empty_table(OPS), empty_table(COMMS), evidence)
    ranges = Ranges.joined([Ranges.of(ops_between), labelled.where(~labelled.is_op)])
    return replace(_tables(framework, trace.events, ranges, evidence, "inferred", launches, calls), by_gaps=True)


def _tables(
    framework: str,
    events: Events,
    ranges: Ranges,
    evidence: tuple[str, ...],
    source: str,
    launches: LaunchIndex,
    calls: pd.DataFrame,
) -> RankTables:
    """Tables from ranges that still lack their steps and microbatches."""
    ranges, evaluated, skipped = without_evaluations(events, ranges, launches)
    phases = LabelledPhases(ranges)
    if not ranges.has_span("STEP", "OPTIMIZER").any():
        # No range ends a step, but ops or messages have to be counted within one: kernels of optimizers do.
        actions = ranges.actions()
        is_counted = (actions["microbatch"] < 0) | ~ranges.is_op[actions["range"]]
        threads = set(ranges.thread[actions["range"][is_counted]].tolist())
        if threads and (optimizers := optimizer_ranges(events, threads)):
            ranges = Ranges.joined([ranges, Ranges.of(optimizers)])
    stepped = steps_of_ranges(ranges)
    if num_outside := num_outside_steps(ranges, stepped):
        what = "evaluation, or steps whose beginning is not in the trace"
        evidence = (*evidence, f"left out {counted(num_outside, 'op')} outside all ranges of steps: {what}")
    labelled = with_microbatches(stepped)
    ops, comms = tables_of_labels(labelled, source, launches, events, calls, phases)
    if len(evaluated[0]):
        ops = with_spans(ops, EVAL, *evaluated, launches)
    return RankTables(framework, ops, comms, (*evidence, *skipped), run_sizes=labelled.run_sizes)


def _inference(events: Events, labelled: Ranges) -> Inference:
    """Infer ops by operators if these name their messages, else by launches."""
    optimizers = [] if has_optimizer_ranges(events) else optimizer_ranges(events)
    leads = labelled.table.leads[labelled.label]
    steps = labelled.start_ns[labelled.has_span("STEP") & ~leads].tolist()
    by_operators = infer_ops(events, [(each.start_ns, each.end_ns) for each in optimizers], steps)
    return by_operators if _is_pipeline(by_operators) else infer_from_launches(events, labelled)


def _is_pipeline(inference: Inference) -> bool:
    """Return whether the inferred ops have forwards, about as many backwards, and messages between them."""
    kinds = [action.kind for _, action in inference.ops]
    fewer, more = sorted((kinds.count(Kind.F), kinds.count(Kind.B)))
    return fewer > 0 and more <= 2 * fewer and inference.num_messages > 0


_MADE_BY = {Kind.SEND_F: Kind.F, Kind.SEND_B: Kind.B}
_READ_BY = {Kind.RECV_F: Kind.F, Kind.RECV_B: Kind.B}
_CUTS = ("STEP", "OPTIMIZER", "GRAD_SYNC")


_Gap = tuple[tuple[Kind, ...], int, int]
"""Ops between two messages: of these kinds, in this order, from a start to an end, ns."""


def ops_between_messages(labelled: Ranges) -> tuple[list[Range], tuple[str, ...]] | None:
    """(the ops of the thread that posts most labelled messages, in time order; the evidence, without ops the reason); None where
    labels name no messages in order.
    """
    messages = labelled.where(labelled.is_message & ~labelled.names_microbatch).objects()
    if not messages:
        return None
    (thread, _), *_ = Counter(entry.thread for entry in messages).most_common(1)
    thread_messages: list[Range] = []
    for entry in sorted(messages, key=lambda entry: (entry.start_ns, -entry.end_ns)):
        if entry.thread == thread and (not thread_messages or entry.start_ns >= thread_messages[-1].end_ns):
            thread_messages.append(entry)  # a timer's range may lie inside its function's
    cuts = np.sort(labelled.start_ns[labelled.has_span(*_CUTS)]).tolist()
    gaps = list(_gaps(thread_messages, cuts, LabelledPhases(labelled)))
    if why := _why_unclear(gaps):
        return [], (why,)
    ops, estimated = _split(gaps, thread_messages[0].label.framework, thread)
    counts = Counter(op.kind for op in ops)
    evidence = [
        f"no labels of ops: {counts[Kind.F]} forwards and {counts[Kind.B]} backwards are what thread {thread} did between "
        f"{len(thread_messages)} labelled messages, on the host's clock: everything there, such as waiting for a message posted "
        "ahead, counts as compute"
    ]
    if estimated:
        evidence.append(
            f"{estimated} times a forward and a backward lie between the same two messages: their sum is measured, where "
            "the one ends and the other begins is estimated by the forwards and backwards that lie alone"
        )
    return ops, tuple(evidence)


def _gaps(messages: Sequence[Range], cuts: Sequence[int], phases: LabelledPhases) -> Iterator[_Gap]:
    position = 0
    starts, ends = (np.array([getattr(entry, name) for entry in messages]) for name in ("start_ns", "end_ns"))
    phase_codes = phases.of(ends[:-1], starts[1:]).tolist()
    for (before, after), phase in zip(pairwise(messages), phase_codes, strict=True):
        while position < len(cuts) and cuts[position] < before.end_ns:
            position += 1
        if position < len(cuts) and cuts[position] < after.start_ns:
            continue  # the end of a step
        kinds = _kinds(before, after, None if phase < 0 else tuple(Phase)[phase])
        if kinds:
            yield kinds, before.end_ns, after.start_ns


def _kinds(before: Range, after: Range, phase: Phase | None) -> tuple[Kind, ...]:
    """Kinds of ops between two messages: forwards only in a warmup, backwards only in a cooldown."""
    read = {_READ_BY[action.kind] for action in before.label.actions if action.kind in _READ_BY}
    made = {_MADE_BY[action.kind] for action in after.label.actions if action.kind in _MADE_BY}
    kinds = (read & made) or made
    if phase is Phase.WARMUP:
        kinds -= {Kind.B}
    elif phase is Phase.COOLDOWN:
        kinds -= {Kind.F}
    return tuple(kind for kind in (Kind.F, Kind.B) if kind in kinds)


def _why_unclear(gaps: Sequence[_Gap]) -> str:
    """The reason why the gaps do not determine the ops; "" where they do."""
    counts = Counter(kind for kinds, *_ in gaps for kind in kinds)
    forwards, backwards = counts[Kind.F], counts[Kind.B]
    counts_text = f"between the labelled messages lie {forwards} forwards and {backwards} backwards"
    remedy = "record with ranges around forward_step and backward_step"
    if not forwards or not backwards or backwards > forwards:
        return f"{counts_text}, which cannot be all of what ran: ops are null; {remedy}"
    alone = {kinds for kinds, *_ in gaps if len(kinds) == 1}
    if any(len(kinds) == 2 for kinds, *_ in gaps) and len(alone) < 2:
        return (
            f"{counts_text}, which cannot be separated where both lie between the same messages: ops are null; {remedy}"
        )
    return ""


def _split(gaps: Sequence[_Gap], framework: str, thread: int) -> tuple[list[Range], int]:
    """The ops in the gaps, and the number of gaps cut in two."""
    labels = {kind: Label(framework, (LabelledAction(kind),), inferred=True) for kind in (Kind.F, Kind.B)}
    ops: list[Range] = []
    num_shared_gaps = sum(len(kinds) == 2 for kinds, *_ in gaps)
    share = 0.0
    if num_shared_gaps:
        forward, backward = (
            median(end - start for kinds, start, end in gaps if kinds == (kind,)) for kind in (Kind.F, Kind.B)
        )
        share = forward / max(forward + backward, 1)
    for kinds, start, end in gaps:
        edges = (start, start + round((end - start) * share), end) if len(kinds) == 2 else (start, end)
        ops += [Range(labels[kind], *of_kind, thread) for kind, of_kind in zip(kinds, pairwise(edges), strict=True)]
    return ops, num_shared_gaps
