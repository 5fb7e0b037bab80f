"""Join the recognised ranks of a run: ops and comms of all ranks, the mesh and the schedule."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from pptrace.model.categories import with_categories
from pptrace.model.device import DeviceWork
from pptrace.model.join_tables import join_adjacent
from pptrace.model.mesh import MeshInfo
from pptrace.model.schedule_info import ScheduleInfo
from pptrace.model.tables import COMMS, COMPUTE_KINDS, MEMORY, OPS, Schema, empty_table
from pptrace.model.traces import InputFormat, Trace
from pptrace.recognise.groups.axes import Groups, find_groups
from pptrace.recognise.groups.communicators import Members, with_members
from pptrace.recognise.groups.descriptions import framework_of_descriptions
from pptrace.recognise.groups.mesh import (
    mesh_from_metadata,
    mesh_from_stages,
    mesh_in_order,
    mesh_with_absent_ranks,
    mesh_with_collectives,
    mesh_with_declared_pipelines,
    mesh_with_groups,
    mesh_with_messages,
    stages_by_rank,
)
from pptrace.recognise.groups.rank_layout import with_layout
from pptrace.recognise.infer.assign_stages import StageAssignment, assign_stages
from pptrace.recognise.infer.chunk_checks import contradiction_of_chunks
from pptrace.recognise.infer.host_order import shows_operators
from pptrace.recognise.infer.match_ranks import (
    JointMatch,
    alone_with_messages,
    is_unsure_alone,
    match_ranks,
    without_inferred,
)
from pptrace.recognise.infer.mesh_and_stages import JoinedRanks, Partial, read_partial
from pptrace.recognise.infer.schedule_of_partial import schedule_of_partial
from pptrace.recognise.messages.comms_from_calls import comms_of_calls
from pptrace.recognise.messages.directions import with_directions
from pptrace.recognise.messages.match import match_calls, match_comms, warn_unmatched, with_sizes
from pptrace.recognise.messages.match_by_adjacent_ops import drop_half_matched, with_adjacent
from pptrace.recognise.ops.from_labels import drop_messages_beyond_ends, with_peers
from pptrace.recognise.ops.host_compute import HostWork
from pptrace.recognise.rank import recognise_rank, without_disagreeing_ops
from pptrace.recognise.recognised_rank import RecognisedRank
from pptrace.recognise.schedule.recognise_schedule import recognise_schedule
from pptrace.recognise.steps.common_steps import with_common_steps, with_recorded_steps
from pptrace.recognise.steps.cut_by_balance import with_balanced_spans, with_balanced_steps
from pptrace.recognise.steps.uncounted import with_repeated_steps, without_capturing_steps
from pptrace.slices import rows_where

UNLABELLED = "unlabelled"
"""The framework of traces without any framework's labels."""


@dataclass(frozen=True, slots=True)
class RecognisedRun:
    """Everything recognised in the traces of a run, each rank still on its own clock.

    ``work`` is each rank's device work, ``host_work`` when the hosts of ranks without device and ops computed; ``facts`` what
    each rank's recorder wrote about itself ({} for others' traces).
    """

    framework: str
    ops: pd.DataFrame
    comms: pd.DataFrame
    memory: pd.DataFrame
    work: Mapping[int, DeviceWork]
    mesh: MeshInfo
    schedule: ScheduleInfo
    facts: Mapping[int, Mapping[str, Any]]
    warnings: tuple[str, ...]
    host_work: Mapping[int, HostWork] = field(default_factory=dict)


def recognise(traces: Sequence[Trace], schedule: str | None = None, num_ranks: int | None = None) -> RecognisedRun:
    """:func:`recognise_ranks` of these traces, one per rank, with their ranks set."""
    return recognise_ranks([recognise_rank(trace) for trace in traces], schedule, num_ranks)


