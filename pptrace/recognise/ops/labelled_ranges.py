"""Ranges of one rank whose names are labels of a framework, and which of them are its ops."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

from pptrace.model.tables import Int64
from pptrace.model.traces import Category, Events
from pptrace.recognise.labels import read_label
from pptrace.recognise.labels.label import EVALUATION
from pptrace.recognise.ops.label_columns import Bool, LabelTable, Ranges
from pptrace.schedule.actions import Kind, Phase

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
        middle = (start_ns + end_ns) // 2
        index = np.searchsorted(self._starts, middle, side="right") - 1
        inside = (index >= 0) & (middle < np.append(self._ends, 0)[index])
        return np.where(inside, np.append(self._phase, 0)[index], -1)

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
    ranges = Ranges(table, index[codes[is_labelled]], events.start_ns[rows], events.ends_of(rows), events.thread[rows])
    # Spans of a kind that pptrace marked as well are dropped: an optimizer's own range lies in the mark of its step.
    marked = {label.span for label in ranges.present() if label.marked}
    if marked:
        is_single = table.of(lambda label: label.marked or not label.span or label.span not in marked, np.bool_)
        ranges = ranges.where(is_single[ranges.label])
    # So are ranges of evaluation, and the ops and messages that begin inside of them.
    is_evaluation = ranges.has_span(EVALUATION)
    spans = outermost(ranges.where(is_evaluation))
    if not len(spans):
        return ranges
    at = np.searchsorted(spans.start_ns, ranges.start_ns, side="right") - 1
    is_inside = (at >= 0) & (ranges.start_ns < spans.end_ns[at])
    return ranges.where(~is_evaluation & ~is_inside)


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
    is_outer: npt.NDArray[np.bool_] = starts >= before
    if (is_outer | (ends <= before)).all():  # every other one lies inside an earlier one
        return is_outer
    latest = np.iinfo(np.int64).min
    for index, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        is_outer[index] = start >= latest
        latest = end if start >= latest else latest
    return is_outer
