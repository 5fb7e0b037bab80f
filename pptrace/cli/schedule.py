"""``pptrace schedule``: the catalogue of schedules, and any of them in full."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from pptrace.api.simulate import Sizes
from pptrace.cli.output import Outputs, option
from pptrace.report.text import plan_size
from pptrace.report.text_table import Stripped
from pptrace.schedule import registry
from pptrace.schedule.lower import lower
from pptrace.schedule.plan import Plan
from pptrace.schedule.shape import Shape
from pptrace.schedule.text import draw, draw_in_time, to_csv
from pptrace.schedule.validate import validate
from pptrace.schedule.zb_auto import optimality
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
    Console(width=None if Console().is_terminal else 150, highlight=False).print(Stripped(table))
    click.echo("\np ranks, m microbatches, v chunks per rank, N microbatch group size (default p)")


@command.command(name="show")
@click.argument("name")
@click.option("--pp", type=int, required=True, help="Pipeline ranks.")
@click.option("--microbatches", type=int, required=True, help="Microbatches per step.")
@click.option("--chunks", type=int, help="Virtual stages per rank [default: the schedule's].")
@click.option("--group-size", type=int, help="Microbatch group size per virtual stage (interleaved) [default: p].")
@click.option("--lean", is_flag=True, help="Fewer warmup forwards (interleaved).")
@click.option("--memory-limit", type=int, help="Activations that a rank may hold (zb-auto) [default: all m].")
@click.option("--csv", "csv_file", metavar="FILE|-", help="Write torch's CSV ('-': to stdout, nothing else).")
@click.option("--with-comms", is_flag=True, help="With sends and receives.")
@click.option("--html", "html_file", type=click.Path(path_type=Path), help="Write a picture as a single HTML file.")
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
