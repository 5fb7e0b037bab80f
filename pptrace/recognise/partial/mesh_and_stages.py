"""Pipelines of which some ranks have no trace: what the others show of the mesh, the schedule and the stages."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from pptrace.model.mesh import MeshInfo
from pptrace.model.tables import COMPUTE_KINDS
from pptrace.recognise.groups.axes import Groups, configured_groups
from pptrace.recognise.groups.topology import multiply_up
from pptrace.recognise.partial.readings import Known, Reading, agreed, lengths_of_stages, readings, strides
from pptrace.recognise.partial.traced_ranks import MESSAGE_CALLS, Detail, Shown, peers_of, shown_ranks
from pptrace.recognise.placement.assign_from_schedule import messages_of_plan
from pptrace.recognise.placement.assign_stages import Placed, with_stages
from pptrace.recognise.schedule.plan_per_step import of_length
from pptrace.schedule.plan import Plan


@dataclass(frozen=True, slots=True)
class Partial:
    """The tables with the stages that are certain, the mesh, and every schedule that the ranks with a trace may have run.

    ``is_complete``: all that there may be were tried.
    """

    placed: Placed
    readings: tuple[Reading, ...]
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


def read_partial(
    ops: pd.DataFrame,
    comms: pd.DataFrame,
    mesh: MeshInfo,
    calls: Mapping[int, pd.DataFrame],
    groups: Groups,
    distributed: Mapping[int, Mapping[str, Any]],
    framework: str,
    is_told: bool = False,
    paired: Collection[int] = (),
) -> Partial | None:
    """What ranks with a trace show where others of their pipeline have none; None where none lacks, or nothing can be said.

    Args:
        ops, comms: with stages below 0 where no label tells them.
        mesh: as labels and groups tell it.
        calls, groups, distributed: by rank its communication, the process groups, and what its profiler wrote of the job.
        framework: whose labels the ops have.
        is_told: whether the facts of the run tell the mesh.
        paired: the ranks on which the microbatches of backwards are those of their forwards, not only counted.
    """
    is_told = is_told and bool(mesh.pipelines)
    if not _lacks_ranks(ops, comms, mesh, calls, groups, is_told, is_exact=framework in _EXACT):
        return None
    shown = shown_ranks(ops, comms, calls, exact=framework in _EXACT, paired=paired)
    if not shown or len({own.detail for own in shown}) > 1:
        return None
    if is_told and not {own.rank for own in shown} <= {rank for pipeline in mesh.pipelines for rank in pipeline}:
        return None
    known = Known(mesh.pipelines) if is_told else _known(shown, mesh, groups, distributed, framework)
    found, complete = readings(shown, known)
    chosen = agreed(found) if complete else None
    is_open = shown[0].detail is not Detail.STAGES
    is_proved = bool(paired)
    if len(shown) > 1 and not is_proved and ((is_open and chosen is None) or (known.pipelines and not found)):
        return None
    if not found and is_open and _is_inferred(ops) and not is_proved:
        return None
    if not is_told:
        mesh = _mesh(shown, found if complete else (), known, mesh, groups)
    ops, comms, notes = _filled(ops, comms, shown, chosen, found if complete else (), mesh)
    if mesh.pp is None:
        notes = (*notes, _unknown_length(shown, mesh))
    return Partial(Placed(ops, comms, mesh, notes), found, complete)


def _unknown_length(shown: Sequence[Shown], mesh: MeshInfo) -> str:
    who = (
        f"rank {shown[0].rank} alone shows a part of a pipeline"
        if len(shown) == 1
        else f"{len(shown)} of {mesh.num_ranks} ranks show a part of a pipeline"
    )
    known = all(mesh.pp_rank(own.rank) is not None or own.detail is Detail.STAGES for own in shown)
    what = "its length is" if known else "its length and stages are"
    return f"{who}: {what} not known"


def _is_inferred(ops: pd.DataFrame) -> bool:
    return bool((ops.loc[ops["kind"].isin(COMPUTE_KINDS), "source"] == "inferred").any())


def _lacks_ranks(
    ops: pd.DataFrame,
    comms: pd.DataFrame,
    mesh: MeshInfo,
    calls: Mapping[int, pd.DataFrame],
    groups: Groups,
    is_told: bool,
    is_exact: bool,
) -> bool:
    """Whether ranks of the pipeline have no trace: by its groups, by stages that no rank holds, or on a rank alone that is not
    the only one of the run."""
    compute = ops[ops["kind"].isin(COMPUTE_KINDS) & (ops["microbatch"] >= 0)]
    ranks = set(compute["rank"].tolist())
    if not ranks:
        return False
    if is_told or (groups.pipelines and mesh.pipelines == groups.pipelines):
        return any(ranks & set(pipeline) and set(pipeline) - set(calls) for pipeline in mesh.pipelines)
    stages = {stage for stage in compute["stage"].tolist() if stage >= 0}
    if stages and len(stages) <= max(stages):
        return True
    if len(ranks) > 1:
        return not stages and mesh.in_order and not mesh.is_guess and mesh.num_ranks > len(calls)
    own = comms[comms["rank"].isin(ranks) & (comms["axis"] == "pp") & comms["kind"].isin(("send", "recv"))]
    is_sending = bool(len(own)) or any(calls[rank]["kind"].isin(MESSAGE_CALLS).any() for rank in ranks if rank in calls)
    return is_sending or (mesh.is_guess and not is_exact) or mesh.num_ranks > len(calls)


def _known(
    shown: Sequence[Shown],
    mesh: MeshInfo,
    groups: Groups,
    distributed: Mapping[int, Mapping[str, Any]],
    framework: str,
) -> Known:
    """What groups, sizes and the framework say of the pipeline."""
    ranks = {own.rank for own in shown}
    own_pipelines = tuple(pipeline for pipeline in groups.pipelines if ranks & set(pipeline))
    if ranks <= {rank for pipeline in own_pipelines for rank in pipeline} and mesh.pipelines == groups.pipelines:
        return Known(own_pipelines, names=_names(framework, shown))
    world = None if mesh.is_guess else mesh.num_ranks
    sizes = _sizes_of_groups(shown[0].rank, distributed) if framework == _TORCH else set()
    if "pp" in groups.sizes:
        sizes = {groups.sizes["pp"]}
    elif world is not None:
        sizes = {size for size in sizes or range(1, world + 1) if multiply_up({**groups.sizes, "pp": size}, world)}
    return Known((), tuple(sorted(sizes)), world, _names(framework, shown))


def _names(framework: str, shown: Sequence[Shown]) -> tuple[str, ...]:
    """The schedules that a framework's labels can be of; of torch's, GPipe alone writes labels without a stage."""
    if framework == _TORCH and shown[0].detail is Detail.KINDS:
        return ("gpipe",)
    return _SCHEDULES_OF.get(framework, ())


def _sizes_of_groups(rank: int, distributed: Mapping[int, Mapping[str, Any]]) -> set[int]:
    """The sizes of the process groups of a rank, of which its pipeline has one in torch's own runtime."""
    return {group.size for group in configured_groups(distributed.get(rank, {})).values() if group.size > 0}


