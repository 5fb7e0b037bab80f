"""Steps from what repeats, of ranks whose steps nothing marks: a loop asks the same of its device again and again.

The steps are the shortest sequence of calls (launches of kernels and graphs, copies, fills, waits) that comes again, from the
first work of one to the first work of the next: a host that runs ahead of its device launches many steps in the time of one.
Logging in some steps only is passed over, where the launches alone repeat.

A wrong step is worse than none. What repeats has to be all there is, but for what came before the loop (captures of graphs, and
whole turns that ran otherwise, as warm-ups do): where other launches follow or lie between, the sequence may be a layer or a
microbatch of a longer step, of which too little was recorded.
"""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
from msgspec import Struct, field

from pptrace.intervals import find_interval, reduce_ranges
from pptrace.model.device import Rows
from pptrace.model.tables import OPS, Bool, Int64, empty_table, ops_table
from pptrace.model.traces import Category, Events
from pptrace.model.wording import counted
from pptrace.recognise.device.idle import LAUNCHES, SYNCHRONISES
from pptrace.recognise.device.work import device_rows, launch_calls
from pptrace.slices import Slice, distinct_of

_MOST_CANDIDATES = 32
_MOST_PLACES = 64
_ALMOST = 0.98


class Period(Struct, frozen=True):
    """The tokens ``start`` to ``stop`` of a sequence repeat with this length: each equals the one ``length`` before it."""

    length: int
    start: int
    stop: int


def find_period(tokens: Int64) -> Period | None:
    """The shortest period that covers about as much of the sequence as any; None where nothing comes twice in a row.

    Lengths that are looked at are those at which the sequence agrees best with itself: its autocorrelation, with a random number
    of size 1 for each token, by FFT (Wiener–Khinchin), so that a million tokens take a second.
    """
    periods = []
    for length in _lengths(tokens):
        start, run = _longest_true(tokens[length:] == tokens[:-length])
        if run >= length:
            periods.append(Period(length, start, start + run + length))
    if not periods:
        return None
    most = max(period.stop - period.start for period in periods)
    return min((p for p in periods if p.stop - p.start >= _ALMOST * most), key=lambda period: period.length)


def occurs_in(tokens: Int64, piece: Int64) -> bool:
    """Return whether the piece, turned by any number of places, occurs in a sequence.

    It is looked for around its rarest token; what occurs more often than can be looked at counts as found.
    """
    length = len(piece)
    if len(tokens) < length:
        return False
    values, counts = np.unique(piece, return_counts=True)
    anchor = values[np.argmin(counts)]
    positions, at = np.flatnonzero(tokens == anchor), np.flatnonzero(piece == anchor)
    if len(positions) * len(at) > _MOST_PLACES * _MOST_PLACES:
        return True
    for position in positions.tolist():
        window = tokens[max(0, position - length + 1) : position + length]
        here = min(position, length - 1)
        for offset in at.tolist():
            expected = piece[(np.arange(len(window)) - here + offset) % length]
            if _longest_true(window == expected)[1] >= length:
                return True
    return False


def _lengths(tokens: Int64) -> list[int]:
    """Candidates for the length, by how well the sequence agrees with itself at that distance."""
    count = len(tokens)
    half = count // 2
    if half < 1:
        return []
    kinds, codes = np.unique(tokens, return_inverse=True)
    phases = np.random.default_rng(0).random(len(kinds))
    size = 1 << (2 * count - 1).bit_length()
    spectrum = np.fft.fft(np.exp(2j * np.pi * phases)[codes.reshape(-1)], size)
    equal = np.fft.ifft(np.abs(spectrum) ** 2).real[1 : half + 1]
    share = equal / (count - np.arange(1, half + 1))
    chosen = [np.argsort(-values.round(6), kind="stable")[:_MOST_CANDIDATES] + 1 for values in (equal, share)]
    return sorted({int(length) for lengths in chosen for length in lengths})


def _longest_true(mask: Bool) -> tuple[int, int]:
    """(start, length) of the longest run of true values."""
    edges = np.diff(np.concatenate(([False], mask, [False])).astype(np.int8))
    starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    if not len(starts):
        return 0, 0
    longest = int(np.argmax(ends - starts))
    return int(starts[longest]), int(ends[longest] - starts[longest])


_GRAPH = re.compile(r"GraphLaunch")
_PROFILER = re.compile(r"^(?:ProfilerStep#|pp1:)")
_LEAST_KINDS = 4
"""Different launches that a step has at least, if no CUDA graph is among them."""
_LEAST_REPEATS_AFTER_OTHERS = 3


