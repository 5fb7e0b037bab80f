"""``pptrace schedule``: the catalogue of schedules, and any of them in full."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from pptrace.api.simulate import MillisecondCosts, SimulatedStep, Sizes, simulate_as
from pptrace.cli.numbers import NUMBER, WHOLE
from pptrace.cli.output import Outputs, option
from pptrace.cli.paths import GIVEN_PATH
from pptrace.errors import ScheduleError, UsageError
from pptrace.model.report_table import ReportTable
from pptrace.report.idle import explain_plan, explained_csv, explained_table, idle_table
from pptrace.report.text import plan_size
from pptrace.report.text_table import Stripped, render_table
from pptrace.schedule import registry
from pptrace.schedule.builders.zb_auto import optimality
from pptrace.schedule.drawing import draw, draw_in_time
from pptrace.schedule.lower import lower
from pptrace.schedule.plan import Plan
from pptrace.schedule.shape import Shape
from pptrace.schedule.text import to_csv
from pptrace.schedule.validate import validate
from pptrace.simulator import IDEAL, Simulation, simulate


@click.group(name="schedule")
def command() -> None:
    """List and show pipeline schedules."""


@command.command(name="list")
def list_schedules() -> None:
    """List every schedule with its ideal bubble and memory."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("name", "what it is", "ideal bubble ratio", "chunks in flight on rank r", "source"):
        table.add_column(column, no_wrap=column == "name")
    for entry in registry.SCHEDULES.values():
        table.add_row(f"[bold]{entry.name}[/]", entry.summary, entry.bubble_text, entry.in_flight_text, entry.source)
    Console(width=None if Console().is_terminal else 150, highlight=False).print(Stripped(table))
    click.echo("\np ranks, m microbatches, v chunks per rank, N microbatch group size (default p)")


@command.command(name="show")
@click.argument("name")
@click.option("--pp", type=WHOLE, required=True, help="Pipeline ranks.")
@click.option("--microbatches", type=WHOLE, required=True, help="Microbatches per step.")
@click.option("--chunks", type=WHOLE, help="Virtual stages per rank [default: the schedule's].")
@click.option("--group-size", type=WHOLE, help="Microbatch group size per virtual stage (interleaved) [default: p].")
@click.option("--lean", is_flag=True, help="Fewer warmup forwards (interleaved).")
@click.option("--memory-limit", type=WHOLE, help="Activations that a rank may hold (zb-auto) [default: all m].")
@click.option("--csv", "csv_file", metavar="FILE|-", help="Write torch's CSV ('-': to stdout, nothing else).")
@click.option("--with-comms", is_flag=True, help="With sends and receives.")
@click.option("--html", "html_file", type=GIVEN_PATH, help="Write a picture as a single HTML file.")
def show(name: str, **options: Any) -> None:
    """Show what each rank does, and what bubble that leaves."""
    _show(name, ShowOptions(**options))


@dataclass(frozen=True, slots=True)
class ShowOptions:
    """The options of ``pptrace schedule show``, as click parses them."""

    pp: int
    microbatches: int
    chunks: int | None
    group_size: int | None
    lean: bool
    memory_limit: int | None
    csv_file: str | None
    with_comms: bool
    html_file: Path | None

    def shape(self, name: str) -> Shape:
        Sizes(self.pp, self.microbatches, self.chunks, self.group_size, self.lean, self.memory_limit).require_whole(
            option
        )
        return registry.shape_for(
            name, self.pp, self.microbatches, self.chunks, self.group_size, self.lean, self.memory_limit
        )


def _show(name: str, options: ShowOptions) -> None:
    outputs = Outputs({"--csv": options.csv_file, "--html": options.html_file})
    shape, with_comms = options.shape(name), options.with_comms
    plan = registry.get(name).build_shape(shape)
    validate(plan)
    outputs.write({"--csv": lambda: to_csv(lower(plan) if with_comms else plan), "--html": lambda: _picture(plan)})
    if not outputs.take_stdout:
        _print(plan, with_comms, optimality_line(name, plan, shape))


