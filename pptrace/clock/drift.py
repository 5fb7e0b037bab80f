"""Linear drift between clocks, estimated from the traffic in several stretches of time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd
from msgspec import Struct
from msgspec.structs import replace

from pptrace.clock.bounds import Matrix, Pairs, Traffic, is_bounded, numbers_of_matches, offset_ranges, reduce_by_match
from pptrace.clock.offsets import CommonEnd, clamp_offset, offsets_by_common_ends
from pptrace.clock.result import READING_NS, Clock, microseconds

_MAX_STRETCHES = 8
_NUM_REFITS = 3  # each fits what the previous one left uncorrected
_MATCHES_PER_LINK = 16  # that a stretch needs for each pair of neighbours in the pipeline, both ways together
_MAX_RATE = 1e-3
"""Largest drift: an oscillator is wrong by less than 100 parts per million, and a clock is slewed by 500 at most."""
_LIKELY_RATE = 1e-4
"""Drift rate assumed where none is measured: two oscillators, each wrong by 50 parts per million."""
_LONG_NS = 50_000_000  # in less, that is a few microseconds


Rates = npt.NDArray[np.float64]


class _Fit(Struct, frozen=True):
    """Linear fits of the differences between clocks, and the offsets that messages allow with and without them.

    ``rates`` are per ns, ``span_ns`` is how long the trace lasts and ``middle_ns`` its middle. Each range is (lowest, highest)
    offset, of all ranks in order: of the whole trace, by chains and by what relates a rank to the first one itself, and of each
    stretch of it, as recorded and straightened.
    """

    rates: Rates
    span_ns: int
    middle_ns: int
    over_trace: list[tuple[int, int]]
    direct: list[tuple[int, int]]
    straight: list[tuple[int, int]]
    parts: list[list[tuple[int, int]]]
    straight_parts: list[list[tuple[int, int]]]
    likely: dict[int, CommonEnd]

    @property
    def is_possible(self) -> bool:
        return bool(np.abs(self.rates).max() <= _MAX_RATE)


def with_drift(clock: Clock, matched: pd.DataFrame, ranks: Sequence[int], same: Pairs) -> Clock:
    """Widen the uncertainty to hold at all times, and correct clocks that drift.

    Where nothing shows how fast, clocks may drift as oscillators do, which widens the uncertainty: if the traffic is too little
    for stretches of it, and before the ranks first met, such as while one waits for the others to begin. Pairs of ranks that are
    the ``same`` clock already stay so.
    """
    traffic = Traffic.of(matched, ranks)
    times = traffic.start_ns + np.array([clock.offsets_ns[rank] for rank in ranks], dtype=np.int64)[traffic.rank]
    begin, end = int(times.min()), int((times + traffic.end_ns - traffic.start_ns).max())
    first, last = (reduce_by_match(function, times, traffic.match) for function in (np.minimum, np.maximum))
    drift_alone_ns = _likely_drift(max(int(last.min()) - begin, end - int(last.max())))
    fit = _fit_lines(matched, ranks, same, traffic, times, first)
    if fit is None:
        low = np.where(same, 0, traffic.lower_bounds(traffic.start_ns, traffic.end_ns))
        drift_ns_over_trace = _likely_drift(end - begin)
        bounds = zip(ranks, offset_ranges(low), _direct(low), strict=True)
        error_ns = [
            _error_at_all_times(clock.offsets_ns[rank], chained, direct, drift_ns_over_trace, len(ranks))
            for rank, chained, direct in bounds
        ]
        return replace(clock, uncertainty_ns=max(clock.uncertainty_ns or 0, *error_ns) + drift_alone_ns)
    parts = [_offset_of(index, rank, ranks[0], clock.offsets_ns[rank], fit) for index, rank in enumerate(ranks)]
    offsets, errors, rates, warnings = zip(*parts, strict=True)
    return Clock(
        clock.method,
        dict(zip(ranks, offsets, strict=True)),
        max(errors) + drift_alone_ns,
        (*clock.warnings, *filter(None, warnings)),
        rates={rank: rate for rank, rate in zip(ranks, rates, strict=True) if rate},
        middle_ns=fit.middle_ns,
    )


def _fit_lines(
    matched: pd.DataFrame, ranks: Sequence[int], same: Pairs, traffic: Traffic, times: Matrix, first: Matrix
) -> _Fit | None:
    """Fit the drift of each rank; None where there is too little traffic.

    Args:
        times: the starts of the rows on the first rank's clock.
        first: the earliest of each match, in the order of their numbers.
    """
    num = min(_MAX_STRETCHES, len(first) // (_MATCHES_PER_LINK * (traffic.num_ranks - 1)))
    if num < 2:
        return None
    # Stretches of time follow each other, each with enough traffic to bound the clocks by itself.
    of_match = np.empty(len(first), dtype=np.intp)
    for index, matches in enumerate(np.array_split(np.argsort(first, kind="stable"), num)):
        of_match[matches] = index
    of_row = of_match[numbers_of_matches(traffic.match)]
    middles = np.array([times[of_row == index].mean() for index in range(num)])

    def allowed(start_ns: Matrix, end_ns: Matrix) -> list[list[tuple[int, int]]]:
        """The lowest and the highest offset of each rank in each stretch."""
        lows = traffic.lower_bounds_of_parts(start_ns, end_ns, of_row, num)
        return [offset_ranges(np.where(same, 0, low)) for low in lows]

    begin, end = int(times.min()), int(times.max())
    middle = (begin + end) // 2
    rates = np.zeros(len(ranks))
    start_ns, end_ns = traffic.start_ns, traffic.end_ns
    straight_parts = parts = allowed(start_ns, end_ns)
    for _ in range(_NUM_REFITS):
        rates += _rates(straight_parts, middles, len(ranks))
        gained = np.rint(rates[traffic.rank] * (times - middle)).astype("int64")
        start_ns, end_ns = traffic.start_ns + gained, traffic.end_ns + gained
        straight_parts = allowed(start_ns, end_ns)
    low = np.where(same, 0, traffic.lower_bounds(traffic.start_ns, traffic.end_ns))
    straight_low = np.where(same, 0, traffic.lower_bounds(start_ns, end_ns))
    return _Fit(
        rates=rates,
        span_ns=end - begin,
        middle_ns=middle,
        over_trace=offset_ranges(low),
        direct=_direct(low),
        straight=offset_ranges(straight_low),
        parts=parts,
        straight_parts=straight_parts,
        likely=offsets_by_common_ends(matched.assign(start_ns=start_ns, end_ns=end_ns), ranks),
    )


def _direct(low: Matrix) -> list[tuple[int, int]]:
    """The lowest and the highest offset of each rank that its own traffic with the first one allows."""
    return list(zip(low[0].tolist(), (-low[:, 0]).tolist(), strict=True))


def _offset_of(index: int, rank: int, first: int, offset_ns: int, fit: _Fit) -> tuple[int, int, float, str]:
    """A rank's offset against the first one's by the fit, its error, ns, the rate by which its times are corrected, a warning."""
    (lower, upper), (low, high) = fit.over_trace[index], fit.straight[index]
    rate = float(fit.rates[index])
    drift = round(abs(rate) * fit.span_ns)
    if lower <= upper:  # one offset does; what drift there may be widens what is known of it
        return offset_ns, _error_with_drift(offset_ns, index, drift, fit), 0.0, ""
    if not (fit.is_possible and 2 * (low - high) <= lower - upper):
        if lower - upper <= READING_NS:
            return offset_ns, _error_with_drift(offset_ns, index, drift, fit), 0.0, ""
        chosen = 0 if upper <= 0 <= lower else offset_ns
        warning = (
            f"rank {rank}: messages contradict each other by {microseconds(lower - upper)} about its clock against rank "
            f"{first}'s, which drift does not explain: the uncertainty of the clock is widened to cover it, and waiting and "
            "transfers are no more exact than that"
        )
        error_ns = max(lower - chosen, chosen - upper, _largest_error(chosen, index, fit.parts))
        return chosen, error_ns, 0.0, warning if index else ""
    likely = fit.likely.get(rank)
    chosen, error_ns = clamp_offset(None if likely is None else likely.offset_ns, low, high)
    if 2 * drift <= abs(high - low):
        return chosen, error_ns + (drift + 1) // 2, 0.0, ""
    warning = (
        f"rank {rank}: its clock drifts against rank {first}'s, by {microseconds(drift)} over the trace, assumed to be "
        "linear and corrected; the offset given is that of the middle of the trace"
    )
    return chosen, max(error_ns, _largest_error(chosen, index, fit.straight_parts)), rate, warning


def _error_with_drift(offset_ns: int, index: int, drift_ns: int, fit: _Fit) -> int:
    """Error of an offset, ns, that no message contradicts, for clocks that may drift all the same.

    What each stretch of time allows holds but for the drift within it; without that, oscillators drift apart as they may.
    """
    likely = _likely_drift(fit.span_ns)
    if not likely:
        return clamp_offset(offset_ns, *fit.over_trace[index])[1]
    drift_ns_over_trace = max(drift_ns, likely) if fit.is_possible else likely
    error_ns = _error_at_all_times(
        offset_ns, fit.over_trace[index], fit.direct[index], drift_ns_over_trace, len(fit.over_trace)
    )
    if not fit.is_possible or not all(is_bounded(*part[index]) for part in fit.parts):
        return error_ns
    in_stretches = max(clamp_offset(offset_ns, *fit.over_trace[index])[1], _largest_error(offset_ns, index, fit.parts))
    return min(error_ns, in_stretches + drift_ns // (2 * len(fit.parts)))


def _error_at_all_times(
    offset_ns: int, chained: tuple[int, int], direct: tuple[int, int], drift_ns: int, num_ranks: int
) -> int:
    """Error of an offset, ns, if two clocks drift apart by ``drift_ns`` over the trace.

    Its bounds were met at any time of it, so that the truth of another time lies up to half of that outside them: of a chain, for
    each of its links.
    """
    error_ns = clamp_offset(offset_ns, *chained)[1] + (num_ranks - 1) * ((drift_ns + 1) // 2)
    return min(error_ns, clamp_offset(offset_ns, *direct)[1] + (drift_ns + 1) // 2) if is_bounded(*direct) else error_ns


def _likely_drift(span_ns: int) -> int:
    """Likely drift between two oscillators over a time, ns; 0 if that is short."""
    return round(_LIKELY_RATE * span_ns) if span_ns >= _LONG_NS else 0


def _largest_error(offset_ns: int, index: int, parts: Sequence[Sequence[tuple[int, int]]]) -> int:
    """Largest error of the offset, ns, in any stretch of time."""
    ranges = (part[index] for part in parts if is_bounded(*part[index]))
    return max((abs(offset_ns - bound) for bounds in ranges for bound in bounds), default=0)


def _rates(parts: Sequence[Sequence[tuple[int, int]]], middles: npt.NDArray[np.float64], num_ranks: int) -> Rates:
    """Growth of each rank's offset per ns: the slope through the middles of what the stretches allow."""
    rates = np.zeros(num_ranks)
    for index in range(1, num_ranks):
        bounded = [row for row, part in enumerate(parts) if is_bounded(*part[index])]
        if len(bounded) > 1:
            base = sum(parts[bounded[0]][index]) // 2
            offsets = [sum(parts[row][index]) // 2 - base for row in bounded]
            rates[index] = np.polyfit(middles[bounded] - middles[bounded[0]], offsets, 1)[0]
    return rates
