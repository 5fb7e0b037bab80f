"""``pptrace whatif``: what would get the time back."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from pptrace.analysis.whole_run import Link
from pptrace.api.whatif import Wishes, predict_changes
from pptrace.cli.counting_bar import counting_bar
from pptrace.cli.numbers import COUNT, NUMBER, WHOLE
from pptrace.cli.output import Outputs
from pptrace.cli.paths import GIVEN_PATH
from pptrace.cli.reading_bar import reading_bar
from pptrace.errors import PptraceError, UsageError
from pptrace.report.whatif import whatif_text
from pptrace.workflow.load import load


@click.command(name="whatif")
@click.argument("paths", nargs=-1, required=True, type=GIVEN_PATH)
@click.option(
    "--schedule",
    "schedules",
    multiple=True,
    metavar="NAME,NAME|all",
    help="With this schedule, or each of several; all: every one of the catalogue.",
)
@click.option("--chunks", type=WHOLE, help="With this number of virtual stages per rank.")
@click.option("--microbatches", type=WHOLE, help="With this number of microbatches in a step, of today's size.")
@click.option("--microbatch-size", type=NUMBER, metavar="X", help="With microbatches X times today's size.")
@click.option("--split", metavar="N,N,…", help="With these layers in each stage.")
@click.option(
    "--ideal",
    "ideals",
    multiple=True,
    metavar="WHAT",
    help="If stage=N, rank=N, kind=K, jitter, communication, stragglers, host or routing cost what their like do; "
    "outside=PART: if data, … took no time.",
)
@click.option("--link-speed", type=NUMBER, metavar="X", help="With messages X times as fast.")
@click.option(
    "--links",
    "links_path",
    type=GIVEN_PATH,
    metavar="PATH",
    help="Take the latencies of links from this run on the same ranks, with messages of several sizes: no change.",
)
@click.option("--layers", metavar="N,N,…", help="The layers of the run's stages, where its trace does not say.")
@click.option(
    "--wgrad-share",
    type=NUMBER,
    metavar="X",
    help="W's part of a full B, where the run has no W: no change [default: 0.5].",
)
@click.option(
    "--fixed-share",
    type=NUMBER,
    metavar="X",
    help="The part of an op that it takes however much it does: no change [default: 0, in the interval to 0.06].",
)
@click.option("--placement", metavar="N,N,…", help="With the pipeline's ranks in this order of today's.")
@click.option("--prefetch", type=WHOLE, metavar="N", help="With receives posted N ops before they are needed.")
@click.option(
    "--memory-limit", metavar="BYTES", help="The most that a rank may have, such as 80GB or 74GiB: no change."
)
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
def command(paths: tuple[Path, ...], **options: Any) -> None:
    """Predict the step with another schedule, split, link or cost.

    PATHS are trace files, a directory with one trace per rank, or a run directory of `pptrace run`. What is asked for is one
    scenario for each schedule; without options, a table of all sensible changes.
    """
    _predict(paths, WhatIfOptions(**options))


@dataclass(frozen=True, slots=True)
class WhatIfOptions:
    """The options of ``pptrace whatif``, as click parses them."""

    schedules: tuple[str, ...]
    chunks: int | None
    microbatches: int | None
    microbatch_size: float | None
    split: str | None
    ideals: tuple[str, ...]
    link_speed: float | None
    links_path: Path | None
    layers: str | None
    wgrad_share: float | None
    fixed_share: float | None
    placement: str | None
    prefetch: int | None
    memory_limit: str | None
    verify: bool
    step: int | None
    json_file: str | None
    csv_file: str | None
    html_file: Path | None
    as_recorded: bool
    jobs: int | None
    no_cache: bool

    @property
    def wishes(self) -> Wishes:
        return Wishes(
            tuple(name for text in self.schedules for name in text.split(",")),
            self.chunks,
            self.microbatches,
            self.microbatch_size,
            _numbers("--split", self.split),
            self.ideals,
            self.link_speed,
            _numbers("--placement", self.placement, "3,2,1,0"),
            self.prefetch,
            _numbers("--layers", self.layers),
            _bytes("--memory-limit", self.memory_limit),
            wgrad_share=self.wgrad_share,
            fixed_share=self.fixed_share,
        )


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


def _links(options: WhatIfOptions) -> tuple[Link, ...]:
    """The links of the run that ``--links`` names."""
    if options.links_path is None:
        return ()
    links = load([options.links_path], jobs=options.jobs, cache=not options.no_cache).report.links
    if not links:
        raise UsageError(f"--links {options.links_path}: that run has no messages between two ranks")
    return links


def _predict(paths: tuple[Path, ...], options: WhatIfOptions) -> None:
    outputs = Outputs({"--json": options.json_file, "--csv": options.csv_file, "--html": options.html_file})
    wishes = replace(options.wishes, links=_links(options))
    with reading_bar() as on_progress:
        analysis = load(
            *(paths, None, options.step, options.jobs, on_progress, not options.no_cache),
            as_recorded=options.as_recorded,
        )
    with counting_bar("predicted") as on_count:
        predictions = predict_changes(analysis, wishes, options.verify, on_count)
    outputs.write({"--json": predictions.to_json, "--csv": predictions.to_csv, "--html": predictions.to_html})
    if not outputs.take_stdout:
        console = Console(width=None if Console().is_terminal else 140, highlight=False)
        console.print(whatif_text(predictions.result, console.width))
    if predictions.result.today is None:
        raise PptraceError(f"nothing is predicted: {predictions.result.warnings[-1]}")
