"""The package as a user's script sees it: typed, quick to import, and all names where they are documented."""

from __future__ import annotations

import doctest
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import pptrace
from tests.support.programs import ROOT

CHECKED = ROOT / ".mypy_cache"
SCRIPT = '''"""What somebody may write."""

import sys

import pandas as pd

import pptrace


def worst_rank(run: pptrace.Run, step: int) -> int:
    ranks: pd.DataFrame = run.ranks[run.ranks["step"] == step]
    return int(ranks.sort_values("bubble_ns")["rank"].iloc[-1])


def alternatives(pp: int, microbatches: int) -> dict[str, float]:
    return {
        name: pptrace.simulate(schedule.build(pp, microbatches), forward=2.0, backward=4.0).bubble_ratio
        for name, schedule in pptrace.schedules.items()
        if schedule.default_chunks == 1
    }


def show(done: float, total: int) -> None:
    print(f"{done:.0f}/{total}", file=sys.stderr)


@pptrace.mark("optimizer")
def update() -> None: ...


def main() -> None:
    run = pptrace.load(sys.argv[1], step=4, progress=show)
    typical = run.report.typical_step
    assert typical is not None
    ratio: float | None = typical.bubble.ratio
    page: str = run.to_html()
    run.to_json("report.json", ops=True)
    verdict: str | None = pptrace.hang(sys.argv[1]).verdict
    print(worst_rank(run, 4), ratio is not None, len(page) > 1000, verdict, alternatives(4, 8)["1f1b"])


if __name__ == "__main__":
    main()
'''
MISTAKES = """
import pptrace

pptrace.frob
pptrace.load(3)
pptrace.load("x").figure(kind="pie")
pptrace.load("x").to_html().frob
pptrace.load("x").report.typical_step.step
pptrace.schedules["1f1b"].build("4", 8)
pptrace.simulate("1f1b", pp=4, microbatches=8).bubble_ratio.frob
pptrace.hang("x").verdict.upper()
"""
_HEAVY = (
    "pandas numpy plotly torch polars msgspec rich click dash instrument pptrace.schedule pptrace.model typing inspect"
)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter whose site-packages lead to pptrace, and to what this one has installed."""
    folder = tmp_path_factory.mktemp("user") / "env"
    venv.create(folder, symlinks=True)
    site = next((folder / "lib").glob("python*")) / "site-packages"
    installed = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "user.pth").write_text("\n".join([str(ROOT), *installed]), encoding="utf-8")
    return folder / "bin" / "python"


def _mypy(python: Path, folder: Path, cache: Path, *scripts: str) -> list[str]:
    """Lines of mypy that say what is wrong with the scripts of a folder."""
    options = ["--strict", "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(cache)]
    command = [str(python), "-m", "mypy", *options, *scripts]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=300, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if ": error:" in line]


def test_a_script_of_a_user_is_typed_and_runs_outside_of_the_project(
    python: Path, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    script, wrong = tmp_path / "script.py", tmp_path / "wrong.py"
    script.write_text(SCRIPT, encoding="utf-8")
    wrong.write_text(MISTAKES, encoding="utf-8")
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    examples = "".join(re.findall(r"```pycon\n(.*?)```", page, flags=re.DOTALL))
    (tmp_path / "page.py").write_text(doctest.script_from_examples(examples), encoding="utf-8")
    cache = pytestconfig.cache.mkdir("mypy_of_users")
    if not any(cache.iterdir()) and CHECKED.is_dir():  # what `make check` has read need not be read again
        shutil.copytree(CHECKED, cache, dirs_exist_ok=True)
    errors = _mypy(
        python, tmp_path, cache, script.name, wrong.name, "page.py"
    )  # one run: it reads pandas anew each time
    refused = {int(line.split(":")[1]) for line in errors if line.startswith(f"{wrong.name}:")}
    assert refused == set(range(4, 12)), errors
    assert [line for line in errors if not line.startswith(f"{wrong.name}:")] == []
    ended = subprocess.run(
        [str(python), script.name, str(ROOT / "sample_traces" / "1f1b_p4")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "1 True True None 0.375\n"), ended.stderr
    assert ended.stderr.splitlines()[-1] == "4/4"
    assert (tmp_path / "report.json").stat().st_size > 10_000


def test_marks_import_nothing_heavy_and_analyses_no_torch_and_pictures_only_where_they_are_asked_for() -> None:
    program = f"""
import sys
before = set(sys.modules)
import pptrace
with pptrace.mark("forward", microbatch=0):
    version = pptrace.__version__
error = pptrace.PptraceError
new = set(sys.modules) - before
print(sorted(new & set({_HEAVY!r}.split())), sorted(name for name in new if name.startswith("pptrace")))
import site
site.main()
run = pptrace.load({str(ROOT / "sample_traces" / "1f1b_p2")!r})
run.to_json(), run.ops, repr(run), run._repr_html_(), pptrace.schedules
pptrace.simulate("1f1b", pp=2, microbatches=2).ops
print([name for name in ("torch", "plotly", "dash", "click", "instrument") if name in sys.modules])
"""
    command = [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}){program}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.splitlines() == ["[] ['pptrace', 'pptrace.errors', 'pptrace.marking', 'pptrace.version']", "[]"]


def test_every_documented_name_is_there_and_no_other() -> None:
    for name in pptrace.__all__:
        assert getattr(pptrace, name) is not None
        assert name in dir(pptrace)
    with pytest.raises(AttributeError, match="module 'pptrace' has no attribute 'frob'"):
        pptrace.frob  # noqa: B018
