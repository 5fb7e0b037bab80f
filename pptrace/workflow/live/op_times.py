"""Compute of the ops of a live record, without an analysis: for the search for slow ranks."""

from __future__ import annotations

from functools import cache

import numpy as np

from pptrace.analysis.slow_rank import OpKind, OpTimes
from pptrace.intervals import lengths_within, union
from pptrace.live_records.file import LiveStep
from pptrace.marks import OpMark, SpanMark, parse_mark
from pptrace.recognise.labels import LabelledAction, read_label
from pptrace.schedule.actions import Action


def op_times(step: LiveStep) -> dict[OpKind, OpTimes]:
    """The ops of a step by kind and stage: their ranges without the communication inside."""
    ops, comms, kinds = _layout(step.names)
    if not len(ops):
        return {}
    begin_ns, end_ns = step.record.begin_ns, step.record.end_ns
    busy = union(begin_ns[comms], end_ns[comms])
    compute_ns = end_ns[ops] - begin_ns[ops] - lengths_within(busy, begin_ns[ops], end_ns[ops])
    by_kind: dict[OpKind, list[int]] = {}
    alone = -1 - step.rank  # an unknown stage is that of no other rank
    for (kind, stage), ns in zip(kinds, compute_ns.tolist(), strict=True):
        by_kind.setdefault((kind, alone if stage is None else stage), []).append(ns)
    return {kind: OpTimes(len(times), float(np.median(times))) for kind, times in by_kind.items()}


def has_ops(step: LiveStep) -> bool:
    """Return whether a record has ranges of ops."""
    return len(_layout(step.names)[0]) > 0


@cache
def _layout(names: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray, tuple[tuple[str, int | None], ...]]:
    """(places of the ops, places of communication, kind and stage of each op; None is a stage that its name does not say)."""
    ops, comms, kinds = [], [], []
    for place, name in enumerate(names):
        mark = parse_mark(name)
        if isinstance(mark, OpMark):
            action: Action | LabelledAction | None = mark.action
        else:  # pptrace.mark in a script
            label = read_label(name)
            action = label.action if label is not None and label.is_op else None
        if action is not None:
            ops.append(place)
            kinds.append((str(action.kind), action.stage))
        elif not isinstance(mark, SpanMark):
            comms.append(place)
    return np.array(ops, dtype=np.intp), np.array(comms, dtype=np.intp), tuple(kinds)
