"""Stages, chunks and microbatches of pipelines of which every rank has a trace, where labels leave them open.

Only when the ranks are joined is it known which pipeline rank a rank is. Labels that name a chunk leave two readings:
chunk c of rank r is stage c·p + r (a loop), or it lies on a zigzag, which for two chunks is a V. Labels that name nothing leave
it to order: the kinds of a rank's ops, in order, are compared with those of each schedule of the registry. Where there are no
process groups, that order also tells which ranks form a pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pandas as pd
from msgspec.structs import replace

from pptrace.axes import SHARING, SIZED, WITHIN_STAGE
from pptrace.errors import ScheduleError
from pptrace.marks import P2P
from pptrace.model.mesh import MeshInfo
from pptrace.model.tables import Int64
from pptrace.recognise.infer.candidates import match_by_kinds, num_leading
from pptrace.recognise.infer.stages import (
    JoinedRanks,
    Layout,
    StageAssignment,
    lack_stages,
    messages_of_plan,
    with_actions,
    with_stages,
    without_incomplete_pipelines,
)
from pptrace.recognise.schedule.measured_steps import MeasuredStep, fullest, kinds_by_pp_rank, match_registry, steps_of
from pptrace.schedule import registry
from pptrace.schedule.actions import Action
from pptrace.schedule.plan import Plan
from pptrace.schedule.replay import replay
from pptrace.schedule.shape import loop, zigzag
from pptrace.schedule.text import from_rows
from pptrace.slices import rows_among


def stages_of_complete(joined: JoinedRanks) -> StageAssignment:
    """Fill in the unknown stages of ops and messages that have a microbatch."""
    ops, mesh = joined.ops, joined.mesh
    comms = without_incomplete_pipelines(joined)
    lacking, lacking_comms = lack_stages(ops), lack_stages(comms)
    mesh, notes = split_into_pipelines(ops, mesh)
    chunks = 1 + max(int(ops.loc[lacking, "chunk"].max()), 0) if lacking.any() else 1
    layout: Layout = loop
    if chunks > 1:
        layout, layout_note = _layout(ops, comms, mesh, chunks)
        notes = (*notes, layout_note)
    elif unknown := _why_unknown(ops, comms, mesh, lacking):
        sizes: dict[str, int | None] = dict.fromkeys(SHARING)  # those of 1 that were only assumed become unknown
        sizes |= {axis: None if (size := mesh.size_of(axis)) == 1 else size for axis in WITHIN_STAGE}
        mesh = replace(mesh.with_sizes(sizes), pp=None, vpp=None, pipelines=(), in_order=False)
        return StageAssignment(ops, comms, mesh, (*notes, unknown))
    elif (by_plan := _by_plan_of_chunks(ops, comms, mesh, joined.calls)) is not None:
        return replace(by_plan, notes=(*notes, *by_plan.notes))
    elif why := _cannot_run(ops[lacking], mesh):
        filled = ops.copy()
        filled.loc[lacking, "microbatch"] = -1
        return StageAssignment(filled, comms[~lacking_comms], replace(mesh, vpp=None), (*notes, why))
    pp_ranks = {rank: mesh.pp_rank(rank) or 0 for rank in {*ops["rank"].tolist(), *comms["rank"].tolist()}}
    ops, comms = (with_stages(table, pp_ranks, mesh.pp or 1, layout) for table in (ops, comms))
    return StageAssignment(ops, comms, replace(mesh, vpp=chunks), notes)


def _why_unknown(ops: pd.DataFrame, comms: pd.DataFrame, mesh: MeshInfo, lacking: pd.Series[bool]) -> str:
    """A warning where ops lie between messages to unknown ranks; "" otherwise."""
    ranks = sorted(set(ops.loc[lacking, "rank"].tolist()))
    is_p2p = rows_among(comms["kind"], P2P) & (comms["axis"] == "pp")
    sends = bool((ops.loc[lacking, "source"] == "inferred").any()) or bool(is_p2p.any())
    if not sends or not (mesh.is_open or is_truncated(ops, mesh) or (len(ranks) == 1 and (mesh.pp or 1) == 1)):
        return ""
    some = f"{len(ranks)} ranks" if mesh.is_guess else f"{len(ranks)} of {mesh.num_ranks} ranks"
    subject = f"rank {ranks[0]} alone shows" if len(ranks) == 1 else f"{some} show"
    return f"{subject} messages, but not the pipeline that they belong to: its length and the stages are null"


def _cannot_run(ops: pd.DataFrame, mesh: MeshInfo) -> str:
    """A warning where ops in this order, with one stage per rank, cannot be what ran; "" otherwise."""
    unnamed = "stages, chunks and microbatches are null"
    if mesh.vpp is not None and mesh.vpp > 1:
        return f"the order of ops matches no known schedule with {mesh.vpp} chunks per rank: {unnamed}"
    steps = [step for step in steps_of(ops, mesh) if len(step.pipeline) > 1]
    if mesh.vpp is None and steps:  # unless a schedule with one stage on each rank runs ops in this order
        plan = match_by_kinds(len(fullest(steps).pipeline), fullest(steps).kinds)
        if plan is None or plan.num_chunks > 1:
            return (
                f"the number of chunks per rank is unknown, and the order of ops matches no known schedule: {unnamed}"
            )
    ops = ops[ops["source"] == "inferred"]
    steps = [step for step in steps_of(ops, mesh) if len(step.pipeline) > 1]
    if not steps:
        return ""
    kinds = fullest(steps).kinds.values()
    plan = _plan_of(ops, mesh, loop)
    if any(row.count("B") > row.count("F") for row in kinds):
        why = "more backwards than forwards, as where weight gradients are ops of their own"
    elif plan is not None and (blocked := replay(plan).blocked):
        why = f"op {blocked[0].index + 1} of pipeline rank {blocked[0].rank} would deadlock"
    else:
        return ""
    return f"with one stage on each rank, {why}: {unnamed}"


def _layout(ops: pd.DataFrame, comms: pd.DataFrame, mesh: MeshInfo, chunks: int) -> tuple[Layout, str]:
    """Loop or zigzag: by the registry's plan that the order follows, else by the messages, else by what can run to its end."""
    plans = {name: _plan_of(ops, mesh, layout) for name, layout in (("loop", loop), ("zigzag", zigzag))}
    known = [name for name, plan in plans.items() if plan is not None and plan.name in registry.SCHEDULES]
    runs = [name for name, plan in plans.items() if plan is not None and not replay(plan).blocked]
    # At a V's turn the last rank hands its first chunk's output to itself; on a loop it sends it to the first rank.
    last = {pipeline[-1] for pipeline in mesh.pipelines if len(pipeline) > 1}
    of_last = comms[comms["rank"].isin(last) & (comms["stage"] < 0) & (comms["microbatch"] >= 0)]
    is_output = (of_last["kind"] == "send") & (of_last["direction"] == "F") & (of_last["chunk"] <= 0)
    by_messages = ["loop" if is_output.any() else "zigzag"] if len(of_last) else []
    shape = "V" if chunks == 2 else "zigzag"
    for chosen, why in (
        (known, "the order of ops is then that of a known schedule"),
        (by_messages, "the messages of the last rank show it"),
        (runs, "with the other placement the ops would deadlock"),
    ):
        if len(chosen) == 1:
            name = "loop" if chosen[0] == "loop" else shape
            layout = loop if chosen[0] == "loop" else zigzag
            return layout, f"the labels name chunks, not stages: {name} placement assumed, since {why}"
    return loop, (
        "the labels name chunks, not stages: loop placement (stage = chunk · p + pipeline rank) assumed, which "
        "neither messages nor the order of ops confirm; with V placement the stages would be others"
    )


