"""A schedule on paper: a name of the catalogue, a CSV of actions or a plan, with costs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from pptrace.api.copies import CopiedTable
from pptrace.api.files import ExportsOps, FilePath, TimelinePicture, text_or_file
from pptrace.api.options import (
    Value,
    argument,
    option,
    options_of,
    require_number,
    require_type,
    require_whole,
    takes_options,
)
from pptrace.errors import UsageError
from pptrace.schedule import registry
from pptrace.schedule.plan import Plan
from pptrace.schedule.shape import Shape
from pptrace.schedule.text import to_csv
from pptrace.schedule.validate import read_sound_csv, validate
from pptrace.simulator import Costs, Simulation, idle_parts, uniform
from pptrace.simulator import simulate as run_on_paper

if TYPE_CHECKING:
    import pandas as pd

NS_PER_MS = 1e6
MOST_MS = 1e9


@dataclass(frozen=True, eq=False)
class SimulatedStep(ExportsOps):
    """Result of :func:`simulate`: one step of a schedule. Time starts at 0 with the first action."""

    simulation: Simulation
    shape: Shape | None = None
    """Arguments of the schedule's builder; None for a CSV or a plan."""

    @property
    def plan(self) -> Plan:
        """Plan of each rank, without sends and receives; printed, it is a grid."""
        return self.simulation.plan

    @property
    def makespan_ns(self) -> int:
        """Time from the first action's start to the last one's end, ns."""
        return self.simulation.makespan_ns

    @property
    def bubble_ratio(self) -> float:
        """Bubble over compute, all ranks together (Megatron's t_pb / t_id)."""
        return self.simulation.bubble_ratio

    @property
    def bubble_share(self) -> float:
        """Bubble over the whole step, all ranks together."""
        return self.simulation.bubble_share

    @CopiedTable
    def ops(self) -> pd.DataFrame:
        """One row per action, with the columns of :attr:`pptrace.Run.ops`; ``source`` is simulated."""
        return self.simulation.ops()

    @CopiedTable
    def ranks(self) -> pd.DataFrame:
        """One row per rank: ``rank``, ``compute_ns``, ``bubble_ns``, ``peak_inflight_microbatches``.

        The last counts activations of one chunk and one microbatch that the rank holds at once.
        """
        import pandas as pd

        columns = ("rank", "compute_ns", "bubble_ns", "peak_inflight_microbatches")
        ranks = self.simulation.ranks
        return pd.DataFrame(
            {name: pd.array([getattr(rank, name) for rank in ranks], dtype="int64") for name in columns}
        )

    @property
    def idle(self) -> pd.DataFrame:
        """One row per stretch of a rank's idle time with one cause; of a rank they sum to its bubble.

        ``rank``, ``start_ns``, ``end_ns``, ``cause`` (fill, warmup, steady, cooldown, drain, message or order), ``before`` (the
        action that runs next, "" at the end), ``other`` (that it waited for; of ``order`` the one that could have run) and
        ``other_rank``.
        """
        import pandas as pd

        columns = ("rank", "start_ns", "end_ns", "cause", "before", "other", "other_rank")
        parts = chain.from_iterable(idle_parts(self.simulation))
        rows = [[getattr(part, name) for name in columns] for part in parts]
        table = pd.DataFrame(rows, columns=list(columns)).astype({"other_rank": "Int64"})
        actions = {name: table[name].map(lambda action: str(action or "")) for name in ("cause", "before", "other")}
        return table.assign(**actions)

    def timeline(self, extent_ns: int | None = None) -> TimelinePicture:
        """The step in time, as a notebook shows it; ``extent_ns`` is how much of time to show, to compare two at one scale."""
        from pptrace.report.html import timeline_page
        from pptrace.report.tiles.inline import inline_simulation

        if extent_ns is not None:
            require_whole("extent_ns", extent_ns, 1)
        extent_ns = extent_ns or 0
        timeline = inline_simulation(self.simulation, extent_ns)
        return TimelinePicture(self.plan.name, timeline_page(self.plan.name, timeline, extent_ns))

    def _json_object(self, with_ops: bool) -> dict[str, Any]:
        from pptrace.report.to_json import simulation_object

        return simulation_object(self.simulation, with_ops)

    def _page(self) -> str:
        from pptrace.report.html import simulation_page

        return simulation_page(self.simulation)

    @overload
    def to_csv(self, path: None = None) -> str: ...
    @overload
    def to_csv(self, path: FilePath) -> None: ...
    def to_csv(self, path: FilePath | None = None) -> str | None:
        """The plan as the CSV of actions that torch.distributed.pipelining reads, as text or written to a file.

        Raises:
            PptraceError: the file cannot be written.
        """
        return text_or_file(to_csv(self.plan), path)

    def __repr__(self) -> str:
        plan = self.plan
        size = f"{plan.name}, pp={plan.pp}, num_microbatches={plan.num_microbatches}, num_chunks={plan.num_chunks}"
        return f"<pptrace.SimulatedStep: {size}, {self.makespan_ns / NS_PER_MS:g} ms, bubble ratio {self.bubble_ratio:.4f}>"

    def _repr_html_(self) -> str:
        from pptrace.api.summary import simulation_summary

        return simulation_summary(self.simulation)


