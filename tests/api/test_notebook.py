"""docs/notebook.ipynb runs, and shows what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go
import pytest

import pptrace
from tests.api.notebook import Cell, run_notebook
from tests.support.programs import ROOT

NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


@pytest.fixture(scope="module")
def cells() -> dict[str, Cell]:
    return run_notebook(NOTEBOOK)


def test_every_picture_is_a_timeline_or_a_figure_with_data(cells: dict[str, Cell]) -> None:
    for name in ("timeline", "one-scale", "zero-bubble"):
        assert isinstance(cells[name].value, pptrace.TimelinePicture)
        assert "<iframe" in cells[name].value._repr_html_()
    for name in ("waterfall", "overview"):
        figure = cells[name].value
        assert isinstance(figure, go.Figure)
        assert len(figure.data) > 0


def test_every_table_has_rows(cells: dict[str, Cell]) -> None:
    for name in ("steps", "ranks", "ops", "comms", "simulate"):
        assert isinstance(cells[name].value, pd.DataFrame)
        assert len(cells[name].value) > 1
        assert not cells[name].value.isna().all(axis=None)


def test_all_schedules_are_simulated_and_those_of_the_catalogue_are_shown(cells: dict[str, Cell]) -> None:
    table = cells["simulate"].value
    assert set(table.index) == set(pptrace.schedules)
    assert table.loc["1f1b", "bubble_ratio"] == pytest.approx(3 / 8, abs=1e-3)
    assert all(name in cells["schedules"].value._repr_html_() for name in pptrace.schedules)


def test_the_notebook_is_stored_without_outputs() -> None:
    stored = json.loads(Path(NOTEBOOK).read_text(encoding="utf-8"))
    code = [cell for cell in stored["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


def test_a_cell_that_fails_fails_the_run(tmp_path: Path) -> None:
    broken = {"cells": [{"cell_type": "code", "id": "bad", "source": ["x = 1\n", "x / 0"]}]}
    (tmp_path / "broken.ipynb").write_text(json.dumps(broken), encoding="utf-8")
    with pytest.raises(ZeroDivisionError):
        run_notebook(tmp_path / "broken.ipynb")
