"""Anybody's ops as a table, CSV, Parquet or JSON (a list of rows, or a row a line): one row per op, message or collective.

    rank         global rank; may be missing where the file's name tells it (rank3.csv)
    step         training step; where it is missing, an op that comes again on its rank begins the next step or, without
                 microbatches, the first one after the whole pipeline has drained
    kind         F, B (full backward), I (input gradient), W (weight gradient), OVERLAP_F_B (``pair`` tells its halves);
                 STEP, OPTIMIZER, GRAD_SYNC, DATA, GC, LOSS; send, recv, all_reduce, all_gather, reduce_scatter,
                 all_to_all, broadcast, reduce, gather, scatter, barrier; SEND_F, RECV_F, SEND_B, RECV_B
    stage        virtual stage; where it is missing, chunk·p + pipeline rank, or one stage per rank
    chunk        of the rank's stages, which; may be missing
    microbatch   where it is missing, the k-th op of a kind and stage in a step is that of microbatch k
    start_U      U is ns, us, ms or s
    end_U, dur_U one of the two
    peer, bytes, axis, group_size, direction (F or B), match     of messages and collectives; each may be missing
    clock        host (also where it is missing) or device: when the row's work ran on the device, not when it was called

Which ranks join in a collective follows from ``dp_rank``, ``tp_rank``, ``cp_rank`` or ``match``; else, where collectives name
one of the axes tp, cp and dp alone, from the ranks with the same stages.

A message or collective inside an op of its rank is taken for a part of it that waits, and out of compute, if either is on the
host clock. Where both are on the device clock they overlapped: compute is all of the op, and the communication hidden in it.

The other columns of :data:`pptrace.model.tables.OPS` and ``COMMS`` are read where they are there; so ``pptrace analyze
--csv`` writes
tables that can be read again. Columns with other names are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from msgspec import Struct

from pptrace.axes import MESH_ORDER
from pptrace.errors import ScheduleError, TraceError
from pptrace.ingest.common.json_texts import UNITS, to_ns
from pptrace.ingest.ops.steps import assign_steps
from pptrace.marks import P2P, Collective
from pptrace.model.join_tables import concat_tables
from pptrace.model.tables import COMMS, COMPUTE_KINDS, OPS, Int64, category_of_codes, comms_table, ops_table
from pptrace.model.wording import listed
from pptrace.schedule.actions import parse_action
from pptrace.slices import group_codes, rows_where

_SPANS = ("STEP", "OPTIMIZER", "GRAD_SYNC", "DATA", "GC", "LOSS", "CHECKPOINT", "LOGGING")
_COLLECTIVES = tuple(map(str, Collective))
_COMMS = (*P2P, *_COLLECTIVES)
_LONG = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}
_P2P = {"SEND_F": ("send", "F"), "RECV_F": ("recv", "F"), "SEND_B": ("send", "B"), "RECV_B": ("recv", "B")}
_KINDS = (*COMPUTE_KINDS, *_SPANS, *_COMMS, *_LONG, *_P2P)
_FEW = 8
_SHOWN_KINDS = "F, B, I, W, OVERLAP_F_B, STEP, OPTIMIZER, GRAD_SYNC, send, recv, all_reduce, …"
_LARGEST = 2**62
_MOST_RANKS = 1_000_000
_LIMITED = frozenset(
    {"rank", "microbatch", "stage", "chunk", "mc", *(f"{axis}_rank" for axis in MESH_ORDER), "group_size", "peer"}
)
"""Columns of places and microbatches, of which no run has more."""


class Checked(Struct, frozen=True):
    """Rows of one file with kinds of the OPS and COMMS tables, in the order of the file. ``damage`` are lines about rows left
    out, ``notes`` lines about what order had to tell.
    """

    ops: pd.DataFrame
    comms: pd.DataFrame
    damage: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def check_table(path: Path, table: pd.DataFrame, rank: int | None) -> Checked:
    """Read one table, strictly.

    Args:
        table: columns as in the module's docstring, cells text or numbers.
        rank: of every row, where the table has no column for it.

    Raises:
        TraceError: a column is missing, or a row has a bad value; the line says which row, counted from 1 below the header.
    """
    reader = Reader(path, table)
    has = frozenset(map(str, table.columns))
    kinds, directions = reader.kinds()
    if "rank" not in has and rank is None:
        raise TraceError(
            f"{path}: no column {'rank'!r} (it has {listed(table.columns, _FEW)}); add it, or name the file rank0.csv"
        )
    columns: dict[str, Any] = {"kind": kinds}
    columns["rank"] = reader.integers("rank", 0) if "rank" in has else np.full(len(table), rank)
    columns["start_ns"], columns["end_ns"] = reader.times()
    for name, of in _OTHER_TIMES.items():
        if name in has:
            columns[name] = reader.time_or(name, columns[of])
    for name in sorted((set(OPS) | set(COMMS) | _COORDINATES) & has - set(columns)):
        dtype = {**OPS, **COMMS}.get(name, "int64")
        columns[name] = reader.integers(name, -1) if dtype == "int64" else reader.texts(name)
    if "clock" in columns:
        reader.refuse("clock", columns["clock"], lambda text: text not in ("", "host", "device"), "one of host, device")
    if "direction" not in columns and (directions != "").any():
        columns["direction"] = directions
    rows = pd.DataFrame(columns, copy=False)
    is_comm = rows["kind"].isin(_COMMS).to_numpy()
    is_gap = pd.Series(reader.texts("step") == "" if "step" in has else np.ones(len(rows), dtype=np.bool_))
    has_microbatches = "microbatch" in has and bool((rows["microbatch"][~is_comm] >= 0).any())
    ops, notes = assign_steps(rows_where(rows, ~is_comm), is_gap, has_microbatches)
    ops = ops if has_microbatches else _with_microbatches(ops)
    _refuse_doubles(path, ops)
    pairs = ops[ops["kind"] == "OVERLAP_F_B"]
    for row, text in zip(pairs.index, pairs["pair"] if "pair" in pairs else [""] * len(pairs), strict=True):
        try:
            parse_action(text)
        except ScheduleError as err:
            raise TraceError(f"{path}: row {row + 1}: pair: {err}") from None
    return Checked(ops, _comm_steps(rows_where(rows, is_comm), is_gap[is_comm], ops), notes=notes)


_OTHER_TIMES = {
    "posted_ns": "start_ns",
    "asked_ns": "start_ns",
    "transfer_start_ns": "start_ns",
    "transfer_end_ns": "end_ns",
}
"""Times of messages that may be missing, and what then stands for them."""
_COORDINATES = frozenset({"pp_rank", "dp_rank", "tp_rank", "cp_rank"})


class Reader(Struct, frozen=True):
    """Reads the columns of one file's table; an error names the row, counted from 1 below the header."""

    path: Path
    table: pd.DataFrame

    def error(self, row: int, value: str, expected: str) -> TraceError:
        return TraceError(f"{self.path}: row {row + 1}: {value}; expected {expected}")

    def texts(self, name: str) -> pd.Categorical[Any]:
        """The texts of a column as categories; empty cells are ""."""
        column = self.table[name]
        try:
            codes, values = pd.factorize(column)
        except TypeError:  # cells of several values, as lists in Parquet and JSON
            codes, values = pd.factorize(column.map(str))
        texts = ["" if value != value else str(value).strip() for value in values.tolist()]
        return category_of_codes(np.where(codes < 0, len(texts), codes), [*texts, ""], ("",))

    def kinds(self) -> tuple[pd.Categorical[Any], pd.Categorical[Any]]:
        """(kinds, directions) as categories."""
        if "kind" not in self.table:
            raise TraceError(
                f"{self.path}: no column 'kind' (it has {listed(self.table.columns, _FEW)}); expected {_SHOWN_KINDS}"
            )
        kinds = self.texts("kind")
        self.refuse("kind", kinds, lambda kind: kind not in _KINDS, f"one of {_SHOWN_KINDS}")
        meanings = [_P2P.get(kind, (_LONG.get(kind, kind), "")) for kind in kinds.categories]
        names, directions = zip(*meanings, strict=True)
        return category_of_codes(kinds.codes, names, ("",)), category_of_codes(kinds.codes, directions, ("",))

    def refuse(self, name: str, texts: pd.Categorical[Any], is_bad: Callable[[str], bool], expected: str) -> None:
        """Name the first row with a bad text, if there is any."""
        bad = [code for code, text in enumerate(texts.categories) if is_bad(text)]
        rows = np.flatnonzero(np.isin(texts.codes, bad))
        if len(rows):
            raise self.error(int(rows[0]), f"{name} {texts[rows[0]][:40]!r}", expected)

    def integers(self, name: str, least: int) -> Int64:
        """The whole numbers of a column; empty cells are -1."""
        column = self.table[name]
        if pd.api.types.is_integer_dtype(column.dtype) and not column.isna().any():
            values = column.to_numpy(dtype=np.int64)
        else:
            texts = self.texts(name)
            self.refuse(name, texts, lambda text: _integer(text) is None, "a whole number")
            values = np.array([_integer(text) or 0 for text in texts.categories], np.int64)[texts.codes]
        most = _MOST_RANKS if name in _LIMITED else _LARGEST
        bad = np.flatnonzero((values < least) | (values > most))
        if len(bad):
            what = "a whole number from 0" if least == 0 else "a whole number from 0, or nothing"
            what = f"a whole number of at most {most}" if values[bad[0]] > most else what
            raise self.error(int(bad[0]), f"{name} {str(self.table[name].iloc[bad[0]])[:40]!r}", what)
        return values

    def times(self) -> tuple[Int64, Int64]:
        """Starts and ends, ns."""
        start = self._time("start")
        if start is None:
            names = " or ".join(f"start_{unit}" for unit in UNITS)
            raise TraceError(
                f"{self.path}: no column for the start (it has {listed(self.table.columns, _FEW)}); expected {names}"
            )
        end = self._time("end")
        if end is None:
            dur = self._time("dur")
            if dur is None:
                raise TraceError(
                    f"{self.path}: no column for the end (it has {listed(self.table.columns, _FEW)}); expected end_ns or dur_ns "
                    "(or _us, _ms, _s)"
                )
            end = start + dur
        bad = np.flatnonzero(end < start)
        if len(bad):
            row = int(bad[0])
            raise self.error(
                row, f"ends at {end[row]} ns, before its start at {start[row]} ns", "an end after the start"
            )
        return start, end

    def time_or(self, name: str, default: Int64) -> Int64:
        """A column of ns whose empty cells have the default."""
        values, good = to_ns(self.table[name], "ns")
        empty = self.texts(name) == ""
        if not (good | empty).all():
            row = int(np.argmin(good | empty))
            raise self.error(row, f"{name} {str(self.table[name].iloc[row])[:40]!r}", "a time in ns, or nothing")
        return np.where(empty, default, values)

    def _time(self, what: str) -> Int64 | None:
        names = [(f"{what}_{unit}", unit) for unit in UNITS if f"{what}_{unit}" in self.table]
        if not names:
            return None
        if len(names) > 1:
            raise TraceError(f"{self.path}: columns {names[0][0]} and {names[1][0]}; expected one of them; remove one")
        name, unit = names[0]
        values, good = to_ns(self.table[name], unit)
        if not good.all():
            row = int(np.argmin(good))
            raise self.error(row, f"{name} {str(self.table[name].iloc[row])[:40]!r}", f"a time in {unit}")
        return values


