"""Mesh and stages of pipelines of which some ranks have no trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from pptrace.axes import SIZED
from pptrace.marks import P2P
from pptrace.model.categories import with_categories
from pptrace.model.mesh import MeshInfo
from pptrace.model.tables import COMPUTE_KINDS, MESSAGE_CALLS, UNKNOWN
from pptrace.recognise.groups.axes import Groups, configured_groups
from pptrace.recognise.groups.topology import multiply_up
from pptrace.recognise.infer.assign_from_schedule import StageAssignment, messages_of_plan
from pptrace.recognise.infer.assign_stages import with_stages
from pptrace.recognise.infer.explanations import (
    Explanation,
    PipelineFacts,
    agreed_explanation,
    find_explanations,
    pipeline_lengths_of_stages,
    strides,
)
from pptrace.recognise.infer.traced_ranks import Detail, TracedRank, find_traced_ranks, peers_of
from pptrace.recognise.schedule.plan_per_step import with_num_microbatches
from pptrace.schedule.plan import Plan
from pptrace.slices import rows_where


@dataclass(frozen=True, slots=True)
class Partial:
    """The tables with the stages that are certain, the mesh, and every schedule that the traced ranks may have run.

    ``is_complete``: all that there may be were tried.
    """

    placed: StageAssignment
    explanations: tuple[Explanation, ...]
    is_complete: bool


_SCHEDULES_OF = {
    "megatron-lm": ("1f1b", "interleaved-1f1b"),
    "deepspeed": ("1f1b",),
    "nanotron": ("gpipe", "1f1b"),
}
"""Schedules that train, of frameworks that have no others."""
_TORCH = "torch.distributed.pipelining"
_EXACT = (_TORCH, "pptrace", "unlabelled")
"""Frameworks whose messages are those that moved; others label functions that may move four."""


@dataclass(frozen=True, slots=True)
class JoinedRanks:
    """The joined ranks of a run, and what is known of their pipeline.

    ``ops`` and ``comms`` have unknown stages where no label names them; ``mesh`` is that of labels and groups, or the one that
    the facts of the run declare (``is_declared``). By rank ``calls`` has its communication, ``distributed`` what its profiler
    wrote of the job. ``framework`` is that of the labels. On the ``paired`` ranks the microbatches of backwards are those of
    their forwards, not only counted.
    """

    ops: pd.DataFrame
    comms: pd.DataFrame
    mesh: MeshInfo
    calls: Mapping[int, pd.DataFrame]
    groups: Groups
    distributed: Mapping[int, Mapping[str, Any]]
    framework: str
    is_declared: bool
    paired: frozenset[int]

    @property
    def has_exact_messages(self) -> bool:
        """Return whether the messages are those that moved and no others."""
        return self.framework in _EXACT


def read_partial(joined: JoinedRanks) -> Partial | None:
    """Derive mesh, schedules and stages from the traced ranks; None where no rank is missing, or nothing can be derived."""
    mesh, groups = joined.mesh, joined.groups
    if not _lacks_ranks(joined):
        return None
    traced_ranks = find_traced_ranks(
        joined.ops, joined.comms, joined.calls, exact=joined.has_exact_messages, paired=joined.paired
    )
    if not traced_ranks or len({traced.detail for traced in traced_ranks}) > 1:
        return None
    if joined.is_declared and not {traced.rank for traced in traced_ranks} <= {
        rank for pipeline in mesh.pipelines for rank in pipeline
    }:
        return None
    facts = PipelineFacts(mesh.pipelines) if joined.is_declared else _pipeline_facts(traced_ranks, joined)
    explanations, is_complete = find_explanations(traced_ranks, facts)
    chosen = agreed_explanation(explanations) if is_complete else None
    is_open = traced_ranks[0].detail is not Detail.STAGES
    is_proved = bool(joined.paired)
    if (
        len(traced_ranks) > 1
        and not is_proved
        and ((is_open and chosen is None) or (facts.pipelines and not explanations))
    ):
        return None
    if not explanations and is_open and _is_inferred(joined.ops) and not is_proved:
        return None
    if not joined.is_declared:
        mesh = _mesh(traced_ranks, explanations if is_complete else (), facts, mesh, groups)
    ops, comms, notes = _with_stages(
        joined.ops, joined.comms, traced_ranks, chosen, explanations if is_complete else (), mesh
    )
    if mesh.pp is None:
        notes = (*notes, _unknown_length(traced_ranks, mesh))
    return Partial(StageAssignment(ops, comms, mesh, notes), explanations, is_complete)


def _unknown_length(traced_ranks: Sequence[TracedRank], mesh: MeshInfo) -> str:
    subject = (
        f"rank {traced_ranks[0].rank} is the only traced rank of its pipeline"
        if len(traced_ranks) == 1
        else f"{len(traced_ranks)} of {mesh.num_ranks} ranks of the pipeline are traced"
    )
    is_known = all(mesh.pp_rank(traced.rank) is not None or traced.detail is Detail.STAGES for traced in traced_ranks)
    what = "its length is" if is_known else "its length and the stages are"
    return f"{subject}: {what} null; give the traces of its other ranks"


def _is_inferred(ops: pd.DataFrame) -> bool:
    return bool((ops.loc[ops["kind"].isin(COMPUTE_KINDS), "source"] == "inferred").any())


def _lacks_ranks(joined: JoinedRanks) -> bool:
    """Return whether ranks of the pipeline have no trace: by its groups, by stages that no rank holds, or for a single rank
    that is not the only one of the run.
    """
    ops, comms, mesh, calls = joined.ops, joined.comms, joined.mesh, joined.calls
    compute = rows_where(ops[["rank", "stage"]], ops["kind"].isin(COMPUTE_KINDS) & (ops["microbatch"] >= 0))
    ranks = set(compute["rank"].unique().tolist())
    if not ranks:
        return False
    pipelines = joined.groups.pipelines
    if joined.is_declared or (pipelines and mesh.pipelines == pipelines):
        return any(ranks & set(pipeline) and set(pipeline) - set(calls) for pipeline in mesh.pipelines)
    stages = {stage for stage in compute["stage"].unique().tolist() if stage >= 0}
    if stages and len(stages) <= max(stages):
        return True
    if len(ranks) > 1:
        return not stages and mesh.in_order and not mesh.is_guess and mesh.num_ranks > len(calls)
    messages = comms[comms["rank"].isin(ranks) & (comms["axis"] == "pp") & comms["kind"].isin(P2P)]
    is_sending = bool(len(messages)) or any(
        calls[rank]["kind"].isin(MESSAGE_CALLS).any() for rank in ranks if rank in calls
    )
    return is_sending or (mesh.is_guess and not joined.has_exact_messages) or mesh.num_ranks > len(calls)


def _pipeline_facts(traced_ranks: Sequence[TracedRank], joined: JoinedRanks) -> PipelineFacts:
    """Facts of the pipeline that follow from groups, sizes and the framework."""
    mesh, groups, distributed, framework = joined.mesh, joined.groups, joined.distributed, joined.framework
    ranks = {traced.rank for traced in traced_ranks}
    own_pipelines = tuple(pipeline for pipeline in groups.pipelines if ranks & set(pipeline))
    if ranks <= {rank for pipeline in own_pipelines for rank in pipeline} and mesh.pipelines == groups.pipelines:
        return PipelineFacts(own_pipelines, names=_names(framework, traced_ranks))
    world = None if mesh.is_guess else mesh.num_ranks
    sizes = _sizes_of_groups(traced_ranks[0].rank, distributed) if framework == _TORCH else set()
    if "pp" in groups.sizes:
        sizes = {groups.sizes["pp"]}
    elif world is not None:
        sizes = {size for size in sizes or range(1, world + 1) if multiply_up({**groups.sizes, "pp": size}, world)}
    return PipelineFacts((), tuple(sorted(sizes)), world, _names(framework, traced_ranks))


def _names(framework: str, traced_ranks: Sequence[TracedRank]) -> tuple[str, ...]:
    """The schedules that a framework's labels can belong to; of torch's, only GPipe writes labels without a stage."""
    if framework == _TORCH and traced_ranks[0].detail is Detail.KINDS:
        return ("gpipe",)
    return _SCHEDULES_OF.get(framework, ())


def _sizes_of_groups(rank: int, distributed: Mapping[int, Mapping[str, Any]]) -> set[int]:
    """The sizes of the process groups of a rank, of which its pipeline has one in torch's own runtime."""
    return {group.size for group in configured_groups(distributed.get(rank, {})).values() if group.size > 0}


