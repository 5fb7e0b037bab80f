"""A simulated step for a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from pptrace.model import units
from pptrace.report.idle import idle_table
from pptrace.report.tables import Bar, Cell, ReportTable
from pptrace.report.text_table import Stripped, render_table
from pptrace.schedule.plan import Plan
from pptrace.simulator import Simulation


def simulation_table(simulation: Simulation, width: int) -> RenderableType:
    """A simulated step, a row per rank, in at most ``width`` columns of text."""
    plan = simulation.plan
    head = Text.assemble(
        (plan.name, "bold"),
        f": {plan_size(plan)} · "
        f"{units.milliseconds(simulation.makespan_ns)} ms · bubble ratio {units.ratio(simulation.bubble_ratio)}, "
        f"share {units.percent(simulation.bubble_share)}",
    )
    rows: list[tuple[Cell, ...]] = []
    for rank in simulation.ranks:
        parts = (("compute", rank.compute_ns), ("bubble", rank.bubble_ns))
        bar = Bar(tuple((name, ns / simulation.makespan_ns) for name, ns in parts))
        times = (units.milliseconds(ns) for _, ns in parts)
        share = units.percent(rank.bubble_ns / simulation.makespan_ns)
        rows.append((str(rank.rank), *times, share, str(rank.peak_inflight_microbatches), bar))
    columns = ("rank", "compute ms", "bubble ms", "bubble share", "peak in flight", "")
    tables = [ReportTable("ranks", "Ranks", columns, tuple(rows)), idle_table(simulation, units.milliseconds, "ms")]
    return Stripped(Group(head, *(render_table(table, width) for table in tables if table is not None)))


def plan_size(plan: Plan) -> str:
    """p, m and v of a plan as text."""
    ranks, chunks = units.counted(plan.pp, "rank"), units.counted(plan.num_chunks, "chunk")
    return f"{ranks}, {units.counted(plan.num_microbatches, 'microbatch', 'microbatches')}, {chunks} per rank"
