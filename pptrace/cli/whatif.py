"""``pptrace whatif``: what would get the time back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pptrace.analysis.links.types import Link
from pptrace.api.options import options_of
from pptrace.api.whatif import predict_changes
from pptrace.api.wishes import Wishes
from pptrace.cli.options import COUNT, GIVEN_PATH, INPUT_PATH, WHOLE, read_value, with_options
from pptrace.cli.output import Outputs, report_console
from pptrace.cli.progress_bars import counting_bar, reading_bar
from pptrace.errors import PptraceError, UsageError
from pptrace.report.whatif import whatif_text
from pptrace.workflow.load import load


@click.command(name="whatif")
@click.argument("paths", nargs=-1, required=True, type=INPUT_PATH)
@with_options(options_of(Wishes).values())
@click.option("--step", type=WHOLE, help="From this step alone.")
@click.option(
    "--json", "json_file", metavar="FILE|-", help="Write the predictions as JSON ('-': to stdout, nothing else)."
)
@click.option("--csv", "csv_file", metavar="FILE|-", help="Write the plan of the advised change as torch's CSV.")
@click.option("--html", "html_file", type=GIVEN_PATH, help="Write a single-file HTML page.")
@click.option("--as-recorded", is_flag=True, help="From the recording: what it cost is not taken out.")
@click.option("--jobs", type=COUNT, help="Processes to read with [default: one per core].")
@click.option("--no-cache", is_flag=True, help="Neither use nor write the cache.")
def command(
    paths: tuple[Path, ...],
    step: int | None,
    json_file: str | None,
    csv_file: str | None,
    html_file: Path | None,
    as_recorded: bool,
    jobs: int | None,
    no_cache: bool,
    **given: Any,
) -> None:
    """Predict the step with another schedule, split, link or cost.

    PATHS are trace files, a directory with one trace per rank, or a run directory of `pptrace run`. What is asked for is one
    scenario for each schedule; without options, a table of all sensible changes.
    """
    outputs = Outputs({"--json": json_file, "--csv": csv_file, "--html": html_file})
    read = {name: read_value(one, given[name], "3,2,1,0") for name, one in options_of(Wishes).items()}
    read["schedules"] = tuple(name for text in given["schedules"] for name in text.split(","))
    wishes = Wishes(**read | {"links": _links(given["links"], jobs, not no_cache)})
    with reading_bar() as on_progress:
        analysis = load(paths, None, step, jobs, on_progress, not no_cache, as_recorded=as_recorded)
    with counting_bar("predicted") as on_count:
        predictions = predict_changes(analysis, wishes, on_count)
    outputs.write({"--json": predictions.to_json, "--csv": predictions.to_csv, "--html": predictions.to_html})
    if not outputs.take_stdout:
        console = report_console()
        console.print(whatif_text(predictions.result, console.width))
    if predictions.result.today is None:
        raise PptraceError(f"nothing is predicted: {predictions.result.warnings[-1]}")


def _links(path: Path | None, jobs: int | None, cache: bool) -> tuple[Link, ...]:
    """The links of the run that ``--links`` names."""
    if path is None:
        return ()
    links = load([path], jobs=jobs, cache=cache).report.links
    if not links:
        raise UsageError(f"--links {path}: that run has no messages between two ranks")
    return links
