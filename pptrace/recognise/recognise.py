"""What was found in each rank → ops and comms of all, with the mesh and the schedule behind them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from pptrace.recognise.call_comms import comms_of_calls
from pptrace.recognise.devices import DeviceWork
from pptrace.recognise.from_labels import with_peers
from pptrace.recognise.group_descriptions import framework_of_descriptions
from pptrace.recognise.groups import Groups, find_groups
from pptrace.recognise.joint_ranks import Joint, match_ranks, without_inferred
from pptrace.recognise.matching import match_calls, match_comms, unmatched, with_sizes
from pptrace.recognise.mesh import (
    MeshInfo,
    mesh_from_metadata,
    mesh_from_stages,
    mesh_in_order,
    mesh_with_collectives,
    mesh_with_groups,
)
from pptrace.recognise.placement import Placed, place
from pptrace.recognise.rank import RankFound, recognise_rank
from pptrace.recognise.schedule import COMPUTE_KINDS, ScheduleInfo, recognise_schedule
from pptrace.tables import COMMS, MEMORY, OPS, Schema, Trace, empty_table

UNLABELLED = "unlabelled"
"""The framework of traces that nothing tells."""


@dataclass(frozen=True, slots=True)
class Recognised:
    """What the traces hold, each rank still on its own clock.

    ``work`` is each rank's device work; ``facts`` what each rank's recorder wrote about itself ({} for others' traces).
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


def recognise(traces: Sequence[Trace], schedule: str | None = None, num_ranks: int | None = None) -> Recognised:
    """:func:`recognise_ranks` of what is found in these traces, one per rank, with their ranks set."""
    return recognise_ranks([recognise_rank(trace) for trace in traces], schedule, num_ranks)


def recognise_ranks(
    ranks: Sequence[RankFound], schedule: str | None = None, num_ranks: int | None = None
) -> Recognised:
    """Join what was found in each rank: the ops, the communication, the mesh and the schedule of the run.

    Args:
        ranks: one per rank, each with its rank set.
        schedule: the name of the schedule to compare with, instead of the one that is found.
        num_ranks: the ranks that the run had, when known; more than ``ranks`` when some have no trace.

    Raises:
        UsageError, ScheduleError: ``schedule`` is unknown or does not fit the run.
    """
    facts = {found.number: found.info.metadata for found in ranks}
    calls = {found.number: found.calls for found in ranks}
    groups = _groups(ranks)
    joint = match_ranks(ranks, groups)
    if joint.pipelines:
        ranks = joint.ranks
        groups = _groups(ranks)
    metadata = list(facts.values())
    located = _locate(ranks, groups, joint, num_ranks)
    if joint.refused and (located.placed.mesh.vpp or 1) == 1 and not _is_split(located.placed.ops):
        ranks = [without_inferred(found) if found.number in joint.refused else found for found in ranks]
        located = _locate(ranks, groups, joint, num_ranks)
    placed = located.placed
    notes = joint.notes if joint.pipelines or (placed.mesh.vpp or 1) == 1 else ()
    warnings = [
        *_of_ranks(ranks),
        *notes,
        *_inferences(located.ops, placed, located.mesh, _stage_order(metadata, located.mesh, groups)),
    ]
    memory = _joined([(found.number, found.memory) for found in ranks], MEMORY)
    ops, mesh, warnings = placed.ops, placed.mesh, [*warnings, *placed.notes]
    comms = with_peers(placed.comms, ops, mesh)
    found_schedule = recognise_schedule(ops, mesh, metadata, schedule)
    comms, told = _with_calls(match_comms(with_sizes(comms, mesh), mesh), calls, groups, ops, mesh, found_schedule)
    warnings += told
    warnings += [f"process groups: {line}" for line in groups.evidence]
    framework, evidence = _framework(ranks, groups)
    return Recognised(
        framework=framework,
        ops=ops,
        comms=comms,
        memory=memory,
        work={found.number: found.work for found in ranks},
        mesh=mesh,
        schedule=found_schedule,
        facts=facts,
        warnings=(*warnings, *evidence, *found_schedule.warnings, *unmatched(comms, facts)),
    )


@dataclass(frozen=True, slots=True)
class _Located:
    """The ops and the mesh as labels and groups tell them, and both with what order tells besides."""

    ops: pd.DataFrame
    mesh: MeshInfo
    placed: Placed


def _locate(ranks: Sequence[RankFound], groups: Groups, joint: Joint, num_ranks: int | None) -> _Located:
    ops = _joined([(found.number, found.ops) for found in ranks], OPS)
    comms = _joined([(found.number, found.comms) for found in ranks], COMMS)
    metadata = [found.info.metadata for found in ranks]
    known = num_ranks or max(len(ranks), *(found.number + 1 for found in ranks))
    mesh = replace(_mesh(metadata, ops, comms, groups, known), is_guess=num_ranks is None and not groups.world_size)
    mesh = _with_pipelines(mesh, joint)
    return _Located(ops, mesh, place(ops, comms, mesh, {found.number: found.calls for found in ranks}))


def _is_split(ops: pd.DataFrame) -> bool:
    """Whether ops without labels have no names since weight gradients are ops of their own: more backwards than forwards."""
    own = ops[(ops["source"] == "inferred") & ops["kind"].isin(COMPUTE_KINDS)]
    return bool((own["stage"] < 0).all() and (own["kind"] == "B").sum() > (own["kind"] == "F").sum())


def _groups(ranks: Sequence[RankFound]) -> Groups:
    return find_groups(
        {found.number: found.calls for found in ranks},
        {found.number: found.info.distributed for found in ranks},
        {found.number: found.ops.loc[found.ops["step"] >= 0, "step"].nunique() for found in ranks},
    )


def _with_pipelines(mesh: MeshInfo, joint: Joint) -> MeshInfo:
    """The mesh with the pipelines whose messages were matched, where it has as many ranks in pipelines of this length."""
    if not joint.pipelines or mesh.pp != len(joint.pipelines[0]):
        return mesh
    return replace(mesh, pipelines=joint.pipelines, in_order=False)


def _framework(ranks: Sequence[RankFound], groups: Groups) -> tuple[str, tuple[str, ...]]:
    """Whose labels the ops have, else who describes process groups so, with a line that says it; else "unlabelled"."""
    labels = {found.framework for found in ranks} - {"", UNLABELLED}
    if labels:
        return min(labels), ()
    framework, description = framework_of_descriptions(group.description for group in groups.axes)
    if framework:
        return framework, (
            f"no labels of a framework: {framework} is told by its names of process groups ({description})",
        )
    return UNLABELLED, ()


def _with_calls(
    comms: pd.DataFrame,
    by_rank: Mapping[int, pd.DataFrame],
    groups: Groups,
    ops: pd.DataFrame,
    mesh: MeshInfo,
    schedule: ScheduleInfo,
) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """The communication that marks and labels tell, which is matched, and what else the ranks called, matched as well."""
    calls, told = comms_of_calls(by_rank, groups, ops, comms, mesh, schedule)
    if calls.empty:
        return comms, told
    matched = match_calls(calls, first=int(comms["match"].max()) + 1 if len(comms) else 0)[list(COMMS)]
    return pd.concat([comms, matched], ignore_index=True) if len(comms) else matched, told


_ALIKE = 1
"""So many ranks say the same with other numbers before the rest of them are counted."""


def _of_ranks(ranks: Sequence[RankFound]) -> list[str]:
    """The lines of all ranks; where many ranks have lines that differ in their numbers alone, the first few."""
    alike: dict[str, list[str]] = {}
    for found in ranks:
        for line in found.warnings:
            alike.setdefault(re.sub(r"\d+", "0", line), []).append(f"rank {found.number}: {line}")
    told = []
    for lines in alike.values():
        more = len(lines) - _ALIKE
        told += lines if more < 2 else [*lines[:_ALIKE], f"and {more} more ranks like {lines[0].split(':')[0]}"]
    return told


def _stage_order(metadata: Sequence[Mapping[str, Any]], mesh: MeshInfo, groups: Groups) -> str:
    """What tells the stages where no label does; "" where the facts of a run do."""
    if any("pp_ranks" in own for own in metadata):
        return ""
    if groups.pipelines and mesh.pipelines == groups.pipelines:
        return "each rank's place in its pipeline's process group is"
    return "the ranks in their order are"


def _inferences(ops: pd.DataFrame, placed: Placed, mesh: MeshInfo, order: str) -> list[str]:
    """What no label says and order had to, with what it was taken from.

    Args:
        ops, mesh: as labels and groups tell them.
        placed: with what order told besides.
        order: what was taken for the stages; "" where they are told.
    """
    compute = ops[ops["kind"].isin(COMPUTE_KINDS)]
    told = []
    is_inferred = bool((compute["source"] == "inferred").any())
    if is_inferred:
        told.append(
            "no labels of ops: forwards, backwards and microbatches are inferred from the order of operators or launches, "
            "autograd's threads and messages on each rank"
        )
    is_taken = bool(order) and (compute["stage"] < 0).all() and not (placed.ops["stage"] < 0).all()
    if compute["rank"].nunique() > 1 and is_taken and not (is_inferred and mesh.is_open):
        told.append(f"no label tells the stages: {order} taken for them")
    return told


def _joined(tables: Sequence[tuple[int, pd.DataFrame]], schema: Schema) -> pd.DataFrame:
    """The tables of all ranks as one, each row with its rank."""
    filled = [table.assign(rank=rank).astype({"rank": "int64"}) for rank, table in tables if len(table)]
    return pd.concat(filled, ignore_index=True) if filled else empty_table(schema)


def _mesh(
    metadata: Sequence[Mapping[str, Any]], ops: pd.DataFrame, comms: pd.DataFrame, groups: Groups, num_ranks: int
) -> MeshInfo:
    """The mesh of the facts, else that of the process groups and the ops; where the facts name no pipelines, those of the ops."""
    told = mesh_from_metadata(metadata, num_ranks)
    if told is None:
        return mesh_with_groups(mesh_with_collectives(_mesh_of_ops(ops, num_ranks), comms), ops, groups)
    return told if told.pipelines else replace(told, pipelines=_mesh_of_ops(ops, num_ranks).pipelines)


def _mesh_of_ops(ops: pd.DataFrame, num_ranks: int) -> MeshInfo:
    compute = ops[ops["kind"].isin(COMPUTE_KINDS)]
    if len(compute) and (compute["stage"] < 0).all():
        return mesh_in_order(sorted(compute["rank"].unique().tolist()), num_ranks)
    stages = {
        rank: frozenset(compute.loc[compute["rank"] == rank, "stage"].tolist())
        for rank in compute["rank"].unique().tolist()
    }
    return mesh_from_stages(stages, num_ranks)
