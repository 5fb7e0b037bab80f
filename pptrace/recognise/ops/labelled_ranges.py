"""Labelled ranges of one rank, each with its step and microbatch; what names leave open follows from their order."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pptrace.model.tables import Category, Events
from pptrace.recognise.labels import Label, LabelledAction, read_label
from pptrace.recognise.labels.label import EVALUATION
from pptrace.recognise.labels.zero_bubble import ZERO_BUBBLE
from pptrace.schedule.actions import Kind, Phase

_BACKWARD = (Kind.B, Kind.I)


@dataclass(frozen=True, slots=True)
class Range:
    """A stretch of the host's time that is an op, the posting of messages, or a span of a step.

    ``part`` is (i, n) where the range holds n ops of equal weight and this is the i-th.
    """

    label: Label
    start_ns: int
    end_ns: int
    thread: int
    step: int = -1
    part: tuple[int, int] = (0, 1)

    @property
    def action(self) -> LabelledAction | None:
        return self.label.action

    @property
    def kind(self) -> Kind | None:
        return self.label.actions[0].kind if self.label.actions else None

    def of(self, *actions: LabelledAction) -> Range:
        return self if actions == self.label.actions else replace(self, label=replace(self.label, actions=actions))


class LabelledPhases:
    """The phases of a schedule that ranges around its ops name."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        self._spans = sorted((r for r in ranges if r.label.phase is not None), key=lambda entry: entry.start_ns)
        self._starts = [span.start_ns for span in self._spans]

    def of(self, start_ns: int, end_ns: int) -> Phase | None:
        """The phase in which the middle of a stretch lies: its beginning may lie before the range of its phase."""
        middle = (start_ns + end_ns) // 2
        index = bisect_right(self._starts, middle) - 1
        return self._spans[index].label.phase if index >= 0 and middle < self._spans[index].end_ns else None

    def lengths(self) -> dict[Phase, list[int]]:
        """The lengths of the ranges, ns, by phase."""
        by_phase: dict[Phase, list[int]] = {}
        for span in self._spans:
            if span.label.phase is not None:
                by_phase.setdefault(span.label.phase, []).append(span.end_ns - span.start_ns)
        return by_phase


def labelled_ranges(events: Events) -> list[Range]:
    """The host ranges whose names are in a catalogue, in time order."""
    on_host = np.flatnonzero(np.isin(events.category, (Category.ANNOTATION, Category.OTHER)))
    codes = events.name_id[on_host]
    labels = {
        code: label for code in np.unique(codes).tolist() if (label := read_label(events.names[code])) is not None
    }
    rows = on_host[np.isin(codes, list(labels))] if labels else on_host[:0]
    ranges = []
    for row, end_ns in zip(rows.tolist(), events.ends_of(rows).tolist(), strict=True):
        label = labels[int(events.name_id[row])]
        ranges.append(Range(label, int(events.start_ns[row]), end_ns, int(events.thread[row])))
    return _of_training(_of_one_writer(ranges))


def _of_one_writer(ranges: Sequence[Range]) -> list[Range]:
    """Drop spans of a kind that pptrace marked as well: an optimizer's own range lies in the mark of its step."""
    marked = {entry.label.span for entry in ranges if entry.label.marked}
    return [entry for entry in ranges if entry.label.marked or not entry.label.span or entry.label.span not in marked]


def _of_training(ranges: Sequence[Range]) -> list[Range]:
    """Drop ranges of evaluation, and the ops and messages that begin inside of them."""
    spans = _outermost([entry for entry in ranges if entry.label.span == EVALUATION])
    if not spans:
        return list(ranges)
    starts, ends = [span.start_ns for span in spans], [span.end_ns for span in spans]

    def is_inside(entry: Range) -> bool:
        index = bisect_right(starts, entry.start_ns) - 1
        return index >= 0 and entry.start_ns < ends[index]

    return [entry for entry in ranges if entry.label.span != EVALUATION and not is_inside(entry)]


