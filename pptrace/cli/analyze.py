"""``pptrace analyze``: where the step time of a trace went."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pptrace.analysis.links.answer import with_network
from pptrace.analysis.links.peaks import read_rate
from pptrace.analysis.report import Report
from pptrace.api.options import Value, option, options_of
from pptrace.api.run import Run
from pptrace.cli.options import INPUT_PATH, with_options
from pptrace.cli.output import Outputs, report_console
from pptrace.cli.progress_bars import reading_bar
from pptrace.errors import PptraceError, UsageError
from pptrace.memory import keep_freed_memory
from pptrace.workflow.load import load

if TYPE_CHECKING:
    from pptrace.workflow.dask_engine import DaskEngine


@dataclass(frozen=True, slots=True)
class AnalyzeOptions:
    """The options of ``pptrace analyze``. ``jobs`` None: one process per core."""

    json_file: str | None = option(
        None, Value.TEXT, "Write the report as JSON ('-': to stdout, nothing else).", "FILE|-", flag="json"
    )
    with_ops: bool = option(False, Value.FLAG, "Put every op into the JSON.", flag="ops")
    html_file: Path | None = option(None, Value.FILE, "Write a single-file HTML report.", flag="html")
    csv_dir: Path | None = option(None, Value.FILE, "Write the tables as CSV into a directory.", flag="csv")
    parquet_dir: Path | None = option(None, Value.FILE, "Write the tables as Parquet into a directory.", flag="parquet")
    perfetto_file: Path | None = option(None, Value.FILE, "Write a trace for ui.perfetto.dev.", flag="perfetto")
    show_all: bool = option(False, Value.FLAG, "Print every step, every rank and every warning.", flag="all")
    schedule: str | None = option(None, Value.TEXT, "Compare with this schedule (see `pptrace schedule list`).")
    step: int | None = option(None, Value.STEP, "Only this step.")
    network: str | None = option(
        None,
        Value.TEXT,
        "Rate of a port of the network between hosts, for peak_gbps of links and collectives: Gb/s, or EDR, HDR, NDR, … "
        "[default: as `pptrace run` recorded it].",
        "RATE",
    )
    as_recorded: bool = option(False, Value.FLAG, "Figures of the recording: what it cost is not taken out.")
    jobs: int | None = option(None, Value.PROCESSES, "Processes to read and explain with [default: one per core].")
    no_cache: bool = option(False, Value.FLAG, "Neither use nor write the cache.")
    engine: str = option(
        "local",
        Value.TEXT,
        "Where the traces are read: in processes of this machine, or on the workers of a dask cluster.",
        choices=("local", "dask"),
    )
    scheduler: str | None = option(
        None,
        Value.TEXT,
        "Running dask scheduler (tcp://HOST:PORT) [default: --jobs workers on this machine].",
        "ADDRESS",
    )

    def __post_init__(self) -> None:
        if self.scheduler is not None and self.engine == "local":
            raise UsageError("--scheduler: only --engine dask has a scheduler; add --engine dask")
        if self.scheduler is not None and self.jobs is not None:
            raise UsageError(
                "--jobs: the scheduler's workers read; leave out --jobs, or --scheduler to start so many here"
            )
        for flag, directory in (("--csv", self.csv_dir), ("--parquet", self.parquet_dir)):
            if str(directory) == "-":
                raise UsageError(f"{flag} -: there are several tables, which stdout cannot take; give a directory")

    @property
    def is_reopened(self) -> bool:
        """Return whether a report of the cache will do."""
        shows_tables = self.html_file or self.csv_dir or self.parquet_dir or self.perfetto_file
        return not shows_tables and self.engine == "local" and not self.no_cache


@click.command(name="analyze")
@click.argument("paths", nargs=-1, required=True, type=INPUT_PATH)
@with_options(options_of(AnalyzeOptions).values())
def command(paths: tuple[Path, ...], **given: Any) -> None:
    """Say where the step time of a run went.

    PATHS are trace files, a directory with one trace per rank, or a run directory of `pptrace run`.
    """
    options = AnalyzeOptions(**given)
    keep_freed_memory()
    network_gbps = None if options.network is None else read_rate(options.network)
    outputs = Outputs({"--json": options.json_file, "--html": options.html_file, "--perfetto": options.perfetto_file})
    with _engine(options) as engine, reading_bar() as on_progress:
        arguments = (paths, options.schedule, options.step, options.jobs, on_progress)
        if options.is_reopened:
            from pptrace.workflow.reopen import reopen  # without the cache it is not needed

            analysis = reopen(*arguments, as_recorded=options.as_recorded).analysis
        else:
            analysis = load(*arguments, not options.no_cache, engine, options.as_recorded)
    if network_gbps is not None:
        analysis = analysis.with_report(with_network(analysis.report, network_gbps))
    run = Run(analysis)
    try:
        for flag, write, directory in (
            ("--csv", run.to_csv, options.csv_dir),
            ("--parquet", run.to_parquet, options.parquet_dir),
        ):
            try:
                if directory is not None:
                    write(directory)
            except PptraceError as err:
                raise PptraceError(f"{flag} {err}") from None
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


def analyze_and_print(paths: Sequence[Path]) -> None:
    """Analyse and print the text report: what `pptrace run` ends with.

    Raises:
        PptraceError: nothing can be analysed.
    """
    with reading_bar() as on_progress:
        analysis = load(paths, jobs=None, on_progress=on_progress)
    _print(analysis.report)


def _print(report: Report, show_all: bool = False) -> None:
    from pptrace.model.report_table import Amount
    from pptrace.report.text import print_report

    print_report(report, report_console(), Amount.WHOLE if show_all else Amount.BRIEF)
