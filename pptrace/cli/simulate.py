"""``pptrace simulate``: a schedule on paper, with costs."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from pptrace.cli.output import write_text
from pptrace.errors import ScheduleError, UsageError
from pptrace.report.text import simulation_table
from pptrace.schedule import registry
from pptrace.schedule.plan import Plan
from pptrace.schedule.text import read_csv
from pptrace.schedule.validate import validate
from pptrace.simulate import simulate, uniform

_NS_PER_MS = 1e6


@click.command(name="simulate")
@click.argument("schedule", metavar="NAME|CSV")
@click.option("--pp", type=int, help="Pipeline ranks (a CSV says its own).")
@click.option("--microbatches", type=int, help="Microbatches per step (a CSV says its own).")
@click.option("--chunks", type=int, help="Virtual stages per rank [default: the schedule's own].")
@click.option("--group-size", type=int, help="Microbatch group size per virtual stage (interleaved) [default: p].")
@click.option("--forward", type=float, default=1.0, show_default=True, metavar="MS", help="Cost of one F.")
@click.option("--backward", type=float, default=2.0, show_default=True, metavar="MS", help="Cost of one full B.")
@click.option("--wgrad", type=float, metavar="MS", help="W's part of a full B [default: half of it].")
@click.option("--p2p", type=float, default=0.0, show_default=True, metavar="MS", help="Cost of one message.")
@click.option("--json", "json_file", metavar="FILE|-", help="Write JSON ('-': to stdout, nothing else).")
@click.option("--ops", "with_ops", is_flag=True, help="Put every op into the JSON.")
@click.option("--html", "html_file", type=click.Path(path_type=Path), help="Write a picture as a single HTML file.")
def command(
    schedule: str,
    pp: int | None,
    microbatches: int | None,
    chunks: int | None,
    group_size: int | None,
    forward: float,
    backward: float,
    wgrad: float | None,
    p2p: float,
    json_file: str | None,
    with_ops: bool,
    html_file: Path | None,
) -> None:
    """Run a schedule on paper: a name of the catalogue, or a CSV of actions.

    Costs are those of one action: one stage's chunk, one microbatch.
    """
    plan = _plan(schedule, pp, microbatches, chunks, group_size)
    costs = uniform(
        forward_ns=round(forward * _NS_PER_MS),
        backward_ns=round(backward * _NS_PER_MS),
        wgrad_ns=None if wgrad is None else round(wgrad * _NS_PER_MS),
        p2p_ns=round(p2p * _NS_PER_MS),
    )
    simulation = simulate(plan.compute_only(), costs)
    if json_file != "-":
        console = Console(width=None if Console().is_terminal else 140, highlight=False)
        console.print(simulation_table(simulation))
    if json_file is not None:
        from pptrace.report.to_json import dump, simulation_object

        write_text(json_file, dump(simulation_object(simulation, with_ops)))
    if html_file is not None:
        from pptrace.report.html import simulation_page

        write_text(str(html_file), simulation_page(simulation))


def _plan(schedule: str, pp: int | None, microbatches: int | None, chunks: int | None, group_size: int | None) -> Plan:
    """The validated plan of a CSV file, or of a name and a shape."""
    if schedule not in registry.SCHEDULES and (schedule.endswith(".csv") or Path(schedule).is_file()):
        plan = read_csv(Path(schedule))
        _require_same(schedule, "--pp", pp, plan.pp)
        _require_same(schedule, "--microbatches", microbatches, plan.num_microbatches)
        _require_same(schedule, "--chunks", chunks, plan.num_chunks)
    else:
        registry.get(schedule)
        if pp is None or microbatches is None:
            missing = "--pp" if pp is None else "--microbatches"
            raise UsageError(
                f"simulate {schedule}: {missing} is not given; a named schedule needs --pp and --microbatches"
            )
        plan = registry.build(schedule, pp, microbatches, chunks, group_size)
    try:
        validate(plan)
    except ScheduleError as err:
        if err.grid:
            click.echo(err.grid)
        raise
    return plan


def _require_same(file: str, option: str, given: int | None, found: int) -> None:
    if given is not None and given != found:
        raise UsageError(f"{file}: {option} {given} does not fit the file, which has {found}; leave the option away")
