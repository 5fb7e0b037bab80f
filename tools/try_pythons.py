"""Tries the analyser on every Python that is installed here: ``python tools/try_pythons.py [PYTHON …]``.

In each, a clean virtual environment outside of the checkout gets the wheel of ``dist/`` (`make dist` builds it) and pytest, but
no torch, and runs the tests that need none against the installed package. With ``--oldest`` it gets the oldest versions of what
pptrace needs that ``pyproject.toml`` admits. Interpreters that are not given are looked for: Python
3.11 to 3.13 on PATH, of pyenv, and of uv (`uv python install 3.13`).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

if str(Path(__file__).resolve().parents[1]) not in sys.path:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.clean_environment import ROOT, CheckError, make_environment, require, run, version

_VERSIONS = ("3.11", "3.12", "3.13")
_ROOMS = (
    *("analysis", "clock", "hang_diagnosis", "ingest", "recognise", "report", "roundtrip", "schedule", "simulator"),
    "timeline",
)
_OF_SOURCES = ("test_import_contracts.py",)
_TESTS_S = 1800
_NEEDED = ("pytest>=8.3", "pytest-xdist>=3.8", "hypothesis>=6.100", "prometheus-client>=0.20", "mcp>=2.0")
_ANSWER = "import sys; print('.'.join(map(str, sys.version_info[:2])), sys.executable)"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        pythons = _answering(options.pythons) if options.pythons else find_pythons()
        require(bool(pythons), f"no Python of {', '.join(_VERSIONS)} here; give the paths of some")
        for absent in sorted(set(_VERSIONS) - set(pythons)):
            print(f"Python {absent}: not installed here, not tried")
        wheel = options.wheel or _built_wheel()
        for number, python in sorted(pythons.items()):
            with tempfile.TemporaryDirectory(prefix=f"pptrace-{number}-") as folder:
                print(f"Python {number}: {try_python(python, wheel, Path(folder), options)}", flush=True)
    except CheckError as err:
        print(f"try_pythons: {err}", file=sys.stderr)
        return 1
    return 0


def find_pythons() -> dict[str, Path]:
    """One interpreter of each supported version, by version; those that do not start are passed over."""
    return {number: path for number, path in _answering(_candidates()).items() if number in _VERSIONS}


def _candidates() -> Iterator[str]:
    yield sys.executable
    for number in _VERSIONS:
        if path := shutil.which(f"python{number}"):
            yield path
    roots = (Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions",)
    data = Path(os.environ.get("XDG_DATA_HOME", Path.home() / ".local" / "share"))
    for root in (*roots, Path(os.environ.get("UV_PYTHON_INSTALL_DIR", data / "uv" / "python"))):
        yield from map(str, sorted(root.glob("*/bin/python3")))


def _answering(pythons: Iterator[str] | Sequence[str]) -> dict[str, Path]:
    """By version, the first of ``pythons`` that starts."""
    result: dict[str, Path] = {}
    for python in pythons:
        try:
            done = subprocess.run([python, "-c", _ANSWER], capture_output=True, text=True, timeout=30, check=True)
        except (OSError, subprocess.SubprocessError):
            continue
        number, _, path = done.stdout.strip().partition(" ")
        result.setdefault(number, Path(path))
    return result


def _built_wheel() -> Path:
    wheels = sorted((ROOT / "dist").glob(f"pptrace-{version()}-*.whl"))
    require(
        len(wheels) == 1, f"{ROOT / 'dist'}: expected one wheel of pptrace {version()}, not {wheels}; run `make dist`"
    )
    return wheels[0]


def _oldest() -> list[str]:
    """Requirements of pptrace, each at the oldest version that it admits."""
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    return [requirement.replace(">=", "==") for requirement in needed]


def try_python(python: Path, wheel: Path, folder: Path, options: argparse.Namespace) -> str:
    """Install the wheel and run the tests against it; pytest's last line.

    Raises:
        CheckError: the wheel cannot be installed, or a test fails.
    """
    environment = make_environment(folder / "environment", python)
    environment.install(wheel.resolve(), *_NEEDED, *(_oldest() if options.oldest else ()))
    checkout = _tests_alone(folder / "tests-alone")
    environment.run(environment.python, "-c", "import pptrace, sys; assert pptrace.__file__.startswith(sys.prefix)")
    command = (environment.python, "-m", "pytest", "-q", "-p", "tools.without_torch", "-p", "no:cacheprovider")
    chosen = options.tests or [*(f"tests/{room}" for room in _ROOMS), *_at_the_root(checkout)]
    output = run([*command, *chosen], checkout, timeout_s=_TESTS_S)
    return output.strip().splitlines()[-1]


def _tests_alone(folder: Path) -> Path:
    """Tests, tools, samples, docs and the settings of pytest without the packages, so that the installed ones are tested."""
    folder.mkdir()
    for name in ("tests", "tools", "sample_traces", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def _at_the_root(checkout: Path) -> list[str]:
    """Test files of no single package, without those that read the packages' sources."""
    files = sorted((checkout / "tests").glob("test_*.py"))
    return [path.relative_to(checkout).as_posix() for path in files if path.name not in _OF_SOURCES]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="try_pythons.py", description="Try the analyser on every Python installed here."
    )
    parser.add_argument("pythons", nargs="*", metavar="PYTHON", help="interpreters [default: those found here]")
    parser.add_argument("--wheel", type=Path, help="the wheel to install [default: the one in dist/]")
    parser.add_argument("--tests", nargs="+", default=(), help="files or folders of tests [default: the analyser's]")
    parser.add_argument("--oldest", action="store_true", help="with the oldest versions of what pptrace needs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
