"""Clocks that drift against each other: how fast, by the traffic in several stretches of time; taken for straight lines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from pptrace.clock.bounds import is_bounded, lower_bounds, offset_ranges
from pptrace.clock.ends import common_ends, within
from pptrace.clock.result import READING_NS, Clock, microseconds

_MAX_STRETCHES = 8
_FITS = 3  # of the drift; each sees what the one before left
_MATCHES_PER_LINK = 16  # that a stretch needs for each pair of neighbours in the pipeline, both ways together


_MAX_RATE = 1e-3
"""Of drift: an oscillator is wrong by less than 100 parts per million, and a clock is slewed by 500 at most."""


def with_drift(clock: Clock, matched: pd.DataFrame, ranks: Sequence[int], same: npt.NDArray[np.bool_]) -> Clock:
    """The clock with an uncertainty that holds at all times, also where clocks drift."""
    times = matched["start_ns"] + matched["rank"].map(clock.offsets_ns)
    begin, end = int(times.min()), int(times.max())
    place = np.searchsorted(np.asarray(ranks), matched["rank"].to_numpy())
    rates = np.zeros(len(ranks))
    straight = matched
    for _ in range(_FITS):
        stretches = _stretches(straight, times, len(ranks))
        if len(stretches) < 2:
            return clock
        rates += _rates(stretches, times, ranks, same)
        gained = np.rint(rates[place] * (times - (begin + end) // 2)).astype("int64")
        straight = matched.assign(start_ns=matched["start_ns"] + gained, end_ns=matched["end_ns"] + gained)
    whole, corrected = (offset_ranges(np.where(same, 0, lower_bounds(rows, ranks))) for rows in (matched, straight))
    likely = common_ends(straight, ranks)
    parts = [
        offset_ranges(np.where(same, 0, lower_bounds(stretch, ranks)))
        for stretch in _stretches(straight, times, len(ranks))
    ]
    corrected_by: dict[int, float] = {}
    offsets, uncertainty, warnings = dict(clock.offsets_ns), 0, list(clock.warnings)
    is_possible = bool(np.abs(rates).max() <= _MAX_RATE)
    for row, rank in list(enumerate(ranks))[1:]:
        rate, (lower, upper), (low, high) = float(rates[row]), whole[row], corrected[row]
        far, drift = within(offsets[rank], lower, upper)[1], round(abs(rate) * (end - begin))
        if lower > upper and not (is_possible and 2 * (low - high) <= lower - upper):
            if lower - upper > READING_NS:
                offsets[rank] = 0 if upper <= 0 <= lower else offsets[rank]
                far = max(lower - offsets[rank], offsets[rank] - upper)
                warnings.append(
                    f"rank {rank}: messages contradict each other by {microseconds(lower - upper)} about its clock against "
                    f"rank {ranks[0]}'s, and no drift explains it: the uncertainty covers that"
                )
        elif is_possible and (2 * drift > abs(upper - lower) or lower > upper):  # else the offset is right all the time
            offsets[rank], far = within(likely.get(rank), low, high)
            if lower > upper and 2 * drift > abs(high - low):
                corrected_by[rank] = rate
                far = max(within(offsets[rank], *part[row])[1] for part in parts if is_bounded(*part[row]))
                warnings.append(
                    f"rank {rank}: its clock drifts against rank {ranks[0]}'s, by {microseconds(drift)} over the trace, which is "
                    "taken for a straight line and corrected; its offset is that of the middle"
                )
            else:
                far += (drift + 1) // 2
        uncertainty = max(uncertainty, far)
    middle = (begin + end) // 2
    return Clock(clock.method, offsets, uncertainty, tuple(warnings), rates=corrected_by, middle_ns=middle)


def _rates(
    stretches: Sequence[pd.DataFrame], times: pd.Series[int], ranks: Sequence[int], same: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float64]:
    """How much each rank's offset grows per ns: the slope through the middles of what the stretches allow."""
    middles = np.array([times[stretch.index].mean() for stretch in stretches])
    rates = np.zeros(len(ranks))
    parts = [offset_ranges(np.where(same, 0, lower_bounds(stretch, ranks))) for stretch in stretches]
    for place in range(1, len(ranks)):
        known = [row for row, part in enumerate(parts) if is_bounded(*part[place])]
        if len(known) > 1:
            base = sum(parts[known[0]][place]) // 2
            offsets = [sum(parts[row][place]) // 2 - base for row in known]
            rates[place] = np.polyfit(middles[known] - middles[known[0]], offsets, 1)[0]
    return rates


def _stretches(rows: pd.DataFrame, times: pd.Series[int], num_ranks: int) -> list[pd.DataFrame]:
    """The rows in parts that follow each other in time, each with traffic enough to bound the clocks by itself."""
    first = times.groupby(rows["match"]).min().sort_values(kind="stable")
    num = min(_MAX_STRETCHES, len(first) // (_MATCHES_PER_LINK * (num_ranks - 1)))
    if num < 2:
        return []
    return [rows[rows["match"].isin(part)] for part in np.array_split(first.index.to_numpy(), num)]