class RepeatedSteps(Struct, frozen=True, eq=False):
    """Steps of a rank from what repeats: times, on the device's clock where it has one (``on_device``).

    ``what`` describes a step, ``boundary`` from where to where it goes, if that is not what it repeats.
    ``reason`` is why there are none, "" where there are, or where nothing was looked for.
    ``has_graphs``: CUDA graphs were launched. ``of_optimizers``: they are what lies between updates. ``spans`` are other ranges
    in the steps, such as optimizers (schema OPS).
    """

    start_ns: Int64 = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    end_ns: Int64 = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    on_device: bool = False
    what: str = ""
    reason: str = ""
    has_graphs: bool = False
    boundary: str = ""
    of_optimizers: bool = False
    spans: pd.DataFrame = field(default_factory=lambda: empty_table(OPS))

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def ranges(self) -> pd.DataFrame:
        """The steps as rows (schema OPS), of no rank."""
        clock = "device" if self.on_device else "host"
        return rows_of_ranges("STEP", np.arange(len(self), dtype=np.int64), self.start_ns, self.end_ns, clock)


def rows_of_ranges(kind: str, step: Int64, start_ns: Int64, end_ns: Int64, clock: str = "host") -> pd.DataFrame:
    """Ranges of one kind as inferred rows of the schema OPS, of no rank."""
    columns = {"kind": kind, "clock": clock, "source": "inferred"}
    return ops_table({**columns, "step": step, "start_ns": start_ns, "end_ns": end_ns})


def repeated_steps(events: Events, captures: Int64) -> RepeatedSteps:
    """The steps of a rank.

    Args:
        captures: times in which CUDA graphs were captured: what is before them is no part of the loop.
    """
    calls = _longest_part(calls_to_device(events), captures)
    launches, every = calls["launches"], np.ones(len(calls), dtype=np.bool_)
    has_graphs = bool(calls["is_graph"].any())
    # A loop that logs in every tenth step is one of ten steps only by its copies and waits, so that launches alone come first.
    # But a graph is a single launch, of which a step may replay several: there the copies and waits around them tell the loop.
    levels = [every] if launches.all() else [every, launches] if has_graphs else [launches, every]
    reasons = []
    for chosen in levels:
        found = _steps_of(calls.where(chosen))
        if len(found):
            return found
        reasons.append(found.reason)
    return RepeatedSteps(reason=reasons[0], has_graphs=has_graphs)


def calls_to_device(events: Events) -> Slice:
    """The calls of a rank, in order of their begin: launches by the kernel they launch, graphs by the names of all their nodes.

    ``token`` is the same for calls that ask for the same; ``work_start_ns`` is −1 where no work of theirs was recorded.
    ``launches`` are those that ask for more than a copy, a fill or a wait; ``is_graph`` of them those of CUDA graphs. Without
    runtime calls they are the kernels, without a device the outermost operators and ranges of the thread that has most of them.
    """
    rows = device_rows(events)
    launched_by = launch_calls(events, rows)
    if not (launched_by >= 0).any():
        calls = rows if len(rows) else outermost_ranges(events)
        start = events.start_ns[calls]
        return Slice(
            {
                "token": events.name_id[calls].astype(np.int64),
                "start_ns": start,
                "end_ns": events.ends_of(calls),
                "work_start_ns": start if len(rows) else np.full(len(calls), -1, dtype=np.int64),
                "launches": (events.category[calls] == Category.KERNEL) | (len(rows) == 0),
                "is_graph": np.zeros(len(calls), dtype=np.bool_),
            }
        )
    order = np.argsort(launched_by, kind="stable")
    order = order[np.searchsorted(launched_by[order], 0) :]
    launching, first, count = np.unique(launched_by[order], return_index=True, return_counts=True)
    others = [events.rows_named(pattern, Category.RUNTIME) for pattern in (LAUNCHES, SYNCHRONISES)]
    calls = np.union1d(launching, np.union1d(*others))
    at = np.searchsorted(calls, launching)
    work, num_work, work_start = (np.full(len(calls), -1, dtype=np.int64) for _ in range(3))
    of_nodes = events.numbers_of_names()[events.name_id[rows[order]]]
    work[at], num_work[at] = np.add.reduceat(of_nodes, first), count  # in whatever order its nodes ran
    work_start[at] = reduce_ranges(np.minimum, events.start_ns[rows[order]], first, first + count)
    name = events.name_id[calls]
    launches = events.named(LAUNCHES)[name]
    return Slice(
        {
            "token": distinct_of([name.astype(np.int64), work, num_work])[0],
            "start_ns": events.start_ns[calls],
            "end_ns": events.ends_of(calls),
            "work_start_ns": work_start,
            "launches": launches,
            "is_graph": events.named(_GRAPH)[name] | (launches & (num_work > 1)),
        }
    )


