"""Makes the environment of ``make gpu``, offline: what this Python has, this checkout, and wheels for what is lacking.

    python tools/gpu/offline_venv.py collect gpu_wheels           where there is a network: download the wheels
    python tools/gpu/offline_venv.py make .venv-gpu gpu_wheels    where there is a GPU: make the environment

The environment sees the packages of the Python that makes it, its torch above all, also where that Python is itself one of a
virtual environment. Only the standard library and pip are used.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import venv
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WHEELS_LIST = ROOT / "tools" / "gpu" / "wheels.txt"
GIVEN = ("torch", "numpy", "pandas", "click", "pytest")
"""Packages that the image has and no wheel brings."""
LIMIT_BYTES = 45 * 2**20
"""With the checkout under 50 MB."""
_REQUIREMENT = re.compile(r"([A-Za-z0-9_.-]+)\s*>=\s*([0-9.]+)")
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


class SetupError(Exception):
    """The environment cannot be made; the text says why and what to do."""


def requirements(text: str) -> dict[str, str]:
    """Package → the oldest version that will do, from the lines of the list."""
    lines = [line.strip() for line in text.splitlines()]
    rows = [_REQUIREMENT.fullmatch(line) for line in lines if line and not line.startswith("#")]
    assert all(rows), f"{WHEELS_LIST}: expected lines such as rich>=13.7"
    return {match[1]: match[2] for match in rows if match}


def lacking(needed: dict[str, str]) -> list[str]:
    """The packages that this Python lacks, or has only older ones of."""
    return [name for name, oldest in needed.items() if _numbers(_version(name)) < _numbers(oldest)]


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _numbers(version: str) -> tuple[int, ...]:
    """Of "2.11.0+cu130" (2, 11, 0); () of ""."""
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[+a-z]", version)[0]))


def collect(folder: Path, python: str) -> None:
    """Download the wheels of the list for ``python`` ("3.12") on Linux, x86-64.

    Raises:
        SetupError: they are too large together.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    platforms = [word for name in _PLATFORMS for word in ("--platform", name)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder), "--no-deps"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms]
    subprocess.run([*command, "--requirement", str(WHEELS_LIST)], check=True, timeout=900)
    total = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
    print(
        f"offline_venv: {len(list(folder.glob('*.whl')))} wheels for Python {python} in {folder}, {total / 1e6:.1f} MB"
    )
    if total > LIMIT_BYTES:
        raise SetupError(
            f"the wheels take {total / 1e6:.1f} MB; expected at most {LIMIT_BYTES / 1e6:.0f}; shorten the list"
        )


def make(target: Path, wheels: Path) -> None:
    """Make the environment at ``target``, anew.

    Raises:
        SetupError: this Python lacks what no wheel brings, or a wheel is not there.
    """
    if missing := [name for name in GIVEN if not _version(name)]:
        raise SetupError(
            f"{sys.executable} has no {', '.join(missing)}; run make with PYTHON=/path/to/python that has torch"
        )
    names = lacking(requirements(WHEELS_LIST.read_text(encoding="utf-8")))
    absent = [name for name in names if not _wheels_of(name, wheels)]
    if absent:
        raise SetupError(
            f"{sys.executable} lacks {', '.join(absent)}, and {wheels} has no wheel of it; collect them with `make gpu-wheels`"
        )
    venv.EnvBuilder(clear=True, symlinks=True, with_pip=False).create(target)
    site = next(target.glob("lib/python3*/site-packages"))
    paths = [str(ROOT), *_site_folders()]
    (site / "given.pth").write_text("\n".join(paths) + "\n", encoding="utf-8")
    if names:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--find-links", str(wheels)]
        command += ["--no-deps", "--no-compile", "--ignore-installed", "--target", str(site)]
        done = subprocess.run([*command, *names], check=False, timeout=300, capture_output=True, text=True)
        if done.returncode:
            reason = next(
                (line for line in reversed(done.stderr.splitlines()) if line.startswith("ERROR")), "pip failed"
            )
            raise SetupError(
                f"{reason}; collect the wheels for this Python: make gpu-wheels GPU_PYTHON={_own_python()}"
            )
    _write_program(target)
    print(
        f"offline_venv: {target}: torch {_version('torch')}, Python {_own_python()}; from wheels: {', '.join(names) or 'nothing'}"
    )


def _wheels_of(name: str, wheels: Path) -> list[Path]:
    plain = re.sub(r"[-_.]+", "_", name).lower()
    return [path for path in wheels.glob("*.whl") if path.name.lower().split("-")[0] == plain]


def _site_folders() -> Iterable[str]:
    """Folders in which this Python finds packages, in its order."""
    return dict.fromkeys(path for path in sys.path if Path(path).name in ("site-packages", "dist-packages"))


def _own_python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _write_program(target: Path) -> None:
    """The ``pptrace`` command of this checkout."""
    program = target / "bin" / "pptrace"
    python = (target / "bin" / "python").absolute()
    program.write_text(
        f"#!{python}\nimport sys\n\nfrom pptrace.cli.main import main\n\nif __name__ == '__main__':\n    sys.exit(main())\n",
        encoding="utf-8",
    )
    program.chmod(0o755)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="offline_venv.py", description="the environment of make gpu")
    actions = parser.add_subparsers(dest="action", required=True)
    collecting = actions.add_parser("collect", help="download the wheels")
    collecting.add_argument("wheels", type=Path)
    collecting.add_argument("--python", default="3.12", help="version of the Python that will use them")
    making = actions.add_parser("make", help="make the environment")
    making.add_argument("target", type=Path)
    making.add_argument("wheels", type=Path)
    options = parser.parse_args(arguments)
    try:
        if options.action == "collect":
            collect(options.wheels, options.python)
        else:
            make(options.target, options.wheels)
    except (SetupError, subprocess.SubprocessError, OSError) as err:
        print(f"offline_venv: {err}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
