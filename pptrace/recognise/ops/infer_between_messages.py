"""Infer ops of traces that label only messages: an op is the host thread's work between two messages.

    … recv_forward │ forward │ send_forward_recv_backward │ backward │ send_backward_recv_forward │ …

A message range that receives something is followed by the op that reads it, and one that sends something comes after the op that
made it. Both sides have to tell the same op; where they do not, as where receives are posted ahead of other ops, the send tells
it. Where both a forward and a backward lie in one gap (Megatron-LM's interleaved steady phase without overlap), the forward
comes first. Times are the host's: they hold everything that the thread did there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import numpy as np

from pptrace.recognise.labels import Label, LabelledAction
from pptrace.recognise.ops.label_columns import LabelledPhases, Range, Ranges
from pptrace.schedule.actions import Kind, Phase

_MADE_BY = {Kind.SEND_F: Kind.F, Kind.SEND_B: Kind.B}
_READ_BY = {Kind.RECV_F: Kind.F, Kind.RECV_B: Kind.B}
_CUTS = ("STEP", "OPTIMIZER", "GRAD_SYNC")


@dataclass(frozen=True, slots=True)
class BetweenMessages:
    """The ops in time order, and the evidence; without ops the reason."""

    ops: tuple[Range, ...]
    evidence: tuple[str, ...]


def ops_between_messages(labelled: Ranges) -> BetweenMessages | None:
    """The ops of the thread that posts most labelled messages; None where labels name no messages in order."""
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
        return BetweenMessages((), (why,))
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
    return BetweenMessages(tuple(ops), tuple(evidence))


@dataclass(frozen=True, slots=True)
class _Gap:
    """Ops between two messages: ops of these kinds, in this order."""

    kinds: tuple[Kind, ...]
    start_ns: int
    end_ns: int


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
            yield _Gap(kinds, before.end_ns, after.start_ns)


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
    counts = Counter(kind for gap in gaps for kind in gap.kinds)
    forwards, backwards = counts[Kind.F], counts[Kind.B]
    counts_text = f"between the labelled messages lie {forwards} forwards and {backwards} backwards"
    remedy = "record with ranges around forward_step and backward_step"
    if not forwards or not backwards or backwards > forwards:
        return f"{counts_text}, which cannot be all of what ran: ops are null; {remedy}"
    alone = {gap.kinds for gap in gaps if len(gap.kinds) == 1}
    if any(len(gap.kinds) == 2 for gap in gaps) and len(alone) < 2:
        return (
            f"{counts_text}, which cannot be separated where both lie between the same messages: ops are null; {remedy}"
        )
    return ""


def _split(gaps: Sequence[_Gap], framework: str, thread: int) -> tuple[list[Range], int]:
    """The ops in the gaps, and the number of gaps cut in two."""
    labels = {kind: Label(framework, (LabelledAction(kind),), inferred=True) for kind in (Kind.F, Kind.B)}
    ops: list[Range] = []
    num_shared_gaps = sum(len(gap.kinds) == 2 for gap in gaps)
    share = 0.0
    if num_shared_gaps:
        forward, backward = (
            median(gap.end_ns - gap.start_ns for gap in gaps if gap.kinds == (kind,)) for kind in (Kind.F, Kind.B)
        )
        share = forward / max(forward + backward, 1)
    for gap in gaps:
        edges = [gap.start_ns, gap.end_ns]
        if len(gap.kinds) == 2:
            edges.insert(1, gap.start_ns + round((gap.end_ns - gap.start_ns) * share))
        for kind, (start, end) in zip(gap.kinds, pairwise(edges), strict=True):
            ops.append(Range(labels[kind], start, end, thread))
    return ops, num_shared_gaps