def outermost_ranges(events: Events, thread: int | None = None) -> Rows:
    """Rows of the operators and ranges of a thread that are in no other one; without one of the thread that has most of them."""
    chosen = events.is_of(Category.CPU_OP, Category.ANNOTATION) & ~events.named(_PROFILER)[events.name_id]
    return events.outermost(np.flatnonzero(chosen if thread is None else chosen & (events.thread == thread)))


def _longest_part(calls: Slice, captures: Int64) -> Slice:
    """The calls of the longest time between captures."""
    if not len(captures) or not len(calls):
        return calls
    part = np.searchsorted(captures[:, 0], calls["start_ns"], side="right")
    is_free = find_interval(captures[:, 0], captures[:, 1], calls["start_ns"]) < 0
    calls, part = calls.where(is_free), part[is_free]
    parts = np.unique(part)
    lengths = [int(np.ptp(calls["start_ns"][part == number])) for number in parts]
    return calls.where(part == parts[int(np.argmax(lengths))]) if len(parts) else calls


def _steps_of(calls: Slice) -> RepeatedSteps:
    """The steps; none with the reason why."""
    period = find_period(calls["token"])
    if period is None:
        return RepeatedSteps(reason="what was launched does not repeat")
    if reason := _objection(calls, period):
        return RepeatedSteps(reason=reason)
    first = period.start + _cut(calls, period)
    bounds, on_device = _begins(calls, np.arange(first, period.stop, period.length), period.stop)
    if len(bounds) < 2:
        return RepeatedSteps(reason="what repeats has no whole turn")
    if (np.diff(bounds) <= 0).any():
        return RepeatedSteps(reason="what repeats runs in another order on the device")
    piece = calls.where(slice(first, first + period.length))
    launches, is_graph = piece["launches"], piece["is_graph"]
    has_device = bool((piece["work_start_ns"] >= 0).any())
    counts = (
        (is_graph.sum(), "CUDA graph", "CUDA graphs"),
        ((launches & ~is_graph).sum(), *(("launch", "launches") if has_device else ("operator", "operators"))),
        ((~launches).sum(), "copy or wait", "copies or waits"),
    )
    what = ", ".join(counted(int(count), one, several) for count, one, several in counts if count)
    return RepeatedSteps(bounds[:-1], bounds[1:], on_device, what, has_graphs=bool(is_graph.any()))


def _objection(calls: Slice, period: Period) -> str:
    """The reason why a period is no step; "" where nothing speaks against it."""
    piece = calls.where(slice(period.start, period.start + period.length))
    if not piece["is_graph"].any() and len(np.unique(piece["token"][piece["launches"]])) < _LEAST_KINDS:
        return f"what repeats has fewer than {_LEAST_KINDS} different launches"
    if calls["launches"][period.stop :].any():
        return "other launches follow what repeats, which may be a part of a longer step"
    if calls["launches"][: period.start].any():
        before = calls["token"][: period.start]
        num_repeats = (period.stop - period.start) // period.length
        if num_repeats < _LEAST_REPEATS_AFTER_OTHERS or len(before) < period.length:
            return "other launches come before what repeats, which may be a part of a longer step"
        if occurs_in(before, piece["token"]):
            return "what repeats is interrupted by other launches, and may be a part of a longer step"
    return ""


def _cut(calls: Slice, period: Period) -> int:
    """Place at which the loop begins anew: where the recording begins, if that is of whole turns, else where the host takes
    longest, at the median, between two calls; with a launch, where that is open.
    """
    if (period.stop - period.start) % period.length == 0 and not calls["launches"][: period.start].any():
        return 0
    gaps = np.maximum(
        calls["start_ns"][period.start + 1 : period.stop] - calls["end_ns"][period.start : period.stop - 1], 0
    )
    turns = len(gaps) // period.length
    typical = np.median(gaps[: turns * period.length].reshape(turns, period.length), axis=0)
    candidates = (np.flatnonzero(typical == typical.max()) + 1) % period.length
    begins_with_launch = calls["launches"][period.start + candidates]
    return int(np.min(candidates[begins_with_launch] if begins_with_launch.any() else candidates))


def _begins(calls: Slice, cuts: Int64, stop: int) -> tuple[Int64, bool]:
    """(begin of each turn, whether they are times of the device): that of its first work, or of its first call without any."""
    never = np.iinfo(np.int64).max
    work = np.where(calls["work_start_ns"] < 0, never, calls["work_start_ns"])[:stop]
    begins = np.minimum.reduceat(work, cuts) if len(cuts) else work[:0]
    if (begins[:-1] == never).any():
        return calls["start_ns"][cuts], False
    return begins[begins < never], True
