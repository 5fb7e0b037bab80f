"""Lengths of a run's steps as a series: where their level changes, which are outliers, and what differs in them.

Levels are separated where Pettitt's test (Applied Statistics 28, 1979: a change of the median, whatever the distribution) finds a
change, in each part again until there is none. An outlier is far above the median of its own level.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from msgspec.structs import replace

from pptrace.analysis.result import StepReport, alike_steps
from pptrace.analysis.whole_run import OUTSIDE, BlamedOp, Cause, StepChange, StepOutlier, StepSeries
from pptrace.model.tables import Floats, Int64

FEWEST_OF_LEVEL = 5
"""A level with fewer steps has no outliers."""
_OUTLIER = 3.0
"""A step longer than its level's median by this many scaled median deviations, and by ``_LEAST_EXCESS``, is an outlier."""
_LEAST_EXCESS = 0.1
_DEVIATION = 1.4826
"""The median deviation of a normal distribution times this is its standard deviation."""
_CHANCE = 0.005
"""A change that chance alone would show more often than this is none."""
_ENOUGH = 7
_LEAST_CHANGE = 0.03
"""Levels closer than this are one: the difference is not worth a word."""


def series_of(steps: Sequence[StepReport]) -> StepSeries | None:
    """The series of the training steps whose length is known; None where there is none.

    ``steps`` are in order. Differences are those between single steps, so that they sum exactly: between an outlier and the
    typical step of its level, and between the typical steps of the levels before and after a change.
    """
    evaluations = tuple(step.step for step in steps if step.is_evaluation)
    known = alike_steps([step for step in steps if not step.is_evaluation])
    known = periodic_steps([step for step in steps if not step.is_evaluation], len(known)) or known
    if not known:
        return None
    spans = np.array([step.length_ns for step in known], dtype=np.int64)
    levels = _levels(spans)
    low, middle, high = (int(value) for value in np.percentile(spans, (10, 50, 90), method="nearest"))
    outliers: list[StepOutlier] = []
    for first, last in levels:
        for step, typical in _outliers(known[first:last]):
            lengths = (step.step, step.length_ns or 0, typical.step, typical.length_ns or 0)
            outliers.append(StepOutlier(*lengths, _differences(step, typical), _most_blamed(step, typical)))
    changes = []
    for (begin, _), (first, last) in pairwise(levels):
        before, after = _typical(known[begin:first]), _typical(known[first:last])
        lengths = (before.step, before.length_ns or 0, after.step, after.length_ns or 0)
        changes.append(StepChange(known[first].step, *lengths, _differences(after, before)))
    by_excess = sorted(outliers, key=lambda outlier: (-outlier.excess_ns, outlier.step))
    return StepSeries(
        *(len(known), int(spans.min()), low, middle, high, int(spans.max())),
        *(tuple(by_excess), tuple(changes), evaluations),
        measure="span" if known[0].period_ns is None else "period",
    )


def periodic_steps(steps: Sequence[StepReport], num_known: int) -> list[StepReport]:
    """The steps of which it is known when the next one begins, which it is not of the last one of a trace without marks of steps;
    none where they are few, so that all steps are needed to tell how they vary, or less than half of ``num_known``.
    """
    periodic = [step for step in steps if None not in (step.span_ns, step.period_ns)]
    return periodic if len(periodic) >= _ENOUGH and 2 * len(periodic) > num_known else []


def _levels(spans: Int64) -> list[tuple[int, int]]:
    """(first, last) of the parts of the series that have one level each."""
    cuts = [0, *_cuts(spans), len(spans)]
    for index in range(1, len(cuts) - 1):  # the test finds that there is a change, and about where
        before, after = cuts[index - 1], cuts[index + 1]
        values = spans[before:after]
        values = np.clip(values, *np.percentile(values, (5, 95)))
        values = values - values.mean()
        first, n = np.arange(1, len(values)), len(values)
        between = np.cumsum(values)[:-1] ** 2 / (first * (n - first))
        cuts[index] = before + (FEWEST_OF_LEVEL + int(between[FEWEST_OF_LEVEL - 1 : n - FEWEST_OF_LEVEL].argmax()))
    return list(pairwise(cuts))


