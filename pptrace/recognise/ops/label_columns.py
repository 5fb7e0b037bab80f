"""Labelled ranges by columns: what a name says is read once, however often it occurs; which ranges are labels of a framework, and
which of them are its ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from msgspec import Struct

from pptrace.intervals import find_interval
from pptrace.model.tables import Bool, Int64
from pptrace.model.traces import Category, Events
from pptrace.recognise.labels import Label, read_label
from pptrace.recognise.labels.label import EVALUATION
from pptrace.schedule.actions import Kind, Phase
from pptrace.slices import Slice

NONE = -1
"""Code of what a name does not give: a stage, a microbatch, a second half, a number of a step, a phase."""

IS_COMPUTE = np.array([kind.is_compute for kind in Kind] + [False])
IS_MESSAGE = np.array([kind.is_p2p for kind in Kind] + [False])
"""True for messages, by the code of a kind; the last is that of :data:`NONE`."""
_HALVES = ("kind", "stage", "chunk", "microbatch")
ACTION_COLUMNS = (*_HALVES, *(f"second_{name}" for name in _HALVES))


class Range(Struct, frozen=True):
    """A stretch of the host's time that is an op, the posting of messages, or a span of a step, as inference makes and takes
    them where no label tells the ops.
    """

    label: Label
    start_ns: int
    end_ns: int
    thread: int

    @property
    def kind(self) -> Kind | None:
        return self.label.actions[0].kind if self.label.actions else None


class LabelTable(Struct, frozen=True, dict=True):
    """Labels as columns: one entry per label in each array, and ``actions`` one row per action of theirs.

    A simple action has no second half (kind :data:`NONE`). A pair has the kind OVERLAP_F_B; its other columns are those of its
    forward, which is its first half.
    """

    labels: tuple[Label, ...]

    def of(self, read: Callable[[Label], Any], dtype: Any) -> npt.NDArray[Any]:
        """Gather a property of each label."""
        return np.array([read(label) for label in self.labels], dtype=dtype)

    @cached_property
    def num_actions(self) -> Int64:
        return self.of(lambda label: len(label.actions), np.int64)

    @cached_property
    def kind(self) -> Int64:
        """The code of the first action's kind."""
        return self.of(lambda label: label.actions[0].kind.code if label.actions else NONE, np.int64)

    @cached_property
    def span(self) -> npt.NDArray[np.object_]:
        return self.of(lambda label: label.span, object)

    @cached_property
    def step(self) -> Int64:
        return self.of(lambda label: NONE if label.step is None else label.step, np.int64)

    @cached_property
    def phase(self) -> Int64:
        return self.of(lambda label: NONE if label.phase is None else label.phase.code, np.int64)

    @cached_property
    def leads(self) -> Bool:
        """Return whether the ops of a step may begin before its range."""
        return self.of(lambda label: label.may_start_before_range, np.bool_)

    @cached_property
    def first_action(self) -> Int64:
        """The row of each label's first action."""
        return np.append(0, np.cumsum(self.num_actions))[:-1]

    @cached_property
    def actions(self) -> Slice:
        rows = []
        for action in (action for label in self.labels for action in label.actions):
            named = [(half.stage, half.chunk, half.microbatch) for half in action.halves]
            halves = [[NONE if number is None else number for number in numbers] for numbers in named]
            second = (action.parts[1].kind.code, *halves[1]) if action.parts else (NONE,) * len(_HALVES)
            rows.append((action.kind.code, *halves[0], *second))
        table = np.array(rows, dtype=np.int64).reshape(len(rows), len(ACTION_COLUMNS))
        return Slice(dict(zip(ACTION_COLUMNS, table.T.copy(), strict=True)))

    @cached_property
    def names_microbatch(self) -> Bool:
        """Return whether the first action has a microbatch."""
        return np.append(self.actions["microbatch"], NONE)[np.where(self.num_actions > 0, self.first_action, -1)] >= 0


