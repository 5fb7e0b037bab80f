"""``pptrace simulate``: a schedule with costs, simulated; or a sweep over many."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from pptrace.api.options import Option, Value, options_of
from pptrace.api.simulate import SimulateOptions
from pptrace.api.sweep import EVERY, SweepOptions, grid_of
from pptrace.cli.options import GIVEN_PATH, plain, with_options
from pptrace.cli.output import Outputs, option, report_console
from pptrace.cli.progress_bars import counting_bar
from pptrace.cli.schedule import optimality_line, simulate_or_draw
from pptrace.errors import UsageError
from pptrace.garbage import paused_gc
from pptrace.model.wording import counted
from pptrace.report.simulation_text import simulation_table

_SEVERAL: dict[Value, Any] = dict.fromkeys((Value.WHOLE, Value.MILLISECONDS), click.STRING)
"""Sizes and costs as text, since in a sweep they may be several."""
_OF_STEP, _OF_SWEEP = options_of(SimulateOptions), options_of(SweepOptions)
_OPTIONS = _OF_STEP | {
    "memory_limit": replace(_OF_STEP["memory_limit"], takes=Value.STEP),  # one for all points
    "costs_of": replace(_OF_SWEEP["costs_of"], default=None),
}


@click.command(name="simulate")
@click.argument("schedule", metavar="NAME|CSV")
@click.option("--sweep", is_flag=True, help="Table of all combinations of the values given.")
@with_options(_OPTIONS.values(), _SEVERAL)
@click.option(
    "--csv",
    "csv_file",
    metavar="FILE|-",
    help="Write the plan as torch's CSV; of a sweep, its points ('-': to stdout, nothing else).",
)
@click.option("--json", "json_file", metavar="FILE|-", help="Write JSON ('-': to stdout, nothing else).")
@click.option("--ops", "with_ops", is_flag=True, help="Put every op into the JSON.")
@click.option("--html", "html_file", type=GIVEN_PATH, help="Write a picture as a single HTML file.")
def command(
    schedule: str,
    sweep: bool,
    csv_file: str | None,
    json_file: str | None,
    with_ops: bool,
    html_file: Path | None,
    **given: Any,
) -> None:
    """Simulate a schedule: a name of the catalogue, or a CSV of actions.

    Costs are those of one action: one stage's chunk, one microbatch.

    With --sweep, sizes, costs and NAME may have several values, and every combination is simulated: NAME,NAME or all;
    2,4,8; 8..64:8 (steps of 8); 8..64:x2 (doubling); of microbatches also multiples of p, as p-1 or 4p.

    \b
    pptrace simulate 1f1b,interleaved-1f1b,zb-h1 --sweep --pp 8 --microbatches 8..64:8 --chunks 1,2,4
    """
    outputs = Outputs({"--csv": csv_file, "--json": json_file, "--html": html_file})
    if sweep:
        for name, is_given in (("lean", given.pop("lean")), ("ops", with_ops)):
            if is_given:
                raise UsageError(f"--sweep: {option(name)} belongs to a single simulation; leave it away")
        _sweep(SweepOptions(schedule, **given | {"costs_of": given["costs_of"] or "rank"}), outputs)
        return
    costs_of = given.pop("costs_of")
    sizes = {name: _value(_OPTIONS[name], value) for name, value in given.items()}
    if schedule == EVERY or ("," in schedule and not Path(schedule).is_file()):
        raise UsageError(f"{schedule}: several schedules make a table; add --sweep")
    if costs_of not in (None, "action"):
        raise UsageError(f"--costs-of {costs_of} needs --sweep; a single simulation has costs of one action")
    with paused_gc():
        step = simulate_or_draw(SimulateOptions(schedule, **sizes), outputs)
        outputs.write({"--csv": step.to_csv, "--json": lambda: step.to_json(ops=with_ops), "--html": step.to_html})
        if not outputs.take_stdout:
            console = report_console()
            console.print(simulation_table(step.simulation, console.width))
            if step.shape is not None and (note := optimality_line(schedule, step.plan, step.shape)):
                console.print(note)


def _value(one: Option, text: Any) -> Any:
    """The single number of an option.

    Raises:
        UsageError: it is none, or several.
    """
    if one.takes not in _SEVERAL or not isinstance(text, str):
        return text
    read, expected = (int, "a whole number") if one.takes is Value.WHOLE else (float, "a number")
    try:
        return read(plain(text))
    except ValueError:
        hint = ", or --sweep for several values" if any(mark in text for mark in (",", "..", "p")) else ""
        raise UsageError(f"--{one.flag} is {text!r}; expected {expected}{hint}") from None


def _sweep(options: SweepOptions, outputs: Outputs) -> None:
    """Simulate what is asked for, write the outputs, and print the table where none of them is stdout.

    Raises:
        UsageError: no combination has a plan; the outputs, which say why of each, are there.
    """
    from pptrace.report.columns import as_csv
    from pptrace.report.sweep.layout import sweep_columns, sweep_object
    from pptrace.report.sweep.table import sweep_text
    from pptrace.report.to_json import dump
    from pptrace.simulator.sweep.run import run_sweep

    def page() -> str:
        from pptrace.report.html import sweep_page  # with plotly

        return sweep_page(swept)

    grid = grid_of(options, option)
    with counting_bar("simulated") as on_count:
        swept = run_sweep(grid, on_count and (lambda num_done: on_count(num_done, grid.num_points)))
    outputs.write(
        {"--csv": lambda: as_csv(sweep_columns(swept)), "--json": lambda: dump(sweep_object(swept)), "--html": page}
    )
    if not outputs.take_stdout:
        console = report_console()
        console.print(sweep_text(swept, console.width))
    if not swept.simulated:
        size = counted(len(swept.refused), "combination")
        raise UsageError(f"--sweep: none of {size} has a plan, such as {swept.refused[0].refused}; give other sizes")
