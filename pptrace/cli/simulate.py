"""``pptrace simulate``: a schedule with costs, simulated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from pptrace.api.simulate import MillisecondCosts, SimulatedStep, Sizes, simulate_as
from pptrace.cli.output import Outputs, option
from pptrace.cli.schedule import optimality_line
from pptrace.errors import ScheduleError
from pptrace.report.text import simulation_table


@click.command(name="simulate")
@click.argument("schedule", metavar="NAME|CSV")
@click.option("--pp", type=int, help="Pipeline ranks (default of a CSV: its number).")
@click.option("--microbatches", type=int, help="Microbatches per step (default of a CSV: its number).")
@click.option("--chunks", type=int, help="Virtual stages per rank [default: the schedule's].")
@click.option("--group-size", type=int, help="Microbatch group size per virtual stage (interleaved) [default: p].")
@click.option("--lean", is_flag=True, help="Fewer warmup forwards (interleaved).")
@click.option("--memory-limit", type=int, help="Activations that a rank may hold (zb-auto) [default: all m].")
@click.option("--forward", type=float, default=1.0, show_default=True, metavar="MS", help="Cost of one F.")
@click.option("--backward", type=float, default=2.0, show_default=True, metavar="MS", help="Cost of one full B.")
@click.option("--wgrad", type=float, metavar="MS", help="W's part of a full B [default: half of it].")
@click.option("--p2p", type=float, default=0.0, show_default=True, metavar="MS", help="Cost of one message.")
@click.option(
    "--csv", "csv_file", metavar="FILE|-", help="Write the plan as torch's CSV ('-': to stdout, nothing else)."
)
@click.option("--json", "json_file", metavar="FILE|-", help="Write JSON ('-': to stdout, nothing else).")
@click.option("--ops", "with_ops", is_flag=True, help="Put every op into the JSON.")
@click.option("--html", "html_file", type=click.Path(path_type=Path), help="Write a picture as a single HTML file.")
def command(schedule: str, **options: Any) -> None:
    """Simulate a schedule: a name of the catalogue, or a CSV of actions.

    Costs are those of one action: one stage's chunk, one microbatch.
    """
    _simulate_and_write(schedule, SimulateOptions(**options))


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """The options of ``pptrace simulate``, as click parses them; costs in ms."""

    pp: int | None
    microbatches: int | None
    chunks: int | None
    group_size: int | None
    lean: bool
    memory_limit: int | None
    forward: float
    backward: float
    wgrad: float | None
    p2p: float
    csv_file: str | None
    json_file: str | None
    with_ops: bool
    html_file: Path | None

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.pp, self.microbatches, self.chunks, self.group_size, self.lean, self.memory_limit)

    @property
    def costs(self) -> MillisecondCosts:
        return MillisecondCosts(self.forward, self.backward, self.wgrad, self.p2p)


def _simulate_and_write(schedule: str, options: SimulateOptions) -> None:
    outputs = Outputs({"--csv": options.csv_file, "--json": options.json_file, "--html": options.html_file})
    step = _simulate(schedule, options.sizes, options.costs)
    outputs.write({"--csv": step.to_csv, "--json": lambda: step.to_json(ops=options.with_ops), "--html": step.to_html})
    if not outputs.take_stdout:
        console = Console(width=None if Console().is_terminal else 140, highlight=False)
        console.print(simulation_table(step.simulation, console.width))
        if step.shape is not None and (note := optimality_line(schedule, step.plan, step.shape)):
            console.print(note)


def _simulate(schedule: str, sizes: Sizes, costs: MillisecondCosts) -> SimulatedStep:
    """Simulate one step; of a plan that deadlocks, the grid is printed before the error ends the command."""
    try:
        return simulate_as(schedule, sizes, costs, spell=option)
    except ScheduleError as err:
        if err.grid:
            click.echo(err.grid)
        raise
