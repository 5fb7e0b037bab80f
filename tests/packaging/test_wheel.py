"""Contents of a wheel. It is built without a network, from a copy of the sources; `make dist` installs and tries one."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

import pytest

import pptrace
from tests.support.programs import ROOT

PACKAGES = ("dashboards", "instrument", "pptrace")
IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc")
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
STRANGERS = (
    "pptrace_runs/demo/rank0.py",
    "tests/test_x.py",
    "sample_traces/make.py",
    "shared/secret.py",
    "docs/conf.py",
)


def _has_setuptools() -> bool:
    if importlib.util.find_spec("setuptools") is None:
        return False
    return int(importlib.metadata.version("setuptools").split(".")[0]) >= 77


pytestmark = pytest.mark.skipif(
    not _has_setuptools(), reason="needs setuptools 77 or newer (the extra dev installs it)"
)


def test_an_editable_installation_is_a_path_so_that_type_checkers_see_the_package(tmp_path: Path) -> None:
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    shutil.copy(ROOT / "pptrace" / "version.py", tmp_path / "pptrace")
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tmp_path)
    command = [sys.executable, "-c", BUILD.replace("build_wheel", "build_editable"), str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    editable = zipfile.ZipFile(tmp_path / done.stdout.splitlines()[-1])
    (path,) = (name for name in editable.namelist() if name.endswith(".pth"))
    assert editable.read(path).decode().strip() == str(tmp_path)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    source = tmp_path_factory.mktemp("source")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=IGNORED)
    for file in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / file, source)
    for stranger in STRANGERS:
        (source / stranger).parent.mkdir(parents=True, exist_ok=True)
        (source / stranger).write_text("")
    command = [sys.executable, "-c", BUILD, str(source)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(source / done.stdout.splitlines()[-1])


def _metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return HeaderParser().parsestr(wheel.read(name).decode())


def test_the_wheel_holds_every_file_of_the_packages_and_no_other(wheel: zipfile.ZipFile) -> None:
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    files = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert packed == files


def test_the_packages_are_marked_as_typed_and_the_dashboard_has_its_assets(wheel: zipfile.ZipFile) -> None:
    assert {*(f"{package}/py.typed" for package in PACKAGES), "dashboards/assets/style.css"} <= set(wheel.namelist())


def test_the_wheel_has_the_version_of_the_package_and_its_license(wheel: zipfile.ZipFile) -> None:
    metadata = _metadata(wheel)
    assert (metadata["Name"], metadata["Version"]) == ("pptrace", pptrace.__version__)
    assert metadata["License-Expression"] == "Apache-2.0"
    (name,) = (name for name in wheel.namelist() if name.endswith("/licenses/LICENSE"))
    assert b"Apache License" in wheel.read(name)


def test_analysing_requires_no_torch(wheel: zipfile.ZipFile) -> None:
    required = _metadata(wheel).get_all("Requires-Dist", [])
    always = {line for line in required if "extra ==" not in line}
    assert any(line.startswith("numpy") for line in always)
    assert not any(line.startswith(("torch", "nvtx", "megatron")) for line in always)
    assert any(line.startswith("torch") and "train" in line for line in required)
    assert not any(line.startswith("torch") and "docs" in line for line in required)
