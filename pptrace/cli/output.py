"""Output of a command: to files, and to stdout, which may be closed or full."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pptrace.api.files import write_text
from pptrace.errors import PptraceError, UsageError

if TYPE_CHECKING:
    from rich.console import Console


def option(name: str) -> str:
    """The option that gives an argument of the API: ``--group-size`` for ``group_size``."""
    return f"--{name.replace('_', '-')}"


def report_console(width: int = 140) -> Console:
    """A console on stdout; where that is no terminal, of a fixed width, so that tables have the same lines everywhere."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else width, highlight=False)


@dataclass(frozen=True, slots=True)
class Outputs:
    """The requested outputs by option: {"--json": a file, "-" for stdout, or None}.

    Raises:
        UsageError: more than one output is stdout, or one has no name, or that of an option.
    """

    targets: Mapping[str, str | Path | None]

    def __post_init__(self) -> None:
        for option, target in self.targets.items():
            if target == "":
                raise UsageError(f"{option}: the name is empty; expected that of a file, or - for stdout")
            if str(target).startswith("--"):  # the option behind one whose file was forgotten
                raise UsageError(
                    f"{option}: {target} is no file; expected the name of one (./{target}), or - for stdout"
                )
        if len(both := self._for_stdout()) > 1:
            raise UsageError(f"{' - and '.join(both)} -: stdout can take one of them; give files for the others")

    @property
    def take_stdout(self) -> bool:
        """Return whether one of them goes to stdout, so that nothing else may be printed."""
        return bool(self._for_stdout())

    def write(self, texts: Mapping[str, Callable[[], str | Iterable[str]]]) -> None:
        """Make and write each output; stdout last, since its reader may end the program, as `| head` does.

        Raises:
            PptraceError: a file cannot be written.
        """
        on_stdout = self._for_stdout()
        for option in (*(option for option in texts if option not in on_stdout), *on_stdout):
            if (target := self.targets[option]) is None:
                continue
            parts = texts[option]()
            if str(target) != "-":
                write_text(target, parts)
                continue
            text = parts if isinstance(parts, str) else "".join(parts)
            sys.stdout.write(text if text.endswith("\n") else text + "\n")

    def _for_stdout(self) -> list[str]:
        return [option for option, target in self.targets.items() if target is not None and str(target) == "-"]


_LOST = (errno.EBADF, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Error numbers of a stream that is closed, or on a file that is full."""


def stdout_error(err: OSError) -> PptraceError | None:
    """The error to report where a write to stdout failed, None for other errors. Later output is dropped."""
    if err.filename is not None or err.errno not in _LOST:
        return None
    drop_stdout()
    reason = "it is closed" if err.errno == errno.EBADF else err.strerror
    return PptraceError(
        f"stdout: cannot be written ({reason}); expected a terminal, a pipe or a file with room left; give one"
    )


def drop_stdout() -> None:
    """Drop what stdout has buffered, and all later output."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def open_streams() -> None:
    """Replace streams that are closed, which Python sets to None; stdout by one that fails on writing, as a closed one does."""
    if sys.stdout is None or sys.stderr is None:
        # The lowest free number, that of the closed stream, which no file opened later then gets.
        null = os.open(os.devnull, os.O_RDONLY)
        sys.stderr = sys.stderr or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
        sys.stdout = sys.stdout or os.fdopen(null, "w", encoding="utf-8", errors="replace", closefd=False)
