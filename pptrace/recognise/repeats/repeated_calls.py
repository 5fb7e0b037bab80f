"""Steps from what repeats, of ranks whose steps nothing marks: a loop asks the same of its device again and again.

The steps are the shortest sequence of calls (launches of kernels and graphs, copies, fills, waits) that comes again, from the
first work of one to the first work of the next: a host that runs ahead of its device launches many steps in the time of one.
Logging in some steps only is passed over, where the launches alone repeat.

A wrong step is worse than none. What repeats has to be all there is, but for what came before the loop (captures of graphs, and
whole turns that ran otherwise, as warm-ups do): where other launches follow or lie between, the sequence may be a layer or a
microbatch of a longer step, of which too little was recorded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from pptrace.intervals import Int64
from pptrace.model.categories import same_category
from pptrace.model.tables import OPS, empty_table, make_table
from pptrace.model.traces import Events
from pptrace.model.wording import counted
from pptrace.recognise.repeats.calls_to_device import Bool, Calls, calls_to_device
from pptrace.recognise.repeats.period import Period, find_period, occurs_in

_LEAST_KINDS = 4
"""Different launches that a step has at least, if no CUDA graph is among them."""
_LEAST_REPEATS_AFTER_OTHERS = 3


@dataclass(frozen=True, slots=True, eq=False)
class RepeatedSteps:
    """Steps of a rank from what repeats: times, on the device's clock where it has one (``on_device``).

    ``what`` describes a step, ``boundary`` from where to where it goes, if that is not what it repeats.
    ``reason`` is why there are none, "" where there are, or where nothing was looked for.
    ``has_graphs``: CUDA graphs were launched. ``spans`` are other ranges in the steps, such as optimizers (schema OPS).
    """

    start_ns: Int64 = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    end_ns: Int64 = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    on_device: bool = False
    what: str = ""
    reason: str = ""
    has_graphs: bool = False
    boundary: str = ""
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
    texts = {"kind": kind, "phase": "", "clock": clock, "source": "inferred", "pair": ""}
    columns: dict[str, Any] = {
        **dict.fromkeys(("rank", "stage", "chunk", "microbatch"), np.full(len(step), -1, dtype=np.int64)),
        **{name: same_category(text, len(step)) for name, text in texts.items()},
        **{"step": step, "start_ns": start_ns, "end_ns": end_ns},
    }
    return make_table(OPS, columns)


def repeated_steps(events: Events, captures: Int64) -> RepeatedSteps:
    """The steps of a rank.

    Args:
        captures: times in which CUDA graphs were captured: what is before them is no part of the loop.
    """
    calls = _longest_part(calls_to_device(events), captures)
    has_graphs = bool(calls.is_graph.any())
    reasons = []
    for chosen in _levels(calls):
        found = _steps_of(calls.where(chosen))
        if isinstance(found, RepeatedSteps):
            return found
        reasons.append(found)
    return RepeatedSteps(reason=next(iter(reasons), ""), has_graphs=has_graphs)


def _longest_part(calls: Calls, captures: Int64) -> Calls:
    """The calls of the longest time between captures."""
    if not len(captures) or not len(calls):
        return calls
    inside = np.searchsorted(captures[:, 0], calls.start_ns, side="right") - 1
    is_captured = (inside >= 0) & (calls.start_ns < captures[np.maximum(inside, 0), 1])
    calls, part = calls.where(~is_captured), inside[~is_captured]
    if not len(calls):
        return calls
    parts = np.unique(part)
    lengths = [int(np.ptp(calls.start_ns[part == number])) for number in parts]
    return calls.where(part == parts[int(np.argmax(lengths))])


def _levels(calls: Calls) -> list[Bool]:
    """Calls among which a period is looked for, in order: launches alone, all calls.

    A loop that logs in every tenth step is one of ten steps only by its copies and waits, so that launches come first. But a
    graph is a single launch, of which a step may replay several: there the copies and waits around them tell the loop.
    """
    every = np.ones(len(calls), dtype=np.bool_)
    if calls.launches.all():
        return [every]
    return [every, calls.launches] if calls.is_graph.any() else [calls.launches, every]


def _steps_of(calls: Calls) -> RepeatedSteps | str:
    """The steps, or the reason why there are none."""
    period = find_period(calls.token)
    if period is None:
        return "what was launched does not repeat"
    if reason := _objection(calls, period):
        return reason
    first = period.start + _cut(calls, period)
    cuts = np.arange(first, len(calls), period.length)
    cuts = cuts[cuts < period.stop]
    bounds, on_device = _begins(calls, cuts, period.stop)
    if len(bounds) < 2 or (np.diff(bounds) <= 0).any():
        return (
            "what repeats has no whole turn" if len(bounds) < 2 else "what repeats runs in another order on the device"
        )
    piece = calls.where(slice(first, first + period.length))
    return RepeatedSteps(bounds[:-1], bounds[1:], on_device, _description(piece), has_graphs=bool(piece.is_graph.any()))


def _objection(calls: Calls, period: Period) -> str:
    """The reason why a period is no step; "" where nothing speaks against it."""
    piece = calls.where(slice(period.start, period.start + period.length))
    if not piece.is_graph.any() and len(np.unique(piece.token[piece.launches])) < _LEAST_KINDS:
        return f"what repeats has fewer than {_LEAST_KINDS} different launches"
    if calls.launches[period.stop :].any():
        return "other launches follow what repeats, which may be a part of a longer step"
    if calls.launches[: period.start].any():
        before = calls.token[: period.start]
        if period.num_repeats < _LEAST_REPEATS_AFTER_OTHERS or len(before) < period.length:
            return "other launches come before what repeats, which may be a part of a longer step"
        if occurs_in(before, piece.token):
            return "what repeats is interrupted by other launches, and may be a part of a longer step"
    return ""


def _cut(calls: Calls, period: Period) -> int:
    """Place at which the loop begins anew: where the host takes longest, at the median, between two calls; with a launch, where
    that is open.
    """
    gaps = np.maximum(calls.start_ns[period.start + 1 : period.stop] - calls.end_ns[period.start : period.stop - 1], 0)
    turns = len(gaps) // period.length
    typical = np.median(gaps[: turns * period.length].reshape(turns, period.length), axis=0)
    places = (np.flatnonzero(typical == typical.max()) + 1) % period.length
    begins_with_launch = calls.launches[period.start + places]
    return int(np.min(places[begins_with_launch] if begins_with_launch.any() else places))


def _begins(calls: Calls, cuts: Int64, stop: int) -> tuple[Int64, bool]:
    """(begin of each turn, whether they are times of the device): that of its first work, or of its first call without any."""
    never = np.iinfo(np.int64).max
    work = np.where(calls.work_start_ns < 0, never, calls.work_start_ns)[:stop]
    begins = np.minimum.reduceat(work, cuts) if len(cuts) else work[:0]
    if (begins[:-1] == never).any():
        return calls.start_ns[cuts], False
    return begins[begins < never], True


def _description(piece: Calls) -> str:
    num_graphs, num_launches = int(piece.is_graph.sum()), int((piece.launches & ~piece.is_graph).sum())
    is_device = bool((piece.work_start_ns >= 0).any())
    parts = [
        counted(num_graphs, "CUDA graph"),
        counted(num_launches, "launch" if is_device else "operator", "launches" if is_device else None),
        counted(int((~piece.launches).sum()), "copy or wait", "copies or waits"),
    ]
    counts = (num_graphs, num_launches, int((~piece.launches).sum()))
    return ", ".join(part for part, count in zip(parts, counts, strict=True) if count)
