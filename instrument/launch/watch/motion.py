"""Activity of a rank's process, seen from outside: its Python stack, and whether it computes, sleeps or is stopped."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from instrument.launch.watch.stacks import Frame, describe_wait, main_stack, parse_stacks, stacks_path

_ANSWER_S = 0.5
_POLL_S = 0.02
_BUSY_SHARE = 0.05
"""Share of a processor, which others may need as well: a rank that uses so much of it computes."""
_APART_S = 0.4
_NUM_LOOKS = 3
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """Usage of a process at one moment, as the kernel gives it; the process does not notice."""

    at_s: float
    cpu_s: float
    state: str

    @property
    def is_stopped(self) -> bool:
        return self.state in ("T", "t")

    def is_busy(self, before: Usage) -> bool:
        """Return whether it has computed since ``before``."""
        used = self.cpu_s - before.cpu_s
        return used > 0 and used >= _BUSY_SHARE * (self.at_s - before.at_s)


def read_usage(pid: int) -> Usage:
    """Read the usage of a process; of none, no time used and no state."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return Usage(time.monotonic(), (int(fields[11]) + int(fields[12])) * _TICK_S, fields[0])
    except (OSError, IndexError, ValueError):
        return Usage(time.monotonic(), 0.0, "")


def stayed_stopped(before: Mapping[int, Usage], now: Mapping[int, Usage]) -> set[int]:
    """Return the ranks that were stopped at both moments: a debugger stops a process for an instant."""
    return {rank for rank, usage in now.items() if usage.is_stopped and rank in before and before[rank].is_stopped}


def describe_rank(usage: Usage, before: Usage | None, stack: tuple[Frame, ...]) -> str:
    """Describe where a rank is, and what it does there."""
    location = describe_wait(stack)
    if usage.is_stopped:
        return f"stopped by a signal ({location})"
    busy = before is not None and usage.is_busy(before)
    return f"{'computing' if busy else 'asleep'} {location if stack else f'({location})'}"


class Stacks:
    """The Python stacks of the ranks of this node.

    A rank writes them when it gets SIGUSR2, also while it computes or holds the interpreter lock. The signal ends what it sleeps
    in by a call of the C library, so look at everything else first.
    """

    def __init__(self, control_dir: Path) -> None:
        self._control_dir = control_dir

    def read(self, pids: Mapping[int, int]) -> dict[int, tuple[Frame, ...]]:
        """The stack of the main thread of each process, by local rank; () of one that does not answer."""
        before = {local: self._size(local) for local in pids}
        for pid in pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR2)
        deadline = time.monotonic() + _ANSWER_S
        while time.monotonic() < deadline and any(self._size(local) == before[local] for local in pids):
            time.sleep(_POLL_S)
        time.sleep(_POLL_S)  # a stack is written in several pieces
        return {local: self._stack(local, begin) for local, begin in before.items()}

    def change(self, pids: Mapping[int, int]) -> bool:
        """Return whether any of the processes is soon elsewhere: a call that holds the interpreter lock stays in its line."""
        first = self.read(pids)
        for _ in range(_NUM_LOOKS - 1):
            time.sleep(_APART_S)
            if self.read(pids) != first:
                return True
        return False

    def _stack(self, local: int, begin: int) -> tuple[Frame, ...]:
        try:
            text = stacks_path(self._control_dir, local).read_bytes()[begin:].decode(errors="replace")
        except OSError:
            return ()
        return main_stack(parse_stacks(text))

    def _size(self, local: int) -> int:
        try:
            return stacks_path(self._control_dir, local).stat().st_size
        except OSError:
            return 0
