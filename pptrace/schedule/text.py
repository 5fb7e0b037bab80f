"""Plans as text: torch's CSV, and a readable grid.

CSV: one row per rank, one cell per action; empty cells are skipped.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

from pptrace.errors import ScheduleError
from pptrace.regular import open_regular
from pptrace.schedule.actions import Action, parse_action
from pptrace.schedule.phases import tag_phases
from pptrace.schedule.plan import Plan, make_plan
from pptrace.schedule.replay import replay

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
    """A plan from cells. Phases are tagged by order, as :func:`pptrace.schedule.phases.tag_phases` says.

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


def draw(plan: Plan, marked: Collection[tuple[int, int]] = ()) -> str:
    """The plan as a grid, one row per rank, in order of execution; ``marked`` (rank, index) cells get ``>…<``."""
    cells = [
        [f">{action}<" if (rank, index) in marked else str(action) for index, action in enumerate(row)]
        for rank, row in enumerate(plan.ranks)
    ]
    return grid(cells)


def draw_in_time(plan: Plan) -> str:
    """The plan on a grid of ticks, one tick per action, gaps left open; in order of execution where it has messages or blocks."""
    timeline = replay(plan) if not plan.has_comms else None
    if timeline is None or timeline.blocked:
        return draw(plan)
    cells = []
    for row in timeline.ranks:
        line = [""] * timeline.makespan
        for timed in row:
            line[timed.start] = str(timed.action)
        cells.append(line)
    return grid(cells)


def grid(cells: list[list[str]]) -> str:
    """Cells in columns, a row per rank, each line headed by its rank."""
    widths = [max(map(len, column)) for column in zip_longest(*cells, fillvalue="")]
    head = len(f"rank {len(cells) - 1}")
    lines = []
    for rank, row in enumerate(cells):
        body = " ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False))
        lines.append(f"{f'rank {rank}'.ljust(head)} | {body}".rstrip())
    return "\n".join(lines)
