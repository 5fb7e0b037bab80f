"""``pptrace live``: the steps of a run that goes on, one line of JSON or text for each."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec

from pptrace.cli.options import COUNT, GIVEN_PATH
from pptrace.report.live import cost_lines, new_notes, step_line
from pptrace.report.step_log import open_step_logs
from pptrace.workflow.live.follow import LiveRun, LiveStepFigures, require_live, status_of

_POLL_S = 0.2


def _followed(run: LiveRun, follow: bool, last: int | None) -> Iterator[LiveStepFigures]:
    """The steps as they come; of those that are there at first the ``last``."""
    while True:
        over = not follow or run.has_ended  # asked before the files are read: what comes after is in them
        steps = run.poll()
        if last:
            steps = iter(deque(steps, maxlen=last))
        for step in steps:
            yield step
            last = None
        if over:
            return
        time.sleep(_POLL_S)


@click.command(name="live", short_help="Print each step of a run that goes on.")
@click.argument("run_dir", type=GIVEN_PATH)
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="One line per step.",
)
@click.option(
    "--follow/--once", default=True, show_default=True, help="Go on until the run ends, or print what is there."
)
@click.option("--last", type=COUNT, metavar="N", help="Of the steps that are there, begin with the last N.")
@click.option(
    "--log",
    "logs",
    multiple=True,
    metavar="KIND:TARGET",
    help="Write the figures of each step to wandb:PROJECT, tensorboard:DIR or jsonl:FILE as well; may be given several times.",
)
def command(run_dir: Path, form: str, follow: bool, last: int | None, logs: tuple[str, ...]) -> None:
    """Print each step of RUN_DIR when all ranks have ended it: its length, what each rank computed and waited for, slow ranks.

    RUN_DIR is the directory of `pptrace run --live`, while it runs or afterwards.
    """
    require_live(run_dir)
    run = LiveRun(run_dir, last=last)
    noted = set[str]()
    with open_step_logs(logs, run_dir) as write:
        for step in _followed(run, follow, last):
            click.echo(json.dumps(msgspec.to_builtins(step)) if form == "json" else step_line(step))
            write(step)
            for note in new_notes(step, noted) if form == "text" else ():
                click.echo(f"pptrace: {note}", err=True)
    if form == "text":
        for line in (*cost_lines(run.cost), *filter(None, [run.early_end])):
            click.echo(f"pptrace: {line}", err=True)
        status = status_of(run_dir)
        if run.has_ended and status != "ok":
            click.echo(
                f"pptrace: the run ended as {status!r}: steps that not all ranks have written are not shown", err=True
            )