def recognise_ranks(
    ranks: Sequence[RecognisedRank],
    schedule: str | None = None,
    num_ranks: int | None = None,
    match: Match | None = None,
) -> RecognisedRun:
    """Join the recognised ranks: the ops, the communication, the mesh and the schedule of the run.

    Args:
        ranks: one per rank, each with its rank set.
        schedule: the name of the schedule to compare with, instead of the one that is found.
        num_ranks: the ranks that the run had, when known; more than ``ranks`` when some have no trace.
        match: what matches the communication instead of :func:`match_here`, as where the rows are on other machines.

    Raises:
        UsageError, ScheduleError: ``schedule`` is unknown or does not fit the run.
    """
    spanned = [recognised.number for recognised in ranks if recognised.info.format is InputFormat.OTLP]
    ranks, cut = (ranks, ()) if spanned else with_balanced_steps(without_disagreeing_ops(ranks))
    ranks, captured = without_capturing_steps(ranks)
    ranks, left_out = with_recorded_steps(ranks)
    ranks, renumbered = with_common_steps(ranks)
    located, joint, against = _locate_matched(ranks, num_ranks, spanned)
    ranks, placed, groups = located.ranks, located.placed, located.groups
    metadata = list(located.facts.values())
    order = _stage_order(metadata, located.mesh, groups)
    warnings = [
        *_warnings_of_ranks(ranks),
        *cut,
        *captured,
        *left_out,
        *renumbered,
        *(joint.notes if not joint.refused or (placed.mesh.vpp or 1) == 1 else ()),
        *(alone_with_messages(ranks) if not joint.notes else ()),
        *([f"several stages per rank are ruled out as well: {against}"] if against else []),
        *located.warnings,
        *_inferences(
            located.ops,
            placed,
            located.mesh,
            order,
            any(recognised.by_gaps or recognised.is_paired for recognised in ranks),
        ),
        *placed.notes,
    ]
    ops, repeated = with_repeated_steps(placed.ops, ranks)
    warnings += repeated
    placed, mesh = replace(placed, ops=ops), placed.mesh
    if located.partial is None:
        schedule_info = recognise_schedule(ops, mesh, metadata, schedule)
    else:
        schedule_info = schedule_of_partial(located.partial, schedule)
    unmatched = Unmatched(ranks, placed, located.calls, groups, schedule_info, spanned, located.partial is not None)
    matched = (match or match_here)(unmatched)
    warnings += matched.warnings
    warnings += [f"process groups: {line}" for line in groups.evidence]
    framework, evidence = _framework(ranks, groups)
    return RecognisedRun(
        framework=framework,
        ops=ops,
        comms=matched.comms,
        memory=join_ranks([(recognised.number, recognised.memory) for recognised in ranks], MEMORY),
        work={recognised.number: recognised.work for recognised in ranks},
        mesh=mesh_with_absent_ranks(mesh, placed.comms) if mesh.is_guess else mesh,
        schedule=schedule_info,
        facts=located.facts,
        warnings=(*warnings, *evidence, *schedule_info.warnings, *matched.without_other_side),
        host_work={recognised.number: recognised.host_work for recognised in ranks},
    )


@dataclass(frozen=True, slots=True)
class Unmatched:
    """The communication of a run before it is matched (``placed.comms``), and what is known of the run by then.

    ``spanned`` are the ranks of OpenTelemetry spans; ``is_partial``: ranks of the pipelines have no trace.
    """

    ranks: Sequence[RecognisedRank]
    placed: StageAssignment
    calls: Mapping[int, pd.DataFrame]
    groups: Groups
    schedule: ScheduleInfo
    spanned: Sequence[int]
    is_partial: bool


@dataclass(frozen=True, slots=True)
class Matched:
    """Communication with its matches; warnings, and those about rows ``without_other_side``."""

    comms: pd.DataFrame
    warnings: tuple[str, ...]
    without_other_side: tuple[str, ...]


Match = Callable[[Unmatched], Matched]


def match_here(run: Unmatched) -> Matched:
    """Match the communication of all ranks in this process."""
    ops, mesh = run.placed.ops, run.placed.mesh
    comms, untimed = _without_untimed(drop_messages_beyond_ends(run.placed.comms, ops, mesh), run.ranks)
    comms = with_ends(with_adjacent(comms, ops, mesh, run.spanned), ops, mesh)
    matched, half_seen = drop_half_matched(match_comms(comms, mesh), run.spanned)
    comms, call_warnings = _with_calls(matched, run.calls, run.groups, ops, mesh, run.schedule)
    numbers = [recognised.number for recognised in run.ranks]
    return Matched(comms, (*untimed, *half_seen, *call_warnings), warn_unmatched(comms, numbers))