def framework_of(ranges: Sequence[Range]) -> str:
    """The framework of the labels: of ops with a microbatch, else of any op or message, else of the rest; or ""."""
    preferred = (
        [r for r in ranges if r.label.is_op and r.label.actions[0].microbatch is not None],
        [r for r in ranges if r.label.actions],
        ranges,
    )
    for among in preferred:
        counts = Counter(r.label.framework for r in among if r.label.framework)
        if counts:
            return counts.most_common(1)[0][0]
    return ""


def labelled_ops(ranges: Sequence[Range]) -> list[Range]:
    """The labelled ops; only those with a microbatch if there are any, since others lie around or inside them.

    [] unless forwards and backwards are both there: "Forward 1" and its like are common words, and a framework that labels
    only forwards leaves the rest to :mod:`pptrace.recognise.ops.infer_from_operators`.
    """
    ops = [entry for entry in ranges if entry.label.is_op]
    with_microbatch = [op for op in ops if _names_microbatch(op) or op.kind is Kind.W]
    ops = with_microbatch if any(map(_names_microbatch, with_microbatch)) else _outermost(ops)
    kinds = {half.kind for op in ops for action in op.label.actions for half in action.halves}
    sure = any(op.action is not None and op.action.stage is not None for op in ops)
    return ops if sure or (Kind.F in kinds and kinds & set(_BACKWARD)) else []


def _names_microbatch(entry: Range) -> bool:
    return entry.action is not None and entry.action.microbatch is not None


def _outermost(ops: Sequence[Range]) -> list[Range]:
    """Drop ranges inside another of the same kind and thread, such as a function's inside its caller's."""
    kept: list[Range] = []
    end_by_kind: dict[tuple[Kind | None, int], int] = {}
    for op in sorted(ops, key=lambda op: (op.start_ns, -op.end_ns)):
        if op.start_ns >= end_by_kind.get((op.kind, op.thread), -1):
            kept.append(op)
            end_by_kind[op.kind, op.thread] = op.end_ns
    return kept


def with_steps_and_microbatches(ranges: Sequence[Range]) -> list[Range]:
    """The ranges in time order, each with its step, and ops and messages with their microbatches."""
    merged = _without_sequences(sorted(ranges, key=lambda entry: entry.start_ns))
    steps: dict[int, list[Range]] = {}
    for entry in _with_steps(merged):
        steps.setdefault(entry.step, []).append(entry)
    resolved = [entry for _, step_ranges in sorted(steps.items()) for entry in _of_step(step_ranges)]
    return sorted(resolved, key=lambda entry: (entry.start_ns, entry.part))


def spans_of_steps(ranges: Sequence[Range]) -> list[Range]:
    """Steps and the ranges in them that are neither op nor message, each with its step; [] without ranges of steps."""
    spans = sorted((entry for entry in ranges if entry.label.span), key=lambda entry: entry.start_ns)
    steps = [entry for entry in spans if entry.label.span == "STEP"]
    chosen = _single([entry for entry in spans if entry.label.step is not None]) or _outermost(steps)
    return (
        _inside([entry for entry in spans if entry.label.span != "STEP" or entry in chosen], chosen) if chosen else []
    )


def num_outside_steps(ranges: Sequence[Range]) -> int:
    """Number of ops that :func:`with_steps_and_microbatches` drops, because no range of a step covers them."""
    kept = _with_steps(sorted(ranges, key=lambda entry: entry.start_ns))
    return sum(entry.label.is_op for entry in ranges) - sum(entry.label.is_op for entry in kept)


def num_sequences(ranges: Sequence[Range]) -> int:
    """Number of parts into which sequences are split."""
    return 1 + max((entry.label.sequence for entry in ranges), default=0)


def _without_sequences(ranges: Sequence[Range]) -> list[Range]:
    """Each part of a split sequence as a microbatch of its own."""
    splits = num_sequences(ranges)
    if splits == 1:
        return list(ranges)

    def renumbered(entry: Range) -> Range:
        part = entry.label.sequence
        actions = (
            action if action.microbatch is None else replace(action, microbatch=action.microbatch * splits + part)
            for action in entry.label.actions
        )
        return entry.of(*actions)

    return [renumbered(entry) for entry in ranges]


