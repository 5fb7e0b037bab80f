"""Assign stages, chunks and microbatches to ops and messages, where labels leave them open.

Only when the ranks are joined is it known which pipeline rank a rank is. Labels that name a chunk leave two readings:
chunk c of rank r is stage c·p + r (a loop), or it lies on a zigzag, which for two chunks is a V. Labels that name nothing leave
it to order: the kinds of a rank's ops, in order, are compared with those of each schedule of the registry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pandas as pd

from pptrace.axes import SHARING, WITHIN_STAGE
from pptrace.errors import ScheduleError
from pptrace.marks import P2P
from pptrace.model.categories import with_categories
from pptrace.model.mesh import MeshInfo
from pptrace.model.stage_texts import with_stage_of_chunk
from pptrace.model.tables import COMPUTE_KINDS
from pptrace.recognise.infer.assign_from_schedule import StageAssignment, assign_microbatches
from pptrace.recognise.infer.candidates import match_by_kinds
from pptrace.recognise.infer.split_pipelines import is_truncated, split_into_pipelines
from pptrace.recognise.schedule.exact_match import match_registry
from pptrace.recognise.schedule.measured_steps import fullest, steps_of
from pptrace.schedule import registry
from pptrace.schedule.placement import loop, zigzag
from pptrace.schedule.plan import Plan
from pptrace.schedule.replay import replay
from pptrace.schedule.text import from_rows
from pptrace.slices import distinct_rows

Layout = Callable[[int, int, int], int]
"""(chunk, pipeline rank, p) → stage."""


def assign_stages(
    ops: pd.DataFrame, comms: pd.DataFrame, mesh: MeshInfo, calls: Mapping[int, pd.DataFrame]
) -> StageAssignment:
    """Fill in the unknown stages of ops and messages that have a microbatch.

    ``calls`` is all communication that no mark tells, by rank (schema ``CALLS``).
    """
    comms = _without_incomplete_pipelines(ops, comms, mesh)
    lacking = (ops["microbatch"] >= 0) & (ops["stage"] < 0)
    lacking_comms = (comms["microbatch"] >= 0) & (comms["stage"] < 0)
    if not lacking.any() and not lacking_comms.any():
        return StageAssignment(ops, comms, mesh)
    mesh, notes = split_into_pipelines(ops, mesh)
    pp_ranks = {rank: mesh.pp_rank(rank) or 0 for rank in {*ops["rank"].tolist(), *comms["rank"].tolist()}}
    chunks = 1 + max(int(ops.loc[lacking, "chunk"].max()), 0) if lacking.any() else 1
    if chunks == 1 and (unknown := _why_unknown(ops, comms, mesh, lacking)):
        return StageAssignment(ops, comms, _without_pipeline(mesh), (*notes, unknown))
    if chunks == 1 and (assignment := assign_microbatches(ops, comms, mesh, calls)) is not None:
        return replace(assignment, notes=(*notes, *assignment.notes))
    if chunks == 1 and (why := _cannot_run(ops[lacking], mesh)):
        filled = ops.copy()
        filled.loc[lacking, "microbatch"] = -1
        return StageAssignment(filled, comms[~lacking_comms], replace(mesh, vpp=None), (*notes, why))
    pp = mesh.pp or 1
    layout: Layout = loop
    if chunks > 1:
        layout, layout_note = _layout(ops, comms, mesh, chunks)
        notes = (*notes, layout_note)
    mesh = replace(mesh, vpp=chunks)
    return StageAssignment(
        with_stages(ops, pp_ranks, pp, layout), with_stages(comms, pp_ranks, pp, layout), mesh, notes
    )


def _without_incomplete_pipelines(ops: pd.DataFrame, comms: pd.DataFrame, mesh: MeshInfo) -> pd.DataFrame:
    """Drop messages of pipelines in which some rank's ops were inferred without its messages: they are matched from the calls
    instead (:mod:`pptrace.recognise.messages.comms_from_calls`).
    """
    inferred = set(ops.loc[(ops["source"] == "inferred") & ops["kind"].isin(COMPUTE_KINDS), "rank"].tolist())
    is_message = (comms["axis"] == "pp") & comms["kind"].isin(P2P)
    with_messages = set(comms.loc[is_message, "rank"].tolist())
    incomplete = [
        p
        for p in mesh.pipelines
        if (ranks_with_ops := inferred & set(p)) & with_messages and ranks_with_ops - with_messages
    ]
    return comms[~(is_message & comms["rank"].isin([rank for p in incomplete for rank in p]))] if incomplete else comms


def _why_unknown(ops: pd.DataFrame, comms: pd.DataFrame, mesh: MeshInfo, lacking: pd.Series[bool]) -> str:
    """A warning where ops lie between messages to unknown ranks; "" otherwise."""
    ranks = sorted(set(ops.loc[lacking, "rank"].tolist()))
    is_p2p = comms["kind"].isin(P2P) & (comms["axis"] == "pp")
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
    if mesh.vpp is None and not _may_have_one_chunk(ops, mesh):
        return f"the number of chunks per rank is unknown, and the order of ops matches no known schedule: {unnamed}"
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


def _may_have_one_chunk(ops: pd.DataFrame, mesh: MeshInfo) -> bool:
    """Return whether a schedule with one stage on each rank runs ops in this order, or nothing else is possible."""
    steps = [step for step in steps_of(ops, mesh) if len(step.pipeline) > 1]
    if not steps:
        return True
    step = fullest(steps)
    plan = match_by_kinds(len(step.pipeline), step.kinds)
    return plan is not None and plan.num_chunks == 1


def _without_pipeline(mesh: MeshInfo) -> MeshInfo:
    """The mesh without a pipeline: sizes of 1 that were only assumed become unknown."""
    sizes: dict[str, int | None] = dict.fromkeys(SHARING)
    sizes |= {axis: None if (size := mesh.size_of(axis)) == 1 else size for axis in WITHIN_STAGE}
    return replace(mesh.with_sizes(sizes), pp=None, vpp=None, pipelines=(), in_order=False)


def with_stages(table: pd.DataFrame, pp_ranks: Mapping[int, int], pp: int, layout: Layout) -> pd.DataFrame:
    lacking = (table["microbatch"] >= 0) & (table["stage"] < 0)
    if not lacking.any():
        return table
    filled, own = table.copy(), table[lacking]
    chunk = own["chunk"].clip(lower=0)
    distinct, index = distinct_rows(np.stack((chunk.to_numpy(), own["rank"].to_numpy()), axis=1))
    filled.loc[lacking, "stage"] = np.array([layout(c, pp_ranks[rank], pp) for c, rank in distinct])[index]
    if "pair" in table:
        filled.loc[lacking, "chunk"] = chunk
        pairs = own[own["pair"] != ""]
        filled = _with_pairs(filled, pairs, pp_ranks, pp, layout) if len(pairs) else filled
    return filled


def _with_pairs(
    table: pd.DataFrame, pairs: pd.DataFrame, pp_ranks: Mapping[int, int], pp: int, layout: Layout
) -> pd.DataFrame:
    """The table with the stages of the halves of overlapped pairs in their texts."""
    codes, distinct = pd.factorize(pairs["pair"].astype(object))
    of_rank, index = distinct_rows(np.stack((codes, pairs["rank"].to_numpy()), axis=1))
    texts = table["pair"].astype(object)
    new = [_pair_with_stages(distinct[code], pp_ranks[rank], pp, layout) for code, rank in of_rank]
    texts[pairs.index] = np.array(new, dtype=object)[index]
    return with_categories(table.assign(pair=texts))


def _pair_with_stages(text: str, rank: int, pp: int, layout: Layout) -> str:
    """An overlapped pair as text, with the stages of its halves."""
    return with_stage_of_chunk(text, lambda chunk: layout(chunk, rank, pp))


def _layout(ops: pd.DataFrame, comms: pd.DataFrame, mesh: MeshInfo, chunks: int) -> tuple[Layout, str]:
    """Loop or zigzag: by the registry's plan that the order follows, else by the messages, else by what can run to its end."""
    plans = {name: _plan_of(ops, mesh, layout) for name, layout in (("loop", loop), ("zigzag", zigzag))}
    known = [name for name, plan in plans.items() if plan is not None and plan.name in registry.SCHEDULES]
    runs = [name for name, plan in plans.items() if plan is not None and not replay(plan).blocked]
    by_messages = _layout_by_messages(comms, mesh)
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
        "neither messages nor "
        "the order of ops confirm; with V placement the stages would be others"
    )


def _layout_by_messages(comms: pd.DataFrame, mesh: MeshInfo) -> list[str]:
    """Recognise the layout by messages: at a V's turn the last rank hands its first chunk's output to itself; on a loop it
    sends it to the first rank.
    """
    last = {pipeline[-1] for pipeline in mesh.pipelines if len(pipeline) > 1}
    sent_and_received = comms[comms["rank"].isin(last) & (comms["stage"] < 0) & (comms["microbatch"] >= 0)]
    if sent_and_received.empty:
        return []
    sends = sent_and_received[
        (sent_and_received["kind"] == "send")
        & (sent_and_received["direction"] == "F")
        & (sent_and_received["chunk"] <= 0)
    ]
    return ["loop"] if len(sends) else ["zigzag"]


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
