"""``pptrace analyze``: where the step time of a trace went."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pptrace.analysis.links.answer import with_network
from pptrace.analysis.links.peaks import read_rate
from pptrace.analysis.result import Report
from pptrace.api.run import Run
from pptrace.cli.numbers import COUNT, WHOLE
from pptrace.cli.output import Outputs
from pptrace.cli.paths import GIVEN_PATH, INPUT_PATH
from pptrace.cli.reading_bar import reading_bar
from pptrace.errors import PptraceError, UsageError
from pptrace.memory import keep_freed_memory
from pptrace.workflow.load import load
from pptrace.workflow.reopen import reopen

if TYPE_CHECKING:
    from pptrace.workflow.dask_engine import DaskEngine


@click.command(name="analyze")
@click.argument("paths", nargs=-1, required=True, type=INPUT_PATH)
@click.option("--json", "json_file", metavar="FILE|-", help="Write the report as JSON ('-': to stdout, nothing else).")
@click.option("--ops", "with_ops", is_flag=True, help="Put every op into the JSON.")
@click.option("--html", "html_file", type=GIVEN_PATH, help="Write a single-file HTML report.")
@click.option("--csv", "csv_dir", type=GIVEN_PATH, help="Write the tables as CSV into a directory.")
@click.option("--parquet", "parquet_dir", type=GIVEN_PATH, help="Write the tables as Parquet into a directory.")
@click.option("--perfetto", "perfetto_file", type=GIVEN_PATH, help="Write a trace for ui.perfetto.dev.")
@click.option("--all", "show_all", is_flag=True, help="Print every step, every rank and every warning.")
@click.option("--schedule", help="Compare with this schedule (see `pptrace schedule list`).")
@click.option("--step", type=WHOLE, help="Only this step.")
@click.option(
    "--network",
    metavar="RATE",
    help="Rate of a port of the network between hosts, for peak_gbps of links and collectives: Gb/s, or EDR, HDR, NDR, … "
    "[default: as `pptrace run` recorded it].",
)
@click.option("--as-recorded", is_flag=True, help="Figures of the recording: what it cost is not taken out.")
@click.option("--jobs", type=COUNT, help="Processes to read and explain with [default: one per core].")
@click.option("--no-cache", is_flag=True, help="Neither use nor write the cache.")
@click.option(
    "--engine",
    type=click.Choice(["local", "dask"]),
    default="local",
    show_default=True,
    help="Where the traces are read: in processes of this machine, or on the workers of a dask cluster.",
)
@click.option(
    "--scheduler",
    metavar="ADDRESS",
    help="Running dask scheduler (tcp://HOST:PORT) [default: --jobs workers on this machine].",
)
def command(paths: tuple[Path, ...], **options: Any) -> None:
    """Say where the step time of a run went.

    PATHS are trace files, a directory with one trace per rank, or a run directory of `pptrace run`.
    """
    _analyze(paths, AnalyzeOptions(**options))


@dataclass(frozen=True, slots=True)
class AnalyzeOptions:
    """The options of ``pptrace analyze``, as click parses them. ``jobs`` None: one process per core."""

    json_file: str | None
    with_ops: bool
    html_file: Path | None
    csv_dir: Path | None
    parquet_dir: Path | None
    perfetto_file: Path | None
    show_all: bool
    schedule: str | None
    step: int | None
    network: str | None
    as_recorded: bool
    jobs: int | None
    no_cache: bool
    engine: str
    scheduler: str | None

    def __post_init__(self) -> None:
        if self.scheduler is not None and self.engine == "local":
            raise UsageError("--scheduler: only --engine dask has a scheduler; add --engine dask")
        if self.scheduler is not None and self.jobs is not None:
            raise UsageError(
                "--jobs: the scheduler's workers read; leave out --jobs, or --scheduler to start so many here"
            )
        for option, directory in (("--csv", self.csv_dir), ("--parquet", self.parquet_dir)):
            if str(directory) == "-":
                raise UsageError(f"{option} -: there are several tables, which stdout cannot take; give a directory")

    @property
    def is_reopened(self) -> bool:
        """Return whether a report of the cache will do."""
        return self.is_report_only and self.engine == "local" and not self.no_cache

    @property
    def is_report_only(self) -> bool:
        """Return whether nothing is written that shows the tables."""
        return not (self.html_file or self.csv_dir or self.parquet_dir or self.perfetto_file)


def _analyze(paths: Sequence[Path], options: AnalyzeOptions) -> None:
    keep_freed_memory()
    network_gbps = None if options.network is None else read_rate(options.network)
    outputs = Outputs({"--json": options.json_file, "--html": options.html_file, "--perfetto": options.perfetto_file})
    with (
        _engine(options) as engine,
        reading_bar() as on_progress,
    ):
        asked = (paths, options.schedule, options.step, options.jobs, on_progress)
        if options.is_reopened:
            analysis = reopen(*asked, as_recorded=options.as_recorded).analysis
        else:
            analysis = load(*asked, not options.no_cache, engine, options.is_report_only, options.as_recorded)
    if network_gbps is not None:
        analysis = analysis.with_report(with_network(analysis.report, network_gbps))
    run = Run(analysis)
    try:
        _write_tables("--csv", run.to_csv, options.csv_dir)
        _write_tables("--parquet", run.to_parquet, options.parquet_dir)
        outputs.write(
            {
                "--json": lambda: run.json_parts(options.with_ops),
                "--html": lambda: run.to_html(),
                "--perfetto": lambda: run.to_perfetto(),
            }
        )
    finally:
        if not outputs.take_stdout:  # after the files: who reads stdout may end the program, as `| head` does
            _print(run.report, options.show_all)


def _engine(options: AnalyzeOptions) -> AbstractContextManager[DaskEngine | None]:
    if options.engine == "local":
        return nullcontext()
    from pptrace.workflow.dask_cluster import open_dask

    return open_dask(options.scheduler, options.jobs)


def _write_tables(option: str, write: Callable[[Path], None], directory: Path | None) -> None:
    if directory is None:
        return
    try:
        write(directory)
    except PptraceError as err:
        raise PptraceError(f"{option} {err}") from None


def analyze_and_print(paths: Sequence[Path]) -> None:
    """Analyse and print the text report: what `pptrace run` ends with.

    Raises:
        PptraceError: nothing can be analysed.
    """
    with reading_bar() as on_progress:
        analysis = load(paths, jobs=None, on_progress=on_progress)
    _print(analysis.report)


def _print(report: Report, show_all: bool = False) -> None:
    """Print the text report. Tables have a fixed width when the output is no terminal, so that lines are not broken."""
    from rich.console import Console

    from pptrace.report.tables import Amount
    from pptrace.report.text import print_report

    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    print_report(report, console, Amount.WHOLE if show_all else Amount.BRIEF)
