"""The progress bar of predictions and sweeps, on a terminal and where there is none."""

from __future__ import annotations

import io
import sys

import pytest

from pptrace.analysis.whatif.answer import answer
from pptrace.analysis.whatif.change import Change
from pptrace.cli.progress_bars import counting_bar
from pptrace.cli.whatif import command
from tests.analysis.whatif.test_study import costs_of, study_of
from tests.cli.test_reading_bar import SAMPLE, Terminal, texts


def test_predictions_are_counted_before_each_and_after_the_last_one() -> None:
    counted: list[tuple[int, int]] = []
    changes = [(name, Change(schedule=name)) for name in ("gpipe", "zb-h1")]
    answer(study_of(costs_of()), changes, lambda *count: counted.append(count))
    assert counted == [(0, 2), (1, 2), (2, 2)]


def test_predictions_on_a_terminal_show_how_many_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    with Terminal() as terminal:
        command.main([str(SAMPLE), "--schedule", "gpipe", "--json", "-"], standalone_mode=False)
    assert any(state.startswith("predicted 1/1") for state in texts(terminal.drawn))
    assert terminal.drawn.endswith("\x1b[2K")


def test_nothing_is_drawn_where_stderr_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", piped := io.StringIO())
    with counting_bar("predicted") as on_count:
        assert on_count is None
    assert piped.getvalue() == ""
