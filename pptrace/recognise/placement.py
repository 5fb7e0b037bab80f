"""Which stage, chunk and microbatch the ops and messages of a run are of, where its labels leave that open.

Only when the ranks are joined is it known which place in its pipeline a rank has. Labels that name a chunk leave two readings:
chunk c of rank r is stage c·p + r (a loop), or it lies on a zigzag, which for two chunks is a V. Labels that name nothing leave
it to order: the kinds of a rank's ops, in order, are compared with those of each schedule of the registry.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import pandas as pd

from pptrace.errors import ScheduleError
from pptrace.recognise.fit import fit
from pptrace.recognise.mesh import MeshInfo
from pptrace.recognise.schedule import COMPUTE_KINDS, identify
from pptrace.schedule import registry
from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.plan import Plan
from pptrace.schedule.replay import replay
from pptrace.schedule.text import from_rows

Layout = Callable[[int, int, int], int]
"""(chunk, pipeline rank, p) → stage."""


@dataclass(frozen=True, slots=True)
class Placed:
    """The tables with their stages, the mesh with its number of chunks, and what was taken from what."""

    ops: pd.DataFrame
    comms: pd.DataFrame
    mesh: MeshInfo
    notes: tuple[str, ...] = ()


def loop(chunk: int, rank: int, pp: int) -> int:
    return chunk * pp + rank


def zigzag(chunk: int, rank: int, pp: int) -> int:
    return chunk * pp + (pp - 1 - rank if chunk % 2 else rank)


def place(ops: pd.DataFrame, comms: pd.DataFrame, mesh: MeshInfo) -> Placed:
    """Fill in stages below 0 of ops and messages that have a microbatch (:func:`pptrace.recognise.catalogues.unplaced`)."""
    comms = _of_whole_pipelines(ops, comms, mesh)
    lacking = (ops["microbatch"] >= 0) & (ops["stage"] < 0)
    lacking_comms = (comms["microbatch"] >= 0) & (comms["stage"] < 0)
    if not lacking.any() and not lacking_comms.any():
        return Placed(ops, comms, mesh)
    mesh, notes = _regrouped(ops, mesh)
    places = {rank: mesh.pp_rank(rank) or 0 for rank in {*ops["rank"].tolist(), *comms["rank"].tolist()}}
    chunks = int(max(1, -ops.loc[lacking, "stage"].min())) if lacking.any() else 1
    if chunks == 1 and (fitted := _fitted(ops, comms, mesh)) is not None:
        return replace(fitted, notes=(*notes, *fitted.notes))
    if chunks == 1 and (alone := _alone(ops, comms, mesh, lacking)):
        told = f"rank {alone[0]} alone shows messages, not the pipeline they go through: its length and stages are not known"
        return Placed(ops, comms, replace(mesh, pp=None, vpp=None, pipelines=()), (*notes, told))
    pp = mesh.pp or 1
    layout: Layout = loop
    if chunks > 1:
        layout, told = _layout(ops, comms, mesh, chunks)
        notes, mesh = (*notes, told), replace(mesh, vpp=chunks)
    return Placed(_with_stages(ops, places, pp, layout), _with_stages(comms, places, pp, layout), mesh, notes)


def _of_whole_pipelines(ops: pd.DataFrame, comms: pd.DataFrame, mesh: MeshInfo) -> pd.DataFrame:
    """``comms`` without the messages of pipelines of which a rank's own order told none: its messages wait in the calls, where
    the other sides of those of its neighbours are (:mod:`pptrace.recognise.call_comms`).
    """
    inferred = set(ops.loc[(ops["source"] == "inferred") & ops["kind"].isin(COMPUTE_KINDS), "rank"].tolist())
    is_message = (comms["axis"] == "pp") & comms["kind"].isin(("send", "recv"))
    telling = set(comms.loc[is_message, "rank"].tolist())
    broken = [p for p in mesh.pipelines if (own := inferred & set(p)) & telling and own - telling]
    return comms[~(is_message & comms["rank"].isin([rank for p in broken for rank in p]))] if broken else comms


def _alone(ops: pd.DataFrame, comms: pd.DataFrame, mesh: MeshInfo, lacking: pd.Series[bool]) -> list[int]:
    """The one rank of a run whose ops lie between messages to ranks that nothing tells; [] where that is not so."""
    ranks = sorted(set(ops.loc[lacking, "rank"].tolist()))
    is_p2p = comms["kind"].isin(("send", "recv")) & (comms["axis"] == "pp")
    sends = bool((ops.loc[lacking, "source"] == "inferred").any()) or bool(is_p2p.any())
    return ranks if len(ranks) == 1 and (mesh.pp or 1) == 1 and sends else []


def _regrouped(ops: pd.DataFrame, mesh: MeshInfo) -> tuple[MeshInfo, tuple[str, ...]]:
    """The mesh with other pipelines, where its ranks were taken as one for want of process groups but their orders say more.

    Ranks of one pipeline stage run the same kinds of ops in the same order, and those of different stages mostly do not. Where
    ranks have no trace, the order of those that have one may fit only one place in a pipeline.
    """
    if len(mesh.pipelines) != 1 or any(size not in (None, 1) for size in (mesh.tp, mesh.cp, mesh.dp)):
        return mesh, ()
    ranks = mesh.pipelines[0]
    by_place = _kinds_by_place(ops[(ops["microbatch"] >= 0) & (ops["stage"] < 0)], mesh)
    kinds = {ranks[place]: row for place, row in by_place.items()}
    is_partial = mesh.num_ranks > len(ranks)
    if len(kinds) != len(ranks) or max(ranks) >= mesh.num_ranks:
        return mesh, ()
    if not is_partial and (len(ranks) < 4 or fit(len(ranks), by_place) is not None):
        return mesh, ()
    found = list(_readings(kinds, mesh.num_ranks, is_partial))
    fewest = [reading for reading in found if reading.chunks == min(other.chunks for other in found)]
    if not fewest or (is_partial and len({reading.pp for reading in fewest}) > 1):
        return mesh, ()
    chosen = fewest[0]
    share = mesh.num_ranks // chosen.pp
    alone = 1 if share == 1 else None
    pipelines = tuple(zip(*(chosen.stage(place, mesh.num_ranks) for place in range(chosen.pp)), strict=True))
    note = (
        f"{share} pipeline{'s' if share > 1 else ''} of {chosen.pp} ranks, inferred from the order in which the ranks with a "
        f"trace run their ops, with the pipeline as the {'slowest' if chosen.is_slowest else 'fastest'} axis of the ranks"
    )
    return replace(mesh, pp=chosen.pp, tp=alone, cp=alone, dp=alone, ep=alone, pipelines=pipelines), (note,)


@dataclass(frozen=True, slots=True)
class _Reading:
    """A way to cut the ranks into pipelines: of ``pp`` ranks, along the slowest axis (Megatron-LM, DeepSpeed) or the fastest."""

    pp: int
    is_slowest: bool
    chunks: int = 1

    def place(self, rank: int, num_ranks: int) -> int:
        return rank // (num_ranks // self.pp) if self.is_slowest else rank % self.pp

    def stage(self, place: int, num_ranks: int) -> list[int]:
        """The ranks that have this place in their pipelines."""
        return [rank for rank in range(num_ranks) if self.place(rank, num_ranks) == place]


_SAME_ON_ALL_RANKS = ("gpipe", "looped-bfs")


def _readings(kinds: Mapping[int, list[str]], num_ranks: int, is_partial: bool) -> Iterator[_Reading]:
    """The readings that the kinds of ops of these ranks allow, longest pipelines first."""
    for pp in (size for size in range(num_ranks if is_partial else num_ranks // 2, 1, -1) if num_ranks % size == 0):
        for is_slowest in (True, False) if pp < num_ranks else (True,):
            reading = _Reading(pp, is_slowest)
            by_stage = {reading.place(rank, num_ranks): row for rank, row in kinds.items()}
            if any(row != by_stage[reading.place(rank, num_ranks)] for rank, row in kinds.items()):
                continue
            plan = fit(pp, by_stage)
            if plan is not None and not (is_partial and plan.name in _SAME_ON_ALL_RANKS):
                yield replace(reading, chunks=plan.num_chunks)


def _kinds_by_place(ops: pd.DataFrame, mesh: MeshInfo) -> dict[int, list[str]]:
    """The kinds of ops of each rank of a pipeline in its most complete step, by the rank's place."""
    steps = _steps(ops, mesh)
    if not steps:
        return {}
    pipeline, rows = max(steps, key=lambda step: sum(map(len, step[1].values())))
    return {pipeline.index(rank): [op.kind for op in row] for rank, row in rows.items()}


