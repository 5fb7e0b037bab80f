"""Pipelines and the groups of each axis: from facts, ops, messages and groups, or where processes record the sizes of the mesh,
but not the order of its axes.

Megatron-LM lays the pipeline out as the slowest axis (``tp-cp-ep-dp-pp``), or before the data-parallel one with
``--use-tp-pp-dp-mapping`` (``parallel_state.py``). Where the two differ, the order of ops speaks: of 1F1B a later rank of the
pipeline runs no more forwards before its first backward than one before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import pandas as pd
from msgspec.structs import replace

from pptrace.axes import MESH_ORDER, SIZED, WITHIN_STAGE, complete_order
from pptrace.marks import P2P
from pptrace.model.mesh import MeshInfo
from pptrace.model.tables import COMPUTE_KINDS
from pptrace.model.traces import PARALLEL
from pptrace.recognise.groups.axes import Groups
from pptrace.recognise.groups.topology import multiply_up
from pptrace.slices import distinct_of, rows_among, rows_where


def mesh_from_metadata(metadata: Sequence[Mapping[str, object]], num_ranks: int) -> MeshInfo | None:
    """The mesh declared in the ranks' facts; None if there is none."""
    with_mesh = [facts for facts in metadata if isinstance(facts.get("mesh"), Mapping) and facts.get("mesh")]
    if not with_mesh:
        return None
    sizes = with_mesh[0]["mesh"]
    assert isinstance(sizes, Mapping)

    def size(axis: str) -> int | None:
        value = sizes.get(axis, 1)  # a mesh that does not name an axis has none
        return value if isinstance(value, int) else None

    world = with_mesh[0].get("world_size")
    mesh = MeshInfo(num_ranks).with_sizes({axis: size(axis) for axis in ("pp", "vpp", *SIZED)})
    # Megatron-LM's order, unless the mesh declares one that names all axes that have several ranks.
    words = order.split("-") if isinstance(order := sizes.get("order"), str) else ()
    is_complete = all(axis in words or mesh.size_of(axis) == 1 for axis in MESH_ORDER)
    # Experts are spread over the ranks of a stage where the declared ep and etp divide these.
    of_stage = prod(mesh.size_of(axis) or 1 for axis in WITHIN_STAGE)
    ep, etp = sizes.get("ep"), sizes.get("etp")
    is_folded = isinstance(ep, int) and isinstance(etp, int) and ep * etp > 0 and of_stage % (ep * etp) == 0
    return replace(
        mesh,
        num_ranks=world if isinstance(world, int) else num_ranks,
        pipelines=_declared_pipelines(with_mesh),
        order=(complete_order(words) if is_complete else None) or MESH_ORDER,
        etp=size("etp") if is_folded else None,
    )


def _declared_pipelines(metadata: Sequence[Mapping[str, object]]) -> tuple[tuple[int, ...], ...]:
    pipelines: set[tuple[int, ...]] = set()
    for facts in metadata:
        ranks = facts.get("pp_ranks")
        if isinstance(ranks, Sequence) and ranks and all(isinstance(rank, int) for rank in ranks):
            pipelines.add(tuple(ranks))
    return tuple(sorted(pipelines))


def mesh_with_declared_pipelines(mesh: MeshInfo, metadata: Sequence[Mapping[str, object]]) -> MeshInfo:
    """Set the pipelines that a watched runtime declared, even where some of their ranks have no trace."""
    pipelines = _declared_pipelines(metadata)
    if len(set(map(len, pipelines))) != 1:
        return mesh
    return replace(mesh, pp=len(pipelines[0]), pipelines=pipelines, in_order=False)


def mesh_from_stages(stages: Mapping[int, frozenset[int]], num_ranks: int) -> MeshInfo:
    """Derive the mesh from the stages of each rank.

    Ranks that hold the same stages are replicas; the i-th of each form the i-th pipeline. tp, cp and dp stay unknown unless
    there is just one replica.
    """
    holders: dict[frozenset[int], list[int]] = {}
    for rank in sorted(stages):
        holders.setdefault(stages[rank], []).append(rank)
    columns = _with_absent(holders) or [holders[key] for key in sorted(holders, key=min)]
    replicas = min((len(column) for column in columns), default=0)
    single = 1 if replicas == 1 else None
    mesh = MeshInfo(
        num_ranks=num_ranks,
        pp=len(columns) or None,
        vpp=max((len(key) for key in holders), default=None),
        pipelines=tuple(tuple(column[index] for column in columns) for index in range(replicas)),
    )
    return mesh.with_sizes(dict.fromkeys(SIZED, single))


