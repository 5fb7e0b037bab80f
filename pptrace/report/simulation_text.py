"""A simulated step as text and tables: its figures, its idle time by cause, and its plan explained action by action."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from msgspec import Struct
from rich.console import Group, RenderableType
from rich.text import Text

from pptrace.model import units
from pptrace.model.report_table import Bar, Cell, ReportTable
from pptrace.report.columns import as_csv
from pptrace.report.text_table import Stripped, render_table
from pptrace.schedule.actions import Action, Key
from pptrace.schedule.needs import needs_of
from pptrace.schedule.plan import Plan
from pptrace.schedule.replay import Timed
from pptrace.simulator import IdleCause, IdlePart, Simulation, idle_by_cause, idle_parts

_MOST_RANKS = 16

MEANINGS: Mapping[IdleCause, str] = {
    IdleCause.FILL: "nothing has come yet",
    IdleCause.WARMUP: "waits for an input until its first backward",
    IdleCause.STEADY: "waits for an input in between",
    IdleCause.COOLDOWN: "waits for an input after its last forward",
    IdleCause.DRAIN: "has nothing left",
    IdleCause.MESSAGE: "its input is on its way",
    IdleCause.ORDER: "another of its actions could have run, in no more memory",
}


def idle_table(simulation: Simulation, written: Callable[[int], str], unit: str) -> ReportTable | None:
    """Idle time by cause, a row for each rank (of many, some) and one for all; None where no rank is idle.

    ``written`` gives a time in ns as text, in the unit that the heads name.
    """
    of_ranks = idle_by_cause(simulation)
    total = {cause: sum(of_rank[cause] for of_rank in of_ranks) for cause in IdleCause}
    causes = [cause for cause in IdleCause if total[cause]]
    if not causes:
        return None
    ranks: Sequence[int] = range(len(of_ranks))
    if len(ranks) > _MOST_RANKS:  # the first and the last among them
        ranks = [index * (len(ranks) - 1) // (_MOST_RANKS - 1) for index in range(_MOST_RANKS)]
    labelled = [*((str(rank), of_ranks[rank]) for rank in ranks), ("all", total)]
    rows = tuple(
        (label, *(written(of_row[cause]) for cause in causes), written(sum(of_row.values())))
        for label, of_row in labelled
    )
    notes = [f"{cause}: {MEANINGS[cause]}" for cause in causes]
    left_out = len(of_ranks) - len(ranks)
    notes = ["; ".join(notes), *([f"… {left_out} more ranks"] if left_out else [])]
    columns = ("rank", *(str(cause) for cause in causes), "bubble")
    return ReportTable("idle", f"Idle by cause, {unit}", columns, rows, tuple(notes))


class Explained(Struct, frozen=True):
    """A stretch of a rank's time: an action with what it needed, or idle time (``runs`` is "") with its cause and why."""

    rank: int
    start_ns: int
    end_ns: int
    runs: str
    needs: str = ""
    cause: str = ""
    why: str = ""


_Ended = Mapping[Key, tuple[int, Timed]]
"""The rank and the time of each action."""


def explain_plan(simulation: Simulation, written: Callable[[int], str]) -> tuple[tuple[Explained, ...], ...]:
    """The whole step of each rank: what runs, what that needed, and why nothing runs; ``written`` gives ns as text."""
    ended: _Ended = {
        half.key: (rank, timed)
        for rank, of_rank in enumerate(simulation.ranks)
        for timed in of_rank.timeline
        for half in timed.action.halves
    }

    def needs(action: Action) -> str:
        """The actions whose outputs an action reads, with rank and end."""
        found = [ended[key] for keys in needs_of(simulation.plan, action) for key in keys if key in ended]
        return ", ".join(f"{timed.action} (rank {rank}, ended {written(timed.end)})" for rank, timed in found)

    explained = []
    for rank, parts in enumerate(idle_parts(simulation)):
        of_rank = [
            Explained(rank, timed.start, timed.end, str(timed.action), needs(timed.action))
            for timed in simulation.ranks[rank].timeline
        ]
        for part in parts:
            why = _why(part, ended, written)
            of_rank.append(Explained(rank, part.start_ns, part.end_ns, "", cause=str(part.cause), why=why))
        explained.append(tuple(sorted(of_rank, key=lambda part: (part.start_ns, part.end_ns))))
    return tuple(explained)


def _why(part: IdlePart, ended: _Ended, written: Callable[[int], str]) -> str:
    if part.other is None:
        return "has run all its actions" if part.before is None else f"{part.before} begins later"
    rank, timed = ended[part.other.halves[0].key]
    if part.cause is IdleCause.ORDER:
        return f"{part.other} could have run before {part.before}: its inputs are there, and it needs no more memory"
    if part.cause is IdleCause.MESSAGE:
        return f"{part.before} waits for the output of {part.other}, on its way from rank {rank} since {written(timed.end)}"
    return f"{part.before} waits for {part.other} on rank {rank}, which ends at {written(timed.end)}"


def explained_csv(explained: Sequence[Sequence[Explained]], written: Callable[[int], str]) -> str:
    """The same as CSV, one row per stretch of time."""
    parts = [*chain.from_iterable(explained)]
    times = {"from": [written(part.start_ns) for part in parts], "to": [written(part.end_ns) for part in parts]}
    words = {name: [getattr(part, name) for part in parts] for name in ("runs", "needs", "cause", "why")}
    return as_csv({"rank": [part.rank for part in parts], **times, **words})


def explained_table(of_rank: Sequence[Explained], written: Callable[[int], str]) -> ReportTable:
    """One rank's stretches of time as a table."""
    rows = tuple(
        (
            written(part.start_ns),
            written(part.end_ns),
            part.runs or "–",
            f"needs {part.needs}" if part.needs else f"{part.cause}: {part.why}" if part.cause else "",
        )
        for part in of_rank
    )
    rank = of_rank[0].rank
    return ReportTable(f"rank-{rank}", f"Rank {rank}", ("from", "to", "runs", ""), rows, num_labels=3)


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