_NEGATIVE = re.compile(r"-\d+(?=[FBI])")


def _with_stages(table: pd.DataFrame, places: Mapping[int, int], pp: int, layout: Layout) -> pd.DataFrame:
    lacking = (table["microbatch"] >= 0) & (table["stage"] < 0)
    if not lacking.any():
        return table
    filled, own = table.copy(), table[lacking]
    chunk = -1 - own["stage"]
    filled.loc[lacking, "stage"] = [
        layout(c, places[rank], pp) for c, rank in zip(chunk.tolist(), own["rank"].tolist(), strict=True)
    ]
    if "chunk" in table:
        filled.loc[lacking, "chunk"] = chunk
        pairs = own["pair"] != ""
        for index, text, rank in zip(own.index[pairs], own.loc[pairs, "pair"], own.loc[pairs, "rank"], strict=True):
            filled.at[index, "pair"] = _placed_pair(text, places[rank], pp, layout)
    return filled


def _placed_pair(text: str, rank: int, pp: int, layout: Layout) -> str:
    """An overlapped pair as text, with the stages of its halves."""
    return _NEGATIVE.sub(lambda match: str(layout(-1 - int(match[0]), rank, pp)), text)


def _layout(ops: pd.DataFrame, comms: pd.DataFrame, mesh: MeshInfo, chunks: int) -> tuple[Layout, str]:
    """Loop or zigzag: by the registry's plan that the order follows, else by the messages, else by what can run to its end."""
    plans = {name: _plan_of(ops, mesh, layout) for name, layout in (("loop", loop), ("zigzag", zigzag))}
    known = [name for name, plan in plans.items() if plan is not None and plan.name in registry.SCHEDULES]
    runs = [name for name, plan in plans.items() if plan is not None and not replay(plan).blocked]
    told = _told_by_messages(comms, mesh)
    shape = "V" if chunks == 2 else "zigzag"
    for chosen, why in (
        (known, "the order of ops is that of a known schedule on it"),
        (told, "of the messages at its turns"),
        (runs, "on the other one the order of ops would wait for itself"),
    ):
        if len(chosen) == 1:
            name = "loop" if chosen[0] == "loop" else shape
            layout = loop if chosen[0] == "loop" else zigzag
            return layout, f"labels tell chunks, not stages: a {name}, since {why}"
    return loop, "labels tell chunks, not stages: taken as a loop (chunk · p + pipeline rank); nothing tells"


