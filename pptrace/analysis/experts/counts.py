"""Counts of routes that our runtime records (``instrument/expert_counts.py``), read from the facts of the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pptrace.analysis.experts import EXPERT_COUNTS
from pptrace.model.tables import UNKNOWN, Int64

_MOST = 2**53


@dataclass(frozen=True, slots=True, eq=False)
class RankCounts:
    """Forwards of layers with experts on one rank, in order of time.

    ``step`` and ``layer`` (forwards,) say of what, ``rows`` how many rows the rank's experts computed in each; ``num`` is how
    many experts the layer has, ``first`` and ``held`` which first of them this rank holds, and how many. ``chosen`` and ``kept``
    (forwards, most experts) count the routes of the rank's tokens, before and after dropping; 0 beyond ``num``. ``tokens`` are
    how many these are, and of ``dropped`` ones no route was kept; −1 where that was not recorded.
    """

    top_k: int
    step: Int64
    layer: Int64
    rows: Int64
    num: Int64
    first: Int64
    held: Int64
    chosen: Int64
    kept: Int64
    tokens: Int64
    dropped: Int64

    def in_steps(self, steps: Sequence[int]) -> RankCounts:
        """The forwards of some steps."""
        inside = np.isin(self.step, np.asarray(steps, dtype=np.int64))
        columns = (getattr(self, name)[inside] for name in _COLUMNS)
        return RankCounts(self.top_k, *columns)


_COLUMNS = ("step", "layer", "rows", "num", "first", "held", "chosen", "kept", "tokens", "dropped")


def counts_of_ranks(
    facts: Mapping[int, Mapping[str, Any]], steps: Mapping[int, Sequence[int]]
) -> dict[int, RankCounts]:
    """The counts of each rank in its ``steps``; ranks without any are left out."""
    read = {rank: read_counts(of_rank.get(EXPERT_COUNTS)) for rank, of_rank in facts.items() if rank in steps}
    inside = {rank: counts.in_steps(steps[rank]) for rank, counts in read.items() if counts is not None}
    return {rank: counts for rank, counts in inside.items() if len(counts.step)}


def read_counts(fact: object) -> RankCounts | None:
    """The counts of one rank; None where it has none, or what stands there is damaged."""
    if not isinstance(fact, Mapping):
        return None
    forwards, chosen, top_k = fact.get("forwards"), fact.get("chosen"), fact.get("top_k")
    if not (isinstance(forwards, list) and isinstance(chosen, list) and _is_number(top_k) and forwards):
        return None
    kept, first = fact.get("kept") or chosen, fact.get("first")
    firsts: list[Any] = first if isinstance(first, list) else [first] * len(forwards)
    if not isinstance(kept, list) or not len(chosen) == len(kept) == len(firsts) == len(forwards):
        return None
    rows: list[Any] = [entry[2] if isinstance(entry, list) and len(entry) == 3 else None for entry in forwards]
    if not all(map(_are_numbers, (*chosen, *kept, *rows))) or not all(map(_is_number, firsts)):
        return None
    if not all(_is_number(entry[0]) and _is_number(entry[1]) for entry in forwards):
        return None
    sizes = [len(line) for line in chosen]
    are_alike = len(set(sizes)) == 1 or isinstance(first, list)
    if [len(line) for line in kept] != sizes or max(sizes) != fact.get("num") or not are_alike:
        return None
    columns: list[list[int]] = [[entry[0] for entry in forwards], [entry[1] for entry in forwards]]
    columns += [[sum(line) for line in rows], sizes, firsts, [len(line) for line in rows]]
    assert isinstance(top_k, int)
    step, layer, computed, num, firsts_of, held = (np.array(column, dtype=np.int64) for column in columns)
    tokens = _tokens(fact.get("tokens"), len(forwards))
    return RankCounts(top_k, step, layer, computed, num, firsts_of, held, _matrix(chosen), _matrix(kept), *tokens)


def _tokens(pairs: object, num_forwards: int) -> Int64:
    """(2, forwards): tokens, and those of which no route was kept; −1 in traces that do not tell, or whose counts are damaged."""
    is_whole = isinstance(pairs, list) and len(pairs) == num_forwards
    if not is_whole or not all(_are_numbers(pair) and len(pair) == 2 and pair[0] >= pair[1] for pair in pairs):  # type: ignore[attr-defined]
        return np.full((2, num_forwards), UNKNOWN)
    return np.array(pairs, dtype=np.int64).T


def _matrix(lines: Sequence[Sequence[int]]) -> Int64:
    """The lines as rows, 0 beyond the end of the shorter ones."""
    table = np.zeros((len(lines), max(map(len, lines))), dtype=np.int64)
    for row, line in zip(table, lines, strict=True):
        row[: len(line)] = line
    return table


def _is_number(value: object) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _are_numbers(line: object) -> bool:
    return isinstance(line, list) and bool(line) and all(map(_is_number, line))
