"""Tables of ops, in which each row is an op already: nothing has to be recognised in events.

CSV or Parquet   anybody's ops (:mod:`pptrace.ingest.op_tables.rows`), with ``comms`` and ``memory`` next to ``ops``
                 ByteDance's straggler traces (:mod:`pptrace.ingest.op_tables.bytedance`)
JSON             pptrace's own reports and simulations (:mod:`pptrace.ingest.op_tables.files`)
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from msgspec.structs import replace

from pptrace.errors import TraceError
from pptrace.ingest.common.byte_source import first_bytes
from pptrace.ingest.common.json_texts import to_ns
from pptrace.ingest.common.rank_names import rank_of_file_name
from pptrace.ingest.op_tables.bytedance import COLUMNS as BYTEDANCE_COLUMNS
from pptrace.ingest.op_tables.bytedance import bytedance_tables
from pptrace.ingest.op_tables.files import Frame, read_frame, read_pptrace_json
from pptrace.ingest.op_tables.rows import Checked, check_table, tables_of
from pptrace.ingest.ops.build import Tables, traces_of
from pptrace.ingest.ops.steps import assign_stages, mesh_facts, number_chunks, pp_ranks
from pptrace.ingest.sniff import PARQUET_MAGIC, partner
from pptrace.model.join_tables import concat_tables
from pptrace.model.tables import COMPUTE_KINDS, MEMORY, empty_table, make_table
from pptrace.model.traces import OP_TABLE, Trace


def read_simulation(path: Path) -> tuple[Trace, ...]:
    """A trace for each rank in pptrace's own JSON.

    Raises:
        TraceError: the file is damaged or was written without ops.
    """
    frames, facts = read_pptrace_json(path)
    tables = _own(path, [(path, Frame(frame)) for frame in frames], "pptrace")
    return traces_of(path, replace(tables, facts={**tables.facts, **facts}))


def read_table(path: Path) -> tuple[Trace, ...]:
    """A trace for each rank in the file.

    Raises:
        TraceError: the file is damaged, lacks a column, or a row of it cannot be true.
    """
    frame = read_frame(path)
    if "optype" in frame.rows and "kind" not in frame.rows:
        if missing := sorted(BYTEDANCE_COLUMNS - set(frame.rows.columns)):
            raise TraceError(
                f"{path}: no column {missing[0]!r}; expected it together with 'optype' in a straggler trace; add it"
            )
        return traces_of(path, bytedance_tables(path, frame.rows), _cut_lines(path, frame))
    files = [(path, frame)]
    del frame
    if (comms := partner(path, "comms")) is not None:
        files.append((comms, read_frame(comms)))
    return traces_of(path, _own(path, files, OP_TABLE))


def _cut_lines(path: Path, frame: Frame) -> tuple[str, ...]:
    return (f"{path}: cut off in its last row, {frame.cut[:60]!r}: left it out",) if frame.cut else ()


def _checked(path: Path, frame: Frame, rank: int | None) -> Checked:
    """The rows of a file, without one that was cut off; a bad cell anywhere else is an error."""
    try:
        return check_table(path, frame.rows, rank)
    except TraceError:
        if not frame.is_open or len(frame.rows) < 2:
            raise
    return replace(
        check_table(path, frame.rows.iloc[:-1], rank), damage=(f"{path}: cut off in its last row: left it out",)
    )


def _own(path: Path, files: list[tuple[Path, Frame]], framework: str) -> Tables:
    """Tables with the columns that we document; ``files`` is emptied, since a table takes much memory."""
    rank = rank_of_file_name(path.name)
    lines = [*(line for file, frame in files for line in _cut_lines(file, frame))]
    checked = []
    while files:
        checked.append(_checked(*files.pop(0), rank))
    lines += [line for part in checked for line in part.damage]
    ops, comms = tables_of(checked)
    compute = ops["kind"].isin(COMPUTE_KINDS).to_numpy()
    given = concat_tables([part.ops for part in checked])
    if "stage" not in given and (ops["chunk"] > 0).any():
        if ops["rank"].nunique() < 2:
            raise TraceError(
                f"{path}: chunks of one rank and no column 'stage'; expected it where each rank has a file of its own; add it"
            )
        ops["stage"] = np.where(compute, assign_stages(ops, pp_ranks(given)), -1)
    if "chunk" not in given:
        ops["chunk"] = np.where(compute & (ops["stage"] >= 0), number_chunks(ops), ops["chunk"])
    facts, facts_of = mesh_facts(given.assign(stage=ops["stage"]), comms)
    if notes := [line for part in checked for line in part.notes]:
        facts = {**facts, "notes": notes}
    source = "simulation" if (ops["source"] == "simulated").all() and len(ops) else "op table"
    return Tables(framework, source, ops, comms, _memory(path), facts, facts_of, tuple(lines))


def _memory(path: Path) -> pd.DataFrame:
    """The table of memory next to one of ops, as ``pptrace analyze --csv`` and ``--parquet`` write it."""
    memory_file = partner(path, "memory")
    if memory_file is None:
        return empty_table(MEMORY)
    try:
        if first_bytes(memory_file).startswith(PARQUET_MAGIC):
            table = read_frame(memory_file).rows
        else:
            table = pd.read_csv(memory_file, dtype=str, keep_default_na=False)
    except (OSError, ValueError) as err:
        raise TraceError(f"{memory_file}: no table ({err}); expected {', '.join(MEMORY)}; write it again") from err
    if missing := [name for name in MEMORY if name not in table]:
        raise TraceError(f"{memory_file}: no column {missing[0]!r}; expected {', '.join(MEMORY)}; write it again")
    columns = {}
    for name in MEMORY:
        values, good = to_ns(table[name], "ns")
        if not good.all():
            row = int(np.argmin(good))
            raise TraceError(f"{memory_file}: row {row + 1}: {name} {table[name].iloc[row]!s}; expected a whole number")
        columns[name] = values
    return make_table(MEMORY, columns)