def mesh_with_messages(mesh: MeshInfo, comms: pd.DataFrame) -> MeshInfo:
    """The mesh whose pipelines are the ranks that exchange messages on axis pp, wherever the numbers of ranks put them.

    Unchanged where messages do not part the ranks into pipelines with one rank for each place.
    """
    if len(mesh.pipelines) < 2 or not len(comms):
        return mesh
    position = {rank: position for pipeline in mesh.pipelines for position, rank in enumerate(pipeline)}
    pipeline_of = {rank: {rank} for rank in position}
    pairs: set[tuple[int, int]] = set()
    for begin in range(0, len(comms), _BLOCK):
        rows = comms[["kind", "axis", "rank", "peer"]].iloc[begin : begin + _BLOCK]
        is_message = rows_among(rows["kind"], P2P) & (rows["axis"] == "pp").to_numpy()
        ends = [rows[name].to_numpy()[is_message] for name in ("rank", "peer")]
        _, first = distinct_of(ends)
        pairs |= set(zip(*(end[first].tolist() for end in ends), strict=True))
    for rank, peer in pairs:
        if rank in position and peer in position and pipeline_of[rank] is not pipeline_of[peer]:
            joined = pipeline_of[rank] | pipeline_of[peer]
            pipeline_of |= dict.fromkeys(joined, joined)
    connected = {min(ranks): tuple(sorted(ranks, key=position.__getitem__)) for ranks in pipeline_of.values()}
    positions = list(range(len(mesh.pipelines[0])))
    if any([position[rank] for rank in ranks] != positions for ranks in connected.values()):
        return mesh
    return replace(mesh, pipelines=tuple(sorted(connected.values())))


_BLOCK = 1 << 20
"""Rows of communication that are looked at together: of all of them at once the numbers would take much memory."""


def _with_absent(holders: Mapping[frozenset[int], list[int]]) -> list[list[int]]:
    """Columns of one pipeline with loop placement that lacks traces in its middle; [] where stages and ranks do not determine
    them.

    Chunk c of place r is stage c·p + r, and the ranks that are there lie at equal distances in the order of their places.
    """
    chunks = max(map(len, holders), default=0)
    present = {min(stages): ranks[0] for stages, ranks in holders.items()}
    pp = max(present, default=0) + 1
    if chunks > 1:
        pp = min(after - before for stages in holders for before, after in pairwise(sorted(stages)))
    looped = all(sorted(stages) == list(range(min(stages), min(stages) + len(stages) * pp, pp)) for stages in holders)
    is_one_replica = all(len(ranks) == 1 for ranks in holders.values())
    if not looped or not is_one_replica or len(present) < 2 or len(present) == pp or max(present) >= pp:
        return []
    (first, rank), (last, last_rank) = min(present.items()), max(present.items())
    stride, remainder = divmod(last_rank - rank, last - first)
    if (
        remainder
        or stride < 1
        or any(actual != rank + stride * (pp_rank - first) for pp_rank, actual in present.items())
    ):
        return []
    return [[number] for pp_rank in range(pp) if (number := rank + stride * (pp_rank - first)) >= 0]


def mesh_with_collectives(mesh: MeshInfo, comms: pd.DataFrame) -> MeshInfo:
    """Set the axis of the collectives, or of messages within stages, if there is one and its groups can be the replicas.

    Replicas that differ in one axis alone are as many as each of its collectives has members, where those say how many.
    """
    replicas = len(mesh.pipelines)
    is_of_axis = ~rows_among(comms["kind"], P2P) | rows_among(comms["axis"], WITHIN_STAGE)
    rows = comms[is_of_axis & ~rows_among(comms["axis"], _OF_PIPELINES)]
    named = set(rows["axis"].tolist())
    if replicas < 2 or replicas * (mesh.pp or 0) != mesh.num_ranks or len(named) != 1 or not named <= set(WITHIN_STAGE):
        return mesh
    if set(rows["group_size"].tolist()) - {replicas, -1}:
        return mesh
    (axis,) = named
    sizes: dict[str, int | None] = {**dict.fromkeys(WITHIN_STAGE, 1), str(axis): replicas}
    groups = [tuple(sorted(column)) for column in zip(*mesh.pipelines, strict=True)]
    for order in (MESH_ORDER, ("pp", *WITHIN_STAGE)):
        candidate = replace(mesh.with_sizes(sizes), order=order)
        if all(candidate.group_of(rank, str(axis)) == group for group in groups for rank in group):
            return candidate
    return mesh


