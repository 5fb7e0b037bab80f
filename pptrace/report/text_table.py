"""One table of a report for a terminal of any width: columns that find no room are left out whole and named below."""

from __future__ import annotations

from collections.abc import Collection

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from pptrace.model.report_table import Bar, ReportTable

_COLOURS = {"compute": "#3b7dd8", "exposed": "#e08a2e", "bubble": "grey50", "either of both": "grey50"}
_GLYPHS = {"compute": "█", "exposed": "▒", "bubble": "░", "either of both": "·"}
"""Letters that tell the parts of a bar apart without colours."""
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
            while line and not line[-1].text.rstrip():
                line.pop()
            yield from line[:-1]
            for last in line[-1:]:
                yield Segment(last.text.rstrip(), last.style)
            yield Segment.line()


class _Columns:
    """The contents of a table's columns: bars, numbers, prose (columns without a name), or labels; and how wide they are."""

    def __init__(self, table: ReportTable) -> None:
        self.table, self.all = table, list(range(len(table.columns)))
        named = [bool(name.strip()) for name in table.columns]
        self.bars = {at for at in self.all if any(isinstance(row[at], Bar) for row in table.rows)}
        self.numbers = {at for at in self.all if at >= table.num_labels and named[at]}
        self.prose = {at for at in self.all if at >= table.num_labels and not named[at]} - self.bars
        texts = [[row[at] for row in table.rows if isinstance(row[at], str)] for at in self.all]
        self.longest = [max(map(cell_len, (table.columns[at].strip(), *texts[at]))) for at in self.all]  # type: ignore[arg-type]

    def least(self, at: int, number_width: int) -> int:
        """The characters that a column needs."""
        if at in self.bars:
            return _BAR_WIDTHS[0]
        if at in self.prose:
            return min(self.longest[at], _PROSE_WIDTH)
        return max(self.longest[at], number_width) if at in self.numbers else self.longest[at]

    def width(self, shown: Collection[int], number_width: int) -> int:
        return sum(self.least(at, number_width) for at in shown) + _GAP * (len(shown) - 1)

    def fitting(self, width: int) -> tuple[list[int], int]:
        """The columns that fit, and the least width of numbers: narrow ones first, then columns are left out: bars and what the
        table says can go, then the numbers from the right; never its labels, nor its first number.
        """
        shown, names = self.all, self.table.columns
        if self.width(shown, _NUMBER_WIDTH) <= width:
            return shown, _NUMBER_WIDTH
        for at in (*sorted(self.bars), *self.table.leave_out, *range(len(names) - 1, self.table.num_labels, -1)):
            if self.width(shown, 0) <= width:
                break
            # Columns with one head, as those of several phases, are left out together.
            shown = [other for other in shown if other != at and not (names[at].strip() and names[other] == names[at])]
        return shown, 0


def render_table(table: ReportTable, width: int) -> RenderableType:
    """A table in at most ``width`` columns of text, with the legend of its bars and its notes below."""
    columns = _Columns(table)
    shown, number_width = columns.fitting(width)
    fits = columns.width(shown, number_width) <= width
    least, most = _BAR_WIDTHS
    others = [at for at in shown if at not in columns.bars]
    needed = [columns.longest[at] if at in columns.prose else columns.least(at, number_width) for at in others]
    bar_width = max(least, min(most, width - sum(needed) - _GAP * (len(shown) - 1)))
    title = Text(f"\n{table.title}", style="bold")  # not that of the drawn table, which would be broken at its width
    drawn = Table(header_style="dim", box=None, pad_edge=False)
    for at in shown:
        is_number, needed_width = at in columns.numbers, columns.least(at, number_width)
        drawn.add_column(
            Text(table.columns[at]),
            justify="right" if is_number else "left",
            no_wrap=is_number or (fits and at not in columns.prose),
            overflow="fold",
            min_width=needed_width,
            width=needed_width if fits and at not in columns.prose | columns.bars else None,  # rich need not measure it
        )
    names: dict[str, None] = {}
    for row in table.rows:
        cells = [row[at] for at in shown]
        names |= dict.fromkeys(name for cell in cells if isinstance(cell, Bar) for name, _ in cell.parts)
        style = None if any(row[1:]) else "bold"  # the heading of the rows below it
        drawn.add_row(*(_bar(cell, bar_width) if isinstance(cell, Bar) else Text(cell) for cell in cells), style=style)
    legend = [part for name in names for part in ((f"{_GLYPHS[name]} ", _COLOURS[name]), f"{name}  ")]
    below = [Text.assemble(*legend)] if len(names) > 1 else []
    lacking = dict.fromkeys(table.columns[at].strip() for at in columns.all if at not in shown)
    named = ", ".join(filter(None, lacking))
    notes = [*table.notes, *([f"some columns need a wider terminal: {named}"] if named else [])]
    return Group(title, drawn, *below, *(Text(note, style="dim") for note in notes))


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
