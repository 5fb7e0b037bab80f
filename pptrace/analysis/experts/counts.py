"""Counts of routes that our runtime records (``instrument/expert_counts.py``), read from the facts of the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pptrace.model.tables import Int64

KEY = "experts"
"""The key of a rank's facts."""
_MOST = 2**53


@dataclass(frozen=True, slots=True, eq=False)
class RankCounts:
    """Forwards of layers with experts on one rank, in order of time.

    ``step`` and ``layer`` (forwards,) say of what, ``rows`` how many rows the rank's experts computed in each. ``chosen`` and
    ``kept`` (forwards, experts) count the routes of the rank's tokens, before and after dropping. ``first`` is its first expert,
    ``num_held`` how many it has.
    """

    top_k: int
    first: int
    num_held: int
    step: Int64
    layer: Int64
    rows: Int64
    chosen: Int64
    kept: Int64

    @property
    def num_experts(self) -> int:
        return int(self.chosen.shape[1])

    def in_steps(self, steps: Sequence[int]) -> RankCounts:
        """The forwards of some steps."""
        inside = np.isin(self.step, np.asarray(steps, dtype=np.int64))
        columns = (column[inside] for column in (self.step, self.layer, self.rows, self.chosen, self.kept))
        return RankCounts(self.top_k, self.first, self.num_held, *columns)


def counts_of_ranks(
    facts: Mapping[int, Mapping[str, Any]], steps: Mapping[int, Sequence[int]]
) -> dict[int, RankCounts]:
    """The counts of each rank in its ``steps``; ranks without any are left out."""
    read = {rank: read_counts(of_rank.get(KEY)) for rank, of_rank in facts.items() if rank in steps}
    inside = {rank: counts.in_steps(steps[rank]) for rank, counts in read.items() if counts is not None}
    return {rank: counts for rank, counts in inside.items() if len(counts.step)}


def read_counts(fact: object) -> RankCounts | None:
    """The counts of one rank; None where it has none, or what stands there is damaged."""
    if not isinstance(fact, Mapping):
        return None
    forwards, chosen = fact.get("forwards"), fact.get("chosen")
    sizes = [fact.get(name) for name in ("num", "top_k", "first")]
    if not (isinstance(forwards, list) and isinstance(chosen, list) and all(map(_is_number, sizes))):
        return None
    num, top_k, first = (int(size) for size in sizes if isinstance(size, int))
    kept = fact.get("kept") or chosen
    rows = [entry[2] if isinstance(entry, list) and len(entry) == 3 else None for entry in forwards]
    if not forwards or not isinstance(kept, list) or not len(chosen) == len(kept) == len(forwards):
        return None
    if not all(_are_numbers(line, num) for line in (*chosen, *kept)) or not num:
        return None
    if not all(_are_numbers(line, len(rows[0] or ())) for line in rows):
        return None
    if not all(_is_number(entry[0]) and _is_number(entry[1]) for entry in forwards):
        return None
    step, layer = (np.array([entry[index] for entry in forwards], dtype=np.int64) for index in (0, 1))
    total = np.array([sum(line or ()) for line in rows], dtype=np.int64)
    both = (np.array(table, dtype=np.int64) for table in (chosen, kept))
    return RankCounts(top_k, first, len(rows[0] or ()), step, layer, total, *both)


def _is_number(value: object) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _are_numbers(line: object, length: int) -> bool:
    return isinstance(line, list) and len(line) == length and all(map(_is_number, line))
