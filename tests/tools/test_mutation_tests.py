"""The tests that judge mutants are those at any depth: a package's tests lie in folders that mirror it."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

TOOLS = Path(__file__).parent
TESTS = TOOLS.parent


@pytest.mark.parametrize("package", ["schedule", "clock", "timeline", "analysis"])
def test_the_tests_of_every_folder_of_a_package_judge_its_mutants(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    found = runpy.run_path(str(TOOLS / "mutation_tests.py"))["files_of_tests"]()
    assert set((TESTS / package).rglob("test_*.py")) <= set(found)
    assert len(found) == len(set(found))
