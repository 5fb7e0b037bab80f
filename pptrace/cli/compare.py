"""``pptrace compare``: whether one run is slower than another, by how much, and in what."""

from __future__ import annotations

import re
from pathlib import Path

import click

from pptrace.analysis.compare.compare import compare_sides
from pptrace.analysis.compare.result import Comparison
from pptrace.analysis.compare.side import ComparedRun
from pptrace.api.compare import RunComparison
from pptrace.cli.options import COUNT, GIVEN_PATH, INPUT_PATH
from pptrace.cli.output import Outputs, report_console
from pptrace.cli.progress_bars import reading_bar
from pptrace.errors import PptraceError, UsageError
from pptrace.ingest.inputs.resolve import require_path
from pptrace.workflow.compare import read_side


@click.command(name="compare")
@click.argument("a", type=INPUT_PATH)
@click.argument("b", type=INPUT_PATH)
@click.option(
    "--json", "json_file", metavar="FILE|-", help="Write the comparison as JSON ('-': to stdout, nothing else)."
)
@click.option("--html", "html_file", type=GIVEN_PATH, help="Write a single-file HTML page.")
@click.option("--all", "show_all", is_flag=True, help="Print every part and every warning.")
@click.option(
    "--fail-on",
    metavar="slower[:PERCENT]",
    help="End with exit code 3 if steps of B are longer, by more than PERCENT with 95 % certainty [default: 0]: for CI.",
)
@click.option("--as-recorded", is_flag=True, help="Compare recordings: what these cost is not taken out.")
@click.option("--jobs", type=COUNT, help="Processes to read with [default: one per core].")
def command(
    a: Path,
    b: Path,
    json_file: str | None,
    html_file: Path | None,
    show_all: bool,
    fail_on: str | None,
    as_recorded: bool,
    jobs: int | None,
) -> int:
    """Say whether run B is slower than run A, by how much, and in which parts of the step.

    A and B are each a trace file, a directory with one trace per rank, a run directory of `pptrace run`, or a directory of
    several runs of one program. They may differ in schedule, sizes and versions: parts are matched by kind, stage, phase and
    axis.

    A program does not run alike twice. Several runs of each, taken in turns, show how much it differs:

    \b
        for i in 1 2 3 4 5; do
            pptrace run -o runs/a/$i --no-analyze --steps 2:52 train.py
            pptrace run -o runs/b/$i --no-analyze --steps 2:52 train.py --changed
        done
        pptrace compare runs/a runs/b
    """
    outputs, limit = Outputs({"--json": json_file, "--html": html_file}), _limit(fail_on)
    for path in (a, b):
        require_path(path)  # rather than after minutes
    comparison = RunComparison(compare_sides(_read(a, jobs, as_recorded), _read(b, jobs, as_recorded)))
    outputs.write({"--json": comparison.to_json, "--html": comparison.to_html})
    if not outputs.take_stdout:
        from pptrace.model.report_table import Amount
        from pptrace.report.text import print_comparison

        print_comparison(comparison.result, report_console(), Amount.WHOLE if show_all else Amount.BRIEF)
    return _FAILED if limit is not None and _is_slower(comparison.result, limit) else 0


_FAILED = 3
"""Exit code of a run that is slower than ``--fail-on`` allows."""
_LIMIT = re.compile(r"slower(?::(\d+(?:\.\d+)?)%?)?", re.ASCII)


def _limit(fail_on: str | None) -> float | None:
    """The change of the step, as a share, that ``--fail-on`` allows; None without the option.

    Raises:
        UsageError: it is no such text.
    """
    if fail_on is None:
        return None
    match = _LIMIT.fullmatch(fail_on)
    if match is None:
        raise UsageError(f"--fail-on {fail_on}: expected slower, or slower and a limit in percent, such as slower:3")
    return float(match[1] or 0) / 100


def _is_slower(comparison: Comparison, limit: float) -> bool:
    """Return whether B is slower by more than the limit, whatever the interval of the change allows for.

    Raises:
        PptraceError: the interval is not known.
    """
    if comparison.span.low is None:
        raise PptraceError(
            "--fail-on: not known how certain the change of the step is: too few whole steps; record more of both runs"
        )
    return comparison.span.low > limit


def _read(path: Path, jobs: int | None, as_recorded: bool) -> list[ComparedRun]:
    with reading_bar() as on_progress:
        return read_side(path, jobs, on_progress, as_recorded=as_recorded)