_OF_PIPELINES = ("pp", "embd", "mirror", "world")
"""Axes whose groups follow from the pipelines and the number of ranks."""


def mesh_with_groups(mesh: MeshInfo, ops: pd.DataFrame, groups: Groups) -> MeshInfo:
    """Add what the process groups determine: sizes of axes, number of ranks, pipelines.

    Pipelines of groups are taken where they fit the stages that labels tell: no two ranks of one may hold the same stages, and
    each rank with ops must be in one.
    """
    stages_of_rank = stages_by_rank(rows_where(ops[["rank", "stage"]], ops["stage"] >= 0))
    compute = set(ops.loc[ops["microbatch"] >= 0, "rank"].unique().tolist())
    is_consistent = bool(groups.pipelines) and compute <= {rank for pipeline in groups.pipelines for rank in pipeline}
    for pipeline in groups.pipelines:
        stages = [stages_of_rank[rank] for rank in pipeline if rank in stages_of_rank]
        is_consistent = is_consistent and len(set(stages)) == len(stages)
    # Where a group has several ranks, the ops alone cannot show that the axes without one have none.
    several = any(size > 1 for size in groups.sizes.values())
    named: dict[str, int | None] = {
        axis: groups.sizes.get(axis, None if several and mesh.size_of(axis) == 1 else mesh.size_of(axis))
        for axis in SIZED
    }
    num_ranks = max(mesh.num_ranks, groups.world_size or 0)
    pp = len(groups.pipelines[0]) if is_consistent else mesh.pp or groups.sizes.get("pp")
    if groups.world_size and not multiply_up({**named, "pp": pp}, num_ranks):
        named |= dict.fromkeys(WITHIN_STAGE)
    return replace(
        mesh.with_sizes(named),
        num_ranks=num_ranks,
        pp=pp,
        pipelines=groups.pipelines if is_consistent and compute else mesh.pipelines,
        in_order=mesh.in_order and not is_consistent,
    )


def stages_by_rank(ops: pd.DataFrame) -> dict[int, frozenset[int]]:
    """The stages of the ops of each rank, the ranks as they come first."""
    _, first = distinct_of([ops["rank"].to_numpy(), ops["stage"].to_numpy()])
    stages: dict[int, set[int]] = {}
    for rank, stage in ops[["rank", "stage"]].iloc[first].itertuples(index=False):
        stages.setdefault(rank, set()).add(stage)
    return {rank: frozenset(stages_of_rank) for rank, stages_of_rank in stages.items()}


def mesh_with_absent_ranks(mesh: MeshInfo, comms: pd.DataFrame) -> MeshInfo:
    """Count all ranks that the pipelines name; sizes that come to fewer are unknown, and so is the length of
    pipelines that send messages to ranks outside of them.
    """
    named = {rank for pipeline in mesh.pipelines for rank in pipeline}
    num_ranks = max(mesh.num_ranks, max(named, default=-1) + 1, mesh.pp or 0)
    is_of_pp = ((comms["axis"] == "pp") & rows_among(comms["kind"], P2P) & comms["rank"].isin(named)).to_numpy()
    peers = set(comms["peer"][is_of_pp].unique().tolist()) - {-1}
    is_cut = bool(named) and not peers <= named
    sizes: dict[str, int | None] = {"pp": None if is_cut else mesh.pp, **{axis: mesh.size_of(axis) for axis in SIZED}}
    known = prod(size for axis in MESH_ORDER if (size := sizes[axis]) is not None)
    if is_cut or (known < num_ranks and not multiply_up(sizes, num_ranks)):
        sizes |= dict.fromkeys(SIZED)
    return replace(mesh.with_sizes(sizes), num_ranks=num_ranks, is_cut=is_cut)


_ORDERS = {
    "tp-cp-dp-pp": "the pipeline as the slowest axis",
    "tp-cp-pp-dp": "the pipeline before the data-parallel axis",
}

Facts = Mapping[int, Mapping[str, Any]]


