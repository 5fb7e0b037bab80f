"""Ops and comms of a run → a trace for each rank in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from pptrace.model.tables import (
    COMMS,
    MEMORY,
    ONE_CLOCK,
    OPS,
    InputFormat,
    Schema,
    Trace,
    empty_table,
    make_table,
    no_events,
)

_OP_DEFAULTS: Mapping[str, Any] = {
    "rank": -1,
    "step": 0,
    "stage": -1,
    "chunk": -1,
    "microbatch": -1,
    "phase": "",
    "clock": "host",
    "source": "label",
    "pair": "",
}
_COMM_DEFAULTS: Mapping[str, Any] = {
    "rank": -1,
    "step": 0,
    "axis": "unknown",
    "peer": -1,
    "group_size": -1,
    "bytes": -1,
    "direction": "",
    "stage": -1,
    "microbatch": -1,
    "stream": -1,
    "match": -1,
    "clock": "host",
}


@dataclass(frozen=True, slots=True)
class Tables:
    """What an op-level format holds of a run: schemas OPS, COMMS and MEMORY, all ranks together, -1 where no rank is named.

    ``facts`` are those of every rank, in the words of pptrace's own metadata (``mesh``, ``pp_ranks``, ``world_size``).
    """

    framework: str
    producer: str
    ops: pd.DataFrame
    comms: pd.DataFrame = field(default_factory=lambda: empty_table(COMMS))
    memory: pd.DataFrame = field(default_factory=lambda: empty_table(MEMORY))
    facts: Mapping[str, Any] = field(default_factory=dict)
    facts_of: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    only_rank: int | None = None  # the rank of a file that holds one, even where it has no row


def ops_table(columns: Mapping[str, Any], num_rows: int) -> pd.DataFrame:
    """A table of schema OPS from what is known; the rest is unknown."""
    return _completed(OPS, columns, _OP_DEFAULTS, num_rows)


def comms_table(columns: Mapping[str, Any], num_rows: int) -> pd.DataFrame:
    """A table of schema COMMS from what is known; without other times a side waits from its start to its end."""
    start, end = columns["start_ns"], columns["end_ns"]
    times = {"posted_ns": start, "asked_ns": start, "transfer_start_ns": start, "transfer_end_ns": end}
    return _completed(COMMS, {**times, **columns}, _COMM_DEFAULTS, num_rows)


def _completed(schema: Schema, columns: Mapping[str, Any], defaults: Mapping[str, Any], num_rows: int) -> pd.DataFrame:
    def values(name: str) -> Any:
        if name not in columns:
            return [defaults[name]] * num_rows
        return columns[name].to_numpy() if isinstance(columns[name], pd.Series) else columns[name]

    return make_table(schema, {name: values(name) for name in schema})


def traces_of(path: Path, tables: Tables, warnings: Sequence[str] = ()) -> tuple[Trace, ...]:
    """One trace per rank, in order. Ranks of one file stand on one clock, unless the facts say otherwise."""
    given = set() if tables.only_rank is None else {tables.only_rank}
    ranks = sorted({*tables.ops["rank"].unique().tolist(), *tables.comms["rank"].unique().tolist(), *given})
    clock = {ONE_CLOCK: str(path)} if len(ranks) > 1 else {}
    return tuple(
        Trace(
            path=str(path),
            format=InputFormat.OPLOG,
            rank=None if rank < 0 else rank,
            producer=tables.producer,
            events=no_events(),
            memory=tables.memory[tables.memory["rank"] == rank].reset_index(drop=True),
            metadata={**clock, **tables.facts, **tables.facts_of.get(rank, {})},
            warnings=(*tables.warnings, *warnings) if rank == ranks[0] else (),
            ops=tables.ops[tables.ops["rank"] == rank].reset_index(drop=True),
            comms=tables.comms[tables.comms["rank"] == rank].reset_index(drop=True),
            framework=tables.framework,
        )
        for rank in ranks
    )
