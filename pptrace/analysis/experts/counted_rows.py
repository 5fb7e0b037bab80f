"""Rows of ranks that exchange tokens with each other, as their runtime counted them: of all forwards, whatever the calls tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from pptrace.analysis.experts.counts import RankCounts
from pptrace.model.tables import Int64

Floats = npt.NDArray[np.float64]
Groups = Sequence[Sequence[int]]
"""The ranks that exchange tokens with each other."""


def rows_of_group(group: Sequence[int], counts: Mapping[int, RankCounts], layer: int | None = None) -> Int64 | None:
    """(members, forwards) rows of a group's experts, of one ``layer`` or of all; None where a member counted none, or other
    forwards.

    The members of a group run the same forwards in the same order: their calls are collectives.
    """
    if not set(group) <= set(counts):
        return None
    tables = []
    for rank in group:
        of_rank = counts[rank]
        chosen = np.arange(len(of_rank.step)) if layer is None else np.flatnonzero(of_rank.layer == layer)
        tables.append(np.stack((of_rank.step[chosen], of_rank.layer[chosen], of_rank.rows[chosen])))
    if any(not np.array_equal(table[:2], tables[0][:2]) for table in tables):
        return None
    return np.stack([table[2] for table in tables])


def ratios_of_layer(groups: Groups, counts: Mapping[int, RankCounts], layer: int | None) -> Floats | None:
    """Most rows of a rank over the mean of its group, in each forward of a layer that has rows; None where any are not known."""
    ratios = []
    for group in groups:
        rows = rows_of_group(group, counts, layer)
        if rows is None:
            return None
        mean = rows.mean(axis=0)
        ratios.append(rows.max(axis=0, initial=0)[mean > 0] / mean[mean > 0])
    return np.concatenate(ratios) if ratios and len(groups[0]) > 1 else None


def rows_and_ratios(groups: Groups, counts: Mapping[int, RankCounts]) -> dict[int, tuple[int, float | None]]:
    """Rank → (its rows in all forwards, these over the mean of its group); none where they are not known."""
    found: dict[int, tuple[int, float | None]] = {}
    for group in groups:
        rows = rows_of_group(group, counts) if len(group) > 1 else None
        if rows is None:
            continue
        of_ranks, mean = rows.sum(axis=1).tolist(), float(rows.sum() / len(group))
        found |= {rank: (own, own / mean if mean else None) for rank, own in zip(group, of_ranks, strict=True)}
    return found