def with_ends(comms: pd.DataFrame, ops: pd.DataFrame, mesh: MeshInfo) -> pd.DataFrame:
    """Fill in peers, directions and sizes of groups, row by row; of ``ops`` only which rank holds which stage is used."""
    comms = with_directions(with_peers(comms, ops, mesh), ops, mesh)
    return with_sizes(with_peers(comms, ops, mesh), mesh)


@dataclass(frozen=True, slots=True)
class _Located:
    """Ops and mesh as labels and groups give them, and with the stages assigned (``placed``). ``partial`` is set where ranks of
    the pipelines have no trace.
    """

    ranks: Sequence[RecognisedRank]
    facts: Mapping[int, Mapping[str, Any]]
    calls: Mapping[int, pd.DataFrame]
    groups: Groups
    ops: pd.DataFrame
    mesh: MeshInfo
    placed: StageAssignment
    partial: Partial | None
    warnings: tuple[str, ...]


def _locate_matched(
    ranks: Sequence[RecognisedRank], num_ranks: int | None, spanned: Sequence[int]
) -> tuple[_Located, JointMatch, str]:
    """Locate the ops after matching unlabelled ranks jointly; drop what order alone inferred where the match refuses it.

    Returns:
        The located ops, the joint match, and what speaks against several stages per rank ("" where nothing does).
    """
    ranks = tuple(ranks)
    found = _groups(ranks)
    joint = match_ranks(ranks, found[1], num_ranks)
    located = _locate(joint.ranks, joint, num_ranks, spanned, found=found if joint.ranks is ranks else None)
    chunked = (
        [recognised for recognised in ranks if recognised.number in joint.refused]
        if (located.placed.mesh.vpp or 1) > 1
        else []
    )
    against = contradiction_of_chunks(chunked, located.placed.ops, located.placed.mesh) if chunked else ""
    is_single = (located.placed.mesh.vpp or 1) == 1 and not _is_split(located.placed.ops)
    if joint.refused and (is_single or against):
        kept = [
            without_inferred(recognised) if recognised.number in joint.refused else recognised for recognised in ranks
        ]
        seen = [
            recognised.number
            for recognised in kept
            if recognised.number in joint.refused and shows_operators(recognised.host)
        ]
        located = _locate(kept, joint, num_ranks, spanned, seen)
    elif not any(recognised.is_paired for recognised in joint.ranks) and is_unsure_alone(ranks, located.placed.ops):
        kept = [without_inferred(recognised) for recognised in ranks]
        located = _locate(kept, joint, num_ranks, spanned)
    return located, joint, against


def _locate(
    ranks: Sequence[RecognisedRank],
    joint: JointMatch,
    num_ranks: int | None,
    spanned: Sequence[int],
    no_pipeline: Collection[int] = (),
    found: tuple[Members, Groups] | None = None,
) -> _Located:
    """Locate the ops of all ranks; ``found`` are their groups, where they are known."""
    ops = join_ranks([(recognised.number, recognised.ops) for recognised in ranks], OPS)
    comms = join_ranks([(recognised.number, recognised.comms) for recognised in ranks], COMMS)
    facts, layout = with_layout({recognised.number: recognised.info.metadata for recognised in ranks}, ops)
    members, groups = found or _groups(ranks, no_pipeline)
    metadata = list(facts.values())
    world = num_ranks or _least_world(ranks, comms)
    mesh = replace(_mesh(metadata, ops, comms, groups, world), is_guess=num_ranks is None and not groups.world_size)
    mesh = _with_pipelines(replace(mesh, vpp=None if spanned and mesh.in_order else mesh.vpp), joint)
    ops, cut = with_balanced_spans(ops, mesh, spanned)
    partial = None
    if not spanned and not any(
        facts_of_rank.get("plan") for facts_of_rank in metadata
    ):  # spans tell sizes of their own
        joined = JoinedRanks(
            ops,
            comms,
            mesh,
            members.calls,
            groups,
            members.distributed,
            framework=_framework(ranks, groups)[0],
            is_declared=any("pp_ranks" in facts_of_rank for facts_of_rank in metadata) and bool(mesh.pipelines),
            paired=frozenset(recognised.number for recognised in ranks if recognised.is_paired),
        )
        partial = read_partial(joined)
    placed = assign_stages(ops, comms, mesh, members.calls) if partial is None else partial.placed
    lines = (*layout, *members.warnings, *cut)
    return _Located(ranks, facts, members.calls, groups, ops, mesh, placed, partial, lines)