@command.command(name="explain")
@click.argument("schedule", metavar="NAME|CSV")
@click.option("--pp", type=WHOLE, help="Pipeline ranks (default of a CSV: its number).")
@click.option("--microbatches", type=WHOLE, help="Microbatches per step (default of a CSV: its number).")
@click.option("--chunks", type=WHOLE, help="Virtual stages per rank [default: the schedule's].")
@click.option("--group-size", type=WHOLE, help="Microbatch group size per virtual stage (interleaved) [default: p].")
@click.option("--lean", is_flag=True, help="Fewer warmup forwards (interleaved).")
@click.option("--memory-limit", type=WHOLE, help="Activations that a rank may hold (zb-auto) [default: all m].")
@click.option("--forward", type=NUMBER, default=1.0, show_default=True, metavar="SLOTS", help="Length of one F.")
@click.option("--backward", type=NUMBER, default=2.0, show_default=True, metavar="SLOTS", help="Length of one full B.")
@click.option("--wgrad", type=NUMBER, metavar="SLOTS", help="W's part of a full B [default: half of it].")
@click.option("--p2p", type=NUMBER, default=0.0, show_default=True, metavar="SLOTS", help="Length of one message.")
@click.option("--rank", "ranks", type=WHOLE, multiple=True, help="Only this rank (several: repeat it).")
@click.option("--csv", "csv_file", metavar="FILE|-", help="Write it as CSV ('-': to stdout, nothing else).")
def explain(schedule: str, ranks: tuple[int, ...], csv_file: str | None, **options: Any) -> None:
    """Explain a plan slot by slot: what runs, what that needed, and why a slot is idle.

    A name of the catalogue, or a CSV of actions: one row per rank, cells such as 0F0, 3I2, 3W2, 1B0 (stage, kind, microbatch).
    """
    outputs = Outputs({"--csv": csv_file})
    sizes = Sizes(**{entry.name: options[entry.name] for entry in fields(Sizes)})
    costs = MillisecondCosts(**{entry.name: options[entry.name] for entry in fields(MillisecondCosts)})
    step = simulate_or_draw(schedule, sizes, costs, outputs)
    shown = _ranks(ranks, step.plan)
    explained = explain_plan(step.simulation, _slots)
    outputs.write({"--csv": lambda: explained_csv([explained[rank] for rank in shown], _slots)})
    if not outputs.take_stdout:
        console = Console(width=None if Console().is_terminal else 140, highlight=False)
        console.print(f"{step.plan.name}: {plan_size(step.plan)}; {_slots(step.makespan_ns)} slots")
        for table in (*(explained_table(explained[rank], _slots) for rank in shown), _idle(step.simulation)):
            if table is not None:
                console.print(Stripped(render_table(table, console.width)))


def _ranks(wanted: tuple[int, ...], plan: Plan) -> tuple[int, ...]:
    for rank in wanted:
        if not 0 <= rank < plan.pp:
            raise UsageError(f"--rank {rank}: {plan.name} has the ranks 0 to {plan.pp - 1}")
    return wanted or tuple(range(plan.pp))


def _slots(time_ns: int) -> str:
    """A time in slots; costs were given in slots where a simulation takes milliseconds."""
    return f"{time_ns / 1e6:g}"


def _idle(simulation: Simulation) -> ReportTable | None:
    return idle_table(simulation, _slots, "slots")


def simulate_or_draw(schedule: str, sizes: Sizes, costs: MillisecondCosts, outputs: Outputs) -> SimulatedStep:
    """Simulate one step; of a plan that is unsound, the grid is printed before the error ends the command, unless stdout is
    for an output.
    """
    try:
        return simulate_as(schedule, sizes, costs, spell=option)
    except ScheduleError as err:
        if err.grid and not outputs.take_stdout:
            click.echo(err.grid)
        raise


def _picture(plan: Plan) -> str:
    from pptrace.report.html import simulation_page

    return simulation_page(simulate(plan, IDEAL))


def optimality_line(name: str, plan: Plan, shape: Shape) -> str | None:
    """One line: a searched schedule's makespan above the lower bound; None for a schedule that is not searched."""
    if not registry.get(name).searches:
        return None
    result = optimality(plan, shape)
    if result.excess == 0:
        return "no order of these actions within the memory limit is shorter: the makespan is the lower bound"
    return f"the makespan is {result.excess:.2%} above the lower bound of what any order could reach"


def _print(plan: Plan, with_comms: bool, optimality_note: str | None) -> None:
    ideal = simulate(plan, IDEAL)
    click.echo(
        f"{plan.name}: {plan_size(plan)}; "
        f"ideal bubble ratio {ideal.bubble_ratio:.4f}, share {ideal.bubble_share:.2%} (F = I = W)"
    )
    if plan.splits_backward:
        waits = max(rank.inner_bubble_ns / rank.compute_ns for rank in ideal.ranks)
        click.echo(f"bubble ratio between a rank's own first and last action: {waits:.4f} at most")
    click.echo(f"chunks in flight at most: {', '.join(str(rank.peak_inflight_microbatches) for rank in ideal.ranks)}")
    click.echo(f"{optimality_note}\n" if optimality_note else "")
    click.echo(draw(lower(plan)) if with_comms else draw_in_time(plan))
    if (table := _idle(ideal)) is not None:
        console = Console(width=None if Console().is_terminal else 150, highlight=False)
        console.print(Stripped(render_table(table, console.width)))