def _plan_of(ops: pd.DataFrame, mesh: MeshInfo, layout: Layout) -> Plan | None:
    """The plan that the most complete step of a pipeline follows if its stages lie so; the registry's where it is one."""
    pp_ranks = {rank: mesh.pp_rank(rank) or 0 for rank in ops["rank"].unique().tolist()}
    with_known_stages = with_stages(ops, pp_ranks, mesh.pp or 1, layout)
    steps = steps_of(with_known_stages, mesh)
    if not steps:
        return None
    step = fullest(steps)
    cells = [cells for _, cells in sorted(zip((pp_ranks[rank] for rank in step.ranks), step.rows, strict=True))]
    try:
        return match_registry(from_rows(cells, "custom"))
    except ScheduleError:
        return None


def _by_plan_of_chunks(
    ops: pd.DataFrame, comms: pd.DataFrame, mesh: MeshInfo, calls: Mapping[int, pd.DataFrame]
) -> StageAssignment | None:
    """Assign chunks and microbatches by the interleaved schedule that the kinds of ops match; None without one."""
    steps = steps_of(ops[(ops["microbatch"] >= 0) & (ops["stage"] < 0)], mesh)
    pipeline_steps = [step for step in steps if len(step.pipeline) > 1]
    if not pipeline_steps:
        return None
    step = fullest(pipeline_steps)
    plan = match_by_kinds(len(step.pipeline), step.kinds, _received_in(step, ops, comms, mesh, calls))
    if plan is None or plan.num_chunks == 1:
        return None
    of_other_lengths = ((step.step, match_by_kinds(plan.pp, step.kinds, like=plan)) for step in steps)
    plans = {step: of_step for step, of_step in of_other_lengths if of_step is not None}
    first = min(step.step for step in steps)

    def planned() -> Iterator[tuple[Int64, Sequence[Action]]]:
        for step in steps:
            for (pp_rank, kinds), labels in zip(step.kinds.items(), step.labels.values(), strict=True):
                actions, count = plans.get(step.step, plan).compute_actions(pp_rank), len(kinds)
                # A step may be cut off: the trace's first one at its beginning, others at their end.
                parts = [actions[:count], actions[len(actions) - count :]][:: -1 if step.step == first else 1]
                yield labels, next((part for part in parts if [action.kind for action in part] == kinds), ())

    filled = with_actions(ops, planned())
    note = (
        f"chunks and microbatches are inferred from the order of forwards and backwards, which is that of {plan.name} with "
        f"{plan.num_microbatches} microbatches and {plan.num_chunks} chunks per rank"
    )
    messages, message_warnings = messages_of_plan(comms, filled, lambda step: plans.get(step, plan), mesh)
    return StageAssignment(filled, messages, replace(mesh, vpp=plan.num_chunks), (note, *message_warnings))


