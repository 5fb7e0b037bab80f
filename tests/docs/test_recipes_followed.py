"""All recipes followed at once in a copy of the sources: the checks and tests that they name pass there.

Always those that are quick; with PPTRACE_ALL all that the recipes name, and strict types.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.recipes import PAGE, copy_sources, follow_all, make_axis_runnable
from tests.support.extent import ALL
from tests.support.programs import ROOT
from tools.house import recipes_of

LINT = '-c "from importlinter.cli import lint_imports_command as lint; lint()" --no-cache'
LONG = {"instrument/pipeline/test_kinds.py", "instrument/models/test_mixes.py", "ingest/test_fuzz.py"}
"""Trainings on several processes and minutes of random damage: nothing that the recipes here add changes them."""
HERE = "docs/test_recipes_followed.py"
ALSO = {"docs/test_report_page.py", "docs/test_site.py", "tools/test_schedule_table.py", "report"}
NAMED = " ".join(
    f"tests/{path}" for path in sorted({*re.findall(r"`tests/([\w/]*test_\w+\.py)`", PAGE), *ALSO} - LONG - {HERE})
)


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, set[str]]]:
    """A copy in which all recipes were followed, and the files that each of them changed."""
    root = tmp_path_factory.mktemp("clone")
    copy_sources(root)
    return root, follow_all(root)


@pytest.fixture(scope="module")
def clone(followed: tuple[Path, dict[str, set[str]]]) -> Path:
    root, _ = followed
    make_axis_runnable(root)
    for command in (
        "tools/schedule_table.py --catalogue --write docs/schedules.md",
        "tools/report_page.py --write docs/report.md",
    ):
        ended = run(root, command)
        assert ended.returncode == 0, ended.stderr
    return root


def run(root: Path, command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", f'"$0" {command}', sys.executable],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )


def test_each_recipe_changes_as_many_files_as_its_table_says(followed: tuple[Path, dict[str, set[str]]]) -> None:
    table = dict(recipes_of(ROOT / "docs" / "extending.md"))
    sources = {recipe: [name for name in names if name.endswith(".py")] for recipe, names in followed[1].items()}
    assert {recipe: str(len(names)) for recipe, names in sources.items()} == table
    pages = {recipe: [name for name in names if name.endswith(".md")] for recipe, names in followed[1].items()}
    assert all(len(names) <= (2 if recipe == "A question" else 1) for recipe, names in pages.items())


@pytest.mark.skipif(not ALL, reason="runs hundreds of tests: PPTRACE_ALL")
def test_the_tests_that_the_recipes_name_pass_where_they_were_followed(clone: Path) -> None:
    ended = run(clone, f"-m pytest -q -p no:cacheprovider {NAMED}")
    assert ended.returncode == 0, ended.stdout[-5000:]


def test_what_the_recipes_add_is_used(clone: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    cells = (
        '{{"acme": 1, "rank": {0}, "step": 0, "op": "{1}", "stage": {0}, "mb": {2}, "begin_us": {3}, "end_us": {4}}}\n'
    )
    order = [(0, "fwd", 0, 0, 2), (0, "fwd", 1, 2, 4), (1, "fwd", 0, 2, 4), (1, "fwd", 1, 4, 6)]
    order += [(1, "bwd", 1, 6, 8), (1, "bwd", 0, 8, 10), (0, "bwd", 1, 8, 10), (0, "bwd", 0, 10, 15)]
    file.write_text("".join(cells.format(*op) for op in order), encoding="utf-8")
    imports = "from pptrace.api.load import load; from pptrace.recognise.labels import read_label as r"
    axes = "print(load(['sample_traces/1f1b_p2']).report.mesh.axes)"
    analyse = f"from pptrace.cli.main import cli; cli(['analyze', '--all', '{file}'])"
    ended = run(clone, f"-c \"{imports}; {axes}; print(r('acme/bwd/s3/mb12').actions[0]); {analyse}\"")
    assert ended.returncode == 0, ended.stderr
    axes_of_run, action, text = ended.stdout.split("\n", 2)
    assert axes_of_run == "{'pp': 2, 'vpp': 1, 'tp': 1, 'cp': 1, 'dp': 1, 'ep': 1, 'xp': 1}"
    assert action == "3B12"
    assert "gpipe-reversed" in text
    assert "Longest op of each stage" in text


@pytest.mark.skipif(not ALL, reason="reads all types and imports anew: PPTRACE_ALL")
@pytest.mark.parametrize("check", ["-m ruff check .", "-m ruff format --check .", "-m mypy", LINT])
def test_the_checks_pass_where_the_recipes_were_followed(clone: Path, check: str) -> None:
    ended = run(clone, check)
    assert ended.returncode == 0, ended.stdout[-3000:]