def _least_world(ranks: Sequence[RecognisedRank], comms: pd.DataFrame) -> int:
    """Least number of ranks that the run can have: those with a trace, and the peers of their messages, have numbers below it."""
    highest = int(comms["peer"].max()) if len(comms) else -1
    return max(len(ranks), highest + 1, *(recognised.number + 1 for recognised in ranks))


def _is_split(ops: pd.DataFrame) -> bool:
    """Return whether unlabelled ops may include separate weight gradients: there are more backwards than forwards."""
    inferred = ops[(ops["source"] == "inferred") & ops["kind"].isin(COMPUTE_KINDS)]
    return bool((inferred["stage"] < 0).all() and (inferred["kind"] == "B").sum() > (inferred["kind"] == "F").sum())


def _groups(ranks: Sequence[RecognisedRank], no_pipeline: Collection[int] = ()) -> tuple[Members, Groups]:
    """The process groups, and the calls with the members of their communicators."""
    members = with_members(
        {recognised.number: recognised.calls for recognised in ranks},
        {recognised.number: recognised.info.metadata for recognised in ranks},
        {recognised.number: recognised.info.distributed for recognised in ranks},
    )
    groups = find_groups(
        members.calls,
        members.distributed,
        {recognised.number: recognised.ops.loc[recognised.ops["step"] >= 0, "step"].nunique() for recognised in ranks},
        by_use=any(recognised.info.format is not InputFormat.NCCL_INSPECTOR for recognised in ranks),
        no_pipeline=no_pipeline,
    )
    return members, groups


def _with_pipelines(mesh: MeshInfo, joint: JointMatch) -> MeshInfo:
    """Replace the mesh's pipelines by those whose messages were matched, if their length is the mesh's."""
    if not joint.pipelines or mesh.pp != len(joint.pipelines[0]):
        return mesh
    return replace(mesh, pipelines=joint.pipelines, in_order=False)


def _framework(ranks: Sequence[RecognisedRank], groups: Groups) -> tuple[str, tuple[str, ...]]:
    """(framework, warnings): that of the labels, else of the names of process groups, else "unlabelled"."""
    labels = {recognised.framework for recognised in ranks} - {"", UNLABELLED}
    if labels:
        return min(labels), ()
    framework, description = framework_of_descriptions(group.description for group in groups.axes)
    if framework:
        return framework, (
            f"no labels of a framework; {framework} recognised by the names of its process groups ({description})",
        )
    return UNLABELLED, ()


def _without_untimed(comms: pd.DataFrame, ranks: Sequence[RecognisedRank]) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Drop pipeline messages of ranks whose ops are the gaps between calls, where receives are posted ahead: the wait for them
    lies in the ops, and its length is unknown.
    """
    is_pipeline = comms["rank"].isin([recognised.number for recognised in ranks if recognised.by_gaps]) & (
        comms["axis"] == "pp"
    )
    is_posted_ahead = (
        is_pipeline & (comms["kind"] == "recv") & (comms["clock"] == "host") & (comms["posted_ns"] > comms["start_ns"])
    )
    if not is_posted_ahead.any():
        return comms, ()
    line = (
        "receives are posted ahead of their ops and no range shows when they completed: messages are left out, and waiting for "
        "them counts as compute; record with ranges around forward_step and backward_step"
    )
    return comms[~is_pipeline], (line,)


def _with_calls(
    comms: pd.DataFrame,
    by_rank: Mapping[int, pd.DataFrame],
    groups: Groups,
    ops: pd.DataFrame,
    mesh: MeshInfo,
    schedule: ScheduleInfo,
) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Add the matched communication calls that neither marks nor labels describe."""
    calls, call_warnings = comms_of_calls(by_rank, groups, ops, comms, mesh, schedule)
    if calls.empty:
        return comms, call_warnings
    matched = match_calls(calls, first=int(comms["match"].max()) + 1 if len(comms) else 0)[list(COMMS)]
    return pd.concat([comms, matched], ignore_index=True) if len(comms) else matched, call_warnings


_MOST_ALIKE = 1
"""Warnings that differ only in numbers are printed for this many ranks; the rest are counted."""


