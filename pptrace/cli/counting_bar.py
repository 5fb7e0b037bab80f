"""The progress bar of work that has a number of parts: how many are done, on stderr where that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