def _told_by_messages(comms: pd.DataFrame, mesh: MeshInfo) -> list[str]:
    """At a zigzag's turn the last rank hands its first chunk's output to itself; on a loop it sends it to the first rank."""
    last = {pipeline[-1] for pipeline in mesh.pipelines if len(pipeline) > 1}
    mine = comms[comms["rank"].isin(last) & (comms["stage"] < 0)]
    if mine.empty:
        return []
    sends = mine[(mine["kind"] == "send") & (mine["direction"] == "F") & (mine["stage"] == -1)]
    return ["loop"] if len(sends) else ["zigzag"]


def _plan_of(ops: pd.DataFrame, mesh: MeshInfo, layout: Layout) -> Plan | None:
    """The plan that the most complete step of a pipeline follows if its stages lie so; the registry's where it is one."""
    places = {rank: mesh.pp_rank(rank) or 0 for rank in ops["rank"].unique().tolist()}
    placed = _with_stages(ops, places, mesh.pp or 1, layout)
    steps = _steps(placed, mesh)
    if not steps:
        return None
    _, rows = max(steps, key=lambda step: sum(map(len, step[1].values())))
    cells = [[_cell(op) for op in rows[rank]] for rank in sorted(rows, key=places.__getitem__)]
    try:
        return identify(from_rows(cells, "custom"))
    except ScheduleError:
        return None


def _cell(op: _Op) -> str:
    return op.pair or f"{op.stage}{op.kind}{op.microbatch}"


@dataclass(frozen=True, slots=True)
class _Op:
    index: int
    kind: str
    stage: int
    microbatch: int
    pair: str


def _steps(ops: pd.DataFrame, mesh: MeshInfo) -> list[tuple[tuple[int, ...], dict[int, list[_Op]]]]:
    """For each pipeline and step its ranks' ops in time order."""
    compute = ops[ops["kind"].isin(COMPUTE_KINDS)].sort_values("start_ns", kind="stable")
    columns = (compute[name].tolist() for name in ("step", "rank", "kind", "stage", "microbatch", "pair"))
    found: dict[tuple[tuple[int, ...], int], dict[int, list[_Op]]] = {}
    pipelines = {rank: pipeline for pipeline in mesh.pipelines for rank in pipeline}
    for index, step, rank, *rest in zip(compute.index.tolist(), *columns, strict=True):
        if rank in pipelines:
            found.setdefault((pipelines[rank], step), {}).setdefault(rank, []).append(_Op(index, *rest))
    return [(pipeline, rows) for (pipeline, _), rows in found.items()]