def _received_in(
    step: MeasuredStep, ops: pd.DataFrame, comms: pd.DataFrame, mesh: MeshInfo, calls: Mapping[int, pd.DataFrame]
) -> int | None:
    """Number of activations that the first rank of a pipeline receives in this step; None if unknown.

    It receives those of all its chunks but the first, of which a mesh may tell the number.
    """
    if mesh.vpp is not None and mesh.vpp > 1:
        forwards = max(row.count("F") for row in step.kinds.values())
        return forwards - forwards // mesh.vpp
    first = step.pipeline[0]
    forward = comms[(comms["axis"] == "pp") & (comms["direction"] == "F") & (comms["microbatch"] >= 0)]
    if len(forward):  # messages tell their directions
        return int(((forward["rank"] == first) & (forward["kind"] == "recv") & (forward["step"] == step.step)).sum())
    if first not in step.ranks or first not in calls:
        return None
    # In a step whose forwards all come before its backwards, as those of GPipe and of interleaved schedules without a steady
    # phase do, what is received until the last of them are activations, where receives can be distinguished from sends.
    kinds, received = step.kinds[step.pp_ranks[step.ranks.index(first)]], calls[first][calls[first]["kind"] == "recv"]
    num_forwards = kinds.count("F")
    if not num_forwards or "F" in kinds[num_forwards:] or received.empty:
        return None
    times = ops.loc[step.labels[first], "start_ns"].to_numpy()
    return int(((received["end_ns"] > times[0]) & (received["end_ns"] <= times[num_forwards - 1])).sum())


