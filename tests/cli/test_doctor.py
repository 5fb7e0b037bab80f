"""``pptrace doctor`` on this machine, and on machines that are not here."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from pptrace.cli import doctor
from pptrace.cli.doctor import Machine, NsysTrial, Torch, list_abilities
from tests.support.programs import ROOT

WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from pptrace.cli.doctor import command; command()"
TORCH = Torch("2.13.0", "12.8", ("H200, 141 GiB",), ("gloo", "nccl"), kineto=True, cupti=True)
MACHINE = Machine("3.11.7", 16, (("nvtx", "0.2.17"),), TORCH, None, "2026.1")


@pytest.fixture
def nsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The program of that name that is found first."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    program = tmp_path / "nsys"
    program.touch(0o755)
    return program


def abilities(machine: Machine) -> dict[str, bool]:
    return {ability.what: ability.works for ability in list_abilities(machine)}


def details(machine: Machine) -> str:
    return "\n".join(ability.detail for ability in list_abilities(machine))


def test_it_shows_what_is_installed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    result = CliRunner().invoke(doctor.command)
    assert result.exit_code == 0
    assert torch.__version__ in result.output
    assert "gloo" in result.output
    assert "Kineto (CPU)" in result.output


def test_it_works_without_torch_and_says_what_to_install() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "pip install 'pptrace[train]'" in " ".join(done.stdout.split())


def test_one_gpu_allows_everything_and_several_ranks_share_it_over_gloo() -> None:
    assert all(abilities(MACHINE).values())
    assert "up to 1 rank on this machine" in details(MACHINE)
    assert "host memory over gloo" in details(MACHINE)


def test_a_machine_without_gpu_and_nsys_says_what_is_missing() -> None:
    machine = Machine("3.11.7", 2, (("nvtx", None),), Torch("2.13.0+cpu", None, (), ("gloo",), True, False), None, None)
    result = abilities(machine)
    lacking = {
        "Train on GPUs",
        "Trace GPU kernels (--profiler torch)",
        "NVTX ranges",
        "Nsight Systems (--profiler nsys)",
    }
    assert {what for what, works in result.items() if not works} == lacking
    assert "nsys is not on PATH: install NVIDIA Nsight Systems" in details(machine)


def test_a_torch_that_cannot_be_imported_is_named_with_its_reason() -> None:
    machine = Machine("3.11.7", 2, (), None, "libcudart.so.12: cannot open shared object file", None)
    assert not abilities(machine)["Train (pptrace run)"]
    assert "torch cannot be imported: libcudart.so.12" in details(machine)


def test_the_version_of_nsys_is_read_and_one_that_fails_is_said(nsys: Path) -> None:
    nsys.write_text("#!/bin/sh\necho NVIDIA Nsight Systems version 2026.1.1-0\n")
    assert doctor.examine().nsys == "2026.1.1-0"
    nsys.write_text("#!/bin/sh\nexit 1\n")
    assert doctor.examine().nsys == "found, but 'nsys --version' fails"


FAKE_NSYS = """#!{python}
import os, pathlib, subprocess, sys
sys.path.insert(0, {root!r})
if sys.argv[1] == "--version":
    print("NVIDIA Nsight Systems version 2026.1.1-0")
    sys.exit()
from tests.ingest.nsight_files import Process, Report, write_report
from tests.support.synthetic import START, Event
from pptrace.model.traces import Category
command = [argument for argument in sys.argv[2:] if not argument.startswith("--")]
stem = next(argument for argument in sys.argv if argument.startswith("--output=")).partition("=")[2]
code = subprocess.run(command).returncode
events = [Event(Category.ANNOTATION, {name!r}, START, START + 5, thread=1)]
write_report(Report([Process(9, events)]), pathlib.Path(stem + ".sqlite"))
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("name", "works", "detail"),
    [("pp1:STEP step=0", True, "recorded a range of nvtx "), ("another", False, "recorded no range of nvtx ")],
)
def test_a_range_is_tried_through_nsys(nsys: Path, name: str, works: bool, detail: str) -> None:
    nsys.write_text(FAKE_NSYS.format(python=sys.executable, root=str(ROOT), name=name))
    trial = doctor._try_nsys()
    assert (trial.works, trial.detail.startswith(detail)) == (works, True), trial


def test_an_nsys_that_leaves_nothing_or_does_not_end_is_said(nsys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nsys.write_text("#!/bin/sh\necho no permission\nexit 1\n")
    assert doctor._try_nsys() == NsysTrial(False, "left no report of a trial (exit code 1: no permission)")
    monkeypatch.setattr(doctor, "_TRIAL_S", 1.0)
    nsys.write_text("#!/bin/sh\nsleep 60\n")
    assert doctor._try_nsys() == NsysTrial(False, "nsys took longer than 1 s and was ended")


def test_what_came_of_the_trial_is_the_answer() -> None:
    failed = replace(MACHINE, nsys_trial=NsysTrial(False, "recorded no range of nvtx 0.2.17"))
    assert not abilities(failed)["Nsight Systems (--profiler nsys)"]
    assert "nsys 2026.1: recorded no range of nvtx 0.2.17" in details(failed)
