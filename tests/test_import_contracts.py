"""The contracts of import-linter hold what they are named for: forbidden imports are planted in a copy, and each is found."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_CONFIG = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))
_CONTRACTS = {contract["name"]: contract for contract in _CONFIG["tool"]["importlinter"]["contracts"]}

_RUNTIME = "the runtime knows of pptrace only its lowest rooms"
_CIRCLE = "no room and no module imports in a circle"
_LAYERS = "data walks one way"
_ANALYSED = "traces are analysed without the runtime, whose launcher the commands alone start"
_STANDARD_LIBRARY = "what ranks of a run import is the standard library alone"
_ASKED_FOR = "torch and dask are imported where they are asked for"
_ALLOWED_IN_RUNTIME = {
    "schedule",
    "marks",
    "marking",
    "live_records",
    "axes",
    "hang_diagnosis",
    "sizes",
    "nsys",
    "environment",
    "errors",
    "garbage",
    "regular",
}

_PLANTED = [
    ("instrument.mesh", "pptrace.intervals", _RUNTIME),
    ("instrument.mesh", "pptrace.slices", _RUNTIME),
    ("instrument.launch.watch.stacks", "instrument.launch.worker", _CIRCLE),
    ("instrument.pipeline.step", "instrument.pipeline.runtime", _CIRCLE),
    ("instrument.launch.launcher", "instrument.mesh", "the hooks work without the runtime"),
    ("pptrace.schedule.plan", "pandas", _STANDARD_LIBRARY),
    ("pptrace.schedule.plan", "numpy", _STANDARD_LIBRARY),
    ("pptrace.axes", "numpy", _STANDARD_LIBRARY),
    ("pptrace.marking", "pandas", _STANDARD_LIBRARY),
    ("pptrace.schedule.plan", "pptrace.intervals", _LAYERS),
    ("pptrace.report.text", "dashboards.app", _LAYERS),
    ("dashboards.app", "pptrace.cli.output", _LAYERS),
    ("pptrace.ingest.formats", "instrument.mesh", _ANALYSED),
    ("pptrace.analysis.steps.steps", "instrument.mesh", _ANALYSED),
    ("pptrace.api.run", "instrument.mesh", _ANALYSED),
    ("pptrace.report.text", "instrument.launch.launcher", _ANALYSED),
    ("pptrace.cli.analyze", "instrument.mesh", _ANALYSED),
    ("pptrace.cli.run", "instrument.mesh", _ANALYSED),
    ("dashboards.store", "instrument.mesh", _ANALYSED),
    ("pptrace.cli.analyze", "torch", _ASKED_FOR),
    ("pptrace.workflow.load", "dask", _ASKED_FOR),
    ("instrument.launch.options", "torch", _ASKED_FOR),
    ("pptrace.analysis.result", "pptrace.analysis.memory", "types of the report know no analysis"),
    ("pptrace.analysis.whole_run", "pptrace.analysis.stragglers", "types of the report know no analysis"),
    ("pptrace.analysis.links", "pptrace.analysis.explain", "types of the report know no analysis"),
    ("pptrace.sizes.transformer", "pptrace.sizes.step", _CIRCLE),
    ("pptrace.sizes.step", "instrument.mesh", _ANALYSED),
    ("pptrace.report.tables.step_series", "pptrace.report.text", _CIRCLE),
    ("pptrace.analysis.memory.show", "pptrace.analysis.stragglers.show", "a table of the report knows no other"),
    ("pptrace.report.tables.step_series", "pptrace.report.tables.ranks", "a table of the report knows no other"),
]


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Output of lint-imports for each broken contract, in a copy that has every forbidden import."""
    copy = tmp_path_factory.mktemp("planted")
    shutil.copy(_ROOT / "pyproject.toml", copy)
    for package in ("pptrace", "instrument", "dashboards"):
        shutil.copytree(_ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    for importer, imported, _ in _PLANTED:
        path = copy.joinpath(*importer.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        assert path.exists(), importer
        with path.open("a", encoding="utf-8") as file:
            file.write(f"\nimport {imported}\n")
    program = "import sys; from importlinter.cli import lint_imports_command as lint; lint(['--no-cache'])"
    ended = subprocess.run([sys.executable, "-c", program], cwd=copy, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    _, details = ended.stdout.split("Broken contracts\n", 1)
    parts = re.split(r"^(.+)\n-{4,}\n", details, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize(("importer", "imported", "contract"), _PLANTED)
def test_a_forbidden_import_breaks_the_contract_named_for_it(
    broken: dict[str, str], importer: str, imported: str, contract: str
) -> None:
    assert contract in broken, f"{contract} is kept"
    if contract == _CIRCLE:
        room = ".".join(a for a, b in zip(importer.split("."), imported.split("."), strict=False) if a == b)
        assert f"No cycles are allowed in {room}." in broken[contract], broken[contract]
    else:
        assert re.search(rf"{re.escape(importer)} -> {re.escape(imported)} \(", broken[contract]), broken[contract]


def _rooms() -> set[str]:
    entries = [
        path for path in (_ROOT / "pptrace").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    ]
    return {f"pptrace.{path.stem}" for path in entries if path.stem != "__init__"}


def test_every_part_of_pptrace_is_allowed_or_forbidden_in_the_runtime() -> None:
    allowed = {f"pptrace.{name}" for name in _ALLOWED_IN_RUNTIME}
    forbidden = {name for name in _CONTRACTS[_RUNTIME]["forbidden_modules"] if name.startswith("pptrace.")}
    assert forbidden == _rooms() - allowed - {"pptrace.__main__", "pptrace.version"}


def test_what_ranks_import_is_held_apart_from_every_dependency() -> None:
    project = _CONFIG["project"]
    listed = [*project["dependencies"], *project["optional-dependencies"]["train"]]
    names = {re.match(r"[\w.-]+", text).group() for text in listed}
    assert set(_CONTRACTS[_STANDARD_LIBRARY]["forbidden_modules"]) == names
