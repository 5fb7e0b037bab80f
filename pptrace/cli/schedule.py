"""``pptrace schedule``: the catalogue of schedules, and any of them in full."""

from __future__ import annotations

from dataclasses import MISSING, replace
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from pptrace.api.options import Value, options_of
from pptrace.api.simulate import SimulatedStep, SimulateOptions, simulate_as
from pptrace.cli.options import GIVEN_PATH, WHOLE, with_options
from pptrace.cli.output import Outputs, option, report_console
from pptrace.errors import ScheduleError, UsageError
from pptrace.report.simulation_text import explain_plan, explained_csv, explained_table, idle_table, plan_size
from pptrace.report.text_table import Stripped, render_table
from pptrace.schedule import registry
from pptrace.schedule.builders.zb_auto import excess_of
from pptrace.schedule.drawing import draw, draw_in_time
from pptrace.schedule.lower import lower
from pptrace.schedule.plan import Plan
from pptrace.schedule.shape import Shape
from pptrace.schedule.text import to_csv
from pptrace.schedule.validate import validate
from pptrace.simulator import IDEAL, simulate


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
    report_console(150).print(Stripped(table))
    click.echo("\np ranks, m microbatches, v chunks per rank, N microbatch group size (default p)")


_OPTIONS = options_of(SimulateOptions).values()
_SIZES = [replace(one, metavar=None) for one in _OPTIONS if one.takes in (Value.WHOLE, Value.FLAG)]
_SIZES_OF_NAME = [
    replace(one, default=MISSING, help=f"{one.help.partition(' (')[0]}.") if one.name in ("pp", "microbatches") else one
    for one in _SIZES
]
"""A name of the catalogue needs what a file has by itself."""
_IN_SLOTS = [
    replace(one, metavar="SLOTS", help=one.help.replace("Cost", "Length"))
    for one in _OPTIONS
    if one.takes is Value.MILLISECONDS
]


@command.command(name="show")
@click.argument("name")
@with_options(_SIZES_OF_NAME)
@click.option("--csv", "csv_file", metavar="FILE|-", help="Write torch's CSV ('-': to stdout, nothing else).")
@click.option("--with-comms", is_flag=True, help="With sends and receives.")
@click.option("--html", "html_file", type=GIVEN_PATH, help="Write a picture as a single HTML file.")
def show(name: str, csv_file: str | None, with_comms: bool, html_file: Path | None, **sizes: Any) -> None:
    """Show what each rank does, and what bubble that leaves."""
    outputs = Outputs({"--csv": csv_file, "--html": html_file})
    options = SimulateOptions(name, **sizes)
    options.require_sizes(option)
    shape = options.shape(option)
    plan = registry.get(name).build_shape(shape)
    validate(plan)
    outputs.write({"--csv": lambda: to_csv(lower(plan) if with_comms else plan), "--html": lambda: _picture(plan)})
    if not outputs.take_stdout:
        _print(plan, with_comms, optimality_line(name, plan, shape))


@command.command(name="explain", short_help="Explain a plan slot by slot.")
@click.argument("schedule", metavar="NAME|CSV")
@with_options([*_SIZES, *_IN_SLOTS])
@click.option("--rank", "ranks", type=WHOLE, multiple=True, help="Only this rank (several: repeat it).")
@click.option("--csv", "csv_file", metavar="FILE|-", help="Write it as CSV ('-': to stdout, nothing else).")
def explain(schedule: str, ranks: tuple[int, ...], csv_file: str | None, **sizes_and_costs: Any) -> None:
    """Explain a plan slot by slot: what runs, what that needed, and why a slot is idle.

    A name of the catalogue, or a CSV of actions: one row per rank, cells such as 0F0, 3I2, 3W2, 1B0 (stage, kind, microbatch).
    """
    outputs = Outputs({"--csv": csv_file})
    step = simulate_or_draw(SimulateOptions(schedule, **sizes_and_costs), outputs)
    for rank in ranks:
        if not 0 <= rank < step.plan.pp:
            raise UsageError(f"--rank {rank}: {step.plan.name} has the ranks 0 to {step.plan.pp - 1}")
    shown = ranks or range(step.plan.pp)
    explained = explain_plan(step.simulation, _slots)
    outputs.write({"--csv": lambda: explained_csv([explained[rank] for rank in shown], _slots)})
    if not outputs.take_stdout:
        console = report_console()
        console.print(f"{step.plan.name}: {plan_size(step.plan)}; {_slots(step.makespan_ns)} slots")
        for table in (
            *(explained_table(explained[rank], _slots) for rank in shown),
            idle_table(step.simulation, _slots, "slots"),
        ):
            if table is not None:
                console.print(Stripped(render_table(table, console.width)))


def _slots(time_ns: int) -> str:
    """A time in slots; costs were given in slots where a simulation takes milliseconds."""
    return f"{time_ns / 1e6:g}"


def simulate_or_draw(options: SimulateOptions, outputs: Outputs) -> SimulatedStep:
    """Simulate one step; of a plan that is unsound, the grid is printed before the error ends the command, unless stdout is
    for an output.
    """
    try:
        return simulate_as(options, spell=option)
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
    excess = excess_of(plan, shape)
    if excess == 0:
        return "no order of these actions within the memory limit is shorter: the makespan is the lower bound"
    return f"the makespan is {excess:.2%} above the lower bound of what any order could reach"


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
    if (table := idle_table(ideal, _slots, "slots")) is not None:
        console = report_console(150)
        console.print(Stripped(render_table(table, console.width)))
