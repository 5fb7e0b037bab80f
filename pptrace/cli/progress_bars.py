"""Progress bars on stderr, where that is a terminal: of a long read, and of work that has a number of parts."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from pptrace.ingest import JobProgress, OnProgress


OnCount = Callable[[int, int], None]
"""Takes how many parts are done, and of how many."""


@contextmanager
def counting_bar(doing: str) -> Iterator[OnCount | None]:
    """A callback that draws the bar, which disappears at the end of the block; None where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn(doing), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda num_done, total: bar.update(task, completed=num_done, total=total)


_SHOWN_AFTER_S = 0.5
_SHOWN_FROM_BYTES = 32 << 20  # takes longer than that: shown at once
_REFRESH_S = 0.1


@contextmanager
def reading_bar() -> Iterator[OnProgress | None]:
    """A callback that draws the bar, which disappears at the end of the block; None where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    bar = ReadingBar(Console(stderr=True))
    try:
        yield bar.show
    finally:
        bar.stop()


class ReadingBar:
    """Draws how far reading is, once it has taken a moment or is of much data.

    It is redrawn when there is news, not by a thread: where one runs, the processes that read cannot be forked.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began_s = time.monotonic()
        self._drawn_s = 0.0
        self._bar: Progress | None = None

    def show(self, progress: JobProgress) -> None:
        now_s = time.monotonic()
        if self._bar is None:
            bytes_left = progress.num_bytes - progress.bytes_read
            if now_s - self._began_s < _SHOWN_AFTER_S and bytes_left < _SHOWN_FROM_BYTES:
                return
            self._bar = _bar(self._console)
            self._bar.add_task(_description(progress), total=progress.num_bytes, completed=progress.bytes_read)
            self._bar.start()
        is_read = progress.files_read == progress.num_files
        if not is_read and now_s - self._drawn_s < _REFRESH_S:
            return
        self._drawn_s = now_s
        self._bar.update(
            self._bar.task_ids[0], description=_description(progress), completed=progress.bytes_read, refresh=True
        )

    def stop(self) -> None:
        """Erase the bar, so that an error or the report begins on an empty line."""
        if self._bar is not None:
            self._bar.stop()


def _bar(console: Console) -> Progress:
    """Make the bar. rich is imported here, as all of it in the command line: most commands end before they need it."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, auto_refresh=False, transient=True)


def _description(progress: JobProgress) -> str:
    noun = "trace" if progress.num_files == 1 else "traces"
    if progress.files_read == progress.num_files:
        return f"analysing {progress.num_files} {noun}"
    return f"read {int(progress.files_read)} of {progress.num_files} {noun}"
