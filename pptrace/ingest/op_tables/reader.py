"""Read op-level formats, in which each row is an op, so that no ops have to be recognised in events.

CSV or Parquet   any program's ops (:mod:`pptrace.ingest.op_tables.rows`), with files ``comms`` and ``memory`` next to ``ops``
                 ByteDance's straggler traces (:mod:`pptrace.ingest.op_tables.bytedance`)
JSON             Primus' pipeline dumps (:mod:`pptrace.ingest.op_tables.primus`)
                 pptrace's own reports and simulations (:mod:`pptrace.ingest.op_tables.pptrace_json`)
JSON or pickle   torch's flight-recorder dumps, with communication and no ops (:mod:`pptrace.ingest.flight_recorder`)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from pptrace.errors import TraceError
from pptrace.ingest.common.byte_source import first_bytes
from pptrace.ingest.common.rank_names import rank_of_file_name
from pptrace.ingest.common.time_units import to_ns
from pptrace.ingest.flight_recorder.dump import sniff_flight
from pptrace.ingest.flight_recorder.reader import read_flight
from pptrace.ingest.op_tables.bytedance import COLUMNS as BYTEDANCE_COLUMNS
from pptrace.ingest.op_tables.bytedance import bytedance_tables
from pptrace.ingest.op_tables.files import PARQUET_MAGIC, Frame, header_of, read_frame, sniff_rows
from pptrace.ingest.op_tables.pptrace_json import read_pptrace_json, sniff_pptrace_json
from pptrace.ingest.op_tables.primus import read_primus, sniff_primus
from pptrace.ingest.op_tables.rows import Checked, check_table, tables_of
from pptrace.ingest.ops.build import Tables, traces_of
from pptrace.ingest.ops.mesh import mesh_facts, pp_ranks
from pptrace.ingest.ops.stages import assign_stages
from pptrace.ingest.ops.steps import COMPUTE
from pptrace.model.tables import MEMORY, OP_TABLE, Trace, empty_table, make_table

OPLOG_SUFFIXES = (".csv", ".csv.gz", ".parquet", ".pq")
_OPS_NAME = re.compile(r"(?<![a-z])ops(?![a-z])")


def sniff_oplog(start: bytes) -> bool:
    """Whether a file that begins with these (decompressed) bytes contains ops."""
    sniffs = (sniff_pptrace_json, sniff_primus, sniff_flight, header_of, sniff_rows)
    return start.startswith(PARQUET_MAGIC) or any(sniff(start) for sniff in sniffs)


def read_oplog(path: Path) -> tuple[Trace, ...]:
    """Read a trace for each rank in the file.

    Raises:
        TraceError: the file is damaged, lacks a column, or has an impossible row.
    """
    start = first_bytes(path)
    if sniff_primus(start):
        return traces_of(path, read_primus(path))
    if sniff_flight(start):
        return traces_of(path, read_flight(path))
    if sniff_pptrace_json(start):
        return traces_of(path, _documented_tables(path, [(path, Frame(read_pptrace_json(path)))], "pptrace"))
    frame = read_frame(path)
    table = frame.rows
    if "optype" in table and "kind" not in table:
        if missing := sorted(BYTEDANCE_COLUMNS - set(table.columns)):
            raise TraceError(
                f"{path}: no column {missing[0]!r}; expected it along with 'optype' in a straggler trace; add it"
            )
        return traces_of(path, bytedance_tables(path, table), _cut_lines(path, frame))
    files = [(path, frame)]
    if (comms := companion_of(path, "comms")) is not None:
        files.append((comms, read_frame(comms)))
    return traces_of(path, _documented_tables(path, files, OP_TABLE))


def companion_of(path: Path, table: str) -> Path | None:
    """The file of another table of the same run: comms.csv of ops.csv, rank0.comms.csv of rank0.ops.csv; None if absent."""
    if not _OPS_NAME.search(path.name):
        return None
    other = path.with_name(_OPS_NAME.sub(table, path.name, count=1))
    return other if other != path and other.is_file() else None


def without_companions(paths: Sequence[Path]) -> list[Path]:
    """Drop the files that are read together with another one."""
    companions = {companion_of(path, table) for path in paths for table in ("comms", "memory")}
    companions |= {path.with_name("config.json") for path in paths if path.name.startswith("pp_rank_")}  # Primus'
    return [path for path in paths if path not in companions]


def _cut_lines(path: Path, frame: Frame) -> tuple[str, ...]:
    return (f"{path}: truncated in its last row, {frame.cut[:60]!r}: left that row out",) if frame.cut else ()


def _checked(path: Path, frame: Frame, rank: int | None) -> Checked:
    """Check the rows of a file; a bad last row that may be truncated is dropped, a bad cell elsewhere is an error."""
    try:
        return check_table(path, frame.rows, rank)
    except TraceError:
        if not frame.is_open or len(frame.rows) < 2:
            raise
    return replace(
        check_table(path, frame.rows.iloc[:-1], rank), damage=(f"{path}: truncated in its last row: left that row out",)
    )


def _documented_tables(path: Path, files: Sequence[tuple[Path, Frame]], framework: str) -> Tables:
    """Tables with pptrace's documented columns."""
    rank = rank_of_file_name(path.name)
    checked = [_checked(file, frame, rank) for file, frame in files]
    warnings = [*(line for file, frame in files for line in _cut_lines(file, frame))]
    warnings += [line for part in checked for line in part.damage]
    ops, comms = tables_of(checked)
    compute = ops["kind"].isin(COMPUTE).to_numpy()
    op_rows = pd.concat([part.ops for part in checked if len(part.ops)] or [checked[0].ops], ignore_index=True)
    if "stage" not in op_rows and (ops["chunk"] > 0).any():
        if ops["rank"].nunique() < 2:
            raise TraceError(
                f"{path}: chunks of one rank and no column 'stage'; expected it where each rank has its own file; add it"
            )
        ops["stage"] = np.where(compute, assign_stages(ops, pp_ranks(op_rows)), -1)
    if "chunk" not in op_rows:
        ops["chunk"] = np.where(compute & (ops["stage"] >= 0), _chunks(ops), ops["chunk"])
    facts, facts_of = mesh_facts(op_rows.assign(stage=ops["stage"]), comms)
    if notes := [line for part in checked for line in part.notes]:
        facts = {**facts, "notes": notes}
    source = "simulation" if (ops["source"] == "simulated").all() and len(ops) else "op table"
    return Tables(framework, source, ops, comms, _memory(path), facts, facts_of, tuple(warnings))


