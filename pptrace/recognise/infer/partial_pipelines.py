"""Mesh, stages and schedules of pipelines of which some ranks have no trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
from msgspec.structs import replace

from pptrace.axes import SIZED
from pptrace.model.mesh import MeshInfo
from pptrace.model.tables import COMPUTE_KINDS, FORWARD_KINDS, UNKNOWN, with_categories
from pptrace.recognise.groups.axes import configured_groups
from pptrace.recognise.groups.topology import multiply_up
from pptrace.recognise.infer.candidates import Detail, TracedRank, find_traced_ranks
from pptrace.recognise.infer.explanations import (
    Explanation,
    PartialPipeline,
    agreed_explanation,
    pipeline_lengths_of_stages,
    strides,
)
from pptrace.recognise.infer.stages import (
    EXACT,
    TORCH,
    JoinedRanks,
    StageAssignment,
    lacks_ranks,
    messages_of_plan,
    with_actions,
    with_stages,
)
from pptrace.recognise.schedule.measured_steps import with_num_microbatches
from pptrace.schedule.actions import Action
from pptrace.schedule.plan import Plan
from pptrace.slices import rows_among

_SCHEDULES_OF = {
    "megatron-lm": ("1f1b", "interleaved-1f1b"),
    "deepspeed": ("1f1b",),
    "nanotron": ("gpipe", "1f1b"),
}
"""Schedules that train, of frameworks that have no others."""


def stages_of_partial(joined: JoinedRanks) -> StageAssignment | None:
    """Derive mesh, schedules and stages from the traced ranks; None where no rank is missing, or nothing can be derived."""
    if joined.tells_sizes or not lacks_ranks(joined):
        return None
    mesh, is_proved = joined.mesh, bool(joined.paired)
    is_exact = joined.framework in EXACT
    traced_ranks = find_traced_ranks(joined.ops, joined.comms, joined.calls, is_exact, joined.paired)
    if not traced_ranks or len({traced.detail for traced in traced_ranks}) > 1:
        return None
    if joined.is_declared:
        if not {traced.rank for traced in traced_ranks} <= {rank for pipeline in mesh.pipelines for rank in pipeline}:
            return None
        pipeline = PartialPipeline(traced_ranks, mesh.pipelines)
    else:
        pipeline = _pipeline_of(traced_ranks, joined)
    every_explanation, is_complete = pipeline.explanations()
    explanations = every_explanation if is_complete else ()
    chosen = agreed_explanation(explanations)
    is_open = pipeline.detail is not Detail.STAGES
    is_ambiguous = (is_open and chosen is None) or (pipeline.pipelines and not every_explanation)
    is_inferred = rows_among(joined.ops["kind"], COMPUTE_KINDS) & (joined.ops["source"] == "inferred")
    is_unexplained = is_open and not every_explanation and is_inferred.any()
    if not is_proved and ((len(traced_ranks) > 1 and is_ambiguous) or is_unexplained):
        return None
    if not joined.is_declared:
        mesh = _mesh(pipeline, explanations, joined)
    ops, comms, notes = _with_stages(joined, pipeline, chosen, explanations, mesh)
    if mesh.pp is None:
        subject = (
            f"rank {traced_ranks[0].rank} is the only traced rank of its pipeline"
            if len(traced_ranks) == 1
            else f"{len(traced_ranks)} of {mesh.num_ranks} ranks of the pipeline are traced"
        )
        is_known = not is_open or all(mesh.pp_rank(traced.rank) is not None for traced in traced_ranks)
        what = "its length is" if is_known else "its length and the stages are"
        notes = (*notes, f"{subject}: {what} null; give the traces of its other ranks")
    return StageAssignment(ops, comms, mesh, notes, every_explanation, is_complete)


def _pipeline_of(traced_ranks: Sequence[TracedRank], joined: JoinedRanks) -> PartialPipeline:
    """The traced ranks with what groups, sizes and the framework tell of their pipeline."""
    mesh, groups, framework = joined.mesh, joined.groups, joined.framework
    names: tuple[str, ...] = _SCHEDULES_OF.get(framework, ())
    if framework == TORCH and traced_ranks[0].detail is Detail.KINDS:
        names = ("gpipe",)  # of torch's schedules, only this one writes labels without a stage
    ranks = {traced.rank for traced in traced_ranks}
    of_ranks = tuple(pipeline for pipeline in groups.pipelines if ranks & set(pipeline))
    if ranks <= {rank for pipeline in of_ranks for rank in pipeline} and mesh.pipelines == groups.pipelines:
        return PartialPipeline(traced_ranks, of_ranks, names=names)
    world = None if mesh.is_guess else mesh.num_ranks
    sizes = set()
    if framework == TORCH:  # the pipeline is one of the process groups in torch's own runtime
        configured = configured_groups(joined.distributed.get(traced_ranks[0].rank, {}))
        sizes = {group.size for group in configured.values() if group.size > 0}
    if "pp" in groups.sizes:
        sizes = {groups.sizes["pp"]}
    elif world is not None:
        sizes = {size for size in sizes or range(1, world + 1) if multiply_up({**groups.sizes, "pp": size}, world)}
    return PartialPipeline(traced_ranks, (), tuple(sorted(sizes)), world, names)


def _mesh(pipeline: PartialPipeline, explanations: Sequence[Explanation], joined: JoinedRanks) -> MeshInfo:
    """The mesh with the sizes and pipeline ranks that all explanations have in common."""
    traced_ranks, sizes_of_groups = pipeline.traced, joined.groups.sizes
    lengths = {explanation.plan.pp for explanation in explanations}
    chunks = {explanation.plan.num_chunks for explanation in explanations}
    options = {traced.rank: {e.pp_ranks[traced.rank] for e in explanations} for traced in traced_ranks}
    if not explanations and pipeline.detail is Detail.STAGES:
        lengths = set(pipeline.lengths)
        if len(traced_ranks[0].stages) > 1:
            lengths = pipeline_lengths_of_stages([traced.stages for traced in traced_ranks])
            lengths = {size for size in lengths if not pipeline.lengths or size in pipeline.lengths}
        chunks = {len(traced.stages) for traced in traced_ranks}
        if len(lengths) == 1:  # the first chunk's stage, on a loop as well as on a V
            options = {traced.rank: {traced.stages[0]} for traced in traced_ranks}
    pp = _only(lengths)
    pp_ranks = {rank: _only(pp_ranks) for rank, pp_ranks in options.items()}
    pipelines = pipeline.pipelines or _pipelines(pipeline, explanations, pp_ranks, pp)
    sizes: dict[str, int | None] = {axis: sizes_of_groups.get(axis) for axis in SIZED}
    if pp is not None and pp == pipeline.world:
        sizes = {axis: size or 1 for axis, size in sizes.items()}
    is_complete = all(len(ranks) == pp for ranks in pipelines)
    known = tuple((rank, -1 if pp_rank is None else pp_rank) for rank, pp_rank in pp_ranks.items())
    return replace(
        joined.mesh.with_sizes(sizes),
        pp=pp,
        vpp=_only(chunks),
        pipelines=pipelines,
        known_pp_ranks=() if is_complete else known,
        in_order=False,
    )


def _only(values: set[int]) -> int | None:
    return next(iter(values)) if len(values) == 1 else None


def _pipelines(
    pipeline: PartialPipeline,
    explanations: Sequence[Explanation],
    pp_ranks: Mapping[int, int | None],
    pp: int | None,
) -> tuple[tuple[int, ...], ...]:
    """The pipelines of global ranks, if exactly one regular mesh gives these ranks their pipeline ranks and peers; else the
    traced ranks, by pipeline rank.
    """
    known = {rank: pp_rank for rank, pp_rank in pp_ranks.items() if pp_rank is not None}
    ranks = [traced.rank for traced in pipeline.traced]
    if len(known) < len(ranks):
        return tuple((rank,) for rank in ranks)
    if pp is not None:
        distances = {abs(peer - traced.rank) for traced in pipeline.traced for peer in traced.peers} - {0}
        neighbours = {
            rank: {neighbour for each in explanations for neighbour in each.plan.peers_of(pp_rank)}
            for rank, pp_rank in known.items()
        }
        fitting = set()
        for stride in sorted(distances) if pipeline.world is None else strides(pp, pipeline.world):
            first = sorted({rank - pp_rank * stride for rank, pp_rank in known.items()})
            if min(first) < 0 or any(rank // stride % pp != pp_rank for rank, pp_rank in known.items()):
                continue
            pipelines = tuple(tuple(base + stride * pp_rank for pp_rank in range(pp)) for base in first)
            pipeline_of = {rank: ranks for ranks in pipelines for rank in ranks}
            if all(
                traced.peers <= {pipeline_of[traced.rank][pp_rank] for pp_rank in neighbours[traced.rank]}
                for traced in pipeline.traced
            ):
                fitting.add(pipelines)
        if len(fitting) == 1:
            return fitting.pop()
    columns: dict[int, list[int]] = {}
    for rank in sorted(ranks, key=lambda rank: (known[rank], rank)):
        columns.setdefault(known[rank], []).append(rank)
    if len({len(column) for column in columns.values()}) > 1:
        return tuple((rank,) for rank in ranks)
    return tuple(zip(*columns.values(), strict=True))


def _with_stages(
    joined: JoinedRanks,
    pipeline: PartialPipeline,
    chosen: Explanation | None,
    explanations: Sequence[Explanation],
    mesh: MeshInfo,
) -> tuple[pd.DataFrame, pd.DataFrame, tuple[str, ...]]:
    """Fill in the stages, chunks and microbatches that all explanations agree on; others are unknown."""
    ops, comms, traced_ranks = joined.ops, joined.comms, pipeline.traced
    if chosen is None and explanations:
        ops = _with_phases(ops, traced_ranks, explanations)
    if pipeline.detail is Detail.STAGES:
        return ops, comms, ()
    has_chunks = pipeline.detail is Detail.CHUNKS or {e.plan.num_chunks for e in explanations} == {1}
    stages = {tuple(map(explanation.plan.stages_of, explanation.pp_ranks.values())) for explanation in explanations}
    if len(stages) == 1 and has_chunks:
        (stages_of,) = stages  # of each traced rank, by chunk
        indices = dict.fromkeys({*ops["rank"].tolist(), *comms["rank"].tolist()}, -1)
        indices |= {traced.rank: index for index, traced in enumerate(traced_ranks)}

        def layout(chunk: int, index: int, _pp: int) -> int:
            return stages_of[index][chunk] if index >= 0 else -1

        return with_stages(ops, indices, 0, layout), with_stages(comms, indices, 0, layout), ()
    if chosen is not None:
        ops = _with_plan(ops, traced_ranks, chosen)
        return (ops, *messages_of_plan(comms, ops, lambda step: _plan_of_step(chosen, ops, step) or chosen.plan, mesh))
    ops, lacking = ops.copy(), (ops["stage"] < 0) & (ops["microbatch"] >= 0)
    if has_chunks:  # microbatches stay where their order is certain, and so do labelled chunks
        ops.loc[lacking, "chunk"] = ops.loc[lacking, "chunk"].clip(lower=0)
    else:
        ops.loc[lacking, ["chunk", "microbatch"]] = UNKNOWN
    ops.loc[lacking, "pair"] = ""
    return ops, comms.assign(microbatch=comms["microbatch"].where(comms["stage"] >= 0, UNKNOWN)), ()


def _with_phases(
    ops: pd.DataFrame, traced_ranks: Sequence[TracedRank], explanations: Sequence[Explanation]
) -> pd.DataFrame:
    """Fill in the phases that all explanations agree on; others are cleared."""
    ops = ops.copy()
    for traced, rows in _rows_of_steps(ops, traced_ranks):
        phases = {
            tuple(str(action.phase) for action in explanation.plan.compute_actions(explanation.pp_ranks[traced.rank]))
            for explanation in explanations
        }
        is_known = len(phases) == 1 and tuple(rows["kind"]) == traced.kinds
        ops.loc[rows.index, "phase"] = list(phases.pop()) if is_known else ""
    return ops


def _with_plan(ops: pd.DataFrame, traced_ranks: Sequence[TracedRank], chosen: Explanation) -> pd.DataFrame:
    """Fill in stages, chunks and microbatches of each step's plan; rows that do not match it have none."""
    planned: list[tuple[Any, Sequence[Action]]] = []
    pair = ops["pair"].astype(object)  # texts that are no category yet
    for traced, rows in _rows_of_steps(ops, traced_ranks):
        plan = _plan_of_step(chosen, ops, int(rows["step"].iloc[0]))
        actions = () if plan is None else plan.compute_actions(chosen.pp_ranks[traced.rank])[: len(rows)]
        if [action.kind.value for action in actions] != rows["kind"].tolist():
            actions = ()
        planned.append((rows.index, actions))
        pair[rows.index] = [str(action) if action.parts else "" for action in actions] or ""
    return with_categories(with_actions(ops, planned).assign(pair=pair))


def _rows_of_steps(ops: pd.DataFrame, traced_ranks: Sequence[TracedRank]) -> Iterator[tuple[TracedRank, pd.DataFrame]]:
    """The compute ops of each step of each rank, in time order."""
    compute = ops[rows_among(ops["kind"], COMPUTE_KINDS) & (ops["microbatch"] >= 0)].sort_values(
        "start_ns", kind="stable"
    )
    for traced in traced_ranks:
        for _, rows in compute[compute["rank"] == traced.rank].groupby("step"):
            yield traced, rows


def _plan_of_step(chosen: Explanation, ops: pd.DataFrame, step: int) -> Plan | None:
    """The plan with as many microbatches as a step has."""
    plan, kinds = chosen.plan, ops.loc[(ops["step"] == step) & ops["rank"].isin(chosen.pp_ranks), ["rank", "kind"]]
    forwards = kinds["kind"].isin(FORWARD_KINDS).groupby(kinds["rank"]).sum().max()
    count = int(forwards) * plan.num_chains // plan.num_chunks
    return plan if count == plan.num_microbatches else with_num_microbatches(plan, count)