def _mesh(
    traced_ranks: Sequence[TracedRank],
    explanations: Sequence[Explanation],
    facts: PipelineFacts,
    mesh: MeshInfo,
    groups: Groups,
) -> MeshInfo:
    """The mesh with the sizes and pipeline ranks that all explanations have in common."""
    lengths = {explanation.plan.pp for explanation in explanations}
    chunks = {explanation.plan.num_chunks for explanation in explanations}
    if not explanations and traced_ranks[0].detail is Detail.STAGES:
        lengths = (
            pipeline_lengths_of_stages([traced.stages for traced in traced_ranks])
            if len(traced_ranks[0].stages) > 1
            else set(facts.lengths)
        )
        lengths = {size for size in lengths if not facts.lengths or size in facts.lengths}
        chunks = {len(traced.stages) for traced in traced_ranks}
    pp = lengths.pop() if len(lengths) == 1 else None
    pp_ranks = {
        traced.rank: _only_value({explanation.pp_ranks[traced.rank] for explanation in explanations})
        for traced in traced_ranks
    }
    if not explanations and traced_ranks[0].detail is Detail.STAGES and pp is not None:
        pp_ranks = {
            traced.rank: traced.stages[0] for traced in traced_ranks
        }  # the first chunk's stage, on a loop as well as on a V
    pipelines = facts.pipelines or _pipelines(traced_ranks, explanations, pp_ranks, pp, facts.world)
    sizes: dict[str, int | None] = {axis: groups.sizes.get(axis) for axis in SIZED}
    if pp is not None and pp == facts.world:
        sizes = {axis: size or 1 for axis, size in sizes.items()}
    is_complete = all(len(pipeline) == pp for pipeline in pipelines)
    return replace(
        mesh.with_sizes(sizes),
        pp=pp,
        vpp=chunks.pop() if len(chunks) == 1 else None,
        pipelines=pipelines,
        known_pp_ranks=()
        if is_complete
        else tuple((rank, -1 if pp_rank is None else pp_rank) for rank, pp_rank in pp_ranks.items()),
        in_order=False,
    )


