"""Locate what the ranks of a run did: which ops those without labels ran, in which groups, mesh and stages.

What becomes known, in this order: the process groups, by the calls of the ranks; the ops of ranks whose labels name none, by
the messages between them (:mod:`pptrace.recognise.infer.locate_unlabelled`); the mesh, by facts, groups and ops; the stages,
chunks and microbatches that labels leave open, by the plans that explain the order of ops on all ranks of a pipeline, or on those
that have a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from msgspec import Struct
from msgspec.structs import replace

from pptrace.clock.same_host import pairs_of_same_host_name, same_host_spread
from pptrace.marks import SpanKind
from pptrace.model.join_tables import join_ranks
from pptrace.model.mesh import MeshInfo
from pptrace.model.tables import BACKWARD_KINDS, COMMS, COMPUTE_KINDS, OPS, What
from pptrace.model.traces import InputFormat
from pptrace.recognise.groups.axes import Groups, find_groups
from pptrace.recognise.groups.calls_by_members import with_groups_by_members
from pptrace.recognise.groups.calls_by_time import with_groups_by_time
from pptrace.recognise.groups.mesh import (
    mesh_from_metadata,
    mesh_from_stages,
    mesh_with_collectives,
    mesh_with_declared_pipelines,
    mesh_with_groups,
    mesh_with_messages,
    stages_by_rank,
    with_layout,
)
from pptrace.recognise.groups.topology import framework_of_descriptions
from pptrace.recognise.groups.usage import Members, When, with_group_of_all, with_members
from pptrace.recognise.infer.stages import JoinedRanks, StageAssignment, known_stages
from pptrace.recognise.recognised_rank import RecognisedRank
from pptrace.recognise.steps.cut_by_balance import with_balanced_spans
from pptrace.slices import rows_among, rows_where

UNLABELLED = "unlabelled"
"""The framework of traces without any framework's labels."""


class Located(Struct, frozen=True):
    """The ranks with the ops that they ran; facts of the run, its groups and framework; ops and mesh with the stages assigned
    (``placed``). ``framework_evidence`` says what shows the framework, if not labels.
    """

    ranks: Sequence[RecognisedRank]
    facts: Mapping[int, Mapping[str, Any]]
    calls: Mapping[int, pd.DataFrame]
    groups: Groups
    placed: StageAssignment
    framework: str
    framework_evidence: tuple[str, ...]
    warnings: tuple[str, ...]


def locate(
    ranks: Sequence[RecognisedRank],
    found: tuple[Members, Groups],
    matched: Sequence[tuple[int, ...]],
    num_ranks: int | None,
    spanned: Sequence[int],
) -> Located:
    """Locate ranks: the mesh by facts, groups and ops, then the stages.

    Args:
        found: the groups (:func:`groups_of`).
        matched: pipelines whose messages were matched.
        num_ranks: the ranks that the run had, when known.
        spanned: the ranks of OpenTelemetry spans.
    """
    ops = join_ranks([(recognised.number, recognised.ops) for recognised in ranks], OPS)
    comms = join_ranks([(recognised.number, recognised.comms) for recognised in ranks], COMMS)
    facts, layout = with_layout({recognised.number: recognised.info.metadata for recognised in ranks}, ops)
    (calls, distributed, uncertain), groups = found
    if matched and groups.sizes.get("pp", len(matched[0])) != len(matched[0]):  # those of messages within stages too
        groups = replace(groups, sizes={})
    metadata = list(facts.values())
    # The ranks with a trace, and the peers of their messages, have numbers below the size of the run; no group has more ranks.
    highest_peer = int(comms["peer"].max()) if len(comms) else -1
    largest = max((group.size for group in groups.axes), default=-1)
    least_world = max(len(ranks), highest_peer + 1, largest, *(recognised.number + 1 for recognised in ranks))
    mesh = _mesh(metadata, ops, comms, groups, num_ranks or least_world)
    vpp = None if spanned and mesh.in_order else mesh.vpp
    mesh = replace(mesh, is_guess=num_ranks is None and not groups.world_size, vpp=vpp)
    if matched and mesh.pp == len(matched[0]):
        mesh = replace(mesh, pipelines=tuple(matched), in_order=False)
    ops, cut = with_balanced_spans(ops, mesh, spanned)
    framework, evidence = _framework(ranks, groups)
    names_ranks = any("pp_ranks" in facts_of_rank for facts_of_rank in metadata)
    joined = JoinedRanks(
        ops,
        comms,
        mesh,
        calls,
        groups,
        distributed,
        framework=framework,
        is_declared=names_ranks and bool(mesh.pipelines),
        paired=frozenset(recognised.number for recognised in ranks if recognised.is_paired),
        tells_sizes=bool(spanned) or any(facts_of_rank.get("plan") for facts_of_rank in metadata),
    )
    placed = known_stages(joined) or _inferred_stages(joined)
    order = ""  # what is taken for the stages where neither labels nor facts of the run tell them
    if not names_ranks:
        by_group = groups.pipelines and mesh.pipelines == groups.pipelines
        order = "the order of ranks in the pipeline's process group is" if by_group else "ascending order of ranks is"
    is_explained = any(recognised.by_gaps or recognised.is_paired for recognised in ranks)
    inferences = _inferences(joined, placed, order, is_explained)
    return Located(
        ranks=ranks,
        facts=facts,
        calls=calls,
        groups=groups,
        placed=placed,
        framework=framework,
        framework_evidence=evidence,
        warnings=(*layout, *uncertain, *cut, *inferences, *placed.notes),
    )


