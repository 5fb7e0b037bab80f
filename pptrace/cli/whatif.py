"""``pptrace whatif``: what would get the time back."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from pptrace.analysis.links.types import Link
from pptrace.api.whatif import predict_changes
from pptrace.api.wishes import OPTIONS, Option, Value, Wishes
from pptrace.cli.counting_bar import counting_bar
from pptrace.cli.numbers import COUNT, NUMBER, WHOLE
from pptrace.cli.output import Outputs
from pptrace.cli.paths import GIVEN_PATH, INPUT_PATH
from pptrace.cli.reading_bar import reading_bar
from pptrace.errors import PptraceError, UsageError
from pptrace.report.whatif import whatif_text
from pptrace.workflow.load import load


def wish_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of all wishes."""
    for option in reversed(OPTIONS):
        kind, several = _TYPES.get(option.takes), option.takes is Value.NAMES
        command = click.option(
            f"--{option.flag}", option.name, type=kind, multiple=several, metavar=option.metavar, help=option.help
        )(command)
    return command


_TYPES = {Value.WHOLE: WHOLE, Value.DEPTH: WHOLE, Value.TIMES: NUMBER, Value.SHARE: NUMBER, Value.RUN: INPUT_PATH}


@click.command(name="whatif")
@click.argument("paths", nargs=-1, required=True, type=INPUT_PATH)
@wish_options
@click.option("--verify", is_flag=True, help="Run it in real processes, with ops that sleep as long as theirs took.")
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
    verify: bool,
    step: int | None,
    json_file: str | None,
    csv_file: str | None,
    html_file: Path | None,
    as_recorded: bool,
    jobs: int | None,
    no_cache: bool,
    **asked: Any,
) -> None:
    """Predict the step with another schedule, split, link or cost.

    PATHS are trace files, a directory with one trace per rank, or a run directory of `pptrace run`. What is asked for is one
    scenario for each schedule; without options, a table of all sensible changes.
    """
    outputs = Outputs({"--json": json_file, "--csv": csv_file, "--html": html_file})
    given = {option.name: _value(option, asked[option.name]) for option in OPTIONS}
    wishes = Wishes(**given | {"links": _links(asked["links"], jobs, not no_cache)})
    with reading_bar() as on_progress:
        analysis = load(paths, None, step, jobs, on_progress, not no_cache, as_recorded=as_recorded)
    with counting_bar("predicted") as on_count:
        predictions = predict_changes(analysis, wishes, verify, on_count)
    outputs.write({"--json": predictions.to_json, "--csv": predictions.to_csv, "--html": predictions.to_html})
    if not outputs.take_stdout:
        console = Console(width=None if Console().is_terminal else 140, highlight=False)
        console.print(whatif_text(predictions.result, console.width))
    if predictions.result.today is None:
        raise PptraceError(f"nothing is predicted: {predictions.result.warnings[-1]}")


def _value(option: Option, given: Any) -> Any:
    """The value of a wish from what click parsed.

    Raises:
        UsageError: it is no list of numbers, or no size.
    """
    match option.takes:
        case Value.NAMES:
            return tuple(name for text in given for name in (text.split(",") if option.name == "schedules" else [text]))
        case Value.LIST:
            return _numbers(f"--{option.flag}", given, "3,2,1,0" if option.name == "placement" else "5,5,5,3")
        case Value.SIZE:
            return _bytes(f"--{option.flag}", given)
    return given


def _numbers(option: str, text: str | None, example: str = "5,5,5,3") -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise UsageError(f"{option} {text}: expected whole numbers with commas between them, such as {example}")
    return tuple(map(int, parts))


def _bytes(option: str, text: str | None) -> int | None:
    if text is None:
        return None
    parts = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)(i?)B?", text, re.ASCII | re.IGNORECASE)
    if parts is None:
        raise UsageError(f"{option} {text}: expected a size such as 80GB, 74GiB or 500MB")
    number, prefix, is_binary = parts.groups()
    return int(float(number) * (1024 if is_binary else 1000) ** " KMGT".index(prefix.upper() or " "))


def _links(path: Path | None, jobs: int | None, cache: bool) -> tuple[Link, ...]:
    """The links of the run that ``--links`` names."""
    if path is None:
        return ()
    links = load([path], jobs=jobs, cache=cache).report.links
    if not links:
        raise UsageError(f"--links {path}: that run has no messages between two ranks")
    return links