def _only_value(values: set[int]) -> int | None:
    return values.pop() if len(values) == 1 else None


def _pipelines(
    traced_ranks: Sequence[TracedRank],
    explanations: Sequence[Explanation],
    pp_ranks: Mapping[int, int | None],
    pp: int | None,
    world: int | None,
) -> tuple[tuple[int, ...], ...]:
    """The pipelines of global ranks, if exactly one regular mesh gives these ranks their pipeline ranks and peers; else the
    traced ranks, by pipeline rank.
    """
    ranks = [traced.rank for traced in traced_ranks]
    known_pp_ranks = {rank: pp_rank for rank, pp_rank in pp_ranks.items() if pp_rank is not None}
    if pp is not None and len(known_pp_ranks) == len(ranks):
        options = strides(pp, world) if world is not None else _strides_of_peers(traced_ranks)
        fitting = {
            pipelines
            for stride in options
            if (pipelines := _pipelines_of_stride(known_pp_ranks, pp, stride)) is not None
            and _are_peers_neighbours(traced_ranks, explanations, known_pp_ranks, pipelines)
        }
        if len(fitting) == 1:
            return fitting.pop()
    columns: dict[int, list[int]] = {}
    for rank in sorted(ranks, key=lambda rank: (known_pp_ranks.get(rank, 0), rank)):
        columns.setdefault(known_pp_ranks.get(rank, -1), []).append(rank)
    if len(known_pp_ranks) < len(ranks) or len({len(column) for column in columns.values()}) > 1:
        return tuple((rank,) for rank in ranks)
    return tuple(zip(*columns.values(), strict=True))


