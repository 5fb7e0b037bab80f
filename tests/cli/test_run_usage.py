"""Mistakes in how ``pptrace run`` is called: found before anything starts, told in one line."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from instrument.launch.options import RunOptions, check_options
from pptrace.cli.run import command
from pptrace.errors import PptraceError, UsageError
from tests.support.programs import ROOT

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from pptrace.cli.run import command
from pptrace.errors import PptraceError
try:
    command(["train.py"])
except PptraceError as err:
    print(err)
    sys.exit(err.exit_code)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a script, an occupied directory and a file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit(9)")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("loop")
    (tmp_path / "loop").symlink_to("link")
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nothing.py"], "no script 'nothing.py' here: expected a Python file, or -m and a module"),
        (["full"], "'full' is a directory: expected a Python script, or -m and a module"),
        (["-m", "no_such_module"], "-m no_such_module: there is no such module here or among the installed packages"),
        (["-n", "0", "train.py"], "-n 0: expected the number of ranks on this node, at least 1"),
        (["--steps", "5:2", "train.py"], "--steps '5:2' holds no step: "),
        (["--steps", "a:b", "train.py"], "--steps 'a:b': expected FIRST:STOP, such as '2:5', or 'all'"),
        (["--timeout", "0", "train.py"], "--timeout 0: expected a number of seconds above 0"),
        (["--hang-timeout", "-1", "train.py"], "--hang-timeout -1: expected a number of seconds above 0"),
        (["-o", "full", "train.py"], "-o 'full' is not empty: give each run a directory of its own"),
        (["-o", "file", "train.py"], "-o 'file' is a file: expected a directory that is empty or does not exist yet"),
        (["-o", "file/run", "train.py"], "-o 'file/run': cannot write into "),
        (
            ["-o", "n" * 300, "train.py"],
            f"-o '{'n' * 119}…: cannot be made or written (File name too long); give another",
        ),
        (["--profiler", "perf", "train.py"], "--profiler 'perf': expected one of torch, nsys, none"),
        (
            ["--profiler", "nsys", "train.py"],
            "--profiler nsys: there is no 'nsys' on PATH: install NVIDIA Nsight Systems",
        ),
        (["--memory", "--profiler", "none", "train.py"], "--memory: allocations are recorded by a profiler"),
        (["--nnodes", "0", "train.py"], "--nnodes 0: expected the number of nodes, at least 1"),
        (["--nnodes", "2", "train.py"], "--nnodes: several nodes need --node-rank K and -o DIR"),
        (["--node-rank", "1", "train.py"], "--node-rank 1: expected 0 to 0 with --nnodes 1"),
        (["--rdzv-endpoint", "a:1", "train.py"], "--rdzv-endpoint 'a:1' is for several nodes"),
        (
            ["--nnodes", "2", "--node-rank", "0", "-o", "x", "train.py"],
            "--nnodes: the nodes must find each other: add --rdzv-endpoint HOST:PORT of the first node",
        ),
        (
            ["--nnodes", "2", "--node-rank", "0", "-o", "x", "--rdzv-endpoint", "a:99999", "train.py"],
            "--rdzv-endpoint 'a:99999': expected HOST:PORT with a port of 1 to 65535",
        ),
    ],
)
def test_a_wrong_call_is_refused_in_one_line_before_anything_starts(here: Path, args: list[str], message: str) -> None:
    before = sorted(here.rglob("*"))
    with pytest.raises(UsageError) as caught:
        command.main(args, standalone_mode=False)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("link", "File exists"),  # a symbolic link that ends nowhere
        ("/proc/no-place", "No such file or directory"),  # which access(2) calls writable
        ("read-only", "Read-only file system"),
        ("closed", "Permission denied"),
    ],
)
def test_a_directory_that_cannot_be_made_is_refused_in_one_line_before_the_script_starts(
    here: Path, monkeypatch: pytest.MonkeyPatch, given: str, why: str
) -> None:
    really = Path.mkdir

    def mkdir(path: Path, *args: Any, **options: Any) -> None:
        if path.name in ("read-only", "closed"):
            code = errno.EROFS if path.name == "read-only" else errno.EACCES
            raise OSError(code, os.strerror(code), str(path))
        really(path, *args, **options)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(UsageError) as caught:
        command.main(["-o", given, "train.py"], standalone_mode=False)
    assert str(caught.value) == f"-o {given!r}: cannot be made or written ({why}); give another directory"
    assert caught.value.exit_code == 2
    assert not list(here.glob("*/run.json"))


def test_a_rank_of_another_launcher_refuses_such_a_directory_too(here: Path) -> None:
    launch = [sys.executable, "-m", "instrument.launch", "-o", "file/run", "train.py"]
    done = subprocess.run(
        launch, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr == "pptrace: -o 'file/run': cannot be made or written (Not a directory); give another directory\n"
    )


def test_a_run_that_recorded_nothing_leaves_its_directory_to_the_next_attempt(here: Path) -> None:
    """A mistake in the script's own arguments is found when it runs; then nobody wants another directory."""
    options = RunOptions(("train.py",), here / "again")
    options.run_dir.mkdir()
    (options.run_dir / "run.json").write_text("{}")
    check_options(options)
    (options.run_dir / "rank0.pt.trace.json.gz").touch()
    with pytest.raises(UsageError, match="is not empty"):
        check_options(options)


def test_options_after_the_script_are_the_script_s_own(here: Path) -> None:
    with pytest.raises(click.UsageError, match="No such option"):
        command.main(["--lr", "1", "train.py"], standalone_mode=False)
    with pytest.raises(UsageError, match="--steps"):
        command.main(["--steps", "x", "train.py", "--lr", "1", "--steps", "7"], standalone_mode=False)


def test_without_torch_one_line_says_what_to_install(here: Path) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (PptraceError.exit_code, "")
    assert done.stdout == "pptrace run needs torch: pip install 'pptrace[train]'\n"