def _cuts(spans: Int64) -> list[int]:
    """The first steps of all levels but the first, in order."""
    cut = _strongest_change(spans)
    if cut is None:
        return []
    return [*_cuts(spans[:cut]), cut, *(cut + later for later in _cuts(spans[cut:]))]


def _strongest_change(spans: Int64) -> int | None:
    """The first step after the change of level that Pettitt's test finds; None where it finds none."""
    n = len(spans)
    if n < 2 * FEWEST_OF_LEVEL:
        return None
    _, index, counts = np.unique(spans, return_inverse=True, return_counts=True)
    ranks: Floats = (np.cumsum(counts) - (counts - 1) / 2)[index]  # equal values have the mean of theirs
    differences = np.abs(2 * np.cumsum(ranks)[:-1] - np.arange(1, n) * (n + 1))[
        FEWEST_OF_LEVEL - 1 : n - FEWEST_OF_LEVEL
    ]
    cut, statistic = int(differences.argmax()) + FEWEST_OF_LEVEL, float(differences.max())
    by_chance = 2 * np.exp(-6.0 * statistic**2 / (n**3 + n**2))
    before, after = (float(np.median(part)) for part in (spans[:cut], spans[cut:]))
    is_large = abs(after - before) >= _LEAST_CHANGE * min(before, after)
    return cut if by_chance < _CHANCE and is_large else None


def _outliers(level: Sequence[StepReport]) -> Iterator[tuple[StepReport, StepReport]]:
    """The outliers of a level, each with the typical step of those that it is compared with: as many microbatches, or, where few
    have as many, no fewer. More microbatches make a step longer and no outlier.
    """
    work = [step.num_forwards for step in level]
    for number, count in sorted(Counter(work).items()):
        most = number if count >= FEWEST_OF_LEVEL else max(work)
        alike = [at for at, num_forwards in enumerate(work) if number <= num_forwards <= most]
        for index in _far_above(np.array([level[at].length_ns for at in alike], dtype=np.int64)):
            if work[alike[index]] == number:
                yield level[alike[index]], _typical([level[at] for at in alike])


def _far_above(spans: Int64) -> list[int]:
    """Steps that are far above the others, where these are enough to tell."""
    if len(spans) < FEWEST_OF_LEVEL:
        return []
    middle = float(np.median(spans))
    deviation = _DEVIATION * float(np.median(np.abs(spans - middle)))
    return np.flatnonzero(spans > middle + max(_OUTLIER * deviation, _LEAST_EXCESS * middle)).tolist()


def _typical(steps: Sequence[StepReport]) -> StepReport:
    """The step of median length, of two the shorter; of those that are explained, if there are any."""
    explained = [step for step in steps if step.causes is not None] or steps
    return sorted(explained, key=lambda step: step.length_ns or 0)[(len(explained) - 1) // 2]


def _most_blamed(step: StepReport, usual: StepReport) -> tuple[BlamedOp, ...]:
    """The op that is charged with most of the bubble that ``step`` has more than ``usual``; none where none is."""
    if step.blame is None or usual.blame is None:
        return ()
    before = {replace(op, ns=0): op.ns for op in usual.blame.ops}
    more = {op: op.ns - before.get(replace(op, ns=0), 0) for op in step.blame.ops}
    excess = step.blame.total_ns - usual.blame.total_ns
    return tuple(op for op, ns in more.items() if 2 * ns > excess > 0)[:1]


def _differences(step: StepReport, usual: StepReport) -> tuple[Cause, ...] | None:
    """Causes that ``step`` has more of than ``usual``, the most first; they sum to the difference of lengths; else None."""
    if step.causes is None or usual.causes is None:
        return None
    more: Counter[tuple[str, tuple[tuple[str, int | str], ...]]] = Counter()
    for report, sign in ((step, 1), (usual, -1)):
        more["compute", ()] += sign * (report.ideal_ns or 0)
        for cause in report.causes or ():
            more[cause.cause, tuple(cause.where.items())] += sign * cause.ns
        for part in report.outside or ():
            more[f"{OUTSIDE}{part.part}", tuple(part.where.items())] += sign * part.ns
    differences = [Cause(cause, dict(where), ns) for (cause, where), ns in more.items() if ns]
    return tuple(sorted(differences, key=lambda part: (-abs(part.ns), part.cause, str(part.where))))