def _warnings_of_ranks(ranks: Sequence[RecognisedRank]) -> list[str]:
    """Warnings of all ranks; of those that differ only in numbers, the first few."""
    by_pattern: dict[str, list[str]] = {}
    for recognised in ranks:
        for line in recognised.warnings:
            by_pattern.setdefault(re.sub(r"\d+", "0", line), []).append(f"rank {recognised.number}: {line}")
    warnings = []
    for lines in by_pattern.values():
        more = len(lines) - _MOST_ALIKE
        warnings += (
            lines if more < 2 else [*lines[:_MOST_ALIKE], f"and {more} more ranks like {lines[0].split(':')[0]}"]
        )
    return warnings


def _stage_order(metadata: Sequence[Mapping[str, Any]], mesh: MeshInfo, groups: Groups) -> str:
    """The source of the stages where no label names them; "" where the facts of the run do."""
    if any("pp_ranks" in facts_of_rank for facts_of_rank in metadata):
        return ""
    if groups.pipelines and mesh.pipelines == groups.pipelines:
        return "the order of ranks in the pipeline's process group is"
    return "ascending order of ranks is"


def _inferences(
    ops: pd.DataFrame, placed: StageAssignment, mesh: MeshInfo, order: str, is_explained: bool
) -> list[str]:
    """Warnings about what was inferred because no label names it.

    Args:
        ops, mesh: as labels and groups tell them.
        placed: with what followed from the order of ops.
        order: what was taken for the stages; "" where they are known.
        has_own_lines: whether lines of the ranks say how their ops were inferred.
    """
    compute = ops[ops["kind"].isin(COMPUTE_KINDS)]
    lines = []
    is_inferred = bool((compute["source"] == "inferred").any())
    if is_inferred and not is_explained:
        lines.append(
            "no labels of ops: forwards, backwards and microbatches are inferred from the order of operators or launches, "
            "autograd's threads and messages of each rank"
        )
    is_assumed = bool(order) and (compute["stage"] < 0).all() and not (placed.ops["stage"] < 0).all()
    if compute["rank"].nunique() > 1 and is_assumed and not (is_inferred and mesh.is_open):
        lines.append(f"no label names the stages: {order} assumed")
    return lines


def join_ranks(tables: Sequence[tuple[int, pd.DataFrame]], schema: Schema) -> pd.DataFrame:
    """Concatenate the tables of all ranks, each row with its rank."""
    filled = [(rank, table) for rank, table in tables if len(table)]
    if not filled:
        return with_categories(empty_table(schema))
    joined = join_adjacent([table for _, table in filled], without=("rank",))
    ranks = np.repeat([rank for rank, _ in filled], [len(table) for _, table in filled])
    joined.insert(0, "rank", ranks.astype(np.int64, copy=False))
    return _with_constants(with_categories(joined))


def _with_constants(table: pd.DataFrame) -> pd.DataFrame:
    """The table with columns of one integer alone, of which it has some, as that integer: they take no memory."""
    columns = {
        str(name): np.broadcast_to(values[0], len(values)) if (values == values[0]).all() else values
        for name in table.columns
        if table[name].dtype == np.int64
        for values in (table[name].to_numpy(),)
    }
    return pd.DataFrame({str(name): columns.get(str(name), table[name]) for name in table.columns}, copy=False)


def _mesh(
    metadata: Sequence[Mapping[str, Any]], ops: pd.DataFrame, comms: pd.DataFrame, groups: Groups, num_ranks: int
) -> MeshInfo:
    """The mesh declared in the facts, else that of process groups and ops; pipelines that the facts lack come from the ops."""
    declared = mesh_from_metadata(metadata, num_ranks)
    if declared is None:
        mesh = mesh_with_messages(_mesh_of_ops(ops, num_ranks), comms)
        mesh = mesh_with_groups(mesh_with_collectives(mesh, comms), ops, groups)
        return mesh_with_declared_pipelines(mesh, metadata)
    if declared.pipelines:
        return declared
    return replace(declared, pipelines=mesh_with_messages(_mesh_of_ops(ops, num_ranks), comms).pipelines)


def _mesh_of_ops(ops: pd.DataFrame, num_ranks: int) -> MeshInfo:
    compute = rows_where(ops[["rank", "stage"]], ops["kind"].isin(COMPUTE_KINDS))
    if len(compute) and (compute["stage"] < 0).all():
        return mesh_in_order(sorted(compute["rank"].unique().tolist()), num_ranks)
    return mesh_from_stages(stages_by_rank(compute), num_ranks)