def _mesh(shown: Sequence[Shown], found: Sequence[Reading], known: Known, mesh: MeshInfo, groups: Groups) -> MeshInfo:
    """The mesh with the sizes and the places that all readings have in common."""
    lengths = {reading.plan.pp for reading in found}
    chunks = {reading.plan.num_chunks for reading in found}
    if not found and shown[0].detail is Detail.STAGES:
        lengths = lengths_of_stages([own.stages for own in shown]) if len(shown[0].stages) > 1 else set(known.lengths)
        lengths = {size for size in lengths if not known.lengths or size in known.lengths}
        chunks = {len(own.stages) for own in shown}
    pp = lengths.pop() if len(lengths) == 1 else None
    places = {own.rank: _common({reading.places[own.rank] for reading in found}) for own in shown}
    if not found and shown[0].detail is Detail.STAGES and pp is not None:
        places = {own.rank: own.stages[0] for own in shown}  # the first chunk's stage, on a loop as well as on a V
    pipelines = known.pipelines or _pipelines(shown, found, places, pp, known.world)
    sizes: dict[str, int | None] = {axis: groups.sizes.get(axis) for axis in ("tp", "cp", "dp", "ep")}
    if pp is not None and pp == known.world:
        sizes = {axis: size or 1 for axis, size in sizes.items()}
    complete = all(len(pipeline) == pp for pipeline in pipelines)
    return replace(
        mesh,
        pp=pp,
        vpp=chunks.pop() if len(chunks) == 1 else None,
        tp=sizes["tp"],
        cp=sizes["cp"],
        dp=sizes["dp"],
        ep=sizes["ep"],
        pipelines=pipelines,
        known_pp_ranks=()
        if complete
        else tuple((rank, -1 if place is None else place) for rank, place in places.items()),
        in_order=False,
    )


