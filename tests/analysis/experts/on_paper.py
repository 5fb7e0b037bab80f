"""Exchanges on paper: groups of ranks that exchange random rows, with times and splits that are stated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from pptrace.analysis.experts.counts import RankCounts
from pptrace.analysis.experts.exchanges import EXCHANGES, join_exchanges
from pptrace.model.tables import Int64
from pptrace.slices import Slice

WIDTH = 8
"""Bytes of a row."""


@dataclass(frozen=True)
class Call:
    """An exchange of a group: ``enters`` are when its ranks come to the dispatch and to the combine (2, members), ns, ``rows``
    from each of them to each (members, members).
    """

    step: int
    ranks: tuple[int, ...]
    enters: Int64
    rows: Int64
    backward: int = 0


def counted(
    routes: ArrayLike,
    layers: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
    first: int = 0,
    held: int | None = None,
    step: int = 0,
) -> RankCounts:
    """Counts of forwards, by default of a layer each, whose tokens have these routes to each expert (forwards, experts): one
    of two a token, and none is dropped. The rank holds ``held`` of the experts, or all of them, and computes so many ``rows``,
    by default those that it routes itself.
    """
    chosen = np.array(routes, dtype=np.int64)
    forwards, num = chosen.shape
    tokens, one = chosen.sum(axis=1), np.ones(forwards, dtype=np.int64)
    layer = np.array(range(forwards) if layers is None else layers)
    places = (num * one, first * one, (num if held is None else held) * one)
    computed = tokens if rows is None else np.array(rows)
    return RankCounts(2, step * one, layer, computed, *places, chosen, chosen, tokens, 0 * one)


def random_calls(seed: int, groups: Sequence[tuple[int, ...]], steps: int = 4, each: int = 5) -> list[Call]:
    """So many forwards of each group in each step, and their backwards; in some all come at once."""
    rng = np.random.default_rng(seed)
    calls = []
    for step in range(steps):
        for group in groups:
            for at in range(each):
                size = len(group)
                enters = np.stack((rng.integers(0, 9, size), 20 + rng.integers(0, 40, size))) + 100 * at
                enters = enters if rng.random() < 0.8 else np.broadcast_to(enters[:, :1], enters.shape)
                rows = rng.integers(0, 6, (size, size)) * (rng.random() < 0.9)
                calls += [Call(step, group, enters, rows, way) for way in (0, 1)]
    return calls


def tables_of(calls: Sequence[Call]) -> dict[int, tuple[Slice, Slice]]:
    """Rank → its exchanges and its communication."""
    ranks = sorted({rank for call in calls for rank in call.ranks})
    tables = {}
    for rank in ranks:
        own = [(match, call) for match, call in enumerate(calls) if rank in call.ranks]
        columns = {name: np.zeros(len(own), dtype=np.int64) for name in EXCHANGES}
        at = [call.ranks.index(rank) for _, call in own]
        columns["rank"] += rank
        columns["out_match"] = np.array([2 * match for match, _ in own])
        columns["back_match"] = columns["out_match"] + 1
        columns["step"] = np.array([call.step for _, call in own])
        columns["backward"] = np.array([call.backward for _, call in own])
        for name, role in (("out", 0), ("back", 1)):
            columns[f"{name}_start_ns"] = np.array(
                [call.enters[role, index] for (_, call), index in zip(own, at, strict=True)]
            )
        columns["out_end_ns"] = columns["begin_ns"] = np.array([call.enters[0].max() for _, call in own])
        columns["sent"] = np.array([call.rows[index].sum() for (_, call), index in zip(own, at, strict=True)])
        columns["rows"] = np.array([call.rows[:, index].sum() for (_, call), index in zip(own, at, strict=True)])
        columns["out_bytes"] = columns["sent"] * WIDTH
        columns["out_row"] = np.arange(len(own))
        texts = [splits_of(call.rows, index) for (_, call), index in zip(own, at, strict=True)]
        tables[rank] = Slice(columns), Slice({"splits": np.array(texts, dtype=object)})
    return tables


def splits_of(rows: Int64, index: int) -> str:
    """The splits that a member's call records."""
    return ">".join(",".join(map(str, side.tolist())) for side in (rows[index], rows[:, index]))


def exchanges_of_all(calls: Sequence[Call]) -> Slice:
    """The exchanges of all ranks, as reports have them."""
    return join_exchanges(exchanges for exchanges, _ in tables_of(calls).values())
