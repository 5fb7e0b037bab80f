"""Read tables in CSV, Parquet or JSON as frames, with texts and numbers as in the file.

json = "[" row ("," row)* "]" | row (newline row)*      row = { column: cell, … }, the first with "kind" and a start

Read ops in pptrace's JSON: ``pptrace simulate … --json FILE --ops`` and ``pptrace analyze … --json FILE --ops``.

simulation = { "schema": "pptrace.simulation/1", "ranks": [{ "rank", "ops": [op, …][, "messages": [end, …]] }, …], … }
report     = { "schema": "pptrace.report/1", "steps": [{ "step", "ranks": [{ "rank", "ops": [op, …] }, …] }, …], … }
op         = { "kind", "stage", "chunk", "microbatch", "phase", "start_ns", "end_ns"[, "parts": [op, op]] }
end        = { "kind", "direction", "stage", "microbatch", "peer", "start_ns", "end_ns", "match" }

The ``parts`` of an op are the halves of an overlapped pair.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from msgspec import Struct

from pptrace.errors import ScheduleError, TraceError
from pptrace.ingest.common.byte_source import ByteSource
from pptrace.ingest.common.json_texts import document_in
from pptrace.ingest.sniff import DELIMITERS, HEADER_BYTES, PARQUET_MAGIC, header_of, sniff_rows
from pptrace.schedule.registry import SCHEDULES
from pptrace.schedule.text import from_rows
from pptrace.schedule.validate import validate

if TYPE_CHECKING:
    import polars

_MOST_CATEGORIES = 100_000
"""Different texts of a column that is read as categories."""
_WIDE_INTEGERS = ("Int128", "UInt128")
"""Types of sums in DuckDB and polars, which arrays do not have."""


class Frame(Struct, frozen=True):
    """The rows of a file; in CSV every cell is text, "" if empty.

    ``cut`` is the text of a truncated last line, as a killed job leaves it; it is not among the rows. ``is_open``: the last row
    has all cells but no line end, so that its last cell may be truncated.
    """

    rows: pd.DataFrame
    cut: str = ""
    is_open: bool = False


def read_frame(path: Path) -> Frame:
    """Read the table in a file.

    Raises:
        TraceError: the file cannot be read, is damaged or holds no rows.
    """
    with ByteSource(path) as source:
        content = b"".join(iter(source.read, b""))
        damage = source.damage or ("bytes behind its end" if source.trailing_bytes else "")
    if damage:
        raise TraceError(f"{path}: damaged gzip ({damage}); expected a complete table; copy it again")
    if content.startswith(PARQUET_MAGIC):
        frame = Frame(_parquet(path, content))
    else:
        frame = _json(path, content) if sniff_rows(content[:HEADER_BYTES]) else _csv(path, content)
    if frame.rows.empty:
        raise TraceError(f"{path}: a table without rows; expected one per op; was anything recorded?")
    return frame


def _parquet(path: Path, content: bytes) -> pd.DataFrame:
    try:
        import polars
    except ImportError:
        raise TraceError(
            f"{path}: Parquet, and polars is not installed; install it (pip install polars) or give the table as CSV"
        ) from None
    try:
        with _silent_threads():
            columns = {}
            for name in polars.read_parquet_schema(io.BytesIO(content)):
                # All of them in polars and converted at the same time would take twice the memory.
                columns[name] = _series(polars.read_parquet(io.BytesIO(content), columns=[name]).to_series())
            return pd.DataFrame(columns, copy=False)
    except (polars.exceptions.PolarsError, polars.exceptions.PanicException, OSError, ValueError) as err:
        panicked = isinstance(err, polars.exceptions.PanicException)  # its message is about polars, not the file
        reason = "its columns cannot be decoded" if panicked else str(err).split("\n", 1)[0][:120]
        raise TraceError(f"{path}: damaged Parquet ({reason}); expected a whole table; copy it again") from err


def _json(path: Path, content: bytes) -> Frame:
    text = content.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace")
    complete_lines, _, last = ("", "", "") if text.lstrip().startswith("[") else text.rpartition("\n")
    cut = last if complete_lines and not last.rstrip().endswith("}") else ""
    lines = (complete_lines if cut else text).splitlines() if complete_lines else [text]
    try:
        rows = [json.loads(line) for line in lines if line.strip()]
    except (ValueError, RecursionError) as err:
        raise TraceError(
            f"{path}: a table in damaged JSON ({err}); expected a list of rows, or a row per line"
        ) from err
    rows = rows[0] if not complete_lines and isinstance(rows[0], list) else rows
    bad_row = next((row_index for row_index, row in enumerate(rows) if not isinstance(row, dict)), None)
    if bad_row is not None:
        raise TraceError(
            f"{path}: row {bad_row + 1}: {str(rows[bad_row])[:40]!r}; expected an object with a cell for each column"
        )
    return Frame(pd.DataFrame(rows, dtype=object), cut.strip())


@contextmanager
def _silent_threads() -> Iterator[None]:
    """Silence stderr: polars' threads print a backtrace there on damaged files, besides raising."""
    try:
        saved_fd = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    null_fd = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_fd, 2)
    os.close(null_fd)
    try:
        yield
    finally:
        os.dup2(saved_fd, 2)
        os.close(saved_fd)


