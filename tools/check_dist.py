"""Builds a wheel and an sdist, and tries both in clean environments: ``python tools/check_dist.py [--out dist]``.

The wheel is built from the sdist, as `python -m build` does, so that nothing left over in the checkout gets in. Each is installed
without torch into a virtual environment outside of the checkout; there the program analyses a sample trace, and every module of
``pptrace`` and ``dashboards`` is imported. Needs a network or an index of packages for pip.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

if str(Path(__file__).resolve().parents[1]) not in sys.path:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.clean_environment import (
    ROOT,
    CheckError,
    Environment,
    make_environment,
    package_files,
    require,
    run,
    version,
)

_SAMPLE = ROOT / "sample_traces" / "1f1b_p4"
_IN_SDIST = ("LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml", "constraints.txt")
_IMPORTS = """
import importlib, pkgutil, sys
from pathlib import Path
for package in ("pptrace", "dashboards"):
    module = importlib.import_module(package)
    for info in pkgutil.walk_packages(module.__path__, package + "."):
        if info.name != "dashboards.assistant.server":  # of the extra mcp
            importlib.import_module(info.name)
import dashboards.app, instrument, pptrace
for module in (pptrace, dashboards, instrument):
    folder = Path(module.__file__).parent
    assert folder.is_relative_to(sys.prefix), folder
    assert (folder / "py.typed").is_file(), folder
assert (Path(dashboards.__file__).parent / "assets" / "style.css").is_file()
from pptrace.report.tiles.scripts import script, style
assert "pptraceTimeline" in script()
assert ".timeline-canvas" in style()
dashboards.app.create_app([Path(sys.argv[1])])
assert "torch" not in sys.modules, "torch was imported"
assert importlib.util.find_spec("torch") is None, "torch is installed"
"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="pptrace-dist-") as folder:
            sdist, wheel = _build(options.out)
            check_wheel(wheel)
            check_sdist(sdist)
            environment = make_environment(Path(folder) / "environment")
            for file in (wheel, sdist):
                try_installed(file, environment)
                print(f"{file}: {file.stat().st_size / 1e3:,.0f} KB, installed without torch and tried")
    except CheckError as err:
        print(f"check_dist: {err}", file=sys.stderr)
        return 1
    return 0


def _build(out: Path) -> tuple[Path, Path]:
    """The sdist and, built from it, the wheel; what stands for other builds in ``out`` goes."""
    for old in (*out.glob("pptrace-*.whl"), *out.glob("pptrace-*.tar.gz")):
        old.unlink()
    run([sys.executable, "-m", "build", "--outdir", out.resolve(), ROOT], ROOT)
    sdists, wheels = sorted(out.glob("pptrace-*.tar.gz")), sorted(out.glob("pptrace-*.whl"))
    require(len(sdists) == len(wheels) == 1, f"{out}: expected one sdist and one wheel, not {[*sdists, *wheels]}")
    return sdists[0].resolve(), wheels[0].resolve()


def check_wheel(wheel: Path) -> None:
    """The files of the packages, the metadata and the license, and nothing else.

    Raises:
        CheckError: a file is missing, or one is there that does not belong.
    """
    names = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}
    info = {name for name in names if name.split("/")[0] == f"pptrace-{version()}.dist-info"}
    expected, packed = package_files(), names - info
    require(not expected - packed, f"{wheel.name} lacks {sorted(expected - packed)}")
    require(not packed - expected, f"{wheel.name} holds what is no part of the packages: {sorted(packed - expected)}")
    require(any(name.endswith("/licenses/LICENSE") for name in info), f"{wheel.name} lacks the license")


def check_sdist(sdist: Path) -> None:
    """The packages, and what is needed to build, test and document them.

    Raises:
        CheckError: a file is missing, or one is there that was recorded or built here.
    """
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = ("docs", "sample_traces", "tests", "tools")
    expected = package_files().union(_IN_SDIST, *(_files_under(folder) for folder in folders))
    require(not expected - names, f"{sdist.name} lacks {sorted(expected - names)}")
    strange = sorted(
        name for name in names if name.split("/")[0] in ("pptrace_runs", "shared", "dist", "build", ".venv")
    )
    require(not strange, f"{sdist.name} holds {strange[:5]}")


def _files_under(folder: str) -> set[str]:
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and not {"__pycache__", "_build"} & set(path.parts) and path.suffix != ".pyc"
    }


def try_installed(package: Path, environment: Environment) -> None:
    """Install a wheel or an sdist into an environment that has nothing else, use what needs no torch, and uninstall it.

    Raises:
        CheckError: something fails, or needs torch.
    """
    environment.install(package)
    folder = environment.folder
    sample = folder / "sample"
    shutil.copytree(_SAMPLE, sample, dirs_exist_ok=True)
    require(version() in environment.run(environment.pptrace, "--version"), "pptrace --version prints another version")
    require("interleaved-1f1b" in environment.run(environment.pptrace, "schedule", "list"), "schedule list: no 1F1B")
    _try_analysis(environment, sample)
    environment.run(environment.python, "-c", _IMPORTS, sample)
    (folder / "script.py").write_text("print()\n", encoding="utf-8")
    refused = environment.run(environment.pptrace, "run", "-n", "2", "script.py", expect=1)
    require("pptrace[train]" in refused, f"pptrace run without torch says {refused!r}, not what to install")
    refused = environment.run(environment.pptrace, "mcp", sample, expect=1)
    require("pptrace[mcp]" in refused, f"pptrace mcp without its SDK says {refused!r}, not what to install")
    environment.run(environment.python, "-m", "pip", "uninstall", "--quiet", "--yes", "pptrace")
    require(not environment.pptrace.exists(), "pip uninstall leaves the program behind")


def _try_analysis(environment: Environment, sample: Path) -> None:
    """The sample's figures are those that the independent program of the tests found."""
    page = environment.folder / "report.html"
    report = environment.folder / "report.json"
    environment.run(
        environment.pptrace, "analyze", sample, "--as-recorded", "--no-cache", "--json", report, "--html", page
    )
    steps = json.loads(report.read_text(encoding="utf-8"))["steps"]
    rows = [(step["step"], step["span_ns"], [rank["bubble_ns"] for rank in step["ranks"]]) for step in steps]
    recorded = json.loads((sample / "expected.json").read_text(encoding="utf-8"))["steps"]
    expected = [(step["step"], step["span_ns"], [rank["bubble_ns"] for rank in step["ranks"]]) for step in recorded]
    require(rows == expected, f"{sample.name}: spans and bubbles are {rows}, expected {expected}")
    text = page.read_text(encoding="utf-8")
    require(text.lstrip().lower().startswith("<!doctype html") and len(text) > 100_000, "--html wrote no page")
    require(
        'class="timeline"' in text and "pptraceTimeline" in text, "--html wrote no timeline, or nothing that draws it"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="check_dist.py", description="Build a wheel and an sdist, and try both.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where they go [default: dist]")
    return parser


if __name__ == "__main__":
    sys.exit(main())