def _common(values: set[int]) -> int | None:
    return values.pop() if len(values) == 1 else None


def _pipelines(
    shown: Sequence[Shown],
    found: Sequence[Reading],
    places: Mapping[int, int | None],
    pp: int | None,
    world: int | None,
) -> tuple[tuple[int, ...], ...]:
    """The pipelines of global ranks, where one regular mesh alone puts these ranks at their places beside their peers; else the
    ranks with a trace, those of each place in order."""
    ranks = [own.rank for own in shown]
    known = {rank: place for rank, place in places.items() if place is not None}
    if pp is not None and len(known) == len(ranks):
        options = strides(pp, world) if world is not None else _strides_of_peers(shown)
        fitting = {
            lines
            for stride in options
            if (lines := _lines(known, pp, stride)) is not None and _meets_peers(shown, found, known, lines)
        }
        if len(fitting) == 1:
            return fitting.pop()
    columns: dict[int, list[int]] = {}
    for rank in sorted(ranks, key=lambda rank: (known.get(rank, 0), rank)):
        columns.setdefault(known.get(rank, -1), []).append(rank)
    if len(known) < len(ranks) or len({len(column) for column in columns.values()}) > 1:
        return tuple((rank,) for rank in ranks)
    return tuple(zip(*columns.values(), strict=True))


def _strides_of_peers(shown: Sequence[Shown]) -> list[int]:
    """How far apart neighbours lie by whom these ranks talk to."""
    return sorted({abs(peer - own.rank) for own in shown for peer in own.messages.peers if peer != own.rank})


