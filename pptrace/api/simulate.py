"""A schedule on paper: a name of the catalogue, a CSV of actions or a plan, with costs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from pptrace.api.arguments import require_number, require_type, require_whole
from pptrace.api.exports import ExportsOps
from pptrace.api.files import FilePath, text_or_file
from pptrace.errors import UsageError
from pptrace.schedule import registry
from pptrace.schedule.actions import Kind
from pptrace.schedule.plan import Plan
from pptrace.schedule.shape import OpCosts, Shape
from pptrace.schedule.text import to_csv
from pptrace.schedule.validate import read_sound_csv, validate
from pptrace.simulator import Costs, Simulation, idle_parts, uniform
from pptrace.simulator import simulate as run_on_paper

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

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

    @property
    def ops(self) -> pd.DataFrame:
        """One row per action, with the columns of :attr:`pptrace.Run.ops`; ``source`` is simulated."""
        return _a_copy(self._ops)

    @cached_property
    def _ops(self) -> pd.DataFrame:
        return self.simulation.ops()

    @property
    def ranks(self) -> pd.DataFrame:
        """One row per rank: ``rank``, ``compute_ns``, ``bubble_ns``, ``peak_inflight_microbatches``.

        The last counts activations of one chunk and one microbatch that the rank holds at once.
        """
        return _a_copy(self._ranks)

    @cached_property
    def _ranks(self) -> pd.DataFrame:
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

    def figure(self, extent_ns: int | None = None) -> go.Figure:
        """The timeline as a plotly figure, in ms; ``extent_ns`` is how much of time to show, to compare two at one scale."""
        from pptrace.report.figures import timeline

        if extent_ns is not None:
            require_whole("extent_ns", extent_ns, 1)
        return timeline(self._ops, extent_ns=extent_ns)

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


def simulate(
    schedule: FilePath | Plan,
    *,
    pp: int | None = None,
    microbatches: int | None = None,
    chunks: int | None = None,
    group_size: int | None = None,
    lean: bool = False,
    memory_limit: int | None = None,
    forward: float = 1.0,
    backward: float = 2.0,
    wgrad: float | None = None,
    p2p: float = 0.0,
) -> SimulatedStep:
    """Run a schedule on paper: what ``pptrace simulate`` shows.

    Costs are milliseconds of one action: one chunk, one microbatch. Each action starts as soon as its rank is free and its
    inputs have arrived; messages overlap compute.

        >>> import pptrace
        >>> pptrace.simulate("1f1b", pp=4, microbatches=8).bubble_ratio  # (p−1)/m
        0.375
        >>> pptrace.simulate("interleaved-1f1b", pp=4, microbatches=8, chunks=2, forward=0.5, backward=1.0).bubble_ratio
        0.1875

    Args:
        schedule: a key of ``pptrace.schedules``, a CSV file of actions, or a plan (as
            :meth:`pptrace.schedule.registry.Schedule.build` makes it). The sizes below belong to a name; a file or a plan has
            its own.
        pp: pipeline ranks.
        microbatches: microbatches per step.
        chunks: virtual stages per rank; None takes the schedule's own.
        group_size: microbatch group size per virtual stage (interleaved schedules); None takes pp.
        lean: fewer warmup forwards (interleaved schedules).
        memory_limit: activations that a rank may hold (zb-auto); None takes all.
        forward: cost of one F, ms.
        backward: cost of one full B, ms.
        wgrad: W's part of a full B, ms; None takes half of it.
        p2p: cost of one message, ms.

    Raises:
        PptraceError: an unknown schedule, a size that it does not have, a file or plan that deadlocks; the message is one line.
    """
    sizes = Sizes(pp, microbatches, chunks, group_size, lean, memory_limit)
    return simulate_as(schedule, sizes, MillisecondCosts(forward, backward, wgrad, p2p))


@dataclass(frozen=True, slots=True)
class Sizes:
    """Size of a plan as a user gives it: the arguments of :func:`simulate` of the same names."""

    pp: int | None = None
    microbatches: int | None = None
    chunks: int | None = None
    group_size: int | None = None
    lean: bool = False
    memory_limit: int | None = None

    def require_whole(self, spell: Spelling) -> None:
        """Refuse sizes that no plan has.

        Raises:
            UsageError: one is no whole number of at least 1.
        """
        for name in ("pp", "microbatches", "chunks", "group_size", "memory_limit"):
            if (size := getattr(self, name)) is not None:
                require_whole(spell(name), size, 1)


@dataclass(frozen=True, slots=True)
class MillisecondCosts:
    """Costs as a user gives them, ms: the arguments of :func:`simulate` of the same names."""

    forward: float = 1.0
    backward: float = 2.0
    wgrad: float | None = None
    p2p: float = 0.0


Spelling = Callable[[str], str]
"""Spelling of an argument by its name: ``group_size`` in Python, ``--group-size`` on the command line."""


def simulate_as(
    schedule: FilePath | Plan, sizes: Sizes, costs: MillisecondCosts, spell: Spelling = str
) -> SimulatedStep:
    """:func:`simulate`, with the names of arguments in messages as ``spell`` has them."""
    require_type(
        "schedule", schedule, (str, os.PathLike, Plan), "a name of pptrace.schedules, a CSV file of actions or a plan"
    )
    known = _costs(costs, spell)
    sizes.require_whole(spell)
    if not isinstance(schedule, Plan) and not _is_file(schedule):
        name = str(schedule)
        shape = _shape(name, sizes, known, spell)
        return SimulatedStep(run_on_paper(registry.get(name).build_shape(shape), known), shape)
    if isinstance(schedule, Plan):
        plan, what = schedule, ("plan", schedule.name)
        validate(plan)
    else:
        plan, what = read_sound_csv(Path(schedule)), ("file", str(schedule))
    _require_no_other_size(*what, plan, sizes, spell)
    return SimulatedStep(run_on_paper(plan.compute_only(), known))


def _a_copy(table: pd.DataFrame) -> pd.DataFrame:
    from pptrace.api.copies import a_copy  # with pandas

    return a_copy(table)


def _is_file(schedule: FilePath) -> bool:
    if not isinstance(schedule, str):
        return True
    return schedule not in registry.SCHEDULES and (schedule.endswith(".csv") or Path(schedule).is_file())


def _costs(costs: MillisecondCosts, spell: Spelling) -> Costs:
    def nanoseconds(name: str) -> int:
        milliseconds: float = getattr(costs, name)
        require_number(spell(name), milliseconds, "milliseconds", MOST_MS)
        return round(milliseconds * NS_PER_MS)

    if costs.wgrad is not None and nanoseconds("wgrad") > nanoseconds("backward"):
        raise UsageError(
            f"{spell('wgrad')} is {costs.wgrad:g}; it is a part of {spell('backward')}, so expected at most {costs.backward:g}"
        )
    return uniform(
        forward_ns=nanoseconds("forward"),
        backward_ns=nanoseconds("backward"),
        wgrad_ns=None if costs.wgrad is None else nanoseconds("wgrad"),
        p2p_ns=nanoseconds("p2p"),
    )


def _shape(name: str, sizes: Sizes, costs: Costs, spell: Spelling) -> Shape:
    registry.get(name)
    if sizes.pp is None or sizes.microbatches is None:
        missing = spell("pp" if sizes.pp is None else "microbatches")
        raise UsageError(
            f"simulate {name}: {missing} is not given; a named schedule needs {spell('pp')} and {spell('microbatches')}"
        )
    return registry.shape_for(
        name,
        sizes.pp,
        sizes.microbatches,
        sizes.chunks,
        sizes.group_size,
        sizes.lean,
        sizes.memory_limit,
        OpCosts(costs.kinds[Kind.F], costs.kinds[Kind.I], costs.kinds[Kind.W], costs.p2p_latency_ns),
    )


def _require_no_other_size(what: str, name: str, plan: Plan, sizes: Sizes, spell: Spelling) -> None:
    """Refuse sizes that do not fit a plan (a ``what`` of that name) which has its own."""
    for argument, given, size in (
        ("pp", sizes.pp, plan.pp),
        ("microbatches", sizes.microbatches, plan.num_microbatches),
        ("chunks", sizes.chunks, plan.num_chunks),
    ):
        if given is not None and given != size:
            raise UsageError(
                f"{name}: {spell(argument)} {given} does not fit the {what}, which has {size}; leave the option away"
            )
    for argument, is_given in (
        ("group_size", sizes.group_size is not None),
        ("lean", sizes.lean),
        ("memory_limit", sizes.memory_limit is not None),
    ):
        if is_given:
            raise UsageError(f"{name}: {spell(argument)} does not change a {what}; leave the option away")
