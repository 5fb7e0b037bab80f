"""One table of a report for a terminal of any width: columns that find no room are left out whole and named below."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from pptrace.report.tables import Bar, Cell, ReportTable

_COLOURS = {"compute": "#3b7dd8", "exposed": "#e08a2e", "bubble": "grey50", "either of both": "grey50"}
_GLYPHS = {
    "compute": "█",
    "exposed": "▒",
    "bubble": "░",
    "either of both": "·",
}  # so that a bar can be read without colours
_BAR_WIDTHS = (10, 30)
"""Characters of a bar: at least, else it is left out, and at most."""
_PROSE_WIDTH = 24
"""Least characters of a column of prose, which wraps."""
_NUMBER_WIDTH = 8
"""Least characters of a column of numbers where there is room, so that tables below each other align."""
_GAP = 2


class Stripped:
    """Anything that rich can print, without the blanks at the ends of its lines."""

    def __init__(self, content: RenderableType) -> None:
        self._content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in console.render_lines(self._content, options, pad=False):
            yield from _without_blanks(line)
            yield Segment.line()


def _without_blanks(line: list[Segment]) -> list[Segment]:
    kept = list(line)
    while kept:
        last = kept.pop()
        if text := last.text.rstrip():
            return [*kept, Segment(text, last.style)]
    return kept


def render_table(table: ReportTable, width: int) -> RenderableType:
    """A table in at most ``width`` columns of text, with the legend of its bars and its notes below."""
    shown, number_width = _fitting(table, width)
    fits = _total(table, shown, number_width) <= width
    bar_width = _bar_width(table, shown, number_width, width)
    drawn = Table(
        title=f"\n{table.title}",
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=None,
        pad_edge=False,
    )
    for index in shown:
        number = _is_number(table, index)
        drawn.add_column(
            Text(table.columns[index]),
            justify="right" if number else "left",
            no_wrap=number or (fits and not _is_prose(table, index)),
            overflow="fold",
            min_width=_least(table, index, number_width),
        )
    for row in table.rows:
        style = None if any(row[1:]) else "bold"  # the heading of the rows below it
        drawn.add_row(*(_cell(row[index], bar_width) for index in shown), style=style)
    bars = [row[index] for row in table.rows for index in shown]
    names = dict.fromkeys(name for cell in bars if isinstance(cell, Bar) for name, _ in cell.parts)
    below = [_legend(names)] if len(names) > 1 else []
    lacking = dict.fromkeys(
        name.strip() for index, name in enumerate(table.columns) if index not in shown and name.strip()
    )
    notes = [*table.notes, *([f"some columns need a wider terminal: {', '.join(lacking)}"] if lacking else [])]
    return Group(drawn, *below, *(Text(note, style="dim") for note in notes))


def _fitting(table: ReportTable, width: int) -> tuple[list[int], int]:
    """The columns that fit, and the least width of numbers: narrow ones first, then columns are left out in their order."""
    shown = list(range(len(table.columns)))
    if _total(table, shown, _NUMBER_WIDTH) <= width:
        return shown, _NUMBER_WIDTH
    for index in _order_to_leave_out(table):
        if _total(table, shown, 0) <= width:
            break
        shown = [other for other in shown if other != index and not _same_head(table, other, index)]
    return shown, 0


def _same_head(table: ReportTable, first: int, second: int) -> bool:
    """Return whether two columns have one head, as those of several phases: they are left out together."""
    return bool(table.columns[first].strip()) and table.columns[first] == table.columns[second]


def _order_to_leave_out(table: ReportTable) -> list[int]:
    """Bars and what the table says can go, then the numbers from the right; never its labels, nor its first number."""
    bars = [index for index in range(len(table.columns)) if _is_bar(table, index)]
    others = range(len(table.columns) - 1, table.num_labels, -1)
    return list(dict.fromkeys([*bars, *table.leave_out, *others]))


def _total(table: ReportTable, shown: Collection[int], number_width: int) -> int:
    return sum(_least(table, index, number_width) for index in shown) + _GAP * (len(shown) - 1)


def _least(table: ReportTable, index: int, number_width: int) -> int:
    if _is_bar(table, index):
        return _BAR_WIDTHS[0]
    longest = _longest(table, index)
    if _is_prose(table, index):
        return min(longest, _PROSE_WIDTH)
    return max(longest, number_width) if _is_number(table, index) else longest


def _longest(table: ReportTable, index: int) -> int:
    texts = (cell for row in table.rows if isinstance(cell := row[index], str))
    return max(cell_len(text) for text in (table.columns[index].strip(), *texts))


def _bar_width(table: ReportTable, shown: Sequence[int], number_width: int, width: int) -> int:
    """The characters of a bar: what the other columns leave, prose in one line where that leaves enough."""
    least, most = _BAR_WIDTHS
    others = [index for index in shown if not _is_bar(table, index)]
    widths = [
        _longest(table, index) if _is_prose(table, index) else _least(table, index, number_width) for index in others
    ]
    return max(least, min(most, width - sum(widths) - _GAP * (len(shown) - 1)))


def _is_bar(table: ReportTable, index: int) -> bool:
    return any(isinstance(row[index], Bar) for row in table.rows)


def _is_number(table: ReportTable, index: int) -> bool:
    return index >= table.num_labels and bool(table.columns[index].strip())


def _is_prose(table: ReportTable, index: int) -> bool:
    return index >= table.num_labels and not table.columns[index].strip() and not _is_bar(table, index)


def _cell(cell: Cell, bar_width: int) -> Text:
    return _bar(cell, bar_width) if isinstance(cell, Bar) else Text(cell)


def _legend(names: Iterable[str]) -> Text:
    return Text.assemble(*(part for name in names for part in ((f"{_GLYPHS[name]} ", _COLOURS[name]), f"{name}  ")))


def _bar(bar: Bar, width: int) -> Text:
    """Shares of a row as a bar; rounding errors carry over, so that equal sums have equal widths."""
    text = Text()
    drawn, total = 0, 0.0
    for name, share in bar.parts:
        total += share
        end = round(width * total)
        text.append(_GLYPHS[name] * (end - drawn), style=_COLOURS[name])
        drawn = end
    return text
