"""The step of each labelled range: by the ranges of steps, else counted by the ops that come again. The tables of one rank,
and the device work launched inside a host range.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from msgspec import Struct
from msgspec.structs import replace

from pptrace.intervals import earliest_from, reduce_ranges
from pptrace.model.device import DeviceWork
from pptrace.model.join_tables import concat_tables
from pptrace.model.tables import Bool, Int64
from pptrace.recognise.ops.label_columns import Ranges, outermost
from pptrace.schedule.actions import Phase
from pptrace.slices import Slice, group_codes, last_like

_NEVER = np.iinfo(np.int64).max


def with_steps(ranges: Ranges) -> Ranges:
    """Ranges in time order with their steps: those of step ranges if there are any, else counted from 0 by ops that come again.

    Of the step ranges the ones that the profiler numbers win. What lies outside all of them is left out, but for those that
    a step may begin before.
    """
    is_step = ranges.has_span("STEP")
    spans = ranges.where(is_step)
    has_number = spans.table.step[spans.label] >= 0
    leads = spans.table.leads[spans.label]
    single = _single(spans.where(has_number & ~leads if (has_number & ~leads).any() else has_number))
    chosen = single if len(single) else outermost(spans)
    if not len(chosen) or not ranges.has_actions.any():
        return replace(ranges, step=counted_steps(ranges))
    is_inferred = ranges.table.of(lambda label: label.inferred, np.bool_)
    if not is_inferred[chosen.label].any():  # the inferred ones are parts of steps
        ranges = ranges.where(~(is_step & is_inferred[ranges.label]))
    return _inside(ranges, chosen)


def spans_of_steps(ranges: Ranges) -> Ranges:
    """Steps and the ranges in them that are neither op nor message, each with its step; none without ranges of steps."""
    spans = ranges.where(ranges.has_span()).in_time_order()
    has_number = spans.table.step[spans.label] >= 0
    single = _single(spans.where(has_number))
    is_step = spans.has_span("STEP")
    chosen = single if len(single) else outermost(spans.where(is_step))
    if not len(chosen):
        return chosen
    columns = [[part.label, part.start_ns, part.end_ns, part.thread] for part in (spans, chosen)]
    return _inside(spans.where(~is_step | (last_like(*columns) >= 0)), chosen)


def num_outside_steps(ranges: Ranges, stepped: Ranges) -> int:
    """Number of ops that :func:`with_steps` dropped, because no range of a step covers them."""
    return int(ranges.is_op.sum() - stepped.is_op.sum())


def _single(spans: Ranges) -> Ranges:
    """Drop spans that a profiler wrote twice: same number and same time as an earlier one."""
    single: list[int] = []
    rows = list(
        zip(spans.table.step[spans.label].tolist(), spans.start_ns.tolist(), spans.end_ns.tolist(), strict=True)
    )
    for index, (number, start, _) in enumerate(rows):
        if not any(number == rows[earlier][0] and start < rows[earlier][2] for earlier in single[-2:]):
            single.append(index)
    return spans.where(np.array(single, dtype=np.int64))


def _inside(ranges: Ranges, spans: Ranges) -> Ranges:
    """The ranges that begin in one of the spans, which are in order of their starts."""
    given = spans.table.step[spans.label]
    has_number = (given >= 0).all() and len(np.unique(given)) == len(spans)
    numbers = given if has_number else np.arange(len(spans))
    index = np.searchsorted(spans.start_ns, ranges.start_ns, side="right") - 1
    is_outside = (index < 0) | (ranges.start_ns >= spans.end_ns[index])
    leads = np.append(spans.table.leads[spans.label], False)
    goes_before = ranges.has_actions & leads[np.minimum(index + 1, len(spans))]
    index = np.where(is_outside, np.where(goes_before, index + 1, -1), index)
    is_inside = index >= 0
    return replace(ranges.where(is_inside), step=numbers[index[is_inside]])


def counted_steps(ranges: Ranges) -> Int64:
    """Steps by order: a new one where an op would come again, where the range of a warmup begins or, for ops without
    microbatches, after the optimizer.

    A message that comes again with no op between is another tensor of the same one. The ranges are in time order.
    """
    # The first range behind each that would begin a new step, if one began with it; beyond all, where none would. Each reason
    # for a cut needs something that was in the step: ``cut_by`` has the earliest cut for which a range is a reason.
    count, actions = len(ranges), ranges.actions()
    cut_by = np.full(count, _NEVER)
    with_actions = np.flatnonzero(ranges.has_actions)
    # The warmup that follows an op or a message.
    warmup = _next(ranges.table.phase[ranges.label] == Phase.WARMUP.code)[with_actions]
    optimizers = np.flatnonzero(ranges.has_span("OPTIMIZER"))
    is_unnamed = np.zeros(count + 1, dtype=np.bool_)
    is_unnamed[actions["range"][actions["microbatch"] < 0]] = True
    action = _next(ranges.has_actions)[optimizers]  # that follows an optimizer
    for reason, cut in (
        _repetitions(ranges, actions),
        (with_actions[warmup < count], warmup[warmup < count]),
        (optimizers[is_unnamed[action]], action[is_unnamed[action]]),
    ):
        np.minimum.at(cut_by, reason, cut)
    cuts = np.minimum(earliest_from(cut_by), count)
    starts, start = [0], 0
    while start < count and (start := int(cuts[start])) < count:
        starts.append(start)
    return np.searchsorted(np.array(starts[1:], dtype=np.int64), np.arange(count), side="right")


def _repetitions(ranges: Ranges, actions: Slice) -> tuple[Int64, Int64]:
    """(ranges, those in which an op of theirs comes again)."""
    if not len(actions):
        return actions["range"], actions["range"]
    num_ops = np.cumsum(ranges.is_op)[actions["range"]]
    codes = group_codes([actions[name] for name in ("kind", "stage", "chunk", "microbatch")])
    order = np.argsort(codes, kind="stable")
    first, second = order[:-1], order[1:]
    again = (codes[first] == codes[second]) & (num_ops[second] > num_ops[first]) & (actions["microbatch"][second] >= 0)
    return actions["range"][first[again]], actions["range"][second[again]]


def _next(which: Bool) -> Int64:
    """First of some rows behind each row; the number of rows where none follows."""
    rows = np.append(np.flatnonzero(which), len(which))
    following: Int64 = rows[np.searchsorted(rows, np.arange(len(which)), side="right").clip(max=len(rows) - 1)]
    return following


class RankTables(Struct, frozen=True):
    """Ops and communication of one rank (schemas OPS and COMMS, rank -1), unmatched, on its own clock; labels are those of
    ``framework``.

    ``by_gaps``: the ops are what lies between messages (:mod:`pptrace.recognise.ops.from_labels`).
    ``run_sizes`` as in :class:`~pptrace.recognise.ops.label_actions.LabelledActions`.
    """

    framework: str
    ops: pd.DataFrame
    comms: pd.DataFrame
    warnings: tuple[str, ...] = ()
    by_gaps: bool = False
    run_sizes: Mapping[int, int] = {}

    def joined_with(self, others: RankTables | None) -> RankTables:
        """Add the ops and messages of other tables, and their spans of kinds that these lack."""
        if others is None:
            return self
        extra = others.ops[~others.ops["kind"].isin(set(self.ops["kind"]))]
        return RankTables(
            self.framework or others.framework,
            concat_tables([self.ops, extra]),
            concat_tables([self.comms, others.comms]),
            (*self.warnings, *others.warnings),
            others.by_gaps,
            {**others.run_sizes, **self.run_sizes},
        )


class LaunchedWork(Struct, frozen=True):
    """Device work launched in each of several host ranges: from the first start to the last end, and the stream and
    algorithm of what was launched first. The numbers mean something only where any was ``launched``.
    """

    launched: Bool
    start_ns: Int64
    end_ns: Int64
    stream: Int64
    algorithm: Int64


class LaunchIndex:
    """Finds the device work that was launched inside host ranges, by any thread of the process."""

    def __init__(self, work: DeviceWork) -> None:
        self._work, rows = work, work.launch_order
        self._rows = {True: rows[work.is_communication[rows]], False: rows[work.is_compute[rows]]}
        self._launches = {kind: work.launch_ns[rows_of_kind] for kind, rows_of_kind in self._rows.items()}

    def spans(self, starts_ns: Int64, ends_ns: Int64, communication: bool) -> LaunchedWork:
        """Work launched in each of several ranges."""
        launches, rows = self._launches[communication], self._rows[communication]
        low, high = np.searchsorted(launches, starts_ns), np.searchsorted(launches, ends_ns)
        launched = low < high
        start, end, stream, algorithm = (np.zeros(len(low), dtype=np.int64) for _ in range(4))
        if launched.any():
            first, behind = low[launched], high[launched]
            start[launched] = reduce_ranges(np.minimum, self._work.start_ns[rows], first, behind)
            end[launched] = reduce_ranges(np.maximum, self._work.end_ns[rows], first, behind)
            stream[launched] = self._work.stream[rows[first]]
            if len(self._work.algorithm):
                algorithm[launched] = self._work.algorithm[rows[first]]
        return LaunchedWork(launched, start, end, stream, algorithm)

    def compute_around(self, starts_ns: Int64, ends_ns: Int64) -> tuple[Int64, Int64, Bool]:
        """(last end of the compute launched before each range, 0 without any; first start of that launched from its end on;
        whether there is any).
        """
        launches, rows = self._launches[False], self._rows[False]
        ended = np.append(0, np.maximum.accumulate(self._work.end_ns[rows]))
        began = earliest_from(self._work.start_ns[rows])
        following = np.searchsorted(launches, ends_ns)
        return ended[np.searchsorted(launches, starts_ns)], began[following], following < len(launches)