def _fitted(ops: pd.DataFrame, comms: pd.DataFrame, mesh: MeshInfo) -> Placed | None:
    """Ops numbered by order, taken for those of the schedule with several chunks whose kinds they follow; None without one."""
    steps = _steps(ops[(ops["microbatch"] >= 0) & (ops["stage"] == -1)], mesh)
    whole = [(pipeline, rows) for pipeline, rows in steps if len(pipeline) > 1]
    if not whole:
        return None
    pipeline, rows = max(whole, key=lambda step: sum(map(len, step[1].values())))
    kinds = {pipeline.index(rank): [op.kind for op in row] for rank, row in rows.items()}
    plan = fit(len(pipeline), kinds, _num_received(comms, pipeline[0]))
    if plan is None or plan.num_chunks == 1:
        return None
    filled = ops.copy()
    for own, rows in steps:
        for rank, row in rows.items():
            actions = plan.compute_actions(own.index(rank))
            if [op.kind for op in row] != [action.kind for action in actions[: len(row)]]:
                continue
            where = [op.index for op in row]
            filled.loc[where, "stage"] = [action.stage for action in actions[: len(row)]]
            filled.loc[where, "chunk"] = [action.chunk for action in actions[: len(row)]]
            filled.loc[where, "microbatch"] = [action.microbatch for action in actions[: len(row)]]
    note = (
        f"chunks and microbatches are inferred from the order of forwards and backwards, which is that of {plan.name} with "
        f"{plan.num_microbatches} microbatches and {plan.num_chunks} chunks per rank"
    )
    notes: tuple[str, ...] = (note,)
    if not _is_possible(comms, plan, mesh):
        comms = comms[comms["axis"] != "pp"]
        notes += (f"labels tell more messages than {plan.name} has: which of them there were is not known",)
    return Placed(filled, _with_plan(comms, plan, mesh), replace(mesh, vpp=plan.num_chunks), notes)


def _is_possible(comms: pd.DataFrame, plan: Plan, mesh: MeshInfo) -> bool:
    """Whether no rank has more messages of a kind in a step than the plan: a function that sends and receives both ways is
    called on all stages, and does not move what has no other side.
    """
    lacking = comms[(comms["axis"] == "pp") & (comms["microbatch"] >= 0) & (comms["stage"] < 0)]
    for (rank, _, kind, direction), rows in lacking.groupby(["rank", "step", "kind", "direction"]):
        place = mesh.pp_rank(int(str(rank)))
        if place is not None and direction in _PRODUCERS:
            planned = sum(1 for _ in _moving(plan, place, direction, sends=kind == "send"))
            if len(rows) > planned:
                return False
    return True


def _num_received(comms: pd.DataFrame, first: int) -> int | None:
    """How many activations the first rank of a pipeline receives in a step; None where messages tell no directions."""
    forward = comms[(comms["axis"] == "pp") & (comms["direction"] == "F")]
    if forward.empty:
        return None
    mine = forward[(forward["rank"] == first) & (forward["kind"] == "recv")]
    return int(mine.groupby("step").size().max()) if len(mine) else 0


_PRODUCERS = {"F": (Kind.F,), "B": (Kind.B, Kind.I)}


def _with_plan(comms: pd.DataFrame, plan: Plan, mesh: MeshInfo) -> pd.DataFrame:
    """Messages numbered by order, taken for those of the plan's ops that send or receive, in the order of these ops."""
    filled = comms.copy()
    lacking = comms[(comms["microbatch"] >= 0) & (comms["stage"] < 0)].sort_values("start_ns", kind="stable")
    for (rank, _, kind, direction), rows in lacking.groupby(["rank", "step", "kind", "direction"]):
        place = mesh.pp_rank(int(str(rank)))
        if place is None or direction not in _PRODUCERS:
            continue
        wanted = list(_moving(plan, place, direction, sends=kind == "send"))[: len(rows)]
        where = rows.index[: len(wanted)]
        filled.loc[where, "stage"] = [action.stage for action in wanted]
        filled.loc[where, "microbatch"] = [action.microbatch for action in wanted]
        filled.loc[rows.index[len(wanted) :], "microbatch"] = -1
    return filled


def _moving(plan: Plan, rank: int, direction: str, sends: bool) -> Iterator[Action]:
    """The ops of a rank whose output goes to another rank, or whose input comes from one."""
    for action in plan.compute_actions(rank):
        for half in action.halves:
            if half.kind not in _PRODUCERS[direction]:
                continue
            away = plan.next_stage if (direction == "F") == sends else plan.previous_stage
            other = away(half.stage)
            if other is not None and plan.placement[other] != rank:
                yield half
