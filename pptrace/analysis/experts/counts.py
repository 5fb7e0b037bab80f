"""Counts of routes that our runtime records (``instrument/expert_counts.py``), read from the facts of the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pptrace.analysis.experts import EXPERT_COUNTS
from pptrace.model.tables import UNKNOWN, Int64

Floats = npt.NDArray[np.float64]
Groups = Sequence[Sequence[int]]
"""The ranks that exchange tokens with each other."""
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