class Ranges(Struct, frozen=True):
    """Ranges as columns; ``label`` is the index into the table of labels, ``step`` is −1 where it is not known."""

    table: LabelTable
    label: Int64
    start_ns: Int64
    end_ns: Int64
    thread: Int64
    step: Int64

    @classmethod
    def of(cls, ranges: Iterable[Range]) -> Ranges:
        rows = list(ranges)
        index: dict[Label, int] = {}
        label = [index.setdefault(entry.label, len(index)) for entry in rows]
        times = ([getattr(entry, name) for entry in rows] for name in ("start_ns", "end_ns", "thread"))
        columns = (np.array(column, dtype=np.int64) for column in (label, *times, [NONE] * len(rows)))
        return cls(LabelTable(tuple(index)), *columns)

    @classmethod
    def joined(cls, parts: Sequence[Ranges]) -> Ranges:
        """Concatenate the ranges of several."""
        present = [part for part in parts if len(part)] or list(parts[:1])
        if all(part.table is present[0].table for part in present):
            table, moves = present[0].table, [0] * len(present)
        else:
            table = LabelTable(tuple(label for part in present for label in part.table.labels))
            moves = np.append(0, np.cumsum([len(part.table.labels) for part in present])).tolist()
        label = np.concatenate([part.label + move for part, move in zip(present, moves, strict=False)])
        names = ("start_ns", "end_ns", "thread", "step")
        return cls(table, label, *(np.concatenate([getattr(part, name) for part in present]) for name in names))

    def __len__(self) -> int:
        return len(self.start_ns)

    def where(self, chosen: npt.NDArray[Any]) -> Ranges:
        columns = (self.label, self.start_ns, self.end_ns, self.thread, self.step)
        return Ranges(self.table, *(column[chosen] for column in columns))

    def in_time_order(self) -> Ranges:
        return self.where(np.argsort(self.start_ns, kind="stable"))

    def objects(self) -> list[Range]:
        rows = zip(*(getattr(self, name).tolist() for name in ("label", "start_ns", "end_ns", "thread")), strict=True)
        return [Range(self.table.labels[label], start, end, thread) for label, start, end, thread in rows]

    def present(self) -> list[Label]:
        """The labels that any of the ranges has."""
        return [self.table.labels[label] for label in np.flatnonzero(np.bincount(self.label)).tolist()]

    @property
    def kind(self) -> Int64:
        return self.table.kind[self.label]

    @property
    def has_actions(self) -> Bool:
        return self.kind >= 0

    @property
    def is_op(self) -> Bool:
        return IS_COMPUTE[self.kind]

    @property
    def is_message(self) -> Bool:
        return IS_MESSAGE[self.kind]

    @property
    def names_microbatch(self) -> Bool:
        return self.table.names_microbatch[self.label]

    def has_span(self, *spans: str) -> Bool:
        """Mark the ranges that are spans of one of some kinds; of any kind, without one."""
        if not len(self.table.labels):
            return np.zeros(0, dtype=np.bool_)
        is_span = np.isin(self.table.span.astype(str), spans) if spans else self.table.span != ""
        return is_span.astype(np.bool_)[self.label]

    def actions(self) -> Slice:
        """The actions of all ranges, in their order; ``range`` is the row of the range."""
        counts = self.table.num_actions[self.label]
        row = np.repeat(np.arange(len(self)), counts)
        position = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        index = self.table.first_action[self.label[row]] + position
        return Slice({"range": row, **self.table.actions.where(index).columns})


BACKWARD_KINDS = (Kind.B.code, Kind.I.code)


