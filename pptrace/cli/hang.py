"""``pptrace hang``: the ranks to blame for a run that hangs."""

from __future__ import annotations

from pathlib import Path

import click

from pptrace.api.hang import hang
from pptrace.cli.options import INPUT_PATH
from pptrace.cli.output import Outputs


@click.command(name="hang")
@click.argument("paths", nargs=-1, required=True, type=INPUT_PATH)
@click.option("--json", "json_file", metavar="FILE|-", help="Write the verdict as JSON ('-': to stdout, nothing else).")
def command(paths: tuple[Path, ...], json_file: str | None) -> None:
    """Say who is to blame for a run that hangs, who only waits, and in how many hops.

    PATHS are torch's flight-recorder dumps, a directory with one per rank, or a run directory of `pptrace run`.
    """
    outputs = Outputs({"--json": json_file})
    report = hang(paths)
    for line in report.warnings:
        click.echo(f"pptrace: {line}", err=True)
    outputs.write({"--json": report.to_json})
    if not outputs.take_stdout:
        click.echo(str(report))
