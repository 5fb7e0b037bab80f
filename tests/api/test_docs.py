"""The examples in docs/python.md and in docstrings give what they show."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest

import pptrace
from pptrace.model.tables import COMMS, MEMORY, OPS, SLACK
from tests.support.programs import ROOT

PAGE = ROOT / "docs" / "python.md"
MODULES = ("load", "run", "simulate", "catalogue", "estimate", "estimate_sweep")


@pytest.fixture
def beside_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory in which examples may write, with the sample traces."""
    (tmp_path / "sample_traces").symlink_to(ROOT / "sample_traces")
    monkeypatch.chdir(tmp_path)


def _run(test: doctest.DocTest, namespace: dict[str, Any]) -> doctest.TestResults:
    test.globs = namespace
    runner = doctest.DocTestRunner(optionflags=doctest.REPORT_NDIFF)
    return runner.run(test, clear_globs=False)


def _cached(module: ModuleType) -> list[doctest.DocTest]:
    """The examples of cached properties, which Python's finder passes over before 3.12."""
    classes = [item for item in vars(module).values() if inspect.isclass(item) and item.__module__ == module.__name__]
    properties = [item for owner in classes for item in vars(owner).values() if isinstance(item, cached_property)]
    return [test for item in properties for test in doctest.DocTestFinder().find(item.func, item.attrname, module)]


@pytest.mark.usefixtures("beside_samples")
def test_the_page_shows_what_its_examples_give(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```pycon\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    namespace: dict[str, Any] = {}
    parser = doctest.DocTestParser()
    results = [_run(parser.get_doctest(block, {}, "python.md", str(PAGE), 0), namespace) for block in blocks]
    assert sum(result.failed for result in results) == 0, capsys.readouterr().out
    assert len(blocks) == 15
    assert all(result.attempted > 0 for result in results)


@pytest.mark.usefixtures("beside_samples")
@pytest.mark.parametrize("name", [*(f"pptrace.api.{module}" for module in MODULES), "pptrace.schedule.registry"])
def test_docstrings_show_what_their_examples_give(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(name)
    tests = [test for test in (*doctest.DocTestFinder().find(module), *_cached(module)) if test.examples]
    results = [_run(test, dict(test.globs)) for test in tests]
    assert sum(result.failed for result in results) == 0, capsys.readouterr().out
    assert results


@pytest.mark.parametrize(
    ("table", "columns"),
    [("ops", {**OPS, **SLACK}), ("comms", COMMS), ("memory", MEMORY), ("steps", None), ("ranks", None)],
)
def test_every_column_is_explained_on_the_page_and_in_the_docstring(table: str, columns: Any) -> None:
    sections = PAGE.read_text(encoding="utf-8").split("## Columns")[1].split("**`run.")[1:]
    section = next(text for text in sections if text.startswith(f"{table}`**"))
    names = set(columns or getattr(_nothing(), table).columns)
    assert names == set(re.findall(r"`([a-z_]+)`", section)) & names, "a column is missing"
    if columns is not None:
        doc = getattr(pptrace.Run, table).__doc__ or getattr(pptrace.Run, table).func.__doc__
        assert [name for name in names if f"``{name}``" not in doc] == []


def _nothing() -> pptrace.Run:
    return pptrace.load(ROOT / "sample_traces" / "1f1b_p2")


def test_tables_of_steps_and_ranks_are_pandas() -> None:
    assert isinstance(_nothing().steps, pd.DataFrame)
