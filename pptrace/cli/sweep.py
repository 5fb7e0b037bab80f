"""``pptrace simulate --sweep``: every combination of schedules, sizes and costs, as a table, a page or columns."""

from __future__ import annotations

from rich.console import Console

from pptrace.api.sweep import SweepOptions, grid_of
from pptrace.cli.counting_bar import counting_bar
from pptrace.cli.output import Outputs, option
from pptrace.errors import UsageError
from pptrace.model.wording import counted
from pptrace.report.sweep.columns import sweep_csv, sweep_object
from pptrace.report.sweep.table import sweep_text
from pptrace.report.to_json import dump
from pptrace.simulator.sweep.run import Sweep, run_sweep


def sweep_and_write(options: SweepOptions, outputs: Outputs) -> None:
    """Simulate what is asked for, write the outputs, and print the table where none of them is stdout.

    Raises:
        UsageError: no combination has a plan; the outputs, which say why of each, are there.
    """
    grid = grid_of(options, option)
    with counting_bar("simulated") as on_count:
        swept = run_sweep(grid, on_count and (lambda num_done: on_count(num_done, grid.num_points)))
    outputs.write(
        {
            "--csv": lambda: sweep_csv(swept),
            "--json": lambda: dump(sweep_object(swept)),
            "--html": lambda: _page(swept),
        }
    )
    if not outputs.take_stdout:
        console = Console(width=None if Console().is_terminal else 140, highlight=False)
        console.print(sweep_text(swept, console.width))
    if not swept.simulated:
        size = counted(len(swept.refused), "combination")
        raise UsageError(f"--sweep: none of {size} has a plan, such as {swept.refused[0].refused}; give other sizes")


def _page(swept: Sweep) -> str:
    from pptrace.report.html import sweep_page  # with plotly

    return sweep_page(swept)