class LabelledPhases:
    """The phases of a schedule that ranges around its ops name."""

    def __init__(self, ranges: Ranges) -> None:
        phase = ranges.table.phase[ranges.label]
        spans = ranges.where(phase >= 0).in_time_order()
        self._starts, self._ends = spans.start_ns, spans.end_ns
        self._phase = spans.table.phase[spans.label]

    def of(self, start_ns: Int64, end_ns: Int64) -> Int64:
        """Code of the phase in which the middle of each stretch lies, −1 for none: its beginning may lie before the range of
        its phase.
        """
        index = find_interval(self._starts, self._ends, (start_ns + end_ns) // 2)
        return np.append(self._phase, NONE)[index]

    def lengths(self) -> dict[Phase, list[int]]:
        """The lengths of the ranges, ns, by phase."""
        phases = tuple(Phase)
        codes = pd.unique(self._phase).tolist()
        lengths = self._ends - self._starts
        return {phases[code]: lengths[self._phase == code].tolist() for code in codes}


def labelled_ranges(events: Events) -> Ranges:
    """The host ranges whose names are in a catalogue, in time order."""
    on_host = np.flatnonzero((events.category == Category.ANNOTATION) | (events.category == Category.OTHER))
    codes = events.name_id[on_host]
    present = np.flatnonzero(np.bincount(codes, minlength=len(events.names)))
    labels = {code: label for code in present.tolist() if (label := read_label(events.names[code])) is not None}
    index = np.full(len(events.names), -1)
    index[list(labels)] = np.arange(len(labels))
    is_labelled = index[codes] >= 0
    rows = on_host[is_labelled]
    table = LabelTable(tuple(labels.values()))
    times = (events.start_ns[rows], events.ends_of(rows), events.thread[rows])
    ranges = Ranges(table, index[codes[is_labelled]], *times, step=np.full(len(rows), NONE))
    # Spans of a kind that pptrace marked as well are dropped: an optimizer's own range lies in the mark of its step.
    marked = {label.span for label in ranges.present() if label.marked}
    if marked:
        is_single = table.of(lambda label: label.marked or not label.span or label.span not in marked, np.bool_)
        ranges = ranges.where(is_single[ranges.label])
    # So are ranges of evaluation, and the ops and messages that begin inside of them.
    is_evaluation = ranges.has_span(EVALUATION)
    if not is_evaluation.any():
        return ranges
    spans = outermost(ranges.where(is_evaluation))
    is_outside = find_interval(spans.start_ns, spans.end_ns, ranges.start_ns) < 0
    return ranges.where(~is_evaluation & is_outside)


def framework_of(ranges: Ranges) -> str:
    """The framework of the labels: of ops with a microbatch, else of any op or message, else of the rest; or ""."""
    frameworks = ranges.table.of(lambda label: label.framework, object)
    for among in (ranges.is_op & ranges.names_microbatch, ranges.has_actions, np.ones(len(ranges), dtype=np.bool_)):
        labels, first, counts = np.unique(ranges.label[among], return_index=True, return_counts=True)
        number: dict[str, int] = {}  # of labels, by framework, in the order of their first ranges
        for at in np.argsort(first, kind="stable").tolist():
            if name := frameworks[labels[at]]:
                number[name] = number.get(name, 0) + int(counts[at])
        if number:
            return max(number, key=lambda name: number[name])
    return ""


def labelled_ops(ranges: Ranges) -> Ranges:
    """The labelled ops; only those with a microbatch if there are any, since others lie around or inside them.

    None unless forwards and backwards are both there: "Forward 1" and its like are common words, and a framework that labels
    only forwards leaves the rest to :mod:`pptrace.recognise.ops.infer_from_operators`.
    """
    ops = ranges.where(ranges.is_op)
    is_named = ops.names_microbatch
    ops = ops.where(is_named | (ops.kind == Kind.W.code)) if is_named.any() else outermost(ops)
    actions = ops.actions()
    kinds = {*actions["kind"].tolist(), *actions["second_kind"].tolist()}
    is_pair = Kind.OVERLAP_F_B.code in kinds
    is_sure = bool((actions["stage"] >= 0).any())
    is_both = (is_pair or Kind.F.code in kinds) and bool(kinds & set(BACKWARD_KINDS))
    return ops if is_sure or is_both else ops.where(np.zeros(len(ops), dtype=np.bool_))


def outermost(ranges: Ranges) -> Ranges:
    """Sort the ranges by start, without those inside another of the same kind and thread, as a function's in its caller's."""
    ordered = ranges.where(np.lexsort((-ranges.end_ns, ranges.start_ns)))
    if len(ordered) < 2:
        return ordered
    _, threads = np.unique(ordered.thread, return_inverse=True)
    group = threads * (len(Kind) + 1) + ordered.kind + 1
    is_outer = np.zeros(len(ordered), dtype=np.bool_)
    for number in np.unique(group).tolist():
        rows = np.flatnonzero(group == number)
        is_outer[rows] = _are_outermost(ordered.start_ns[rows], ordered.end_ns[rows])
    return ordered.where(is_outer)


def _are_outermost(starts: Int64, ends: Int64) -> Bool:
    """Mark the ranges (in order of their starts) that begin when the last of those before them has ended."""
    before = np.append(np.iinfo(np.int64).min, np.maximum.accumulate(ends)[:-1])
    is_outer: Bool = starts >= before
    if (is_outer | (ends <= before)).all():  # every other one lies inside an earlier one
        return is_outer
    latest = np.iinfo(np.int64).min
    for index, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        is_outer[index] = start >= latest
        latest = end if start >= latest else latest
    return is_outer
