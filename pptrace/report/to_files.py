"""The tables behind a report as files, one per table: CSV, or Parquet for DuckDB, polars and pandas.

Parts of a report as rows of a file: JSON with the names of the report, or CSV.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pandas as pd

from pptrace.fields import field_names
from pptrace.workflow.analyse import Analysis

if TYPE_CHECKING:
    import polars


def write_csv(analysis: Analysis, directory: Path) -> None:
    """Write ops.csv, comms.csv and, where the trace has memory events, memory.csv; columns as in pptrace.model.tables,
    and of ops their slack. Of a run with experts whose rows from rank to rank are known, these are expert_traffic.csv.

    Raises:
        OSError: the directory cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name, table in _tables(analysis).items():
        table.to_csv(directory / f"{name}.csv", index=False)
    traffic = directory / "expert_traffic.csv"
    traffic.unlink(missing_ok=True)  # another run's
    if analysis.expert_traffic is not None:
        analysis.expert_traffic.table().to_csv(traffic, index=False)


def write_parquet(analysis: Analysis, directory: Path) -> None:
    """Write ops.parquet and, where they have rows, comms.parquet and memory.parquet, with the columns of the CSV files.

    Raises:
        OSError: the directory cannot be written.
    """
    import polars
    from polars.exceptions import ComputeError

    directory.mkdir(parents=True, exist_ok=True)
    for name, table in _tables(analysis).items():
        if not len(table) and name != "ops":
            (directory / f"{name}.parquet").unlink(missing_ok=True)  # another run's
            continue
        columns = {str(column): _polars_column(table[column]) for column in table}
        try:
            polars.DataFrame(columns).write_parquet(directory / f"{name}.parquet")
        except ComputeError as err:  # as of a disk that is full
            (directory / f"{name}.parquet").unlink(missing_ok=True)
            raise OSError(str(err).rpartition("IO error: ")[2]) from err


def _tables(analysis: Analysis) -> dict[str, pd.DataFrame]:
    data = analysis.data
    tables = {"ops": analysis.ops_with_slack, "comms": data.comms, "memory": data.memory}
    return {name: table for name, table in tables.items() if len(table.columns)}


def _polars_column(column: pd.Series[Any]) -> polars.Series:
    import polars

    if isinstance(column.dtype, pd.CategoricalDtype):
        texts = polars.Series(column.cat.categories.tolist(), dtype=polars.String)
        return texts.gather(column.cat.codes.to_numpy().astype("uint32"))
    if isinstance(column.dtype, pd.BooleanDtype):
        values = pd.Series(column.to_numpy(dtype=bool, na_value=False))
        return polars.Series(values.to_numpy()).set(polars.Series(column.isna().to_numpy()), None)
    return polars.Series(column.to_numpy() if column.dtype != object else column.tolist())


_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First characters by which spreadsheets take a text for a formula."""

Row = Any
"""A dataclass of the report, or a mapping by name."""


def json_of(rows: Iterable[Row]) -> str:
    """The rows as a JSON array of objects."""
    return msgspec.json.format(msgspec.json.encode(list(rows)), indent=1).decode() + "\n"


def csv_of(rows: Iterable[Row]) -> str:
    """The rows as CSV: parts of parts have columns of their own (``in_flight_planned``), places are text, the unknown empty.

    A text that a spreadsheet would take for a formula begins with an apostrophe.
    """
    flat = [dict(_cells(row)) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def _cells(row: Row, before: str = "") -> Iterable[tuple[str, object]]:
    members = row if isinstance(row, Mapping) else {name: getattr(row, name) for name in field_names(type(row))}
    for name, value in members.items():
        if field_names(type(value)):
            yield from _cells(value, f"{before}{name}_")
            continue
        cell = value
        if isinstance(value, Mapping):
            cell = ", ".join(f"{key} {part}" for key, part in value.items())
        elif isinstance(value, Sequence) and not isinstance(value, str):
            cell = " ".join(map(str, value))
        if isinstance(cell, str) and cell.startswith(_FORMULA):
            cell = f"'{cell}"
        yield f"{before}{name}", "" if cell is None else cell
