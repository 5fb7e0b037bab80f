"""Stacks of a rank that hangs, read from what ``faulthandler`` writes:

dump   = { header { frame } }
header = ("Thread" | "Current thread") " 0x…" … "(most recent call first):"
frame  = '  File "' path '", line ' number " in " function
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_HEADER = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):", re.IGNORECASE)
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_LIBRARY = re.compile(r"/(?:site-packages|dist-packages)/|/lib/python\d|^<frozen ")
_BOOTSTRAP = re.compile(r"/instrument/(?:launch|adapters)/(?:\w+/)?[^/]*\.py$")
"""Files that start the script, or watch what it calls."""


def stacks_path(control_dir: Path, local_rank: int) -> Path:
    """Path to which a rank writes the stacks of its threads when it gets SIGUSR2."""
    return control_dir / f"rank{local_rank}.stacks"


@dataclass(frozen=True, slots=True)
class Frame:
    path: str
    line: int
    function: str


def parse_stacks(text: str) -> list[tuple[Frame, ...]]:
    """One tuple per thread, the innermost frame first; lines that are neither header nor frame are skipped."""
    threads: list[list[Frame]] = []
    for line in text.splitlines():
        if _HEADER.match(line):
            threads.append([])
        elif threads and (match := _FRAME.fullmatch(line)):
            threads[-1].append(Frame(match[1], int(match[2]), match[3]))
    return [tuple(frames) for frames in threads]


def main_stack(threads: list[tuple[Frame, ...]]) -> tuple[Frame, ...]:
    """The thread that runs the script, without the frames of the launcher and of hooks; empty where there is none."""
    for frames in threads:
        if any(frame.path.endswith("/launch/worker.py") for frame in frames):
            return tuple(frame for frame in frames if not _is_bootstrap(frame))
    return ()


def _from_here(path: str) -> str:
    """A path as a user in the working directory would type it, where it lies below."""
    with suppress(ValueError, OSError):
        return str(Path(path).relative_to(Path.cwd()))
    return path


def describe_wait(frames: tuple[Frame, ...]) -> str:
    """Describe in one line where a thread waits: the call, and the line of the user's own code that it comes from."""
    if not frames:
        return "no Python stack could be read"
    own = next((frame for frame in frames if not _LIBRARY.search(frame.path)), None)
    inner = frames[0]
    if own is None or own is inner:
        return f"in {inner.function} ({_from_here(inner.path)}:{inner.line})"
    return (
        f"in {_outermost_library(frames, own).function}, called from {own.function} ({_from_here(own.path)}:{own.line})"
    )


def is_setting_up(frames: tuple[Frame, ...]) -> bool:
    """Return whether the thread waits for other ranks to make a process group."""
    return any(frame.function == "init_process_group" and _LIBRARY.search(frame.path) for frame in frames)


def _outermost_library(frames: tuple[Frame, ...], own: Frame) -> Frame:
    """The library function that the user's code called, wrappers passed over: the one a reader knows."""
    called = frames[: frames.index(own)]
    return next(
        (frame for frame in reversed(called) if frame.function not in ("wrapper", "inner", "__call__")), called[-1]
    )


def _is_bootstrap(frame: Frame) -> bool:
    return frame.path.startswith("<frozen ") or bool(_BOOTSTRAP.search(frame.path))