def _integer(text: str) -> int | None:
    """The whole number that a cell says, −1 for an empty one; None where it says none."""
    if text == "":
        return -1
    try:
        value = int(text.removesuffix(".0"))  # a column of whole numbers with gaps, as programs write it
    except ValueError:
        return None
    return value if abs(value) <= _LARGEST else _LARGEST + 1


def _with_microbatches(ops: pd.DataFrame) -> pd.DataFrame:
    """Ops that nothing numbers: the k-th of a kind and stage in its step is that of microbatch k."""
    key = [name for name in ("rank", "step", "kind", "stage", "chunk") if name in ops]
    nth = ops.sort_values("start_ns", kind="stable").groupby(key, observed=True).cumcount()
    return ops.assign(microbatch=nth.where(ops["kind"].isin(COMPUTE_KINDS), -1).astype("int64"))


def _comm_steps(comms: pd.DataFrame, is_gap: pd.Series[bool], ops: pd.DataFrame) -> pd.DataFrame:
    """Communication without a step belongs to that of the last op of its rank that had begun, the first before any has."""
    if "step" in comms and not is_gap.any():
        return comms
    steps = comms["step"].to_numpy(copy=True) if "step" in comms else np.zeros(len(comms), dtype=np.int64)
    for rank, rank_ops in ops[ops["step"] >= 0].sort_values("start_ns", kind="stable").groupby("rank"):
        is_lacking = (comms["rank"] == rank).to_numpy() & is_gap.to_numpy()
        index = (
            np.searchsorted(rank_ops["start_ns"].to_numpy(), comms.loc[is_lacking, "start_ns"].to_numpy(), side="right")
            - 1
        )
        steps[is_lacking] = np.maximum.accumulate(rank_ops["step"].to_numpy())[np.maximum(index, 0)]
    return comms.assign(step=steps)


