"""Plans as torch's CSV: one row per rank, one cell per action; empty cells are skipped."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from pptrace.errors import ScheduleError
from pptrace.regular import open_regular
from pptrace.schedule.actions import Action, parse_action
from pptrace.schedule.plan import Plan, make_plan, tag_phases

_NO_SCHEDULE = (
    "; a schedule has one row per rank, as `pptrace schedule show NAME --csv FILE` writes it, and tables of ops are for "
    "`pptrace analyze`"
)
"""Advice on a file whose first cell is no action."""


def to_rows(plan: Plan) -> list[list[str]]:
    """The plan's cells, rank by rank."""
    return [[str(action) for action in row] for row in plan.ranks]


def to_csv(plan: Plan) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(to_rows(plan))
    return out.getvalue()


def from_rows(rows: Iterable[Iterable[str]], name: str, where: str = "") -> Plan:
    """A plan from cells. Phases are tagged by order, as :func:`pptrace.schedule.plan.tag_phases` says.

    Raises:
        ScheduleError: a cell that is no action, or cells that make no plan; the message begins with ``where`` (else the name),
            and names row and column.
    """
    where = where or name
    parsed: list[list[Action]] = []
    for row_number, row in enumerate(rows, 1):
        actions = []
        for column, cell in enumerate(row, 1):
            if not cell.strip():
                continue
            try:
                actions.append(parse_action(cell.strip()))
            except ScheduleError as err:
                hint = "" if actions or any(parsed) else _NO_SCHEDULE
                raise ScheduleError(f"{where}: row {row_number}, cell {column}: {err}{hint}") from None
        parsed.append(actions)
    return tag_phases(replace(make_plan(where, parsed), name=name))


def from_csv(text: str, name: str = "custom", where: str = "") -> Plan:
    """Read torch's CSV; trailing blank lines are ignored.

    Raises:
        ScheduleError: as :func:`from_rows`.
    """
    try:
        rows = list(csv.reader(io.StringIO(text.rstrip("\r\n"))))
    except csv.Error as err:
        raise ScheduleError(f"{where or name}: is not CSV ({err})") from None
    return from_rows(rows, name, where)


def read_csv(path: Path) -> Plan:
    """A plan from a CSV file, named after the file.

    Raises:
        ScheduleError: the file cannot be read, or as :func:`from_csv`.
    """
    try:
        with (
            open_regular(path) as file,
            io.TextIOWrapper(file, "utf-8-sig") as content,
        ):  # spreadsheets write a byte order mark
            text = content.read()
    except UnicodeDecodeError:
        raise ScheduleError(f"{path}: cannot be read (it is no text); expected a CSV of actions") from None
    except OSError as err:
        raise ScheduleError(f"{path}: cannot be read ({err.strerror}); expected a CSV of actions") from None
    return from_csv(text, path.stem, str(path))
