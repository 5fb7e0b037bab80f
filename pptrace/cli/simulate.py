"""``pptrace simulate``: a schedule with costs, simulated; or a sweep over many."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from pptrace.api.simulate import MillisecondCosts, Sizes
from pptrace.cli.numbers import WHOLE, plain
from pptrace.cli.output import Outputs, option
from pptrace.cli.paths import GIVEN_PATH
from pptrace.cli.schedule import optimality_line, simulate_or_draw
from pptrace.errors import UsageError
from pptrace.garbage import paused_gc
from pptrace.report.text import simulation_table

EVERY = "all"


@click.command(name="simulate")
@click.argument("schedule", metavar="NAME|CSV")
@click.option("--sweep", is_flag=True, help="Table of all combinations of the values given.")
@click.option("--pp", metavar="P", help="Pipeline ranks (default of a CSV: its number).")
@click.option("--microbatches", metavar="M", help="Microbatches per step (default of a CSV: its number).")
@click.option("--chunks", metavar="V", help="Virtual stages per rank [default: the schedule's].")
@click.option("--group-size", metavar="N", help="Microbatch group size per virtual stage (interleaved) [default: p].")
@click.option("--lean", is_flag=True, help="Fewer warmup forwards (interleaved).")
@click.option("--memory-limit", type=WHOLE, help="Activations that a rank may hold (zb-auto) [default: all m].")
@click.option("--forward", default="1.0", show_default=True, metavar="MS", help="Cost of one F.")
@click.option("--backward", default="2.0", show_default=True, metavar="MS", help="Cost of one full B.")
@click.option("--wgrad", metavar="MS", help="W's part of a full B [default: half of it].")
@click.option("--p2p", default="0.0", show_default=True, metavar="MS", help="Cost of one message.")
@click.option(
    "--costs-of",
    type=click.Choice(["rank", "model", "action"]),
    help="In a sweep: costs are those of all layers of a rank, of the whole model, or of one action [default: rank].",
)
@click.option(
    "--csv",
    "csv_file",
    metavar="FILE|-",
    help="Write the plan as torch's CSV; of a sweep, its points ('-': to stdout, nothing else).",
)
@click.option("--json", "json_file", metavar="FILE|-", help="Write JSON ('-': to stdout, nothing else).")
@click.option("--ops", "with_ops", is_flag=True, help="Put every op into the JSON.")
@click.option("--html", "html_file", type=GIVEN_PATH, help="Write a picture as a single HTML file.")
def command(schedule: str, **options: Any) -> None:
    """Simulate a schedule: a name of the catalogue, or a CSV of actions.

    Costs are those of one action: one stage's chunk, one microbatch.

    With --sweep, sizes, costs and NAME may have several values, and every combination is simulated: NAME,NAME or all;
    2,4,8; 8..64:8 (steps of 8); 8..64:x2 (doubling); of microbatches also multiples of p, as p-1 or 4p.

    \b
    pptrace simulate 1f1b,interleaved-1f1b,zb-h1 --sweep --pp 8 --microbatches 8..64:8 --chunks 1,2,4
    """
    chosen = SimulateOptions(**options)
    if chosen.sweep:
        _sweep(schedule, chosen)
        return
    with paused_gc():
        _simulate_and_write(schedule, chosen)


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """The options of ``pptrace simulate``, as click parses them: sizes and costs (ms) as text, since they may be several."""

    sweep: bool
    pp: str | None
    microbatches: str | None
    chunks: str | None
    group_size: str | None
    lean: bool
    memory_limit: int | None
    forward: str
    backward: str
    wgrad: str | None
    p2p: str
    costs_of: str | None
    csv_file: str | None
    json_file: str | None
    with_ops: bool
    html_file: Path | None

    @property
    def sizes(self) -> Sizes:
        pp, microbatches, chunks, group_size = map(self._whole, ("pp", "microbatches", "chunks", "group_size"))
        return Sizes(pp, microbatches, chunks, group_size, self.lean, self.memory_limit)

    @property
    def costs(self) -> MillisecondCosts:
        wgrad = None if self.wgrad is None else self._number("wgrad")
        return MillisecondCosts(self._number("forward"), self._number("backward"), wgrad, self._number("p2p"))

    @property
    def outputs(self) -> Outputs:
        return Outputs({"--csv": self.csv_file, "--json": self.json_file, "--html": self.html_file})

    def _whole(self, name: str) -> int | None:
        text: str | None = getattr(self, name)
        try:
            return None if text is None else int(plain(text))
        except ValueError:
            raise self._several(name, "a whole number") from None

    def _number(self, name: str) -> float:
        try:
            return float(plain(getattr(self, name)))
        except ValueError:
            raise self._several(name, "a number") from None

    def _several(self, name: str, expected: str) -> UsageError:
        """The error of an option that is no single number."""
        text = str(getattr(self, name))
        hint = ", or --sweep for several values" if any(mark in text for mark in (",", "..", "p")) else ""
        return UsageError(f"{option(name)} is {text!r}; expected {expected}{hint}")


def _simulate_and_write(schedule: str, options: SimulateOptions) -> None:
    outputs = options.outputs
    if schedule == EVERY or ("," in schedule and not Path(schedule).is_file()):
        raise UsageError(f"{schedule}: several schedules make a table; add --sweep")
    if options.costs_of not in (None, "action"):
        raise UsageError(f"--costs-of {options.costs_of} needs --sweep; a single simulation has costs of one action")
    step = simulate_or_draw(schedule, options.sizes, options.costs, outputs)
    outputs.write({"--csv": step.to_csv, "--json": lambda: step.to_json(ops=options.with_ops), "--html": step.to_html})
    if not outputs.take_stdout:
        console = Console(width=None if Console().is_terminal else 140, highlight=False)
        console.print(simulation_table(step.simulation, console.width))
        if step.shape is not None and (note := optimality_line(schedule, step.plan, step.shape)):
            console.print(note)


def _sweep(schedules: str, options: SimulateOptions) -> None:
    from pptrace.api.sweep import SweepArguments
    from pptrace.cli.sweep import sweep_and_write

    for name, is_given in (("lean", options.lean), ("ops", options.with_ops)):
        if is_given:
            raise UsageError(f"--sweep: {option(name)} belongs to a single simulation; leave it away")
    asked = {entry.name: getattr(options, entry.name) for entry in fields(SweepArguments)}
    sweep_and_write(schedules, SweepArguments(**asked | {"costs_of": options.costs_of or "rank"}), options.outputs)
