"""``pptrace simulate``: a schedule on paper, with costs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console

from pptrace.cli.output import Outputs
from pptrace.cli.schedule import optimality_line
from pptrace.errors import ScheduleError, UsageError
from pptrace.report.text import simulation_table
from pptrace.schedule import registry
from pptrace.schedule.actions import Kind
from pptrace.schedule.plan import Plan
from pptrace.schedule.shape import OpCosts, Shape
from pptrace.schedule.text import read_csv, to_csv
from pptrace.schedule.validate import validate
from pptrace.simulator import Costs, Simulation, simulate, uniform

_NS_PER_MS = 1e6
_MOST_MS = 1e9


@click.command(name="simulate")
@click.argument("schedule", metavar="NAME|CSV")
@click.option("--pp", type=int, help="Pipeline ranks (a CSV says its own).")
@click.option("--microbatches", type=int, help="Microbatches per step (a CSV says its own).")
@click.option("--chunks", type=int, help="Virtual stages per rank [default: the schedule's own].")
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
def command(
    schedule: str,
    pp: int | None,
    microbatches: int | None,
    chunks: int | None,
    group_size: int | None,
    lean: bool,
    memory_limit: int | None,
    forward: float,
    backward: float,
    wgrad: float | None,
    p2p: float,
    csv_file: str | None,
    json_file: str | None,
    with_ops: bool,
    html_file: Path | None,
) -> None:
    """Run a schedule on paper: a name of the catalogue, or a CSV of actions.

    Costs are those of one action: one stage's chunk, one microbatch.
    """
    outputs = Outputs({"--csv": csv_file, "--json": json_file, "--html": html_file})
    costs = uniform(
        forward_ns=_nanoseconds("--forward", forward),
        backward_ns=_nanoseconds("--backward", backward),
        wgrad_ns=None if wgrad is None else _nanoseconds("--wgrad", wgrad),
        p2p_ns=_nanoseconds("--p2p", p2p),
    )
    asked = _Asked(schedule, pp, microbatches, chunks, group_size, lean, memory_limit)
    shape = None if asked.is_file else asked.shape(costs)
    plan = _checked(asked.read()) if shape is None else registry.get(schedule).build(shape)
    simulation = simulate(plan.compute_only(), costs)
    _write(outputs, plan, simulation, with_ops)
    if not outputs.take_stdout:
        console = Console(width=None if Console().is_terminal else 140, highlight=False)
        console.print(simulation_table(simulation))
        if shape is not None and (note := optimality_line(schedule, plan, shape)):
            console.print(note)


def _write(outputs: Outputs, plan: Plan, simulation: Simulation, with_ops: bool) -> None:
    """Each format is imported when it is asked for."""

    def json_object() -> str:
        from pptrace.report.to_json import dump, simulation_object

        return dump(simulation_object(simulation, with_ops))

    def picture() -> str:
        from pptrace.report.html import simulation_page

        return simulation_page(simulation)

    outputs.write({"--csv": lambda: to_csv(plan.compute_only()), "--json": json_object, "--html": picture})


def _nanoseconds(option: str, milliseconds: float) -> int:
    if not math.isfinite(milliseconds) or abs(milliseconds) > _MOST_MS:
        raise UsageError(f"{option} {milliseconds}: expected milliseconds, at most {_MOST_MS:.0e}")
    return round(milliseconds * _NS_PER_MS)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A schedule as the command line names it: a file, or a name of the catalogue and its size."""

    schedule: str
    pp: int | None
    microbatches: int | None
    chunks: int | None
    group_size: int | None
    lean: bool
    memory_limit: int | None

    @property
    def is_file(self) -> bool:
        named = self.schedule in registry.SCHEDULES
        return not named and (self.schedule.endswith(".csv") or Path(self.schedule).is_file())

    def shape(self, costs: Costs) -> Shape:
        registry.get(self.schedule)
        if self.pp is None or self.microbatches is None:
            missing = "--pp" if self.pp is None else "--microbatches"
            raise UsageError(
                f"simulate {self.schedule}: {missing} is not given; a named schedule needs --pp and --microbatches"
            )
        return registry.shape_for(
            self.schedule,
            self.pp,
            self.microbatches,
            self.chunks,
            self.group_size,
            self.lean,
            self.memory_limit,
            OpCosts(costs.kinds[Kind.F], costs.kinds[Kind.I], costs.kinds[Kind.W], costs.p2p_latency_ns),
        )

    def read(self) -> Plan:
        plan = read_csv(Path(self.schedule))
        for option, given, found in (
            ("--pp", self.pp, plan.pp),
            ("--microbatches", self.microbatches, plan.num_microbatches),
            ("--chunks", self.chunks, plan.num_chunks),
        ):
            if given is not None and given != found:
                raise UsageError(
                    f"{self.schedule}: {option} {given} does not fit the file, which has {found}; leave the option away"
                )
        for option, is_given in (
            ("--group-size", self.group_size is not None),
            ("--lean", self.lean),
            ("--memory-limit", self.memory_limit is not None),
        ):
            if is_given:
                raise UsageError(f"{self.schedule}: {option} does not change a file; leave the option away")
        return plan


def _checked(plan: Plan) -> Plan:
    try:
        validate(plan)
    except ScheduleError as err:
        if err.grid:
            click.echo(err.grid)
        raise
    return plan