Spelling = Callable[[str], str]
"""Spelling of an argument by its name: ``group_size`` in Python, ``--group-size`` on the command line."""


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """Sizes and costs of a schedule on paper, as a user gives them."""

    schedule: FilePath | Plan = argument(
        "A key of pptrace.schedules, a CSV file of actions, or a plan (as pptrace.schedule.registry.Schedule.build makes it); a "
        "file or a plan has its own sizes."
    )
    _: KW_ONLY
    pp: int | None = option(None, Value.WHOLE, "Pipeline ranks (default of a CSV: its number).", "P", label="p")
    microbatches: int | None = option(
        None, Value.WHOLE, "Microbatches per step (default of a CSV: its number).", "M", label="m"
    )
    chunks: int | None = option(None, Value.WHOLE, "Virtual stages per rank [default: the schedule's].", "V", label="v")
    group_size: int | None = option(
        None, Value.WHOLE, "Microbatch group size per virtual stage (interleaved) [default: p].", "N"
    )
    lean: bool = option(False, Value.FLAG, "Fewer warmup forwards (interleaved).")
    memory_limit: int | None = option(None, Value.WHOLE, "Activations that a rank may hold (zb-auto) [default: all m].")
    forward: float = option(
        1.0,
        Value.MILLISECONDS,
        "Cost of one F.",
        "MS",
        label="F ms",
        hint="forward of one microbatch in all layers of a rank",
    )
    backward: float = option(
        2.0, Value.MILLISECONDS, "Cost of one full B.", "MS", label="B ms", hint="full backward of the same"
    )
    wgrad: float | None = option(None, Value.MILLISECONDS, "W's part of a full B [default: half of it].", "MS")
    p2p: float = option(0.0, Value.MILLISECONDS, "Cost of one message.", "MS", label="message ms")

    def require_sizes(self, spell: Spelling = str) -> None:
        """Refuse sizes that no plan has.

        Raises:
            UsageError: one is no whole number of at least 1.
        """
        for name, one in options_of(SimulateOptions).items():
            if one.takes is Value.WHOLE and (size := getattr(self, name)) is not None:
                require_whole(spell(name), size, 1)

    def shape(self, spell: Spelling = str, costs: Costs | None = None) -> Shape:
        """The size of the plan of a named schedule; ``costs`` are for those that are searched.

        Raises:
            PptraceError: the schedule is unknown, a size is missing, or it has no plan of these.
        """
        name = str(self.schedule)
        registry.get(name)
        if self.pp is None or self.microbatches is None:
            missing = spell("pp" if self.pp is None else "microbatches")
            raise UsageError(
                f"simulate {name}: {missing} is not given; a named schedule needs {spell('pp')} and {spell('microbatches')}"
            )
        sizes = (self.pp, self.microbatches, self.chunks, self.group_size, self.lean, self.memory_limit)
        return registry.shape_for(name, *sizes, None if costs is None else costs.of_search)