def _inferred_stages(joined: JoinedRanks) -> StageAssignment:
    """The stages that labels leave open: what finds them is imported for such runs alone."""
    from pptrace.recognise.infer.complete_pipelines import stages_of_complete
    from pptrace.recognise.infer.partial_pipelines import stages_of_partial

    return stages_of_partial(joined) or stages_of_complete(joined)


def on_one_clock(facts: Mapping[int, Mapping[str, Any]]) -> Callable[[int, int], bool]:
    """Return what tells whether two ranks have one clock, as far as their recorders or the names of their hosts tell."""

    def have_one_clock(*pair: int) -> bool:
        return same_host_spread(pair, facts) is not None or bool(pairs_of_same_host_name(pair, facts)[0, 1])

    return have_one_clock


def _with_times_of_updates(recognised: RecognisedRank, calls: pd.DataFrame) -> pd.DataFrame:
    """A rank's calls outside of autograd's engine by when they were made (a :class:`When`), where its updates are known: before
    one, behind which no backward comes, or in forwards.
    """
    what, start = (recognised.host[name].to_numpy() for name in ("what", "start_ns"))
    kind, begun = (recognised.ops[name].to_numpy() for name in ("kind", "start_ns"))
    backward = np.sort(np.append(start[what == What.ENGINE.value], begun[np.isin(kind, BACKWARD_KINDS)]))
    update = np.sort(np.append(start[what == What.OPTIMIZER.value], begun[kind == SpanKind.OPTIMIZER]))
    if not len(update) or not len(backward):
        return calls
    at, is_outside = calls["start_ns"].to_numpy(), (calls["backward"] == When.OUTSIDE).to_numpy()
    next_backward, next_update = (
        np.append(of, np.iinfo(np.int64).max)[np.searchsorted(of, at)] for of in (backward, update)
    )
    when = np.where(next_update < next_backward, When.BEFORE_UPDATE, When.IN_FORWARD)
    when[np.minimum(next_backward, next_update) == np.iinfo(np.int64).max] = When.OUTSIDE
    return calls.assign(backward=np.where(is_outside, when, calls["backward"]))


def groups_of(
    ranks: Sequence[RecognisedRank], no_pipeline: Collection[int] = (), pipelines: Collection[tuple[int, ...]] = ()
) -> tuple[Members, Groups]:
    """The process groups, and the calls with the members of their communicators; ``pipelines`` are those that were matched."""
    facts = {recognised.number: recognised.info.metadata for recognised in ranks}
    members = with_members(
        {recognised.number: _with_times_of_updates(recognised, recognised.calls) for recognised in ranks},
        facts,
        {recognised.number: recognised.info.distributed for recognised in ranks},
    )

    calls, distributed, lines = members
    configured = [info for info in distributed.values() if info.get("pg_config")]
    worlds = {info.get("world_size") for info in distributed.values()}
    if not configured and len(worlds) == 1 and isinstance(world := worlds.pop(), int):
        calls, of_all = with_group_of_all(calls, world)
        members = calls, distributed, (*lines, *of_all)
    elif configured:
        calls, by_members = with_groups_by_members(calls, distributed)
        calls, by_time = with_groups_by_time(calls, distributed, on_one_clock(facts))
        members = calls, distributed, (*lines, *by_members, *by_time)
    groups = find_groups(
        *members[:2],
        {recognised.number: recognised.ops.loc[recognised.ops["step"] >= 0, "step"].nunique() for recognised in ranks},
        by_use=any(recognised.info.format is not InputFormat.NCCL_INSPECTOR for recognised in ranks),
        no_pipeline=no_pipeline,
        pipelines=pipelines,
    )
    return members, groups


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


def _inferences(joined: JoinedRanks, placed: StageAssignment, order: str, is_explained: bool) -> list[str]:
    """Warnings about what was inferred because no label names it.

    Args:
        joined: as labels and groups tell them.
        placed: with what followed from the order of ops.
        order: what was taken for the stages; "" where they are known.
        is_explained: whether lines of the ranks say how their ops were inferred.
    """
    compute = joined.ops[rows_among(joined.ops["kind"], COMPUTE_KINDS)]
    lines = []
    is_inferred = bool((compute["source"] == "inferred").any())
    if is_inferred and not is_explained:
        lines.append(
            "no labels of ops: forwards, backwards and microbatches are inferred from the order of operators or launches, "
            "autograd's threads and messages of each rank"
        )
    is_assumed = bool(order) and (compute["stage"] < 0).all() and not (placed.ops["stage"] < 0).all()
    if compute["rank"].nunique() > 1 and is_assumed and not (is_inferred and joined.mesh.is_open):
        lines.append(f"no label names the stages: {order} assumed")
    return lines


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
    compute = rows_where(ops[["rank", "stage"]], rows_among(ops["kind"], COMPUTE_KINDS))
    if len(compute) and (compute["stage"] < 0).all():  # one pipeline of all ranks that compute is assumed
        ranks = tuple(sorted(compute["rank"].unique().tolist()))
        return MeshInfo(num_ranks, len(ranks), vpp=1, tp=1, cp=1, dp=1, ep=1, pipelines=(ranks,), in_order=True)
    return mesh_from_stages(stages_by_rank(compute), num_ranks)