def _chunks(ops: pd.DataFrame) -> pd.Series[int]:
    """Chunk of each op: the index of its stage among those of its rank."""
    staged = ops["stage"].where(ops["stage"] >= 0)
    return (staged.groupby(ops["rank"]).rank(method="dense").fillna(0) - 1).astype("int64")


def _memory(path: Path) -> pd.DataFrame:
    memory_path = companion_of(path, "memory")
    if memory_path is None:
        return empty_table(MEMORY)
    table = read_frame_of_memory(memory_path)
    columns = {}
    for name in MEMORY:
        values, is_valid = to_ns(table[name], "ns")
        if not is_valid.all():
            row = int(np.argmin(is_valid))
            raise TraceError(f"{memory_path}: row {row + 1}: {name} {table[name].iloc[row]!s}; expected a whole number")
        columns[name] = values
    return make_table(MEMORY, columns)


def read_frame_of_memory(path: Path) -> pd.DataFrame:
    """Read a table of memory, as ``pptrace analyze --csv`` writes it.

    Raises:
        TraceError: it cannot be read or lacks a column.
    """
    try:
        table = pd.read_csv(path, dtype=str, keep_default_na=False)
    except (OSError, ValueError) as err:
        raise TraceError(f"{path}: no table ({err}); expected {', '.join(MEMORY)}; write it again") from err
    missing = [name for name in MEMORY if name not in table]
    if missing:
        raise TraceError(f"{path}: no column {missing[0]!r}; expected {', '.join(MEMORY)}; write it again")
    return table
