"""Linear drift between clocks, estimated from the traffic in several stretches of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pandas as pd

from pptrace.clock.bounds import Matrix, is_bounded, lower_bounds, offset_ranges
from pptrace.clock.ends import clamp_offset, offsets_by_common_ends
from pptrace.clock.result import READING_NS, Clock, microseconds

_MAX_STRETCHES = 8
_NUM_REFITS = 3  # each fits what the previous one left uncorrected
_MATCHES_PER_LINK = 16  # that a stretch needs for each pair of neighbours in the pipeline, both ways together


_MAX_RATE = 1e-3
"""Largest drift: an oscillator is wrong by less than 100 parts per million, and a clock is slewed by 500 at most."""


_LIKELY_RATE = 1e-4
"""Drift rate assumed where none is measured: two oscillators, each wrong by 50 parts per million."""

_LONG_NS = 50_000_000  # in less, that is a few microseconds


Same = npt.NDArray[np.bool_]
"""Shape (n, n): which ranks are on one clock already."""


@dataclass(frozen=True, slots=True)
class _Fit:
    """Linear fits of the differences between clocks, and the offsets that messages allow with and without them.

    ``rates`` are per ns, ``span_ns`` is how long the trace lasts and ``middle_ns`` its middle. Each range is (lowest, highest)
    offset, of all ranks in order: of the whole trace, by chains and by what relates a rank to the first one itself, and of each
    stretch of it, as recorded and straightened.
    """

    rates: npt.NDArray[np.float64]
    span_ns: int
    middle_ns: int
    whole: list[tuple[int, int]]
    direct: list[tuple[int, int]]
    straight: list[tuple[int, int]]
    parts: list[list[tuple[int, int]]]
    straight_parts: list[list[tuple[int, int]]]
    likely: dict[int, int]

    @property
    def is_possible(self) -> bool:
        return bool(np.abs(self.rates).max() <= _MAX_RATE)


@dataclass(frozen=True, slots=True)
class _Offset:
    """A rank's offset, its error, ns, the rate by which its times are corrected, and a warning."""

    offset_ns: int
    error_ns: int
    rate: float = 0.0
    warning: str = ""


def with_drift(clock: Clock, matched: pd.DataFrame, ranks: Sequence[int], same: Same) -> Clock:
    """Widen the uncertainty to hold at all times, and correct clocks that drift.

    Where nothing shows how fast, clocks may drift as oscillators do, which widens the uncertainty: if the traffic is too little
    for stretches of it, and before the ranks first met, such as while one waits for the others to begin.
    """
    times = matched["start_ns"] + matched["rank"].map(clock.offsets_ns)
    first_contact = times.groupby(matched["match"]).max()
    last = (times + matched["end_ns"] - matched["start_ns"]).max()
    drift_alone_ns = _likely_drift(int(max(first_contact.min() - times.min(), last - first_contact.max())))
    fit = _fit_lines(clock, matched, ranks, same)
    if fit is None:
        low = np.where(same, 0, lower_bounds(matched, ranks))
        drift_ns_over_trace = _likely_drift(int(last - times.min()))
        bounds = zip(ranks, offset_ranges(low), _direct(low), strict=True)
        error_ns = [
            _error_at_all_times(clock.offsets_ns[rank], chained, direct, drift_ns_over_trace, len(ranks))
            for rank, chained, direct in bounds
        ]
        return replace(clock, uncertainty_ns=max(clock.uncertainty_ns or 0, *error_ns) + drift_alone_ns)
    offsets = {rank: _offset_of(index, rank, ranks[0], clock.offsets_ns[rank], fit) for index, rank in enumerate(ranks)}
    return Clock(
        clock.method,
        {rank: rank_offset.offset_ns for rank, rank_offset in offsets.items()},
        max(rank_offset.error_ns for rank_offset in offsets.values()) + drift_alone_ns,
        (*clock.warnings, *(rank_offset.warning for rank_offset in offsets.values() if rank_offset.warning)),
        rates={rank: rank_offset.rate for rank, rank_offset in offsets.items() if rank_offset.rate},
        middle_ns=fit.middle_ns,
    )


def _fit_lines(clock: Clock, matched: pd.DataFrame, ranks: Sequence[int], same: Same) -> _Fit | None:
    """Fit the drift of each rank; None where there is too little traffic."""
    times = matched["start_ns"] + matched["rank"].map(clock.offsets_ns)
    begin, end = int(times.min()), int(times.max())
    middle = (begin + end) // 2
    index = np.searchsorted(np.asarray(ranks), matched["rank"].to_numpy())
    rates = np.zeros(len(ranks))
    recorded = _stretches(matched, times, len(ranks))
    if len(recorded) < 2:
        return None
    straight, stretches = matched, recorded
    for _ in range(_NUM_REFITS):
        rates += _rates(stretches, times, ranks, same)
        gained = np.rint(rates[index] * (times - middle)).astype("int64")
        straight = matched.assign(start_ns=matched["start_ns"] + gained, end_ns=matched["end_ns"] + gained)
        stretches = _stretches(straight, times, len(ranks))

    def allowed(rows: pd.DataFrame) -> list[tuple[int, int]]:
        return offset_ranges(np.where(same, 0, lower_bounds(rows, ranks)))

    return _Fit(
        rates=rates,
        span_ns=end - begin,
        middle_ns=middle,
        whole=allowed(matched),
        direct=_direct(np.where(same, 0, lower_bounds(matched, ranks))),
        straight=allowed(straight),
        parts=list(map(allowed, recorded)),
        straight_parts=list(map(allowed, stretches)),
        likely=offsets_by_common_ends(straight, ranks),
    )


