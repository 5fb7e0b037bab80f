"""Sequences of unequal length: microbatches that cost more on every stage, forward and backward, are data and no slow worker.

The study (OSDI'25, 5.3) names them by the correlation of forwards and backwards of the same microbatch. A rank that is slow for
a while has that too, so the stages have to agree as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from pptrace.analysis.matrix.step_matrix import StepMatrix
from pptrace.analysis.stragglers.reason import Reason, gains
from pptrace.model.known import all_known
from pptrace.model.tables import Floats, Int64
from pptrace.schedule.actions import Kind

LONG_SEQUENCES = "long sequences"
_LEAST_CORRELATION = 0.9
"""Correlation of forwards and backwards, as in the study."""
_LEAST_AGREEMENT = 0.7
"""Correlation of a stage with the others, the median over stages."""
_DETAIL = (
    "the same microbatches take longer on all stages, forward and backward (correlation {correlation:.2f}): deal sequences out "
    "so that microbatches have equal work, which grows with the square of a sequence's length"
)


def long_sequences(plans: Sequence[StepMatrix]) -> Reason | None:
    """Microbatches of unequal work, and what steps would get back if each cost as the mean one of its step; None without."""
    factors = all_known(map(_of_microbatches, plans))
    if not factors:
        return None
    # by medians over stages, which single ops that are long for another reason do not change
    correlation = _correlation(
        [(np.median(part.forward, axis=1), np.median(part.backward, axis=1)) for part in factors]
    )
    agreement = float(np.median([_correlation([pair]) for part in factors for pair in part.stage_and_others]))
    if correlation < _LEAST_CORRELATION or agreement < _LEAST_AGREEMENT:
        return None
    evened = (replace(costs, durations=part.evened(costs)) for costs, part in zip(plans, factors, strict=True))
    return Reason(
        LONG_SEQUENCES,
        ("jitter", "straggler"),
        {},
        "Long sequences: {share} goes to microbatches of unequal work",
        _DETAIL.format(correlation=correlation),
        gains(plans, evened),
        {"correlation": correlation, "agreement_of_stages": agreement},
    )


class _Microbatches(Struct, frozen=True, eq=False):
    """Costs of forwards and backwards against what is usual for their stage, shape (windows, stages, microbatches).

    ``forward`` and ``backward`` are deviations from the mean of their window and stage, ``ratio`` is of both together.
    """

    forward: Floats
    backward: Floats
    ratio: Floats

    @property
    def stage_and_others(self) -> list[tuple[Floats, Floats]]:
        """Deviations of each stage, and the medians of those of the others."""
        both = self.forward + self.backward
        return [(both[:, at], np.median(np.delete(both, at, axis=1), axis=1)) for at in range(both.shape[1])]

    def evened(self, costs: StepMatrix) -> Int64:
        """The costs of all rows if every microbatch were the mean one of its step.

        Of a window that is at least half of the stages' excess, as one of two may be of a slow rank; within it, their median.
        """
        of_window = self.ratio.mean(axis=2, keepdims=True)
        shared = np.sort(of_window, axis=1)[:, (of_window.shape[1] - 1) // 2]
        _, step = np.unique(costs.step, return_inverse=True)
        of_step = np.bincount(step, weights=shared[:, 0]) / np.bincount(step)
        factor = shared / of_step[step, np.newaxis] * np.median(self.ratio / of_window, axis=1)
        is_of_one = costs.table.kind != Kind.OVERLAP_F_B.code
        of_rows = np.where(is_of_one, factor[:, costs.table.microbatch], 1.0)
        return np.rint(costs.durations / of_rows).astype(np.int64)


def _of_microbatches(costs: StepMatrix) -> _Microbatches | None:
    """None where there is nothing to compare, or a stage lacks a forward or backward of its own."""
    table = costs.table
    if table.num_stages < 2 or table.num_microbatches < 2:
        return None
    ratios = []
    for codes in ((Kind.F.code,), (Kind.B.code, Kind.I.code)):
        rows = np.full((table.num_stages, table.num_microbatches), -1, dtype=np.intp)
        chosen = np.flatnonzero(np.isin(table.kind, codes))
        rows[table.stage[chosen], table.microbatch[chosen]] = chosen
        if (rows < 0).any():
            return None
        taken = costs.durations[:, rows].astype(np.float64)
        usual = np.median(taken.mean(axis=2), axis=0)[:, np.newaxis]
        if not usual.all():
            return None
        ratios.append(taken / usual)
    forward, backward = (ratio - ratio.mean(axis=2, keepdims=True) for ratio in ratios)
    both = (ratios[0] + ratios[1]) / 2
    return _Microbatches(forward, backward, both) if both.min() > 0 else None


def _correlation(pairs: Sequence[tuple[Floats, Floats]]) -> float:
    """Pearson's correlation of all pairs of values; 0 where one of them does not vary."""
    first, second = (np.concatenate([pair[side].ravel() for pair in pairs]) for side in (0, 1))
    scale = first.std() * second.std()
    return float(((first - first.mean()) * (second - second.mean())).mean() / scale) if scale else 0.0
