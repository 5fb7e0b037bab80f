"""Tables that tools write into pages of the docs: each between two lines that mark its begin and end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pptrace.errors import UsageError


def write_or_print(text: str, page: Path | None) -> None:
    """Write a whole page, or print it where there is none."""
    if page is None:
        print(text, end="")
    else:
        page.write_text(text, encoding="utf-8")


@dataclass(frozen=True, slots=True)
class MarkedTable:
    """A table in the file of ``--write``; without a file it is printed."""

    page: Path | None
    begin: str
    end: str

    def require_markers(self) -> None:
        """Refuse a page without the markers: before anything is measured, rather than after minutes.

        Raises:
            UsageError: they are not there exactly once, in order.
        """
        if self.page is not None:
            self.replaced("", self.page.read_text("utf-8"))

    def write(self, table: str) -> None:
        """Replace what stands between the markers, or print."""
        if self.page is None:
            print(table)
        else:
            self.page.write_text(self.replaced(table, self.page.read_text("utf-8")), "utf-8")

    def replaced(self, table: str, text: str) -> str:
        """``text`` with ``table`` in place of what stands between the markers."""
        begin, end = self.begin, self.end
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
            raise UsageError(f"{self.page}: expected one line {begin!r} and after it one line {end!r}; put them in")
        before, rest = text.split(begin)
        return f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}"
