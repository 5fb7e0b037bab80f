"""Build OPS and COMMS tables, and from them a trace per rank."""

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


def ops_table(columns: Mapping[str, Any], num_rows: int) -> pd.DataFrame:
    """Make a table of schema OPS; missing columns get the values of unknown ones."""
    return _completed(OPS, columns, _OP_DEFAULTS, num_rows)


def comms_table(columns: Mapping[str, Any], num_rows: int) -> pd.DataFrame:
    """Make a table of schema COMMS; missing columns get those of unknown ones, missing times the start or the end."""
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
    """Make one trace per rank, in order. Ranks of one file share a clock unless the facts say otherwise."""
    declared_ranks = set() if tables.only_rank is None else {tables.only_rank}
    ranks = sorted({*tables.ops["rank"].unique().tolist(), *tables.comms["rank"].unique().tolist(), *declared_ranks})
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