@takes_options(SimulateOptions)
def simulate(options: SimulateOptions) -> SimulatedStep:
    """Run a schedule on paper: what ``pptrace simulate`` shows.

    Costs are milliseconds of one action: one chunk, one microbatch. Each action starts as soon as its rank is free and its
    inputs have arrived; messages overlap compute.

        >>> import pptrace
        >>> pptrace.simulate("1f1b", pp=4, microbatches=8).bubble_ratio  # (p−1)/m
        0.375
        >>> pptrace.simulate("interleaved-1f1b", pp=4, microbatches=8, chunks=2, forward=0.5, backward=1.0).bubble_ratio
        0.1875

    Raises:
        PptraceError: an unknown schedule, a size that it does not have, a file or plan that deadlocks; the message is one line.
    """
    return simulate_as(options)


def simulate_as(options: SimulateOptions, spell: Spelling = str) -> SimulatedStep:
    """:func:`simulate`, with the names of arguments in messages as ``spell`` has them."""
    schedule = options.schedule
    require_type(
        "schedule", schedule, (str, os.PathLike, Plan), "a name of pptrace.schedules, a CSV file of actions or a plan"
    )
    costs = _costs(options, spell)
    options.require_sizes(spell)
    if isinstance(schedule, str) and (
        schedule in registry.SCHEDULES or not (schedule.endswith(".csv") or Path(schedule).is_file())
    ):
        shape = options.shape(spell, costs)
        return SimulatedStep(run_on_paper(registry.get(schedule).build_shape(shape), costs), shape)
    if isinstance(schedule, Plan):
        plan, what = schedule, ("plan", schedule.name)
        validate(plan)
    else:
        plan, what = read_sound_csv(Path(schedule)), ("file", str(schedule))
    _require_no_other_size(*what, plan, options, spell)
    return SimulatedStep(run_on_paper(plan.compute_only(), costs))


def _costs(options: SimulateOptions, spell: Spelling) -> Costs:
    costs_ns: dict[str, Any] = {}
    for name in ("forward", "backward", "wgrad", "p2p"):
        milliseconds = getattr(options, name)
        if milliseconds is not None or name != "wgrad":
            require_number(spell(name), milliseconds, "milliseconds", MOST_MS)
            costs_ns[f"{name}_ns"] = round(milliseconds * NS_PER_MS)
    if costs_ns.get("wgrad_ns", 0) > costs_ns["backward_ns"]:
        raise UsageError(
            f"{spell('wgrad')} is {options.wgrad:g}; it is a part of {spell('backward')}, "
            f"so expected at most {options.backward:g}"
        )
    return uniform(**costs_ns)


def _require_no_other_size(what: str, name: str, plan: Plan, sizes: SimulateOptions, spell: Spelling) -> None:
    """Refuse sizes that do not fit a plan (a ``what`` of that name) which has its own."""
    for size_name, given, size in (
        ("pp", sizes.pp, plan.pp),
        ("microbatches", sizes.microbatches, plan.num_microbatches),
        ("chunks", sizes.chunks, plan.num_chunks),
    ):
        if given is not None and given != size:
            raise UsageError(
                f"{name}: {spell(size_name)} {given} does not fit the {what}, which has {size}; leave the option away"
            )
    for size_name, is_given in (
        ("group_size", sizes.group_size is not None),
        ("lean", sizes.lean),
        ("memory_limit", sizes.memory_limit is not None),
    ):
        if is_given:
            raise UsageError(f"{name}: {spell(size_name)} does not change a {what}; leave the option away")
