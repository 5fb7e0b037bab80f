"""Mutants are judged by tests at any depth that pass without a change; a sample is drawn from the mutants asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import mutants, mutation_tests

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("package", ["schedule", "clock", "timeline", "analysis"])
def test_the_tests_of_every_folder_of_a_package_judge_its_mutants(package: str) -> None:
    found = mutation_tests.files_of_tests()
    assert set((TESTS / package).rglob("test_*.py")) <= set(found)
    assert len(found) == len(set(found))


@pytest.mark.filterwarnings("ignore:No data was collected")
def test_tests_that_fail_without_a_change_are_named_and_judge_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "test_one.py": "def test_good():\n    pass\n\ndef test_bad():\n    assert False\n",
        "test_two.py": "import no_such_module\n",
        "test_three.py": "import os\n\ndef test_ends():\n    os._exit(3)\n",
    }
    (tmp_path / "tests").mkdir()
    for name, text in files.items():
        (tmp_path / "tests" / name).write_text(text)
    (tmp_path / "tests" / "conftest.py").write_text("")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.setattr(mutation_tests, "ROOT", tmp_path)
    monkeypatch.setattr(mutation_tests, "CACHE", tmp_path / "kept.json")
    monkeypatch.setattr(mutation_tests, "TESTS", tuple(files))
    monkeypatch.chdir(tmp_path)
    measured, failing = mutation_tests.measure(mutation_tests.Children(3))
    assert set(measured) == {"tests/test_one.py::test_good"}
    assert failing == ["tests/test_one.py::test_bad", "tests/test_three.py", "tests/test_two.py"]


@pytest.fixture(scope="module")
def every() -> dict[str, list[mutants.Mutant]]:
    return mutants.all_mutants()


def test_a_sample_is_drawn_from_the_mutants_that_have_a_text(every: dict[str, list[mutants.Mutant]]) -> None:
    some = mutants.with_text(every, ["analysis/explain/critical_path.py"])
    assert {package for package, group in some.items() if group} == {"analysis"}
    assert {mutant.path for mutant in some["analysis"]} == {"pptrace/analysis/explain/critical_path.py"}
    size = mutants.LEAST + 3
    assert len(some["analysis"]) > size
    drawn = mutants.draw(some, size, 0)
    assert len({mutant.name for mutant in drawn}) == len(drawn) == size
    assert set(drawn) <= set(some["analysis"])
    everything = mutants.draw(every, sum(map(len, every.values())), 0)
    assert {mutant.name for mutant in everything} == {mutant.name for group in every.values() for mutant in group}


def test_every_listed_mutant_that_changes_nothing_is_one(every: dict[str, list[mutants.Mutant]]) -> None:
    assert mutants.stale_lines(mutants.read_equivalent(), every) == []
    (line,) = mutants.stale_lines({"pptrace/clock/gone.py f: x = 0 [0 → 1]": "why"}, every)
    assert line.endswith("remove the line: pptrace/clock/gone.py f: x = 0 [0 → 1]")


def test_tests_in_the_folder_that_mirrors_a_mutants_come_first() -> None:
    mutant = mutants.Mutant("pptrace/analysis/explain/critical_path.py", 0, 7, range(7, 8), "", True)
    lines = {mutant.path: [6, 7]}
    seconds = {
        "tests/report/test_a.py::test_fast": 0.1,
        "tests/analysis/test_b.py::test_of_package": 0.2,
        "tests/analysis/links/test_c.py::test_of_another_room": 0.3,
        "tests/analysis/explain/test_d.py::test_slow": 9.0,
        "tests/analysis/explain/test_e.py::test_slower": 20.0,
    }
    measured = {test: {"seconds": taken, "lines": lines} for test, taken in seconds.items()}
    elsewhere = {"tests/analysis/explain/test_f.py::test_of_other_lines": {"seconds": 0.0, "lines": {mutant.path: [8]}}}
    chosen = mutation_tests.choose_tests(mutant, measured | elsewhere)
    names = [test.split("::")[1] for test in chosen]
    assert names == ["test_slow", "test_slower", "test_of_package", "test_of_another_room", "test_fast"]
    measured["tests/analysis/explain/test_e.py::test_slower"]["seconds"] = mutation_tests.BUDGET_S
    assert [test.split("::")[1] for test in mutation_tests.choose_tests(mutant, measured)] == ["test_slow"]
