"""What a rank's process does, seen from outside: its Python stack, and whether it computes, sleeps or is stopped."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from instrument.launch.stacks import Frame, describe_wait, main_stack, parse_stacks
from instrument.launch.worker import stacks_path

_ANSWER_S = 0.5
_POLL_S = 0.02
_BUSY_SHARE = 0.25
"""Of a processor: a rank that uses so much of it computes."""
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Sample:
    """A process at one moment."""

    at_s: float
    cpu_s: float
    is_stopped: bool
    stack: tuple[Frame, ...]

    def where(self, before: Sample | None = None) -> str:
        """In words: where it is, and what it did since ``before``."""
        place = describe_wait(self.stack)
        if self.is_stopped:
            return f"stopped by a signal, {place}"
        if before is None or self.at_s <= before.at_s:
            return place
        return f"{'computing' if self._is_busy(before) else 'asleep'} {place}"

    def moved(self, before: Sample) -> bool:
        """Whether it computes, and no longer where it was: a call that holds the interpreter stays in its line."""
        return self._is_busy(before) and (not self.stack or self.stack != before.stack)

    def _is_busy(self, before: Sample) -> bool:
        return self.cpu_s - before.cpu_s >= _BUSY_SHARE * (self.at_s - before.at_s)


class Sampler:
    """Samples the ranks of this node."""

    def __init__(self, control_dir: Path) -> None:
        self._control_dir = control_dir

    def take(self, pids: Mapping[int, int]) -> dict[int, Sample]:
        """A sample of each process, by local rank; each writes its stacks when it gets SIGUSR2, also while it computes."""
        before = {local: self._size(local) for local in pids}
        for pid in pids.values():
            _signal(pid)
        deadline = time.monotonic() + _ANSWER_S
        while time.monotonic() < deadline and any(self._size(local) == before[local] for local in pids):
            time.sleep(_POLL_S)
        time.sleep(_POLL_S)  # a stack is written in several pieces
        return {local: self._sample(local, pid, before[local]) for local, pid in pids.items()}

    def _sample(self, local: int, pid: int, begin: int) -> Sample:
        try:
            text = stacks_path(self._control_dir, local).read_bytes()[begin:].decode(errors="replace")
        except OSError:
            text = ""
        cpu_s, state = read_process(pid)
        return Sample(time.monotonic(), cpu_s, state in ("T", "t"), main_stack(parse_stacks(text)))

    def _size(self, local: int) -> int:
        try:
            return stacks_path(self._control_dir, local).stat().st_size
        except OSError:
            return 0


def read_process(pid: int) -> tuple[float, str]:
    """Processor time used, in seconds, and the kernel's letter for the state; (0, "") where there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * _TICK_S, fields[0]
    except (OSError, IndexError, ValueError):
        return 0.0, ""


def _signal(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGUSR2)
    except ProcessLookupError:
        return
