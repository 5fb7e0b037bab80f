"""Read rocpd databases: what rocprofv3 and rocprof-sys write, one for each process, or several merged into one file.

Times are those of the node's clock since its start, which the processes of a node share. The environments of processes, which
are in the file, tell ranks and are not passed on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pptrace.errors import TraceError
from pptrace.ingest.common.codes import Codes
from pptrace.ingest.common.json_texts import object_of
from pptrace.ingest.common.rank_names import rank_of_file_name, rank_of_value
from pptrace.ingest.common.sort_events import EventColumns, sorted_events
from pptrace.ingest.common.sqlite import Database
from pptrace.ingest.nsight.ranks import RANK_VARIABLES
from pptrace.ingest.rocpd.tables import read_tables, suffixes_of
from pptrace.model.tables import MEMORY, empty_table
from pptrace.model.traces import DEVICE_NAMES, HOST, HOST_NAME, ONE_CLOCK, Category, InputFormat, Trace
from pptrace.model.wording import counted

EXPECTED_INPUT = "expected the database that 'rocprofv3 --output-format rocpd' writes; copy it anew or record again"


def read_rocpd(path: Path) -> tuple[Trace, ...]:
    """Read a trace for each process with kernels, else with copies, else with calls or ranges.

    Raises:
        TraceError: the file cannot be read, is no such database, or holds no events.
    """
    with Database(path, EXPECTED_INPUT) as db:
        suffixes = suffixes_of(db)
        if not suffixes:
            raise TraceError(f"{path}: an SQLite database without the tables of rocpd; {EXPECTED_INPUT}")
        warnings: list[str] = []
        processes = [process for suffix in suffixes for process in _processes(db, suffix, warnings)]
        most = max((process.worth for process in processes), default=0)
        chosen = [process for process in processes if process.worth == most > 0]
        if not chosen:
            what = f" ({'; '.join(db.damage)})" if db.damage else ""
            raise TraceError(f"{path}: no kernel, copy, call or range{what}; {EXPECTED_INPUT} with --sys-trace")
        if others := len(processes) - len(chosen):
            warnings.append(f"left out {counted(others, 'process', 'processes')} without {_MISSING[chosen[0].worth]}")
        warnings += db.damage
        version = dict(db.all_rows(f"rocpd_metadata{suffixes[0]}", ("tag", "value"))).get("schema_version")
    producer = f"rocpd (schema {version})" if isinstance(version, str) and len(version) < 20 else "rocpd"
    if len(chosen) == 1 and chosen[0].rank is None:
        chosen[0].rank = rank_of_file_name(path.name)
    traces: list[Trace] = []
    for process in chosen:
        ordered = sorted_events(process.rows, process.names, 0)
        traces.append(
            Trace(
                path=str(path),
                format=InputFormat.ROCPD,
                rank=process.rank,
                producer=producer,
                events=ordered.without_comm_args,
                memory=empty_table(MEMORY),
                metadata=process.facts,
                warnings=(*(() if traces else warnings), *ordered.warnings),
                damage=ordered.damage_with(is_cut=bool(db.damage)),
            )
        )
    if not any(trace.num_events for trace in traces):
        raise TraceError(f"{path}: no event has a usable time; {EXPECTED_INPUT}")
    return tuple(sorted(traces, key=lambda trace: (trace.rank is None, trace.rank or 0)))


_MISSING = {3: "kernels", 2: "device work", 1: "events"}


@dataclass(slots=True)
class _Process:
    """The events of a process, and what the file says of it. ``worth``: 3 with kernels, 2 with copies, 1 with others, 0."""

    rows: Sequence[EventColumns]
    names: Sequence[str]
    rank: int | None
    facts: Mapping[str, Any]

    @property
    def worth(self) -> int:
        kinds = {int(kind) for rows in self.rows for kind in np.unique(rows.category).tolist()}
        return 3 if Category.KERNEL in kinds else 2 if Category.MEMCPY in kinds else 1 if kinds else 0


def _processes(db: Database, suffix: str, warnings: list[str]) -> list[_Process]:
    """The processes of which the tables of one suffix are: one, as a rule."""
    names = Codes()
    tables = read_tables(db, suffix, names, warnings)
    described = {
        key: (node, environment)
        for key, node, environment in db.all_rows(f"rocpd_info_process{suffix}", ("id", "nid", "environment"))
    }
    ids = sorted({number for rows in tables for number in np.unique(rows.process).tolist()} | set(described))
    hosts = dict(db.all_rows(f"rocpd_info_node{suffix}", ("id", "hostname")))
    gpus = [
        str(name)
        for name, kind in db.all_rows(f"rocpd_info_agent{suffix}", ("product_name", "type"))
        if kind == "GPU" and name
    ]
    found = []
    for number in ids:
        own_rows = [rows.select(np.flatnonzero(rows.process == number)) for rows in tables]
        node, environment = described.get(number, (None, None))
        variables = object_of(environment)  # the launcher of the process set them
        ranks = (rank_of_value(variables.get(name)) for name in RANK_VARIABLES)
        rank = next((rank for rank in ranks if rank is not None), None)
        facts: dict[str, Any] = {DEVICE_NAMES: gpus} if gpus else {}
        if node is not None:
            facts[ONE_CLOCK] = f"{HOST}{node}"
        if hosts.get(node):
            facts[HOST_NAME] = str(hosts[node])
        found.append(_Process([rows for rows in own_rows if len(rows)], names.texts, rank, facts))
    return found
