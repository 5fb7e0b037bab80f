"""Build OPS and COMMS tables, and from them a trace per rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from msgspec import Struct, field

from pptrace.model.tables import COMMS, MEMORY, OPS, empty_table
from pptrace.model.traces import ONE_CLOCK, InputFormat, Trace


class Tables(Struct, frozen=True):
    """The content of an op-level format: tables of schemas OPS, COMMS and MEMORY with all ranks, -1 where the rank is unknown.

    ``facts`` apply to all ranks, ``facts_of`` to one, with the keys of pptrace's metadata (``mesh``, ``pp_ranks``, …).
    """

    framework: str
    producer: str
    ops: pd.DataFrame
    comms: pd.DataFrame = field(default_factory=lambda: empty_table(COMMS))
    memory: pd.DataFrame = field(default_factory=lambda: empty_table(MEMORY))
    facts: Mapping[str, Any] = field(default_factory=dict)
    facts_of: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    only_rank: int | None = None  # the rank of a single-rank file, which may have no rows


def traces_of(path: Path, tables: Tables, warnings: Sequence[str] = ()) -> tuple[Trace, ...]:
    """Make one trace per rank, in order. Ranks of one file share a clock unless the facts say otherwise."""
    declared_ranks = set() if tables.only_rank is None else {tables.only_rank}
    ops, comms, memory = (by_rank(table) for table in (tables.ops, tables.comms, tables.memory))
    ranks = sorted({*ops, *comms, *declared_ranks})
    clock = {ONE_CLOCK: str(path)} if len(ranks) > 1 else {}
    return tuple(
        Trace(
            path=str(path),
            format=InputFormat.OPLOG,
            rank=None if rank < 0 else rank,
            producer=tables.producer,
            memory=memory[rank] if rank in memory else empty_table(MEMORY),
            metadata={**clock, **tables.facts, **tables.facts_of.get(rank, {})},
            warnings=(*tables.warnings, *warnings) if rank == ranks[0] else (),
            ops=ops[rank] if rank in ops else empty_table(OPS),
            comms=comms[rank] if rank in comms else empty_table(COMMS),
            framework=tables.framework,
        )
        for rank in ranks
    )


def by_rank(table: pd.DataFrame) -> dict[int, pd.DataFrame]:
    """The rows of each rank."""
    ranks = table["rank"].to_numpy()
    if (ranks[1:] < ranks[:-1]).any():
        order = np.argsort(ranks, kind="stable")
        table = _taken(table, order)
        ranks = table["rank"].to_numpy()
    firsts = np.flatnonzero(np.concatenate(([True], ranks[1:] != ranks[:-1]))) if len(ranks) else np.zeros(0, np.intp)
    edges = pairwise([*firsts.tolist(), len(ranks)])
    return {
        rank: table.iloc[first:last].reset_index(drop=True)
        for rank, (first, last) in zip(ranks[firsts].tolist(), edges, strict=True)
    }


def _taken(table: pd.DataFrame, order: npt.NDArray[np.intp]) -> pd.DataFrame:
    """The rows in another order; ``table`` loses its columns one after the other, so that they are not there twice.

    Columns that are one array, such as times that stand for others, stay so.
    """
    columns: dict[str, Any] = {}
    by_address: dict[int, Any] = {}
    for name in map(str, list(table)):
        values = table.pop(name).array
        if isinstance(values, pd.Categorical):
            columns[name] = values.take(order)
            continue
        address = values.to_numpy().__array_interface__["data"][0]
        if address not in by_address:
            by_address[address] = values.to_numpy().take(order)
        columns[name] = by_address[address]
    return pd.DataFrame(columns, copy=False)
