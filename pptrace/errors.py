"""The errors a user can meet. Each message is one line: where, what was found, what was expected, what to do.

Only the command line catches them; everything else lets them pass.
"""


def mistake_of(err: Exception) -> str:
    """The line about an error that is a mistake in pptrace itself, for whoever shows it and logs where it was."""
    return f"{type(err).__name__}: {err} (a mistake in pptrace; the terminal has the details)"


class PptraceError(Exception):
    """A mistake in what pptrace was given. Ends a command with one line and exit code 1."""

    exit_code = 1


class UsageError(PptraceError):
    """A mistake in how a command or function was called. Exit code 2."""

    exit_code = 2


class UnknownScheduleError(UsageError, KeyError):
    """Error of a name that no schedule has; a KeyError too, as that of any mapping."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would quote it


class TraceError(PptraceError):
    """A trace file or directory that gives nothing to analyse."""


class ScheduleError(PptraceError):
    """A plan that is illegal, incomplete or deadlocks.

    ``grid`` is the plan drawn as text with the faulty places marked, or "" where no drawing helps.
    """

    def __init__(self, message: str, grid: str = "") -> None:
        super().__init__(message)
        self.grid = grid


class ShapeError(ScheduleError):
    """A size that a schedule does not have (p, m, v, group size): wrong usage, not a bad input."""

    exit_code = 2