def with_layout(facts: Facts, ops: pd.DataFrame) -> tuple[Facts, tuple[str, ...]]:
    """Add ``mesh`` and ``pp_ranks`` to the facts where sizes and the order of ops give them; with a warning where assumed.

    Args:
        facts: by rank; those without :data:`~pptrace.model.traces.PARALLEL` stay as they are.
        ops: of all ranks, in the order of time on each.
    """
    with_sizes = {
        rank: rank_facts for rank, rank_facts in facts.items() if isinstance(rank_facts.get(PARALLEL), Mapping)
    }
    if not with_sizes:
        return facts, ()
    sizes = next(iter(with_sizes.values()))[PARALLEL]
    axes = {str(axis): int(sizes.get(axis, 1)) for axis in MESH_ORDER}
    world = prod(axes.values())
    if any(rank >= world for rank in with_sizes) or any(
        rank_facts[PARALLEL]["pp"] != axes["pp"] for rank_facts in with_sizes.values()
    ):
        return facts, ("the ranks and the sizes of the mesh in the spans contradict each other: the mesh is null",)
    order, line = _order(with_sizes, axes, _leading_forwards(ops))
    if order is None:
        return facts, (line,)
    chunks = {rank_facts[PARALLEL].get("vpp") for rank_facts in with_sizes.values()} - {None}
    mesh = {**axes, "vpp": chunks.pop() if len(chunks) == 1 else None, "ep": None, "order": order}
    laid_out = {
        rank: {**rank_facts, "mesh": mesh, "pp_ranks": _pipeline(rank, axes, order)}
        if rank in with_sizes
        else rank_facts
        for rank, rank_facts in facts.items()
    }
    return laid_out, (line,) if line else ()


def _order(with_sizes: Facts, axes: Mapping[str, int], leading: Mapping[int, int]) -> tuple[str | None, str]:
    """The first order of axes that nothing contradicts, with a warning where it is not certain; None without one."""
    if axes["dp"] == 1 or axes["pp"] == 1:
        return next(iter(_ORDERS)), ""
    possible = [order for order in _ORDERS if _agrees(with_sizes, axes, order, leading)]
    if not possible:
        return None, "the order of ops matches no known layout of the ranks in the spans: stages are null"
    reason = "confirmed by the order of ops" if len(possible) == 1 else "assumed, as Megatron-LM's default"
    return possible[0], f"pipelines of {axes['pp']} ranks with {_ORDERS[possible[0]]} of the ranks: {reason}"


def _agrees(with_sizes: Facts, axes: Mapping[str, int], order: str, leading: Mapping[int, int]) -> bool:
    """Return whether declared pipeline ranks and leading forwards are those of this order of axes."""
    forwards_by_pp_rank: dict[int, set[int]] = {}
    for rank, rank_facts in with_sizes.items():
        pp_rank = _pipeline(rank, axes, order).index(rank)
        declared = rank_facts[PARALLEL].get("pp_rank")
        if declared is not None and declared != pp_rank:
            return False
        if rank in leading:
            forwards_by_pp_rank.setdefault(pp_rank, set()).add(leading[rank])
    in_order = [forwards_by_pp_rank[pp_rank] for pp_rank in sorted(forwards_by_pp_rank)]
    same = all(len(counts) == 1 for counts in in_order)
    return same and all(max(after) <= min(before) for before, after in pairwise(in_order))


def _pipeline(rank: int, axes: Mapping[str, int], order: str) -> list[int]:
    """The global ranks of the pipeline of a rank."""
    stride = 1
    for axis in order.split("-"):
        if axis == "pp":
            break
        stride *= axes[axis]
    first = rank - rank // stride % axes["pp"] * stride
    return [first + pp_rank * stride for pp_rank in range(axes["pp"])]


def _leading_forwards(ops: pd.DataFrame) -> dict[int, int]:
    """Number of forwards of each rank before the first backward of its fullest step."""
    compute = ops[rows_among(ops["kind"], COMPUTE_KINDS)].sort_values("start_ns", kind="stable")
    leading: dict[int, int] = {}
    for rank, rank_ops in compute.groupby("rank"):
        kinds: Sequence[str] = max((part["kind"].tolist() for _, part in rank_ops.groupby("step")), key=len)
        leading[int(str(rank))] = next((index for index, kind in enumerate(kinds) if kind != "F"), len(kinds))
    return leading