def _refuse_doubles(path: Path, ops: pd.DataFrame) -> None:
    """Refuse an op that stands there twice; and a span, to the nanosecond, as where files of one run were put together twice."""
    is_compute = ops["kind"].isin(COMPUTE_KINDS)
    compute = ops[is_compute]
    key = [name for name in ("rank", "step", "kind", "stage", "chunk", "microbatch") if name in compute]
    codes = np.sort(group_codes([compute[name] for name in key]))
    if (codes[1:] == codes[:-1]).any():
        first, row = _first_double(compute, key)
        what = ", ".join(f"{name} {compute[name].to_dict()[row]}" for name in key)
        raise TraceError(
            f"{path}: row {row + 1} is the same op as row {first + 1} ({what}); expected each op once; "
            "remove one, or number the steps"
        )
    spans, key = ops[~is_compute & (ops["end_ns"] > ops["start_ns"])], ["rank", "kind", "start_ns", "end_ns"]
    if spans.duplicated(key).any():
        first, row = _first_double(spans, key)
        what = "rank {}, {} from {} to {} ns".format(*spans.loc[row, key])
        raise TraceError(
            f"{path}: row {row + 1} is the same as row {first + 1} ({what}); expected each once; remove one"
        )


def _first_double(rows: pd.DataFrame, key: list[str]) -> tuple[int, int]:
    """The first row with the key of the first row that repeats one, and that row."""
    row = int(rows.index[rows.duplicated(key)][0])
    return int(rows.index[(rows[key] == rows.loc[row, key]).all(axis=1)][0]), row


def tables_of(checked: Sequence[Checked]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """OPS and COMMS of all files together. Each is completed by itself: columns of numbers that meet none become floats."""
    ops, comms = [], []
    for part in checked:
        p2p = part.comms["kind"].isin(P2P)  # between two of the pipeline, unless the table says otherwise
        defaults = {"axis": np.where(p2p, "pp", "unknown"), "group_size": np.where(p2p, 2, -1)}
        comms.append(
            comms_table({"step": 0, **defaults, **{name: part.comms[name] for name in COMMS if name in part.comms}})
        )
        ops.append(ops_table({"step": 0, **{name: part.ops[name] for name in OPS if name in part.ops}}))
    return concat_tables(ops), concat_tables(comms)