def _strides_of_peers(traced_ranks: Sequence[TracedRank]) -> list[int]:
    """Possible distances between neighbours, by the peers of messages."""
    return sorted(
        {abs(peer - traced.rank) for traced in traced_ranks for peer in traced.messages.peers if peer != traced.rank}
    )


def _pipelines_of_stride(pp_ranks: Mapping[int, int], pp: int, stride: int) -> tuple[tuple[int, ...], ...] | None:
    """The pipelines of these ranks with neighbours ``stride`` apart; None where that contradicts their pipeline ranks."""
    first = sorted({rank - pp_rank * stride for rank, pp_rank in pp_ranks.items()})
    if min(first) < 0 or any(rank // stride % pp != pp_rank for rank, pp_rank in pp_ranks.items()):
        return None
    return tuple(tuple(base + stride * pp_rank for pp_rank in range(pp)) for base in first)


def _are_peers_neighbours(
    traced_ranks: Sequence[TracedRank],
    explanations: Sequence[Explanation],
    pp_ranks: Mapping[int, int],
    pipelines: Sequence[Sequence[int]],
) -> bool:
    """Return whether all known peers of the ranks are their neighbours in these pipelines."""
    for traced in traced_ranks:
        pipeline = next(pipeline for pipeline in pipelines if traced.rank in pipeline)
        neighbours = {
            pipeline[pp_rank]
            for explanation in explanations
            for pp_rank in peers_of(explanation.plan, pp_ranks[traced.rank])
        }
        if not traced.messages.peers <= neighbours:
            return False
    return True


def _with_stages(
    ops: pd.DataFrame,
    comms: pd.DataFrame,
    traced_ranks: Sequence[TracedRank],
    chosen: Explanation | None,
    explanations: Sequence[Explanation],
    mesh: MeshInfo,
) -> tuple[pd.DataFrame, pd.DataFrame, tuple[str, ...]]:
    """Fill in the stages, chunks and microbatches that all explanations agree on; others are unknown."""
    if chosen is None and explanations:
        ops = _with_phases(ops, traced_ranks, explanations)
    detail, num_chunks = traced_ranks[0].detail, {explanation.plan.num_chunks for explanation in explanations}
    if detail is Detail.STAGES:
        return ops, comms, ()
    stages = _common_stages(explanations)
    if stages is not None and (detail is Detail.CHUNKS or num_chunks == {1}):
        pp_ranks = dict.fromkeys({*ops["rank"].tolist(), *comms["rank"].tolist()}, -1)
        pp_ranks |= {traced.rank: index for index, traced in enumerate(traced_ranks)}

        def layout(chunk: int, index: int, _pp: int) -> int:
            return stages[index][chunk] if index >= 0 else -1

        return with_stages(ops, pp_ranks, 0, layout), with_stages(comms, pp_ranks, 0, layout), ()
    if chosen is not None:
        ops = _with_microbatches(ops, traced_ranks, chosen)
        return (ops, *messages_of_plan(comms, ops, lambda step: _plan_of_step(chosen, ops, step) or chosen.plan, mesh))
    return *_without_stages(ops, comms, keep=detail is Detail.CHUNKS or num_chunks == {1}), ()


def _common_stages(explanations: Sequence[Explanation]) -> list[tuple[int, ...]] | None:
    """The stages of each rank with a trace, by chunk, where all explanations have the same."""
    stages_by_explanation = {
        tuple(explanation.plan.stages_of(pp_rank) for pp_rank in explanation.pp_ranks.values())
        for explanation in explanations
    }
    return list(stages_by_explanation.pop()) if len(stages_by_explanation) == 1 else None


def _without_stages(ops: pd.DataFrame, comms: pd.DataFrame, keep: bool) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Clear the stages; microbatches stay where their order is certain, and so do labelled chunks."""
    ops, lacking = ops.copy(), (ops["stage"] < 0) & (ops["microbatch"] >= 0)
    if keep:
        ops.loc[lacking, "chunk"] = ops.loc[lacking, "chunk"].clip(lower=0)
    else:
        ops.loc[lacking, ["chunk", "microbatch"]] = UNKNOWN
    ops.loc[lacking, "pair"] = ""
    return ops, comms.assign(microbatch=comms["microbatch"].where(comms["stage"] >= 0, UNKNOWN))


def _with_phases(
    ops: pd.DataFrame, traced_ranks: Sequence[TracedRank], explanations: Sequence[Explanation]
) -> pd.DataFrame:
    """Fill in the phases that all explanations agree on; others are cleared."""
    ops = ops.copy()
    for traced, rows in _rows_of_steps(ops, traced_ranks):
        phases = {tuple(explanation.phases_of(traced.rank)) for explanation in explanations}
        is_known = len(phases) == 1 and tuple(rows["kind"]) == traced.kinds
        ops.loc[rows.index, "phase"] = list(phases.pop()) if is_known else ""
    return ops


def _with_microbatches(ops: pd.DataFrame, traced_ranks: Sequence[TracedRank], chosen: Explanation) -> pd.DataFrame:
    """Fill in stages, chunks and microbatches of each step's plan; rows that do not match it have none."""
    ops = ops.assign(pair=ops["pair"].astype(object))  # texts that are no category yet
    for traced, rows in _rows_of_steps(ops, traced_ranks):
        plan = _plan_of_step(chosen, ops, int(rows["step"].iloc[0]))
        actions = () if plan is None else plan.compute_actions(chosen.pp_ranks[traced.rank])[: len(rows)]
        is_same_order = [action.kind.value for action in actions] == rows["kind"].tolist()
        for name in ("stage", "chunk", "microbatch"):
            ops.loc[rows.index, name] = [getattr(action, name) for action in actions] if is_same_order else -1
        ops.loc[rows.index, "pair"] = (
            [str(action) if action.parts else "" for action in actions] if is_same_order else ""
        )
    return with_categories(ops)


def _rows_of_steps(ops: pd.DataFrame, traced_ranks: Sequence[TracedRank]) -> Iterator[tuple[TracedRank, pd.DataFrame]]:
    """The compute ops of each step of each rank, in time order."""
    compute = ops[ops["kind"].isin(COMPUTE_KINDS) & (ops["microbatch"] >= 0)].sort_values("start_ns", kind="stable")
    for traced in traced_ranks:
        for _, rows in compute[compute["rank"] == traced.rank].groupby("step"):
            yield traced, rows


def _plan_of_step(chosen: Explanation, ops: pd.DataFrame, step: int) -> Plan | None:
    """The plan with as many microbatches as a step has."""
    plan, kinds = chosen.plan, ops.loc[(ops["step"] == step) & ops["rank"].isin(chosen.pp_ranks), ["rank", "kind"]]
    forwards = kinds["kind"].isin(("F", "OVERLAP_F_B")).groupby(kinds["rank"]).sum().max()
    count = int(forwards) * plan.num_chains // plan.num_chunks
    return plan if count == plan.num_microbatches else with_num_microbatches(plan, count)
