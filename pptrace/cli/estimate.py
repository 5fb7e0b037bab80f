"""``pptrace estimate``: memory, FLOPs and bytes sent of a model on a mesh, before it runs; or a sweep over many meshes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from pptrace.api.estimate import EstimatedRun, estimate_as
from pptrace.api.estimate_options import EstimateOptions
from pptrace.api.estimate_sweep import SWEPT, EstimateSweepOptions, run_combinations
from pptrace.api.options import Option, Value, options_of
from pptrace.api.sweep import EVERY
from pptrace.cli.options import GIVEN_PATH, plain, read_value, with_options
from pptrace.cli.output import Outputs, option, report_console
from pptrace.cli.progress_bars import counting_bar
from pptrace.errors import UsageError

_ONE = options_of(EstimateOptions)
_SEVERAL = options_of(EstimateSweepOptions)
_IN_SWEEP = _SEVERAL.keys() - _ONE.keys()
_OPTIONS = {name: replace(one, takes=Value.TEXT) if name in SWEPT else one for name, one in _SEVERAL.items()}


@click.command(name="estimate")
@click.argument("schedule", metavar="NAME")
@click.option("--sweep", is_flag=True, help="Table of all combinations of the values given.")
@with_options(_OPTIONS.values(), {Value.FILE: GIVEN_PATH})
@click.option(
    "--csv", "csv_file", metavar="FILE|-", help="Write the table of ranks, or a sweep, as CSV ('-': to stdout)."
)
@click.option("--json", "json_file", metavar="FILE|-", help="Write JSON ('-': to stdout, nothing else).")
def command(schedule: str, sweep: bool, csv_file: str | None, json_file: str | None, **given: Any) -> None:
    """Estimate what a step needs from sizes alone, with a schedule of the catalogue: nothing runs.

    Memory of each rank at its peak, FLOPs, and the bytes that it sends along each axis.

    With --sweep, NAME, sizes of axes, microbatches, ZeRO and recompute may have several values (2,4,8; 1..8:x2), and every
    combination is estimated: what fits comes first, with --tflops the shortest step first.

    \b
    pptrace estimate 1f1b --pp 4 --microbatches 8 --microbatch-size 2 --layers 24 --hidden 1024 --heads 16 \\
      --sequence 2048 --vocabulary 50304 --tied
    pptrace estimate all --sweep --model config.json --ranks 64 --pp 1..16:x2 --tp 1..8:x2 --global-batch 256 --fits 80GB
    """
    outputs = Outputs({"--csv": csv_file, "--json": json_file})
    values = {name: read_value(_OPTIONS[name], value, "2,4,12") for name, value in given.items()}
    if sweep:
        _sweep(EstimateSweepOptions(schedule, **values), outputs)
        return
    if schedule == EVERY or "," in schedule:
        raise UsageError(f"{schedule}: several schedules make a table; add --sweep")
    for name in _IN_SWEEP:
        if values.pop(name) is not None:
            raise UsageError(f"--{_SEVERAL[name].flag} needs --sweep")
    for name in SWEPT & values.keys():
        values[name] = _one_value(_ONE[name], values[name])
    _show(estimate_as(EstimateOptions(schedule, **values), option), outputs)


def _one_value(one: Option, text: Any) -> Any:
    """The single value of an option that has several in a sweep.

    Raises:
        UsageError: it is none, or several.
    """
    if text is None:
        return 1 if one.name == "dp" else None
    if not isinstance(text, str) or text in one.choices:
        return text
    hint = ", or --sweep for several values" if any(mark in text for mark in (",", "..")) else ""
    if one.choices:
        raise UsageError(f"--{one.flag} is {text!r}; expected one of {', '.join(one.choices)}{hint}")
    try:
        return int(plain(text))
    except ValueError:
        raise UsageError(f"--{one.flag} is {text!r}; expected a whole number{hint}") from None


def _show(run: EstimatedRun, outputs: Outputs) -> None:
    from rich.console import Group
    from rich.text import Text

    from pptrace.report.estimate.table import headline, tables, verdict_lines
    from pptrace.report.text_table import Stripped, render_table

    outputs.write({"--csv": run.to_csv, "--json": run.to_json})
    if outputs.take_stdout:
        return
    console, facts = report_console(), (run.link_speeds, run.limit_bytes)
    lines = map(Text, verdict_lines(run.estimate, run.step, run.speeds, *facts, run.unused_links))
    shown = [render_table(table, console.width) for table in tables(run.estimate, *facts)]
    console.print(Stripped(Group(Text(headline(run.estimate), style="bold"), *lines, *shown)))


def _sweep(options: EstimateSweepOptions, outputs: Outputs) -> None:
    """Estimate all combinations, write the outputs, and print the table where none of them is stdout.

    Raises:
        UsageError: no combination fits; the outputs, which say why of each, are there.
    """
    from rich.console import Group
    from rich.text import Text

    from pptrace.report.columns import as_csv
    from pptrace.report.estimate.sweep import candidate_columns, candidate_table, sweep_lines, sweep_object
    from pptrace.report.text_table import Stripped, render_table
    from pptrace.report.to_json import dump

    with counting_bar("estimated") as on_count:
        found = run_combinations(options, option, on_count)
    outputs.write({"--csv": lambda: as_csv(candidate_columns(found)), "--json": lambda: dump(sweep_object(found))})
    first, *others = sweep_lines(found)
    if not outputs.take_stdout:
        console, lines = report_console(), [Text(line, style="yellow") for line in others]
        table = [render_table(candidate_table(found), console.width)] if found[0].fits else []
        console.print(Stripped(Group(Text(first, style="bold"), *table, *lines)))
    if not found[0].fits:
        raise UsageError(f"--sweep: {first}; give other sizes")
