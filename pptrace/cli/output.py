"""Writing what a command was asked for: to files, and to stdout, which may be closed or full."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from pptrace.errors import PptraceError, UsageError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def _write_text(target: str | Path, text: str) -> None:
    """Write to a file, or to stdout for "-".

    Raises:
        PptraceError: the file cannot be written.
    """
    if str(target) == "-":
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        return
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as err:
        raise PptraceError(f"{target}: cannot be written ({err.strerror}); give another file") from None


@dataclass(frozen=True, slots=True)
class Outputs:
    """What the options ask to be written: {"--json": a file, "-" for stdout, or None}.

    Raises:
        UsageError: more than one is to go to stdout.
    """

    targets: Mapping[str, str | Path | None]

    def __post_init__(self) -> None:
        if len(both := self._for_stdout()) > 1:
            raise UsageError(f"{' - and '.join(both)} -: stdout can take one of them; give files for the others")

    @property
    def take_stdout(self) -> bool:
        """Whether stdout is for one of them, and nothing else may be printed."""
        return bool(self._for_stdout())

    def write(self, texts: Mapping[str, Callable[[], str]]) -> None:
        """Write them by the makers of their texts; stdout last, since who reads it may end the program, as `| head` does.

        Raises:
            PptraceError: a file cannot be written.
        """
        on_stdout = self._for_stdout()
        for option in (*(option for option in texts if option not in on_stdout), *on_stdout):
            if (target := self.targets[option]) is not None:
                _write_text(target, texts[option]())

    def _for_stdout(self) -> list[str]:
        return [option for option, target in self.targets.items() if target is not None and str(target) == "-"]


class _Stdout(io.FileIO):
    """Stdout's file: what it does not take ends the command with one line, and what comes after that is dropped."""

    _is_broken = False

    def write(self, data: ReadableBuffer) -> int:
        if self._is_broken:
            return len(memoryview(data))
        try:
            return super().write(data)
        except OSError as err:
            self._is_broken = True
            if isinstance(err, BrokenPipeError):
                raise
            reason = "it is closed" if err.errno == errno.EBADF else err.strerror
            raise PptraceError(
                f"stdout: cannot be written ({reason}); expected a terminal, a pipe or a file with room left; give one"
            ) from None


def guard_streams() -> None:
    """Make a stdout that is closed or full an error of one line. Python has None for a stream that is closed."""
    if sys.stdout is None or sys.stderr is None:
        null = os.open(
            os.devnull, os.O_RDONLY
        )  # takes the number of the closed stream, which no file opened later then gets
        sys.stderr = sys.stderr or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
        sys.stdout = sys.stdout or _guarded(null, "utf-8", "replace")
    elif (out := sys.__stdout__) is not None and sys.stdout is out and not out.isatty():
        sys.stdout = _guarded(out.fileno(), out.encoding, out.errors)


def _guarded(fd: int, encoding: str, errors: str | None) -> TextIO:
    return io.TextIOWrapper(io.BufferedWriter(_Stdout(fd, "wb", closefd=False)), encoding, errors)