def _series(column: polars.Series) -> pd.Series[Any]:
    """Convert a column: numbers to an array; texts, and integers with gaps, to objects, since floats would be inexact."""
    import polars

    kind = str(column.dtype)
    if kind.startswith(("Enum", "Categorical")):
        column, kind = column.cast(str), "String"
    texts = column.unique() if kind == "String" else None
    if texts is not None and len(texts) <= _MOST_CATEGORIES:
        names = sorted(texts.drop_nulls().to_list())
        dtype: pd.CategoricalDtype[Any] = pd.CategoricalDtype(names)
        codes = column.cast(polars.Enum(names)).to_physical().cast(polars.Int32).fill_null(-1).to_numpy()
        return pd.Series(pd.Categorical.from_codes(codes, dtype=dtype))
    if kind in _WIDE_INTEGERS:
        return pd.Series(column.to_list(), dtype=object)
    if column.dtype.is_float() or (column.dtype.is_integer() and not column.null_count()):
        return pd.Series(column.to_numpy())
    return pd.Series(column.to_list(), dtype=object)


def _csv(path: Path, content: bytes) -> Frame:
    names = header_of(content)
    text = content.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace")
    first = text.split("\n", 1)[0]
    delimiter = max(DELIMITERS, key=first.count)
    if not names:
        if '"Correlation_Id"' in first and '_Timestamp"' in first:
            raise TraceError(
                f"{path}: rocprofv3's own CSV, which is not read; expected its database, which --output-format rocpd writes"
            )
        raise TraceError(
            f"{path}: its first line is {first.strip()[:60]!r}; expected the columns of a table of ops, such as "
            "rank,step,kind,stage,microbatch,start_ns,end_ns"
        )
    if double := next((name for index, name in enumerate(names) if name and name in names[:index]), None):
        raise TraceError(f"{path}: two columns {double!r}; expected each column once; remove one")
    complete_lines, _, last = text.rpartition("\n")
    before_last, in_last = (_num_cells(line, delimiter) for line in (complete_lines.rpartition("\n")[2], last))
    cut = last if complete_lines and 0 < in_last < min(before_last, len(names)) else ""
    rows = io.StringIO(complete_lines if cut else text)
    try:
        frame = pd.read_csv(
            rows, sep=delimiter, dtype=str, keep_default_na=False, na_filter=False, on_bad_lines="error"
        )
    except (ValueError, pd.errors.ParserError, csv.Error) as err:
        reason = str(err).strip().split("\n", 1)[0][:120]
        raise TraceError(f"{path}: no table ({reason}); expected as many cells in each line as columns") from err
    return Frame(frame.rename(columns=str.strip), cut, is_open=bool(last) and not cut)


