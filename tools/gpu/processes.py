"""Runs a command within a limit, and ends it with every process that it started, wherever those went.

Ranks of torch's launcher have sessions of their own, so that killing a process group leaves them: this process becomes the parent
of orphans (Linux's child subreaper), and what is left below it is killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_STACKS_S = 1.0
_END_S = 10.0


@dataclass(frozen=True, slots=True)
class Ended:
    """``code`` is None where the limit ended it."""

    code: int | None
    seconds: float


def adopt_orphans() -> None:
    """Processes below this one whose parents end become its children."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def run(command: Sequence[str], log: Path, limit_s: float, environ: Mapping[str, str], folder: Path) -> Ended:
    """Run a command with its output in ``log``. No process that it started is left when this returns."""
    started = time.monotonic()
    before = frozenset(descendants(os.getpid()))
    with log.open("ab") as output:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environ),
            cwd=folder,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGUSR1)  # the parts write their stacks then
            time.sleep(_STACKS_S)
            code = None
        finally:
            _end_others(before)
            if process.poll() is None:
                process.kill()
                process.wait()
    return Ended(code, round(time.monotonic() - started, 2))


def descendants(of: int) -> list[int]:
    """The processes below one, nearest first."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError, ValueError):  # it ended meanwhile
                continue
            children.setdefault(parent, []).append(int(folder.name))
    result = [of]
    for pid in result:
        result += children.get(pid, [])
    return result[1:]


def _end_others(kept: frozenset[int]) -> None:
    """Kill what is left below this process besides ``kept``, and wait for it."""
    deadline = time.monotonic() + _END_S
    while (left := [pid for pid in descendants(os.getpid()) if pid not in kept]) and time.monotonic() < deadline:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        _reap(left)
        time.sleep(0.02)


def _reap(pids: Sequence[int]) -> None:
    for pid in pids:
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:  # not ours to wait for, or subprocess has already
            continue
