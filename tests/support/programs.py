"""Runs ``pptrace`` as a user would: the installed program in a process of its own, killed with its children when it hangs.

:func:`pptrace_here` runs the same command line in this process: a second less for each of hundreds of calls.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from pptrace.cli.main import main
from tests.support.forked import PROGRAM, start_python

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "sample_traces"
EXAMPLE = ROOT / "instrument" / "examples" / "train_gpt.py"


def sizes(**of_model: int) -> tuple[str, ...]:
    """Options of the example for a model of these sizes, with one sequence in a microbatch."""
    named = (of_model | {"microbatch_size": 1}).items()
    return tuple(text for name, size in named for text in (f"--{name.replace('_', '-')}", str(size)))


@dataclass(frozen=True, slots=True)
class Ended:
    code: int
    out: str
    err: str


def pptrace_in_shell(line: str, timeout_s: float = 300) -> Ended:
    """Run a line of bash, in which ``pptrace`` is the installed program: for what a shell does to its streams."""
    program = Path(sys.executable).parent / "pptrace"
    done = subprocess.run(
        ["bash", "-c", f'pptrace() {{ "{program}" "$@"; }}; set -o pipefail; {line}'],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=timeout_s,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def pptrace(
    *arguments: str | Path,
    timeout_s: float = 300,
    cwd: Path = ROOT,
    environ: Mapping[str, str] | None = None,
    forked: bool = False,
) -> Ended:
    """Run ``pptrace``; ``forked``: it and its ranks are forks of a process that has imported torch."""
    return run_command(
        [PROGRAM, *map(str, arguments)], timeout_s, cwd, {"NO_COLOR": "1", **(environ or {})}, forked=forked
    )


def script(path: Path, *arguments: str, timeout_s: float = 300) -> Ended:
    """Run a Python script from the root of the project, as a fork of a process that has imported torch."""
    return run_command([sys.executable, str(path), *arguments], timeout_s, ROOT, {"NO_COLOR": "1"}, forked=True)


def torchrun(num_ranks: int, *arguments: str | Path, timeout_s: float = 120) -> Ended:
    """Run a script from the root of the project on so many ranks; all are forks of a process that has imported torch."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks), "--standalone"]
    return run_command([*command, *map(str, arguments)], timeout_s, ROOT, {}, forked=True)


def run_command(command: list[str], timeout_s: float, cwd: Path, environ: Mapping[str, str], *, forked: bool) -> Ended:
    """Run a command; one that is over its time is killed with all its children, and fails the test with its output."""
    process = (start_python if forked else subprocess.Popen)(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        start_new_session=True,
        env={**os.environ, **environ},
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"{' '.join(command)} ran over {timeout_s} s\n{out}\n{err}") from None
    return Ended(process.returncode, out, err)


def pptrace_here(*arguments: str | Path) -> Ended:
    """``pptrace`` in this process, from the root of the project: its main function with these arguments."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["pptrace", *map(str, arguments)])
        patch.setenv("NO_COLOR", "1")
        patch.chdir(ROOT)
        with pytest.raises(SystemExit) as ended:
            main()
    code = ended.value.code
    return Ended(code, out.getvalue(), err.getvalue())


def one_line(ended: Ended, code: int) -> str:
    """The single line that a failed command leaves on stderr."""
    assert ended.code == code, ended
    lines = ended.err.strip().splitlines()
    assert len(lines) == 1, ended.err
    assert lines[0].startswith("pptrace: ")
    return lines[0]