def split_into_pipelines(ops: pd.DataFrame, mesh: MeshInfo) -> tuple[MeshInfo, tuple[str, ...]]:
    """Split ranks that were assumed to form one pipeline, where their order of ops shows several.

    Ranks of one pipeline stage run the same kinds of ops in the same order, and those of different stages mostly do not. Where
    ranks have no trace, the order of those that have one may fit only one pipeline rank.
    """
    if len(mesh.pipelines) != 1 or any(size not in (None, 1) for size in (mesh.tp, mesh.cp, mesh.dp)):
        return mesh, ()
    ranks = mesh.pipelines[0]
    kinds_by_rank = kinds_by_pp_rank(ops[(ops["microbatch"] >= 0) & (ops["stage"] < 0)], mesh)
    kinds = {ranks[pp_rank]: row for pp_rank, row in kinds_by_rank.items()}
    is_partial = mesh.num_ranks > len(ranks)
    if len(kinds) != len(ranks) or max(ranks) >= mesh.num_ranks:
        return mesh, ()
    if not is_partial and (len(ranks) < 4 or match_by_kinds(len(ranks), kinds_by_rank) is not None):
        return mesh, ()
    options = list(_possible_splits(kinds, mesh.num_ranks, is_partial))
    with_fewest_chunks = [option for option in options if option[0] == min(chunks for chunks, *_ in options)]
    if not with_fewest_chunks or (is_partial and len({len(pp_ranks) for _, pp_ranks, _ in with_fewest_chunks}) > 1):
        return mesh, ()
    chunks, columns, axis = with_fewest_chunks[0]
    if is_partial and mesh.is_guess and chunks > 1:
        return mesh, ()  # more ranks with fewer chunks would do as well
    pp = len(columns)
    num_pipelines = mesh.num_ranks // pp
    note = (
        f"{num_pipelines} pipeline{'s' if num_pipelines > 1 else ''} of {pp} ranks, inferred from the "
        f"order in which the ranks with a trace run their ops, with the pipeline as the {axis} axis of the ranks"
    )
    split = replace(mesh, pp=pp, pipelines=tuple(zip(*columns, strict=True)), in_order=False)
    return split.with_sizes(dict.fromkeys(SIZED, 1 if num_pipelines == 1 else None)), (note,)


def _possible_splits(
    kinds: Mapping[int, list[str]], num_ranks: int, is_partial: bool
) -> Iterator[tuple[int, list[list[int]], str]]:
    """(chunks, ranks by pipeline rank, axis) of splits that match the kinds of ops of these ranks, longest pipelines first.

    The pipeline is the slowest axis of the ranks (Megatron-LM, DeepSpeed) or the fastest.
    """
    for pp in (size for size in range(num_ranks if is_partial else num_ranks // 2, 1, -1) if num_ranks % size == 0):
        count = num_ranks // pp
        slowest = [list(range(first, first + count)) for first in range(0, num_ranks, count)]
        fastest = [list(range(first, num_ranks, pp)) for first in range(pp)]
        for columns, axis in (
            ((slowest, "slowest"), (fastest, "fastest")) if pp < num_ranks else ((slowest, "slowest"),)
        ):
            pp_rank_of = {rank: pp_rank for pp_rank, ranks in enumerate(columns) for rank in ranks}
            by_pp_rank = {pp_rank_of[rank]: row for rank, row in kinds.items()}
            if any(row != by_pp_rank[pp_rank_of[rank]] for rank, row in kinds.items()):
                continue
            plan = match_by_kinds(pp, by_pp_rank)
            if plan is not None and not (is_partial and registry.SCHEDULES[plan.name].same_order_on_every_rank):
                yield plan.num_chunks, columns, axis


def is_truncated(ops: pd.DataFrame, mesh: MeshInfo) -> bool:
    """Return whether later pipeline ranks are probably missing: the last traced rank has more than one warm-up forward, and no
    schedule of this length matches its order.
    """
    if not mesh.in_order or not mesh.is_guess:
        return False
    kinds_by_rank = kinds_by_pp_rank(ops[(ops["microbatch"] >= 0) & (ops["stage"] < 0)], mesh)
    if not kinds_by_rank:
        return False
    last = kinds_by_rank[max(kinds_by_rank)]
    return 1 < num_leading(last) < last.count("F") and match_by_kinds(len(mesh.pipelines[0]), kinds_by_rank) is None