def _with_steps(ranges: Sequence[Range]) -> list[Range]:
    """Assign steps: those of step ranges if there are any, else counted from 0 by ops that come again.

    Of the step ranges the ones that the profiler numbers win. What lies outside all of them is left out, but for those that
    a step may begin before.
    """
    spans = [entry for entry in ranges if entry.label.span == "STEP"]
    with_number = [span for span in spans if span.label.step is not None]
    chosen = _single([span for span in with_number if not span.label.may_start_before_range] or with_number)
    chosen = chosen or _outermost(spans)
    if chosen and any(entry.label.actions for entry in ranges):
        if not any(span.label.inferred for span in chosen):  # the inferred ones are parts of steps
            ranges = [entry for entry in ranges if not (entry.label.span == "STEP" and entry.label.inferred)]
        return _inside(ranges, chosen)
    return counted_steps(ranges)


def _single(spans: Sequence[Range]) -> list[Range]:
    """Drop spans that a profiler wrote twice: same number and same time as an earlier one."""
    kept: list[Range] = []
    for span in spans:
        if not any(span.label.step == earlier.label.step and span.start_ns < earlier.end_ns for earlier in kept[-2:]):
            kept.append(span)
    return kept


def _inside(ranges: Sequence[Range], spans: Sequence[Range]) -> list[Range]:
    starts = [span.start_ns for span in spans]
    given_numbers = [span.label.step for span in spans if span.label.step is not None]
    numbers = given_numbers if len(set(given_numbers)) == len(spans) else list(range(len(spans)))
    with_steps = []
    for entry in ranges:
        index = bisect_right(starts, entry.start_ns) - 1
        if index < 0 or entry.start_ns >= spans[index].end_ns:
            is_op = bool(entry.label.actions)
            index = (
                index + 1 if is_op and index + 1 < len(spans) and spans[index + 1].label.may_start_before_range else -1
            )
        if index >= 0:
            with_steps.append(replace(entry, step=numbers[index]))
    return with_steps


def counted_steps(ranges: Sequence[Range]) -> list[Range]:
    """Steps by order: a new one where an op would come again, where the range of a warmup begins or, for ops without
    microbatches, after the optimizer.

    A message that comes again with no op between is another tensor of the same one.
    """
    done: dict[object, int] = {}  # how many ops there had been
    count, num_ops, with_steps = 0, 0, []
    optimized = False
    for entry in ranges:
        num_ops += entry.label.is_op
        actions = [a for a in entry.label.actions if a.microbatch is not None]
        is_repeated = any(done.get(action.key, num_ops) < num_ops for action in actions)
        warms_up = entry.label.phase is Phase.WARMUP and bool(done)
        if is_repeated or warms_up or (optimized and any(action.microbatch is None for action in entry.label.actions)):
            count += 1
            done.clear()
            optimized = False
        optimized = entry.label.span == "OPTIMIZER" or (optimized and not entry.label.actions)
        done |= {action.key: num_ops for action in entry.label.actions}
        with_steps.append(replace(entry, step=count))
    return with_steps


def _of_step(ranges: Sequence[Range]) -> list[Range]:
    """The ranges of one step with microbatches by order, and B as I where the trace has its weight gradient."""
    ranges = list(_with_microbatches(_without_rolled_back_ops(ranges)))
    ranges = _with_weights(ranges)
    return _split_backward(ranges)


def _without_rolled_back_ops(ranges: Sequence[Range]) -> list[Range]:
    """Drop ops that zero bubble's post-validation rolled back: where it takes an optimizer step back, the first ops run again."""
    zero_bubble_ops = [entry for entry in ranges if entry.label.framework == ZERO_BUBBLE and _names_microbatch(entry)]
    last = {action.key: entry.start_ns for entry in zero_bubble_ops for action in entry.label.actions}
    return [
        entry
        for entry in ranges
        if not entry.label.is_op
        or not _names_microbatch(entry)
        or last.get(entry.label.actions[0].key, entry.start_ns) == entry.start_ns
    ]


