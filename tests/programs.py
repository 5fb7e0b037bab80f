"""Runs the installed ``pptrace`` program as a user would: a process of its own, killed with its children when it hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
SAMPLES = ROOT / "sample_traces"
EXAMPLE = ROOT / "instrument" / "examples" / "train_gpt.py"


@dataclass(frozen=True, slots=True)
class Ended:
    code: int
    out: str
    err: str


def pptrace(*arguments: str | Path, timeout_s: float = 120, cwd: Path = ROOT) -> Ended:
    """Run ``pptrace``; a run over its time is killed with all its children, and fails the test with its output."""
    program = Path(sys.executable).parent / "pptrace"
    process = subprocess.Popen(
        [str(program), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        start_new_session=True,
        env={**os.environ, "NO_COLOR": "1"},
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"pptrace {arguments} ran over {timeout_s} s\n{out}\n{err}") from None
    return Ended(process.returncode, out, err)


def one_line(ended: Ended, code: int) -> str:
    """The single line that a failed command leaves on stderr."""
    assert ended.code == code, ended
    lines = ended.err.strip().splitlines()
    assert len(lines) == 1, ended.err
    assert lines[0].startswith("pptrace: ")
    return lines[0]
