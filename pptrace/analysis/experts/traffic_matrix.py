"""Rows from rank to rank as a matrix, and what the report has of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from pptrace.analysis.experts.types import ExpertTraffic, TrafficPair
from pptrace.model.tables import Int64
from pptrace.slices import distinct_of

SPLITS, COUNTS = "splits", "counts"
MOST_PAIRS = 100
"""Most pairs that the report has; the matrix has all."""
Group = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class TrafficMatrix:
    """Rows from rank to rank, a cell for each pair of members of a group, own ones included, by source and target.

    ``bytes`` are −1 where they are not known. ``groups`` are the ranks that exchange tokens, in ascending order.
    """

    known_from: str
    source: Int64
    target: Int64
    rows: Int64
    bytes: Int64
    groups: tuple[Group, ...]

    @property
    def sent(self) -> Int64:
        """Rows of each cell's source to all targets."""
        number, _ = distinct_of([self.source])
        total = np.zeros(int(number.max(initial=-1)) + 1, dtype=np.int64)
        np.add.at(total, number, self.rows)
        of_cell: Int64 = total[number]
        return of_cell

    def table(self) -> pd.DataFrame:
        """A row for each cell: ``source``, ``target``, ``rows`` and ``bytes``, <NA> where they are not known."""
        names = ("source", "target", "rows", "bytes")
        table = pd.DataFrame({name: getattr(self, name) for name in names}).astype({"bytes": "Int64"})
        return table.assign(bytes=table["bytes"].mask(table["bytes"] < 0))

    def pairs(self, most: int | None = None) -> tuple[TrafficPair, ...]:
        """The cells; of ``most`` those of two ranks that have most rows, the first of them first."""
        order = np.arange(len(self.rows))
        if most is not None:
            order = np.flatnonzero(self.source != self.target)
            order = order[np.lexsort((self.target[order], self.source[order], -self.rows[order]))][:most]
        share = self.rows / np.maximum(self.sent, 1)
        columns = (self.source, self.target, self.rows, self.bytes, share)
        return tuple(
            TrafficPair(source, target, rows, None if size < 0 else size, part)
            for source, target, rows, size, part in zip(*(column[order].tolist() for column in columns), strict=True)
        )


_NONE: Int64 = np.zeros(0, dtype=np.int64)
NO_PAIRS = TrafficMatrix(SPLITS, _NONE, _NONE, _NONE, _NONE, ())
"""The matrix of a run without any pair."""


def report_traffic(matrix: TrafficMatrix | None) -> ExpertTraffic | None:
    """The report's part of a matrix."""
    if matrix is None:
        return None
    is_away = matrix.source != matrix.target
    sizes = matrix.bytes[is_away]
    return ExpertTraffic(
        known_from=matrix.known_from,
        num_rows=int(matrix.rows.sum()),
        away_rows=int(matrix.rows[is_away].sum()),
        away_bytes=int(sizes.sum()) if (sizes >= 0).all() else None,
        num_pairs=int(is_away.sum()),
        pairs=matrix.pairs(MOST_PAIRS),
    )