def _with_microbatches(ranges: Sequence[Range]) -> Iterator[Range]:
    """The k-th op or message of a kind that names no microbatch is that of microbatch k."""
    counts: Counter[Kind] = Counter()
    for entry in ranges:
        is_adjacent = entry.label.adjacent and not entry.label.is_op
        actions = [action if is_adjacent else _with_microbatch(action, counts) for action in entry.label.actions]
        yield entry.of(*actions) if actions else entry


def _with_microbatch(action: LabelledAction, counts: Counter[Kind]) -> LabelledAction:
    """The action with the next microbatch of its kind where it has none; W waits for its backward."""
    if action.parts:
        parts = tuple(_with_microbatch(part, counts) for part in action.parts)
        return replace(action, microbatch=parts[0].microbatch, parts=parts)
    if action.microbatch is not None or action.kind is Kind.W:
        return action
    counts[action.kind] += 1
    return replace(action, microbatch=counts[action.kind] - 1)


def _with_weights(ranges: Sequence[Range]) -> list[Range]:
    """Assign microbatches to weight gradients without one: a flush becomes one op for each outstanding one, in the order of
    their backwards; any other follows the backward before it or, after the last forward, belongs to the last ones in order.
    """
    unnamed = [e for e in ranges if _is_unnamed_weight(e)]
    if not unnamed:
        return list(ranges)
    named = {e.action.key for e in ranges if e.kind is Kind.W and e.action is not None}
    forwards = [e.start_ns for e in ranges if e.kind in (Kind.F, Kind.OVERLAP_F_B)]
    last_forward = max(forwards, default=-1)
    trailing = sum(1 for e in unnamed if e.start_ns > last_forward and not e.label.flushes_weight_grads)
    backwards = [(half, e) for e in ranges for a in e.label.actions for half in a.halves if half.kind in _BACKWARD]
    trailing_backwards = deque(half for half, _ in backwards[len(backwards) - trailing :] if trailing)
    with_weights: list[Range] = []
    seen: list[LabelledAction] = []
    for entry in ranges:
        seen += [half for action in entry.label.actions for half in action.halves if half.kind in _BACKWARD]
        if not _is_unnamed_weight(entry):
            with_weights.append(entry)
        elif entry.label.flushes_weight_grads:
            assert entry.action is not None
            chunk = entry.action.chunk_of_rank
            due = [half for half in seen if half.chunk_of_rank == chunk and half.key_of(Kind.W) not in named]
            for index, half in enumerate(due):
                part = replace(entry, part=(index, len(due)))
                with_weights.append(part.of(replace(half, kind=Kind.W)))
            named |= {half.key_of(Kind.W) for half in due}
        else:
            source = (
                trailing_backwards.popleft()
                if entry.start_ns > last_forward and trailing_backwards
                else (seen[-1] if seen else None)
            )
            if source is not None:
                with_weights.append(entry.of(replace(source, kind=Kind.W)))
    return with_weights


def _is_unnamed_weight(entry: Range) -> bool:
    return entry.kind is Kind.W and entry.action is not None and entry.action.microbatch is None


def _split_backward(ranges: Sequence[Range]) -> list[Range]:
    """B as I where its weight gradient is an op of its own."""
    with_weight = {e.action.key[1:] for e in ranges if e.kind is Kind.W and e.action is not None}
    if not with_weight:
        return list(ranges)

    def split(action: LabelledAction) -> LabelledAction:
        if action.parts:
            return replace(action, parts=tuple(map(split, action.parts)))
        return replace(action, kind=Kind.I) if action.kind is Kind.B and action.key[1:] in with_weight else action

    return [entry.of(*map(split, entry.label.actions)) if entry.label.actions else entry for entry in ranges]
