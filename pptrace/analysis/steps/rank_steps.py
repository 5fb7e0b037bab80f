"""The steps of one rank: the partition of each window, phases, communication, all steps of a rank at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from pptrace.analysis.aligned import AlignedRun, RankRows
from pptrace.analysis.memory.answer import peaks_in_flight, peaks_of_steps
from pptrace.analysis.result import CommSummary, PhaseSummary, RankIdeal, RankStep
from pptrace.analysis.steps.communication import summarise_steps
from pptrace.analysis.steps.host_idle import held_up_op, host_idle_of_windows, synchronisations_of_windows
from pptrace.analysis.steps.op_rows import OpRows
from pptrace.intervals import EMPTY, intersect, lengths_within, merge, subtract, union
from pptrace.model.device import HostIdle, with_host_waits
from pptrace.model.known import masked
from pptrace.model.mesh import MeshInfo
from pptrace.model.tables import MESSAGES, Bool, Int64
from pptrace.recognise.device.work import NO_DEVICE, breakdowns
from pptrace.recognise.groups.topology import UNKNOWN
from pptrace.slices import Slice, reduce_groups
from pptrace.timeline.lanes import Lane, host_waits
from pptrace.timeline.windows import StepWindow, phase_spans_of_steps


class RankWindows(Struct, frozen=True):
    """The windows of one rank, one per step, in order of the steps, ns.

    Where a window is not ``comparable``, the times of other ranks say nothing about this one's, and the window is its own,
    from its first op to its last. ``is_alone``: other ranks of its pipeline have no trace, and those that have do not compare.
    ``lacks_work``: device work of it is missing. ``is_whole``: the trace has every op of the step. ``ideals`` are the rank's
    ideal bubble in each, None where none is known.
    """

    rank: int
    steps: Int64
    start_ns: Int64
    end_ns: Int64
    comparable: Bool
    lacks_work: Bool
    is_alone: Bool
    is_whole: Bool
    ideals: tuple[RankIdeal | None, ...] = ()

    @classmethod
    def of(
        cls,
        rank: int,
        windows: Sequence[StepWindow],
        data: AlignedRun,
        *marks: Sequence[bool],
        ideals: tuple[RankIdeal | None, ...] = (),
    ) -> RankWindows:
        """The windows of a rank; ``marks`` say of each whether it is ``comparable``, ``is_alone`` and ``is_whole``."""
        lacks_work = [data.lacks_work(rank, window.step) for window in windows]
        comparable, is_alone, is_whole, lacks = (np.array(mark, dtype=np.bool_) for mark in (*marks, lacks_work))
        steps, start, end = (
            np.array([getattr(window, name) for window in windows], dtype=np.int64)
            for name in ("step", "start_ns", "end_ns")
        )
        return cls(rank, steps, start, end, comparable, lacks, is_alone, is_whole, ideals)

    def index_of(self, rows: Slice) -> tuple[Slice, Int64]:
        """(rows of these steps, the index of each one's window); the rows are in order of step."""
        index = np.searchsorted(self.steps, rows["step"])
        inside = index < len(self.steps)
        inside[inside] = self.steps[index[inside]] == rows["step"][inside]
        return (rows, index) if inside.all() else (rows.where(inside), index[inside])


class TimesInWindows(Struct, frozen=True, dict=True):
    """The time of a rank by what it did, in several windows, ns."""

    lane: Lane
    start_ns: Int64
    end_ns: Int64

    @cached_property
    def compute_ns(self) -> Int64:
        return lengths_within(self.lane.compute, self.start_ns, self.end_ns)

    @cached_property
    def exposed_ns(self) -> Int64:
        return lengths_within(self.lane.exposed, self.start_ns, self.end_ns)

    @cached_property
    def is_known(self) -> Bool:
        """Mask of the steps in which no part of the communication may be waiting."""
        known: Bool = lengths_within(self.lane.unknown, self.start_ns, self.end_ns) == 0
        return known

    @property
    def rest_ns(self) -> Int64:
        return self.end_ns - self.start_ns - self.compute_ns

    @property
    def bubble_ns(self) -> Int64:
        """Time that is neither compute nor exposed communication, ns, if that is known."""
        return self.rest_ns - self.exposed_ns

    @property
    def least_bubble_ns(self) -> Int64:
        """Bubble if all communication were transfers, ns."""
        either = merge(self.lane.not_overlapped, self.lane.exposed)
        return self.rest_ns - lengths_within(either, self.start_ns, self.end_ns)


def report_rank_steps(windows: RankWindows, data: AlignedRun, mesh: MeshInfo) -> list[RankStep]:
    """All steps of one rank of a pipeline.

    Args:
        windows: its windows; where they are not comparable, replaced by its own.
        data: everything measured.
        mesh: which pipeline rank it is.
    """
    rank = windows.rank
    rows = data.rows.of_rank(rank)
    ops, op_window = windows.index_of(rows.ops)
    windows = _own_where_not_comparable(windows, ops, op_window)
    comms, comm_window = windows.index_of(rows.comms)
    times = TimesInWindows(data.lanes[rank], windows.start_ns, windows.end_ns)
    known = windows.comparable & ~windows.is_alone & times.is_known & windows.is_whole & ~_has_early_ends(windows, data)
    first_op = np.searchsorted(op_window, np.arange(len(windows.steps) + 1))
    has_times = ~windows.lacks_work
    # the lowest stage of each step; None where no op has one
    has_stage = ops["stage"] >= 0
    lowest = reduce_groups(np.minimum, ops["stage"][has_stage], op_window[has_stage], len(windows.steps))
    hosts = host_of_steps(windows, data, held_up_op(ops))
    columns: dict[str, Sequence[Any]] = {
        "stage": masked(lowest, lowest < np.iinfo(np.int64).max),
        "window_ns": (windows.end_ns - windows.start_ns).tolist(),
        "compute_ns": masked(times.compute_ns, has_times & windows.is_whole),
        "exposed_comm_ns": masked(times.exposed_ns, known),
        "bubble_ns": masked(times.bubble_ns, known),
        "phases": _phases(ops, op_window, windows, times.lane, known),
        "comms": comms_of_steps(comms, comm_window, windows, data),
        "spans": durations_of_steps(rows.spans, windows),
        "device": device_of_steps(windows, data),
        **hosts,
        "idle_spans": idle_by_host(rows.spans, times, np.zeros(len(known), dtype=np.bool_), hosts["host"])[
            "idle_spans"
        ],
        "peak_in_flight": peaks_in_flight(ops, op_window, len(windows.steps)),
        "ops": [
            OpRows(ops, first, last) for first, last in zip(first_op[:-1].tolist(), first_op[1:].tolist(), strict=True)
        ],
        "ideal": windows.ideals,
        **memory_of_steps(rows, windows, data),
        **_not_compute(times, comms, comm_window, windows, known, data),
    }
    pp_rank = mesh.pp_rank(rank)
    return [
        RankStep(rank=rank, pp_rank=pp_rank, **dict(zip(columns, values, strict=True)))
        for values in zip(*columns.values(), strict=True)
    ]


def _own_where_not_comparable(windows: RankWindows, ops: Slice, op_window: Int64) -> RankWindows:
    if windows.comparable.all():
        return windows
    first = reduce_groups(np.minimum, ops["start_ns"], op_window, len(windows.steps))
    last = reduce_groups(np.maximum, ops["end_ns"], op_window, len(windows.steps))
    return replace(
        windows,
        start_ns=np.where(windows.comparable, windows.start_ns, first),
        end_ns=np.where(windows.comparable, windows.end_ns, last),
    )


def _has_early_ends(windows: RankWindows, data: AlignedRun) -> Bool:
    """Mark the steps in which communication of the rank has a wrong end: how long it waited is not known."""
    ends = data.clock.early_ends.get(windows.rank)
    if ends is None:
        return np.zeros(len(windows.steps), dtype=np.bool_)
    ends = np.sort(data.clock.to_common_clock(windows.rank, ends))
    return np.searchsorted(ends, windows.end_ns, side="right") > np.searchsorted(ends, windows.start_ns)


def _phases(
    ops: Slice, op_window: Int64, windows: RankWindows, lane: Lane, known: Bool
) -> list[dict[str, PhaseSummary]]:
    """The phases of each step; {} where an op has none."""
    lacks_phase = np.zeros(len(windows.steps), dtype=np.bool_)
    lacks_phase[op_window[ops["phase"] == ""]] = True
    tagged = ~lacks_phase[op_window]
    spans = phase_spans_of_steps(
        ops.where(tagged), op_window[tagged], windows.start_ns.tolist(), windows.end_ns.tolist()
    )
    starts, ends = (
        np.array([getattr(span, edge) for of_step in spans for span in of_step], dtype=np.int64)
        for edge in ("start_ns", "end_ns")
    )
    times = TimesInWindows(lane, starts, ends)
    of_phase = len(spans[0]) if spans else 1
    bubbles = iter(masked(times.bubble_ns, np.repeat(known, of_phase)))
    return [
        {
            str(span.phase): PhaseSummary(span.start_ns, span.end_ns, span.num_forward, span.num_backward, bubble)
            for span, bubble in zip(of_step, bubbles_of_step, strict=True)
        }
        if not lacks
        else {}
        for of_step, bubbles_of_step, lacks in zip(
            spans, zip(*[bubbles] * of_phase, strict=True), lacks_phase.tolist(), strict=True
        )
    ]


def _not_compute(
    times: TimesInWindows, comms: Slice, comm_window: Int64, windows: RankWindows, known: Bool, data: AlignedRun
) -> dict[str, list[int | None]]:
    """Time of each window without compute, and bounds of the bubble in it, ns; None where the rank's times do not say when it
    computed.

    Part of the exposed communication may be waiting after all, as far as the clocks of both sides are uncertain. Where a rank
    is the only one with a trace and its messages were not recorded, any part of the rest may have been a transfer.
    """
    num_steps, is_known = len(windows.steps), windows.is_whole & ~windows.lacks_work
    matched = np.bincount(comm_window[comms["match"] >= 0], minlength=num_steps)
    slack = 2 * matched * (data.clock.uncertainty_ns or 0)
    is_message = comms.among("kind", MESSAGES) & comms.among("axis", ("pp", UNKNOWN))
    has_messages = ~windows.is_alone
    has_messages[comm_window[is_message]] = True
    rest, bubble = times.rest_ns, times.bubble_ns
    high = np.where(windows.comparable, np.minimum(rest, bubble + slack), rest)
    low = np.where(has_messages, np.where(known, bubble, times.least_bubble_ns), 0)
    return {
        "not_compute_ns": masked(rest, is_known),
        "bubble_low_ns": masked(low, is_known),
        "bubble_high_ns": masked(np.where(known, bubble, high), is_known),
    }


_BESIDE_COMPUTE = ("hidden_ns", "exposed_ns", "free_ns", "overlap_ratio")
_TIMES = (*_BESIDE_COMPUTE, "total_ns", "wait_ns", "algbw_gbps", "busbw_gbps")


def comms_of_steps(
    comms: Slice, window: Int64, windows: RankWindows, data: AlignedRun
) -> list[tuple[CommSummary, ...]]:
    """The summaries of a rank's communication in each step, without times where its device was not recorded.

    Where the ranks' times do not compare, nothing tells waiting from transfer.
    """
    rank = windows.rank
    if not windows.comparable.all():
        comms = Slice({**comms.columns, "match": np.where(windows.comparable[window], comms["match"], -1)})
    prediction = data.predicted.get(rank)
    predicted = None if prediction is None else [prediction.of_step(step) for step in windows.steps.tolist()]
    ops, of_window = windows.index_of(data.rows.of_rank(windows.rank).ops)
    ends = reduce_groups(np.maximum, ops["end_ns"], of_window, len(windows.steps))
    behind = (np.where(ends == np.iinfo(np.int64).min, windows.end_ns, ends), windows.end_ns)
    summaries = summarise_steps(comms, window, len(windows.steps), data.lanes[rank].compute, predicted, behind)
    unknown = () if data.lanes[rank].knows_compute else _BESIDE_COMPUTE
    return [
        tuple(replace(comm, **dict.fromkeys(_TIMES if lacks else unknown)) for comm in of_step)
        for of_step, lacks in zip(summaries, windows.lacks_work.tolist(), strict=True)
    ]


def durations_of_steps(spans: Slice, windows: RankWindows) -> list[dict[str, int]]:
    """Total duration of a rank's other ranges in each step, by kind, ns."""
    spans, window = windows.index_of(spans)
    totals: list[dict[str, int]] = [{} for _ in windows.steps]
    kind, kinds = spans.codes("kind")
    sums = np.zeros((len(totals), len(kinds)), dtype=np.int64)
    np.add.at(sums, (window, kind), spans["end_ns"] - spans["start_ns"])
    for row, column in sorted(set(zip(window.tolist(), kind.tolist(), strict=True))):
        totals[row][kinds[column]] = int(sums[row, column])
    return totals


def device_of_steps(windows: RankWindows, data: AlignedRun) -> list[Any]:
    """The device breakdown of each window; nothing of those in which work is missing."""
    of_windows = breakdowns(data.work[windows.rank], *_on_rank_clock(windows, data))
    return [one or NO_DEVICE for one in masked(of_windows, ~windows.lacks_work)]


def _on_rank_clock(windows: RankWindows, data: AlignedRun) -> tuple[list[int], list[int]]:
    """(starts, ends) of the windows on the rank's own clock."""
    times = (windows.start_ns, windows.end_ns)
    start, end = (data.clock.times_on_rank_clock(windows.rank, of_windows).tolist() for of_windows in times)
    return start, end


def host_of_steps(
    windows: RankWindows, data: AlignedRun, held_up: Callable[[int], str | None] = lambda _: None
) -> dict[str, list[Any]]:
    """The device-idle time of each window by its cause, and the synchronisations in it, each of which held up an op."""
    rank, work = windows.rank, data.work[windows.rank]
    starts, ends = _on_rank_clock(windows, data)
    waits = data.clock.times_on_rank_clock(rank, host_waits(data.rows.of_rank(rank).comms))
    idle = with_host_waits(work.idle, waits)
    synchronisations: list[Any] = [None] * len(starts)
    if len(work) and not idle.reason:

        def on_clock(time_ns: int) -> int:
            return int(data.clock.to_common_clock(rank, np.array([time_ns]))[0])

        synchronisations = synchronisations_of_windows(idle.synchronisations, starts, ends, held_up, on_clock)
    hosts = host_idle_of_windows(work, idle, starts, ends)
    of_steps = {"host": hosts, "synchronisations": synchronisations}
    return {name: masked(values, ~windows.lacks_work) for name, values in of_steps.items()}


_IDLE_KINDS = ("GC", "DATA", "CHECKPOINT", "LOGGING")
"""Ranges that say why a host launches nothing; of two around one moment the first one counts."""


def idle_by_host(
    spans: Slice, times: TimesInWindows, of_operators: Bool, hosts: Sequence[HostIdle | None]
) -> dict[str, list[Any]]:
    """Idle time of each window by what the rank's host did meanwhile, ns: that in its ranges by kind, and that between operators.

    Args:
        of_operators: where the operators of a host without a device tell what it computed.
        hosts: what a device waited for, None where that is not known.
    """
    lane, named = times.lane, EMPTY
    totals: list[dict[str, int]] = [{} for _ in hosts]
    for kind in _IDLE_KINDS:
        rows = spans.where(spans.among("kind", (kind,)))
        if not len(rows):
            continue
        ranges = subtract(union(rows["start_ns"], rows["end_ns"]), named)
        named = merge(named, ranges)
        if lane.idle is None:
            idle = subtract(ranges, merge(lane.compute, lane.not_overlapped, lane.exposed))
        else:
            idle = intersect(ranges, lane.idle.launch_starved)
        for total, ns in zip(totals, lengths_within(idle, times.start_ns, times.end_ns).tolist(), strict=True):
            total.update({kind: ns} if ns else {})
    on_device = np.array([host is not None for host in hosts], dtype=np.bool_)
    between = times.least_bubble_ns if of_operators.any() else np.zeros_like(times.start_ns)
    if lane.idle is not None and lane.idle.between_operators is not None:
        paused = intersect(merge(lane.idle.between_operators, named), lane.idle.launch_starved)
        between, of_operators = lengths_within(paused, times.start_ns, times.end_ns), of_operators | on_device
    return {
        "paused_in": _paused_in(times, named),
        "idle_spans": masked(totals, of_operators | on_device),
        "between_operators_ns": masked(between, of_operators),
    }


def _paused_in(times: TimesInWindows, named: Int64) -> list[dict[str, int]]:
    """Idle time of each window in pauses of the host in ranges, by their names, without the times that are ``named`` already."""
    lane = times.lane
    busy = merge(named, lane.compute, lane.not_overlapped, lane.exposed)
    found: list[dict[str, int]] = [{} for _ in times.start_ns]
    for name, pauses in lane.pauses.items():
        idle = subtract(pauses, busy if lane.idle is None else named)
        idle = idle if lane.idle is None else intersect(idle, lane.idle.launch_starved)
        for of_window, ns in zip(found, lengths_within(idle, times.start_ns, times.end_ns).tolist(), strict=True):
            of_window.update({name: ns} if ns else {})
    return found


def memory_of_steps(rows: RankRows, windows: RankWindows, data: AlignedRun) -> dict[str, list[Any]]:
    """The rank's memory in each step; None where nothing tells."""
    peaks = peaks_of_steps(rows, windows.rank, windows.steps, windows.start_ns, windows.end_ns, data)
    return {
        "peak_memory_bytes": [None if peak is None else peak.peak for peak in peaks],
        "peak_memory_kind": [None if peak is None else str(peak.kind) for peak in peaks],
        "start_memory_bytes": [None if peak is None else peak.start for peak in peaks],
        "peak_reserved_bytes": [None if peak is None else peak.reserved_peak for peak in peaks],
    }