def _direct(low: Matrix) -> list[tuple[int, int]]:
    """The lowest and the highest offset of each rank that its own traffic with the first one allows."""
    return list(zip(low[0].tolist(), (-low[:, 0]).tolist(), strict=True))


def _offset_of(index: int, rank: int, first: int, offset_ns: int, fit: _Fit) -> _Offset:
    """A rank's offset against the first one's, by the fit."""
    (lower, upper), (low, high) = fit.whole[index], fit.straight[index]
    rate = float(fit.rates[index])
    drift = round(abs(rate) * fit.span_ns)
    if lower <= upper:  # one offset does; what drift there may be widens what is known of it
        return _Offset(offset_ns, _error_with_drift(offset_ns, index, drift, fit))
    if not (fit.is_possible and 2 * (low - high) <= lower - upper):
        if lower - upper <= READING_NS:
            return _Offset(offset_ns, _error_with_drift(offset_ns, index, drift, fit))
        chosen = 0 if upper <= 0 <= lower else offset_ns
        contradiction = (
            f"messages contradict each other by {microseconds(lower - upper)} about its clock against rank {first}'s"
        )
        warning = (
            f"rank {rank}: {contradiction}, which drift does not explain: the uncertainty of the clock is widened "
            "to cover it, and "
            "waiting and transfers are no more exact than that"
        )
        error_ns = max(lower - chosen, chosen - upper, _largest_error(chosen, index, fit.parts))
        return _Offset(chosen, error_ns, 0.0, warning if index else "")
    chosen, error_ns = clamp_offset(fit.likely.get(rank), low, high)
    if 2 * drift <= abs(high - low):
        return _Offset(chosen, error_ns + (drift + 1) // 2)
    warning = (
        f"rank {rank}: its clock drifts against rank {first}'s, by {microseconds(drift)} over the trace, assumed to be "
        "linear and corrected; the offset given is that of the middle of the trace"
    )
    return _Offset(chosen, max(error_ns, _largest_error(chosen, index, fit.straight_parts)), rate, warning)


def _error_with_drift(offset_ns: int, index: int, drift_ns: int, fit: _Fit) -> int:
    """Error of an offset, ns, that no message contradicts, for clocks that may drift all the same.

    What each stretch of time allows holds but for the drift within it; without that, oscillators drift apart as they may.
    """
    likely = _likely_drift(fit.span_ns)
    if not likely:
        return clamp_offset(offset_ns, *fit.whole[index])[1]
    drift_ns_over_trace = max(drift_ns, likely) if fit.is_possible else likely
    error_ns = _error_at_all_times(offset_ns, fit.whole[index], fit.direct[index], drift_ns_over_trace, len(fit.whole))
    if not fit.is_possible or not all(is_bounded(*part[index]) for part in fit.parts):
        return error_ns
    in_stretches = max(clamp_offset(offset_ns, *fit.whole[index])[1], _largest_error(offset_ns, index, fit.parts))
    return min(error_ns, in_stretches + drift_ns // (2 * len(fit.parts)))


def _error_at_all_times(
    offset_ns: int, chained: tuple[int, int], direct: tuple[int, int], apart_ns: int, num_ranks: int
) -> int:
    """Error of an offset, ns, if two clocks drift apart by ``apart_ns`` over the trace.

    Its bounds were met at any time of it, so that the truth of another time lies up to half of that outside them: of a chain, for
    each of its links.
    """
    error_ns = clamp_offset(offset_ns, *chained)[1] + (num_ranks - 1) * ((apart_ns + 1) // 2)
    return min(error_ns, clamp_offset(offset_ns, *direct)[1] + (apart_ns + 1) // 2) if is_bounded(*direct) else error_ns


def _likely_drift(span_ns: int) -> int:
    """Likely drift between two oscillators over a time, ns; 0 if that is short."""
    return round(_LIKELY_RATE * span_ns) if span_ns >= _LONG_NS else 0


def _largest_error(offset_ns: int, index: int, parts: Sequence[Sequence[tuple[int, int]]]) -> int:
    """Largest error of the offset, ns, in any stretch of time."""
    ranges = (part[index] for part in parts if is_bounded(*part[index]))
    return max((abs(offset_ns - bound) for bounds in ranges for bound in bounds), default=0)


def _rates(
    stretches: Sequence[pd.DataFrame], times: pd.Series[int], ranks: Sequence[int], same: Same
) -> npt.NDArray[np.float64]:
    """Growth of each rank's offset, ns per ns: the slope through the middles of what the stretches allow."""
    middles = np.array([times[stretch.index].mean() for stretch in stretches])
    rates = np.zeros(len(ranks))
    parts = [offset_ranges(np.where(same, 0, lower_bounds(stretch, ranks))) for stretch in stretches]
    for index in range(1, len(ranks)):
        bounded = [row for row, part in enumerate(parts) if is_bounded(*part[index])]
        if len(bounded) > 1:
            base = sum(parts[bounded[0]][index]) // 2
            offsets = [sum(parts[row][index]) // 2 - base for row in bounded]
            rates[index] = np.polyfit(middles[bounded] - middles[bounded[0]], offsets, 1)[0]
    return rates


def _stretches(rows: pd.DataFrame, times: pd.Series[int], num_ranks: int) -> list[pd.DataFrame]:
    """The rows in parts that follow each other in time, each with traffic enough to bound the clocks by itself."""
    first = times.groupby(rows["match"]).min().sort_values(kind="stable")
    num = min(_MAX_STRETCHES, len(first) // (_MATCHES_PER_LINK * (num_ranks - 1)))
    if num < 2:
        return []
    return [rows[rows["match"].isin(part)] for part in np.array_split(first.index.to_numpy(), num)]
