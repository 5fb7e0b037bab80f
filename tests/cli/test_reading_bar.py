"""The progress bar of a long read, on a terminal and where there is none."""

from __future__ import annotations

import io
import os
import re
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Self

import pytest
from rich.console import Console

from pptrace.cli import progress_bars
from pptrace.cli.progress_bars import ReadingBar
from pptrace.ingest import JobProgress, open_inputs
from tests.support.read import read_traces

pty = pytest.importorskip("pty", reason="a pseudo-terminal needs Unix")
SAMPLE = Path(__file__).parents[2] / "sample_traces" / "1f1b_p4"


class Terminal:
    """A pseudo-terminal that is stderr within a ``with`` block. It is read meanwhile: it holds a few kilobytes only."""

    def __init__(self) -> None:
        self._written = b""

    def __enter__(self) -> Self:
        self._reader, writer = os.openpty()
        self._file = os.fdopen(writer, "w", encoding="utf-8")
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        self._stderr, sys.stderr = sys.stderr, self._file
        return self

    def _read(self) -> None:
        with suppress(OSError):  # how the end of a terminal shows on Linux
            while piece := os.read(self._reader, 1 << 16):
                self._written += piece

    @property
    def drawn(self) -> str:
        return self._written.decode()

    def __exit__(self, *_: object) -> None:
        sys.stderr = self._stderr
        self._file.close()
        self._thread.join()
        os.close(self._reader)


@pytest.fixture(autouse=True)
def _terminal_of_100_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")


def texts(drawn: str) -> list[str]:
    """The states of the bar, without control sequences and without the bar itself."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn)
    return [" ".join(re.sub("[━╸╺]", "", line).split()) for line in re.split(r"[\r\n]+", plain) if line.strip()]


def test_a_long_read_on_a_terminal_shows_traces_bytes_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_bars, "_SHOWN_AFTER_S", 0)
    monkeypatch.setattr(progress_bars, "_REFRESH_S", 0)
    inputs = open_inputs([SAMPLE])
    with Terminal() as terminal, progress_bars.reading_bar() as on_progress:
        read_traces(inputs, 1, on_progress)
    kilobytes = f"{sum(file.num_bytes for file in inputs.files) / 1000:.1f}"
    states = texts(terminal.drawn)
    assert re.fullmatch(rf"read 0 of 4 traces 0\.0/{kilobytes} kB -:--:--", states[0])
    assert any(re.fullmatch(rf"read 3 of 4 traces [\d.]+/{kilobytes} kB \d:\d\d:\d\d", state) for state in states)
    assert states[-1] == f"analysing 4 traces {kilobytes}/{kilobytes} kB 0:00:00"
    assert terminal.drawn.endswith("\x1b[2K")  # the bar is erased: the report begins on an empty line


def test_the_cursor_is_shown_again_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_bars, "_SHOWN_AFTER_S", 0)

    def interrupted() -> None:
        with progress_bars.reading_bar() as on_progress:
            on_progress(JobProgress(0, 2, 0, 10))
            raise KeyboardInterrupt

    with Terminal() as terminal, pytest.raises(KeyboardInterrupt):
        interrupted()
    assert terminal.drawn.rindex("\x1b[?25h") > terminal.drawn.rindex("\x1b[?25l")


def test_nothing_is_drawn_where_stderr_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # which makes rich take a pipe for a terminal
    monkeypatch.setattr(sys, "stderr", piped := io.StringIO())
    with progress_bars.reading_bar() as on_progress:
        assert on_progress is None
    assert piped.getvalue() == ""


@pytest.mark.parametrize(("num_bytes", "is_shown"), [(1000, False), (1 << 30, True)])
def test_a_bar_appears_at_once_for_much_data_only(num_bytes: int, is_shown: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    bar = ReadingBar(console)
    for part in (0, 0.25, 1):
        bar.show(JobProgress(part, 1, int(num_bytes * part), num_bytes))
    bar.stop()
    assert bool(console.file.getvalue()) == is_shown


def test_a_bar_appears_when_reading_has_taken_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(progress_bars.time, "monotonic", lambda: now_s)
    console = Console(file=(drawn := io.StringIO()), force_terminal=True, width=100)
    bar = ReadingBar(console)
    bar.show(JobProgress(0, 1, 0, 1000))
    assert drawn.getvalue() == ""
    now_s += 0.6
    bar.show(JobProgress(0.5, 1, 500, 1000))
    bar.stop()
    assert "read 0 of 1 trace 0.5/1.0 kB -:--:--" in texts(drawn.getvalue())
