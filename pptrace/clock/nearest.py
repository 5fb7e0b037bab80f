"""Offsets that meet all bounds and are the nearest to the recorded clocks.

A recorded clock is the best there is as long as nothing speaks against it. Ranks are placed one after the other, those first that
the fewest others contradict: each keeps its recorded clock if it can, or is moved to the nearest end of what the bounds and the
ranks before it allow. Where that is farther than the bounds are wide, the clock is that of another host and its recorded time
tells nothing: it is moved as ranks before it were that agree with it, or to the middle of the bounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from pptrace.clock.bounds import UNBOUNDED, Matrix
from pptrace.clock.ends import CommonEnd
from pptrace.clock.result import READING_NS


def nearest_offsets(ranks: Sequence[int], low: Matrix, likely: Mapping[int, CommonEnd]) -> list[int] | None:
    """Offsets against the first rank, ns, in the order of the ranks; None where the bounds contradict each other.

    Contradictions no larger than a reading error are none.

    Args:
        low: as of :func:`~pptrace.clock.bounds.lower_bounds`.
        likely: where kernels of one communication end together.
    """
    is_likely = any(end.demands_other_than(0) for end in likely.values())
    if low.max() <= 0 and not is_likely:
        return [0] * len(ranks)
    closed = _closure(low)
    if closed is None:
        closed = _closure(np.where(np.eye(len(low), dtype=np.bool_), 0, np.maximum(low - READING_NS, -UNBOUNDED)))
    if closed is None:
        return None
    order = np.argsort((closed > 0).sum(axis=0) + (closed > 0).sum(axis=1), kind="stable").tolist()
    anchor = order[0]
    likely_here = {
        index: likely[rank].against(likely[ranks[anchor]])
        for index, rank in enumerate(ranks)
        if rank in likely and ranks[anchor] in likely
    }
    lower, upper = closed[anchor].copy(), -closed[:, anchor]
    width = upper - lower
    offsets = {anchor: 0}
    for index in order[1:]:
        bounds = (int(lower[index]), int(upper[index]))
        offset = placed(bounds, int(width[index]), offsets.values(), likely_here.get(index))
        offsets[index] = offset
        lower = np.maximum(lower, offset + closed[index])
        upper = np.minimum(upper, offset - closed[:, index])
    return [offsets[index] - offsets[0] for index in range(len(ranks))]


def placed(bounds: tuple[int, int], width: int, moved: Iterable[int], likely: CommonEnd | None) -> int:
    """The offset of one rank within its bounds, ns.

    Args:
        width: how far a recorded clock may be moved and still be trusted.
        moved: the offsets of the ranks before it.
        likely: where its kernels end together with those of others.
    """
    lower, upper = bounds
    nearest: int | None = _clamp(0, lower, upper)
    if abs(nearest or 0) > width:
        distance, offset = min(
            ((abs(_clamp(other, lower, upper) - other), other) for other in moved), default=(width, 0)
        )
        nearest = _clamp(offset, lower, upper) if distance < width else None
    if likely is not None and (nearest is None or likely.demands_other_than(nearest)):
        return _clamp(likely.offset_ns, lower, upper)
    return (lower + upper) // 2 if nearest is None else nearest


def _clamp(offset_ns: int, lower: int, upper: int) -> int:
    return min(max(offset_ns, lower), upper)


def _closure(low: Matrix) -> Matrix | None:
    """The tightest bound of each pair by any chain of pairs (Floyd and Warshall); None where chains contradict each other."""
    closed: Matrix = low.copy()
    for index in range(len(closed)):
        np.maximum(closed, closed[:, index, None] + closed[index], out=closed)
        if closed.diagonal().max() > 0:
            return None
    return np.maximum(closed, -UNBOUNDED)