def _num_cells(line: str, delimiter: str) -> int:
    try:
        return len(next(csv.reader([line], delimiter=delimiter), []))
    except csv.Error:
        return 0


def read_pptrace_json(path: Path) -> tuple[list[pd.DataFrame], dict[str, Any]]:
    """Read (tables of ops and messages with the columns of :mod:`pptrace.ingest.op_tables.rows`, facts of all ranks).

    Raises:
        TraceError: the file is damaged or was written without ops.
    """
    document = document_in(path, "file of pptrace; write it again")
    rows = list(_rows(document))
    if not rows:
        raise TraceError(
            f"{path}: a {document['schema']} without ops; expected them in it; write it with --ops as well"
        )
    messages = list(_messages(document))
    return [pd.DataFrame(part) for part in (rows, messages) if part], _plan(document)


def _plan(document: dict[str, Any]) -> dict[str, Any]:
    """The plan of a simulation whose order its ops alone do not name: a searched one, or one by hand; else {}.

    That of a report is the order of its ops where the run had such a plan and followed it. Ops that are no whole plan, as in a
    file that was edited, tell none, as do whole steps of several orders.
    """
    named = document.get("schedule")
    if not _is_simulation(document):
        if not isinstance(named, dict) or named.get("source") != "metadata" or named.get("mismatches"):
            return {}
        named = named.get("name")
    name = named if isinstance(named, str) and named in SCHEDULES else "custom"
    if name in SCHEDULES and not SCHEDULES[name].searches:
        return {}
    orders: list[list[list[str]]] = []
    for step in _steps(document):
        if (rows := _order(step)) not in orders:
            orders.append(rows)
    whole = [rows for rows in orders if _is_whole(rows, name)]
    return {"plan": {"name": name, "rows": whole[0]}} if len(whole) == 1 else {}


def _order(step: dict[str, Any]) -> list[list[str]]:
    """The ops of each rank of a pipeline, in its order; of several pipelines, those of the first one."""
    ranks: dict[str, list[str]] = {}
    for rank in _objects(step.get("ranks")):
        number = str(rank.get("pp_rank", rank.get("rank")))
        ranks.setdefault(number, [_pair(op) or _cell(op) for op in _objects(rank.get("ops"))])
    return [ranks.get(str(number), []) for number in range(len(ranks))]


def _is_whole(rows: list[list[str]], name: str) -> bool:
    try:
        validate(from_rows(rows, name))
    except ScheduleError:
        return False
    return True


def _is_simulation(document: dict[str, Any]) -> bool:
    return str(document["schema"]).startswith("pptrace.simulation")


def _steps(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [document] if _is_simulation(document) else _objects(document.get("steps"))


def _cell(op: dict[str, Any]) -> str:
    return f"{op.get('stage')}{op.get('kind')}{op.get('microbatch')}"


def _rows(document: Any) -> Iterator[dict[str, Any]]:
    is_simulation = _is_simulation(document)
    for step in _steps(document):
        for rank in _objects(step.get("ranks")):
            for op in _objects(rank.get("ops")):
                shared = {"rank": rank.get("rank"), "step": 0 if is_simulation else step.get("step")}
                yield {**shared, **op, "pair": _pair(op), "source": "simulated" if is_simulation else "label"}


def _messages(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for rank in _objects(document.get("ranks")) if _is_simulation(document) else ():
        for end in _objects(rank.get("messages")):
            yield {"rank": rank.get("rank"), "step": 0, "axis": "pp", **end}


def _pair(op: dict[str, Any]) -> str:
    """The text of an overlapped pair, from its halves; "" for other ops."""
    halves = list(map(_cell, _objects(op.get("parts"))))
    return f"({';'.join(halves)})OVERLAP_F_B" if halves else ""


def _objects(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
