"""Virtual environments outside of the checkout, with nothing in them but what is installed into them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("pptrace", "instrument", "dashboards")
_INSTALL_S = 900


class CheckError(Exception):
    """Something that was to hold does not; the message is one line."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment in ``folder``. Its programs run in ``folder`` as well, so that no checkout is on their path."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def pptrace(self) -> Path:
        return self.folder / "bin" / "pptrace"

    def install(self, *requirements: str | Path) -> None:
        """Install with pip; prereleases and what is already there stay out."""
        run([self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements], self.folder)

    def run(self, *command: str | Path, expect: int = 0, timeout_s: float = 300) -> str:
        """The output of a program in this environment."""
        return run(command, self.folder, expect, timeout_s)


def make_environment(folder: Path, python: str | Path = sys.executable) -> Environment:
    """A virtual environment of ``python``, with pip alone in it."""
    run([python, "-m", "venv", folder], folder.parent)
    return Environment(folder)


def run(command: Sequence[str | Path], cwd: Path, expect: int = 0, timeout_s: float = _INSTALL_S) -> str:
    """The output of a program that sees neither the checkout nor the caller's virtual environment.

    Raises:
        CheckError: it ended with another code than ``expect``, or took longer than ``timeout_s``.
    """
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    variables = {name: value for name, value in os.environ.items() if name not in hidden}
    shown = " ".join(map(str, command))
    try:
        done = subprocess.run(
            [str(part) for part in command],
            cwd=cwd,
            env=variables | {"NO_COLOR": "1"},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CheckError(f"{shown}: took longer than {timeout_s:.0f} s") from None
    if done.returncode != expect:
        raise CheckError(f"{shown}: exit code {done.returncode}, expected {expect}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def require(holds: bool, what: str) -> None:
    """Raise :class:`CheckError` with ``what`` unless it holds."""
    if not holds:
        raise CheckError(what)


def version() -> str:
    """The version that the sources state."""
    text = (ROOT / "pptrace" / "version.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    require(match is not None, 'pptrace/version.py: expected a line __version__ = "…"')
    assert match is not None
    return match[1]


def package_files(root: Path = ROOT) -> set[str]:
    """Every file of the packages under ``root`` that a wheel must hold."""
    return {
        path.relative_to(root).as_posix()
        for package in PACKAGES
        for path in (root / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".pyc", ".pyo")
    }