def _lines(places: Mapping[int, int], pp: int, stride: int) -> tuple[tuple[int, ...], ...] | None:
    """The pipelines of these ranks, whose neighbours lie ``stride`` apart; None where no rank would be such a number."""
    first = sorted({rank - place * stride for rank, place in places.items()})
    if min(first) < 0 or any(rank // stride % pp != place for rank, place in places.items()):
        return None
    return tuple(tuple(base + stride * place for place in range(pp)) for base in first)


def _meets_peers(
    shown: Sequence[Shown],
    found: Sequence[Reading],
    places: Mapping[int, int],
    lines: Sequence[Sequence[int]],
) -> bool:
    """Whether all known peers of the ranks are their neighbours in these pipelines."""
    for own in shown:
        line = next(line for line in lines if own.rank in line)
        near = {line[place] for reading in found for place in peers_of(reading.plan, places[own.rank])}
        if not own.messages.peers <= near:
            return False
    return True


def _filled(
    ops: pd.DataFrame,
    comms: pd.DataFrame,
    shown: Sequence[Shown],
    chosen: Reading | None,
    found: Sequence[Reading],
    mesh: MeshInfo,
) -> tuple[pd.DataFrame, pd.DataFrame, tuple[str, ...]]:
    """The tables with the stages, chunks and microbatches that all readings give them; what they do not is unknown."""
    if chosen is None and found:
        ops = _with_phases(ops, shown, found)
    detail, num_chunks = shown[0].detail, {reading.plan.num_chunks for reading in found}
    if detail is Detail.STAGES:
        return ops, comms, ()
    stages = _common_stages(found)
    if stages is not None and (detail is Detail.CHUNKS or num_chunks == {1}):
        places = dict.fromkeys({*ops["rank"].tolist(), *comms["rank"].tolist()}, -1)
        places |= {own.rank: index for index, own in enumerate(shown)}

        def layout(chunk: int, index: int, _pp: int) -> int:
            return stages[index][chunk] if index >= 0 else -1

        return with_stages(ops, places, 0, layout), with_stages(comms, places, 0, layout), ()
    if chosen is not None:
        ops = _numbered(ops, shown, chosen)
        return (ops, *messages_of_plan(comms, ops, lambda step: _plan_of_step(chosen, ops, step) or chosen.plan, mesh))
    return *_without_stages(ops, comms, keep=detail is Detail.CHUNKS or num_chunks == {1}), ()


def _common_stages(found: Sequence[Reading]) -> list[tuple[int, ...]] | None:
    """The stages of each rank with a trace, by chunk, where all readings have the same."""
    told = {tuple(reading.plan.stages_of(place) for place in reading.places.values()) for reading in found}
    return list(told.pop()) if len(told) == 1 else None


def _without_stages(ops: pd.DataFrame, comms: pd.DataFrame, keep: bool) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The tables without stages; microbatches are kept where order numbers them for sure, and the chunks that labels tell."""
    ops, lacking = ops.copy(), (ops["stage"] < 0) & (ops["microbatch"] >= 0)
    if keep:
        ops.loc[lacking, "chunk"] = -1 - ops.loc[lacking, "stage"]
    else:
        ops.loc[lacking, "microbatch"] = -1
    ops.loc[lacking, "stage"], ops.loc[lacking, "pair"] = -1, ""
    open_ends = (comms["stage"] < 0) & (comms["microbatch"] >= 0)
    return ops, comms.assign(
        stage=comms["stage"].where(~open_ends, -1), microbatch=comms["microbatch"].where(~open_ends, -1)
    )


def _with_phases(ops: pd.DataFrame, shown: Sequence[Shown], found: Sequence[Reading]) -> pd.DataFrame:
    """The ops with the phases that all readings give the steps in the order compared; the others have none."""
    ops = ops.copy()
    for own, rows in _rows_of_steps(ops, shown):
        phases = {tuple(reading.phases_of(own.rank)) for reading in found}
        is_known = len(phases) == 1 and tuple(rows["kind"]) == own.kinds
        ops.loc[rows.index, "phase"] = phases.pop() if is_known else ""
    return ops


def _numbered(ops: pd.DataFrame, shown: Sequence[Shown], chosen: Reading) -> pd.DataFrame:
    """The ops with the stages, chunks and microbatches of their steps' plans; a row that is no step of it has none."""
    ops = ops.copy()
    for own, rows in _rows_of_steps(ops, shown):
        plan = _plan_of_step(chosen, ops, int(rows["step"].iloc[0]))
        actions = () if plan is None else plan.compute_actions(chosen.places[own.rank])[: len(rows)]
        alike = [action.kind.value for action in actions] == rows["kind"].tolist()
        for name in ("stage", "chunk", "microbatch"):
            ops.loc[rows.index, name] = [getattr(action, name) for action in actions] if alike else -1
        ops.loc[rows.index, "pair"] = [str(action) if action.parts else "" for action in actions] if alike else ""
    return ops


def _rows_of_steps(ops: pd.DataFrame, shown: Sequence[Shown]) -> Iterator[tuple[Shown, pd.DataFrame]]:
    """The compute ops of each step of each rank, in time order."""
    compute = ops[ops["kind"].isin(COMPUTE_KINDS) & (ops["microbatch"] >= 0)].sort_values("start_ns", kind="stable")
    for own in shown:
        for _, rows in compute[compute["rank"] == own.rank].groupby("step"):
            yield own, rows


def _plan_of_step(chosen: Reading, ops: pd.DataFrame, step: int) -> Plan | None:
    """The plan with as many microbatches as a step has."""
    plan, kinds = chosen.plan, ops.loc[(ops["step"] == step) & ops["rank"].isin(chosen.places), ["rank", "kind"]]
    forwards = kinds["kind"].isin(("F", "OVERLAP_F_B")).groupby(kinds["rank"]).sum().max()
    count = int(forwards) * plan.num_chains // plan.num_chunks
    return plan if count == plan.num_microbatches else of_length(plan, count)
