"""The ``pptrace`` command: runs a subcommand, and turns errors into one line and an exit code."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from pptrace.cli.output import drop_stdout, open_streams, stdout_error
from pptrace.errors import PptraceError
from pptrace.version import __version__

_COMMANDS = {
    "run": "start a training script on several ranks, profile it, analyse it",
    "analyze": "say where the step time of a trace went",
    "whatif": "say what another schedule, split or link would get back",
    "compare": "say whether one run is slower than another, and in what",
    "dashboard": "look at traces in a browser",
    "live": "print each step of a run that goes on",
    "mcp": "answer an assistant about traces",
    "hang": "say who is to blame for a run that hangs",
    "schedule": "list and show pipeline schedules",
    "simulate": "simulate a schedule",
    "estimate": "say what a model needs on a mesh before it runs",
    "doctor": "say what is installed here, or what is damaged in a recording",
}


_OBJECTS_TO_COLLECT = 20_000
_BLAS_THREADS = "OPENBLAS_NUM_THREADS"


@contextmanager
def _one_blas_thread() -> Iterator[None]:
    """Let numpy, where it is imported within, start no threads for products of matrices: they spin for a tenth of the start.

    What is started later, as training is by ``pptrace run``, has the environment as it was.
    """
    if _BLAS_THREADS in os.environ:
        yield
        return
    os.environ[_BLAS_THREADS] = "1"
    try:
        yield
    finally:
        del os.environ[_BLAS_THREADS]


class _Commands(click.Group):
    """Subcommands are imported when they are used, so that each starts fast."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, _ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        gc.disable()  # imports make no garbage; collecting takes a tenth of the start
        with _one_blas_thread():
            command: click.Command = importlib.import_module(f"pptrace.cli.{cmd_name}").command
        gc.freeze()
        # Tables are no garbage: by default 200 collections of a small trace find none.
        gc.set_threshold(_OBJECTS_TO_COLLECT)
        gc.enable()
        return command

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


_QUESTION = "Where did the pipeline-parallel step go, and what would get it back?"


@click.group(cls=_Commands, help=_QUESTION, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pptrace")
def cli() -> None:
    """Run one of the commands."""


def main() -> None:
    """Run the command line.

    Exit codes: 0 done, 1 bad input or unwritable output, 2 wrong usage, 3 what ``--fail-on`` names, 130 interrupted.
    """
    open_streams()
    try:
        code = _run()
        sys.stdout.flush()
        sys.exit(code)
    except PptraceError as err:
        _fail(str(err), err.exit_code)
    except click.UsageError as err:
        where = f" (see `{err.ctx.command_path} --help`)" if err.ctx else ""
        _fail(f"{err.format_message().rstrip('.')}{where}", 2)
    except click.ClickException as err:
        _fail(err.format_message(), err.exit_code)
    except (click.Abort, KeyboardInterrupt):
        _fail("interrupted", 130)
    except BrokenPipeError:  # the reader of stdout is gone, as `| head` does
        drop_stdout()
        sys.exit(1)
    except OSError as err:
        if (lost := stdout_error(err)) is None:
            raise
        _fail(str(lost), lost.exit_code)


def _run() -> int:
    """Run the command and return its exit code; without a subcommand, print the help."""
    try:
        code = cli.main(prog_name="pptrace", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as err:
        click.echo(err.format_message())
        return 2
    return code if isinstance(code, int) else 0


def _fail(message: str, code: int) -> None:
    """Print the message as one line on stderr and exit."""
    click.echo(f"pptrace: {' '.join(message.split())}", err=True)
    sys.exit(code)
