"""Check op tables of any program, CSV, Parquet or JSON: one row per op, message or collective.

    rank         global rank; may be missing where the file's name contains it (rank3.csv)
    step         training step; where it is missing, an op that repeats on its rank begins the next step; without microbatches
                 the first op after the whole pipeline has drained does
    kind         F, B (full backward), I (input gradient), W (weight gradient), OVERLAP_F_B (``pair`` names its halves);
                 STEP, OPTIMIZER, GRAD_SYNC, DATA, GC, LOSS; send, recv, all_reduce, all_gather, reduce_scatter,
                 all_to_all, broadcast, reduce, gather, scatter, barrier; SEND_F, RECV_F, SEND_B, RECV_B
    stage        virtual stage; where it is missing, chunk·p + pipeline rank, or one stage per rank
    chunk        index of the stage among those of its rank; may be missing
    microbatch   where it is missing, the k-th op of a kind and stage in a step is that of microbatch k
    start_U      U is ns, us, ms or s
    end_U, dur_U one of the two
    peer, bytes, axis, group_size, direction (F or B), match     of messages and collectives; each may be missing
    clock        host (also where it is missing) or device: the times of the work on the device, not of its call

The members of a collective follow from ``dp_rank``, ``tp_rank``, ``cp_rank`` or ``match``; else, where collectives name
one of the axes tp, cp and dp alone, from the ranks with the same stages.

A message or collective inside an op of its rank counts as a wait of that op, not as compute, if either is on the host clock.
Where both are on the device clock they ran concurrently: all of the op is compute, and the communication is hidden.

The other columns of :data:`pptrace.model.tables.OPS` and ``COMMS`` are read if present, so that tables written by ``pptrace
analyze --csv`` can be read. Columns with other names are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from pptrace.errors import ScheduleError, TraceError
from pptrace.ingest.common.time_units import UNITS, to_ns
from pptrace.ingest.ops.build import comms_table, ops_table
from pptrace.ingest.ops.steps import COMPUTE, assign_steps
from pptrace.model.tables import COMMS, OPS, Int64
from pptrace.schedule.actions import parse_action

_SPANS = ("STEP", "OPTIMIZER", "GRAD_SYNC", "DATA", "GC", "LOSS")
_COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
)
_COMMS = ("send", "recv", *_COLLECTIVES)
_LONG_NAMES = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}
_P2P = {"SEND_F": ("send", "F"), "RECV_F": ("recv", "F"), "SEND_B": ("send", "B"), "RECV_B": ("recv", "B")}
_KINDS = (*COMPUTE, *_SPANS, *_COMMS, *_LONG_NAMES, *_P2P)
_SHOWN_KINDS = "F, B, I, W, OVERLAP_F_B, STEP, OPTIMIZER, GRAD_SYNC, send, recv, all_reduce, …"
_MAX_INTEGER = 2**62
_MAX_INDEX = 1_000_000
_INDEX_COLUMNS = frozenset(
    {"rank", "microbatch", "stage", "chunk", "mc", "pp_rank", "dp_rank", "tp_rank", "cp_rank", "group_size", "peer"}
)
"""Columns of indices, none of which exceeds _MAX_INDEX in any run."""


@dataclass(frozen=True, slots=True)
class Checked:
    """Checked rows of one file, split into OPS and COMMS, in the order of the file. ``columns_in_file`` are the file's columns,
    ``damage`` warnings of rows left out, ``notes`` about steps that were inferred from the order of ops.
    """

    ops: pd.DataFrame
    comms: pd.DataFrame
    columns_in_file: frozenset[str]
    damage: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def check_table(path: Path, table: pd.DataFrame, rank: int | None) -> Checked:
    """Check one table strictly.

    Args:
        table: columns as in the module's docstring, cells text or numbers.
        rank: the rank of all rows, where the table has no column for it.

    Raises:
        TraceError: a column is missing, or a row has a bad value; the line says which row, counted from 1 below the header.
    """
    reader = Reader(path, table, len(table))
    columns_in_file = frozenset(map(str, table.columns))
    kinds, directions = reader.kinds()
    if "rank" not in columns_in_file and rank is None:
        raise TraceError(
            f"{path}: no column {'rank'!r} ({_column_list(table.columns)}); add it, or name the file rank0.csv"
        )
    columns: dict[str, Any] = {"kind": kinds}
    columns["rank"] = reader.integers("rank", 0) if "rank" in columns_in_file else np.full(len(table), rank)
    columns["start_ns"], columns["end_ns"] = reader.times()
    for name, default_column in _DEFAULT_TIMES.items():
        if name in columns_in_file:
            columns[name] = reader.time_or(name, columns[default_column])
    for name in sorted((set(OPS) | set(COMMS) | _COORDINATES) & columns_in_file - set(columns)):
        dtype = {**OPS, **COMMS}.get(name, "int64")
        columns[name] = reader.integers(name, -1) if dtype == "int64" else reader.texts(name)
    if "clock" in columns:
        reader.require("clock", columns["clock"], ("", "host", "device"))
    if "direction" not in columns and (directions != "").any():
        columns["direction"] = directions
    rows = pd.DataFrame(columns)
    is_comm = rows["kind"].isin(_COMMS).to_numpy()
    is_gap = pd.Series(reader.texts("step") == "" if "step" in columns_in_file else np.ones(len(rows), dtype=np.bool_))
    ops, notes = assign_steps(rows[~is_comm], is_gap, "microbatch" in columns_in_file)
    ops = with_microbatches(ops, "microbatch" in columns_in_file)
    _refuse_duplicates(path, ops)
    _check_pairs(path, ops)
    return Checked(ops, _comm_steps(rows[is_comm], is_gap[is_comm], ops), columns_in_file, notes=notes)


_DEFAULT_TIMES = {
    "posted_ns": "start_ns",
    "asked_ns": "start_ns",
    "transfer_start_ns": "start_ns",
    "transfer_end_ns": "end_ns",
}
"""Optional time columns of messages, and the column that replaces each."""
_COORDINATES = frozenset({"pp_rank", "dp_rank", "tp_rank", "cp_rank"})


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads the columns of one file's table; an error names the row, counted from 1 below the header."""

    path: Path
    table: pd.DataFrame
    num_rows: int

    def error(self, row: int, finding: str, expected: str) -> TraceError:
        return TraceError(f"{self.path}: row {row + 1}: {finding}; expected {expected}")

    def texts(self, name: str) -> npt.NDArray[Any]:
        values = ["" if value is None or value != value else str(value).strip() for value in self.table[name].tolist()]
        return np.array(values, dtype=object)

    def kinds(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        if "kind" not in self.table:
            raise TraceError(
                f"{self.path}: no column 'kind' ({_column_list(self.table.columns)}); expected {_SHOWN_KINDS}"
            )
        kinds = self.texts("kind")
        bad_rows = next((row for row, kind in enumerate(kinds) if kind not in _KINDS), None)
        if bad_rows is not None:
            raise self.error(bad_rows, f"kind {kinds[bad_rows][:40]!r}", f"one of {_SHOWN_KINDS}")
        directions = np.array([_P2P[kind][1] if kind in _P2P else "" for kind in kinds], dtype=object)
        canonical = [_P2P[kind][0] if kind in _P2P else _LONG_NAMES.get(kind, kind) for kind in kinds]
        return np.array(canonical, dtype=object), directions

    def require(self, name: str, texts: npt.NDArray[Any], allowed: Sequence[str]) -> None:
        """Raise for a text that is not allowed."""
        bad_rows = next((row for row, text in enumerate(texts) if text not in allowed), None)
        if bad_rows is not None:
            raise self.error(bad_rows, f"{name} {texts[bad_rows][:40]!r}", f"one of {', '.join(filter(None, allowed))}")

    def integers(self, name: str, minimum: int) -> Int64:
        """Parse a column of integers; empty cells are -1."""
        column = self.table[name]
        if pd.api.types.is_integer_dtype(column.dtype) and not column.isna().any():
            values = column.to_numpy(dtype=np.int64)
        else:
            values = np.array([self._integer(name, row, text) for row, text in enumerate(self.texts(name))], np.int64)
        limit = _MAX_INDEX if name in _INDEX_COLUMNS else _MAX_INTEGER
        bad_rows = np.flatnonzero((values < minimum) | (values > limit))
        if len(bad_rows):
            expected = "a whole number from 0" if minimum == 0 else "a whole number, or nothing"
            expected = f"a whole number of at most {limit}" if values[bad_rows[0]] > limit else expected
            raise self.error(int(bad_rows[0]), f"{name} {str(self.table[name].iloc[bad_rows[0]])[:40]!r}", expected)
        return values

    def _integer(self, name: str, row: int, text: str) -> int:
        if text == "":
            return -1
        try:
            value = int(text.removesuffix(".0"))  # as programs write integer columns with gaps
        except ValueError:
            raise self.error(row, f"{name} {text[:40]!r}", "a whole number") from None
        return value if abs(value) <= _MAX_INTEGER else _MAX_INTEGER + 1

    def times(self) -> tuple[Int64, Int64]:
        """Parse the starts and ends, ns."""
        start = self._time("start")
        if start is None:
            names = " or ".join(f"start_{unit}" for unit in UNITS)
            raise TraceError(
                f"{self.path}: no column for the start ({_column_list(self.table.columns)}); expected {names}"
            )
        end = self._time("end")
        if end is None:
            dur = self._time("dur")
            if dur is None:
                raise TraceError(
                    f"{self.path}: no column for the end ({_column_list(self.table.columns)}); expected end_ns or dur_ns "
                    "(or _us, _ms, _s)"
                )
            end = start + dur
        bad_rows = np.flatnonzero(end < start)
        if len(bad_rows):
            row = int(bad_rows[0])
            raise self.error(
                row, f"ends at {end[row]} ns, before its start at {start[row]} ns", "an end after the start"
            )
        return start, end

    def time_or(self, name: str, default: Int64) -> Int64:
        """Parse a column of ns; empty cells have the default."""
        values, is_valid = to_ns(self.table[name], "ns")
        empty = self.texts(name) == ""
        if not (is_valid | empty).all():
            row = int(np.argmin(is_valid | empty))
            raise self.error(row, f"{name} {str(self.table[name].iloc[row])[:40]!r}", "a time in ns, or nothing")
        return np.where(empty, default, values)

    def _time(self, prefix: str) -> Int64 | None:
        names = [(f"{prefix}_{unit}", unit) for unit in UNITS if f"{prefix}_{unit}" in self.table]
        if not names:
            return None
        if len(names) > 1:
            raise TraceError(f"{self.path}: columns {names[0][0]} and {names[1][0]}; expected one of them; remove one")
        name, unit = names[0]
        values, is_valid = to_ns(self.table[name], unit)
        if not is_valid.all():
            row = int(np.argmin(is_valid))
            raise self.error(row, f"{name} {str(self.table[name].iloc[row])[:40]!r}", f"a time in {unit}")
        return values


def with_microbatches(ops: pd.DataFrame, has_microbatches: bool) -> pd.DataFrame:
    """Number the microbatches where the table does not: the k-th op of a kind and stage in its step is of microbatch k."""
    if has_microbatches:
        return ops
    key = [name for name in ("rank", "step", "kind", "stage", "chunk") if name in ops]
    nth = ops.sort_values("start_ns", kind="stable").groupby(key).cumcount()
    return ops.assign(microbatch=nth.where(ops["kind"].isin(COMPUTE), -1).astype("int64"))


def _comm_steps(comms: pd.DataFrame, is_gap: pd.Series[bool], ops: pd.DataFrame) -> pd.DataFrame:
    """Give communication without a step that of the last op begun on its rank; before the first op, that op's."""
    steps = comms["step"].to_numpy(copy=True) if "step" in comms else np.zeros(len(comms), dtype=np.int64)
    for rank, ops_of_rank in ops[ops["step"] >= 0].sort_values("start_ns", kind="stable").groupby("rank"):
        is_of_rank_without_step = (comms["rank"] == rank).to_numpy() & is_gap.to_numpy()
        index = (
            np.searchsorted(
                ops_of_rank["start_ns"].to_numpy(),
                comms.loc[is_of_rank_without_step, "start_ns"].to_numpy(),
                side="right",
            )
            - 1
        )
        steps[is_of_rank_without_step] = np.maximum.accumulate(ops_of_rank["step"].to_numpy())[np.maximum(index, 0)]
    return comms.assign(step=steps)


def _refuse_duplicates(path: Path, ops: pd.DataFrame) -> None:
    compute = ops[ops["kind"].isin(COMPUTE)]
    key = [name for name in ("rank", "step", "kind", "stage", "chunk", "microbatch") if name in compute]
    duplicates = compute.index[compute.duplicated(key)]
    if not len(duplicates):
        return
    row = int(duplicates[0])
    equal_rows = compute[(compute[key] == compute.loc[row, key]).all(axis=1)]
    identity = ", ".join(f"{name} {compute[name].to_dict()[row]}" for name in key)
    raise TraceError(
        f"{path}: row {row + 1} is the same op as row {int(equal_rows.index[0]) + 1} ({identity}); expected each op once; "
        "remove one, or number the steps"
    )


def _check_pairs(path: Path, ops: pd.DataFrame) -> None:
    pairs = ops[ops["kind"] == "OVERLAP_F_B"]
    for row, text in zip(pairs.index, pairs["pair"] if "pair" in pairs else [""] * len(pairs), strict=True):
        try:
            parse_action(text)
        except ScheduleError as err:
            raise TraceError(f"{path}: row {row + 1}: pair: {err}") from None


def tables_of(checked: Sequence[Checked]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """OPS and COMMS of all files. Each file is completed first: concatenating with missing columns would make floats."""
    ops = [_table(part.ops, OPS, ops_table) for part in checked]
    comms = [_table(_with_defaults(part.comms), COMMS, comms_table) for part in checked]
    return pd.concat(ops, ignore_index=True), pd.concat(comms, ignore_index=True)


def _table(rows: pd.DataFrame, schema: Mapping[str, str], make: Any) -> pd.DataFrame:
    frame: pd.DataFrame = make({name: rows[name] for name in schema if name in rows}, len(rows))
    return frame


def _with_defaults(comms: pd.DataFrame) -> pd.DataFrame:
    """Fill in axis and group size where the columns are missing: messages are of the pipeline, between two ranks."""
    p2p = comms["kind"].isin(("send", "recv"))
    filled = comms.copy()
    if "axis" not in comms:
        filled["axis"] = np.where(p2p, "pp", "unknown")
    if "group_size" not in comms:
        filled["group_size"] = np.where(p2p, 2, -1)
    return filled


def _column_list(names: Sequence[str] | pd.Index[Any]) -> str:
    shown = ", ".join(map(str, list(names)[:8]))
    return f"it has {shown}{', …' if len(names) > 8 else ''}"
