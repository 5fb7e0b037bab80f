"""Which ranks form a pipeline, and which form a group of each axis."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import pandas as pd

from pptrace.recognise.group_shapes import multiply_up
from pptrace.recognise.groups import Groups

AXES = ("tp", "cp", "dp", "pp")
"""Axes from the fastest-varying to the slowest, as Megatron-LM orders ranks: rank = tp + t·(cp + c·(dp + d·pp))."""


@dataclass(frozen=True, slots=True)
class MeshInfo:
    """The report's ``mesh``: sizes of the axes, None where nothing tells; and the pipelines of global ranks.

    ``in_order``: nothing tells the pipeline, so that all ranks with ops are taken for it, in their order. ``is_guess``: nothing
    tells how many ranks there were either; at least as many as the highest number says. ``places`` are the pipeline ranks of
    those with a trace (-1: unknown) where nothing tells the global ranks of the others, which ``pipelines`` then lack.
    """

    num_ranks: int
    pp: int | None
    vpp: int | None
    tp: int | None
    cp: int | None
    dp: int | None
    ep: int | None
    pipelines: tuple[tuple[int, ...], ...] = ()
    order: tuple[str, ...] = AXES
    in_order: bool = False
    is_guess: bool = False
    places: tuple[tuple[int, int], ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether the pipeline may be another one: nothing tells it, and the run had ranks without ops in the traces."""
        return self.in_order and self.num_ranks > len(self.pipelines[0])

    def pipeline_of(self, rank: int) -> tuple[int, ...]:
        """The global ranks of the pipeline that ``rank`` belongs to, in pipeline order; () when unknown."""
        return next((pipeline for pipeline in self.pipelines if rank in pipeline), ())

    def lacks_ranks(self, rank: int, present: Collection[int]) -> bool:
        """Whether ranks of this one's pipeline are not among ``present``."""
        return bool(self.places) or not set(self.pipeline_of(rank)) <= set(present)

    @property
    def num_pipeline_ranks(self) -> int | None:
        """The ranks of all pipelines together; None where their length is not known."""
        if not self.places:
            return sum(map(len, self.pipelines))
        return None if self.pp is None else self.pp * len(self.pipelines)

    def pp_rank(self, rank: int) -> int | None:
        """The place of a rank in its pipeline; None when unknown."""
        if self.places:
            place = dict(self.places).get(rank, -1)
            return place if place >= 0 else None
        pipeline = self.pipeline_of(rank)
        return pipeline.index(rank) if pipeline else None

    def group_of(self, rank: int, axis: str, size: int | None = None) -> tuple[int, ...] | None:
        """The global ranks of the group of ``axis`` that holds ``rank``; None when the mesh does not tell.

        With a ``size`` that divides the group's, only the neighbours that share a part of that size with it: Ulysses within
        a ring (USP, arXiv 2405.07719).
        """
        group = self._whole_group_of(rank, axis)
        if group is None or size is None or not 0 < size < len(group) or len(group) % size:
            return group
        first = group.index(rank) // size * size
        return group[first : first + size]

    def _whole_group_of(self, rank: int, axis: str) -> tuple[int, ...] | None:
        if axis == "world":
            return tuple(range(self.num_ranks))
        pipeline = () if self.places else self.pipeline_of(rank)
        if axis == "pp":
            return pipeline or None
        if axis == "embd":
            return (pipeline[0], pipeline[-1]) if pipeline and rank in (pipeline[0], pipeline[-1]) else None
        if axis == "mirror" and pipeline:
            place = pipeline.index(rank)
            return tuple(pipeline[index] for index in sorted((place, len(pipeline) - 1 - place)))
        sizes = {"tp": self.tp or 1, "cp": self.cp or 1, "dp": self.dp or 1, "pp": self.pp or 1}
        axes = axis.split("-")
        if not set(axes) <= set(sizes):
            return None
        members, stride = [rank], 1
        for name in self.order:
            if name in axes:
                own = rank // stride % sizes[name]
                members = [member + (index - own) * stride for index in range(sizes[name]) for member in members]
            stride *= sizes[name]
        return tuple(sorted(members))


def mesh_from_metadata(metadata: Sequence[Mapping[str, object]], num_ranks: int) -> MeshInfo | None:
    """The mesh as the ranks' own facts tell it; None when they do not."""
    known = [facts for facts in metadata if isinstance(facts.get("mesh"), Mapping) and facts.get("mesh")]
    if not known:
        return None
    sizes = known[0]["mesh"]
    assert isinstance(sizes, Mapping)

    def size(axis: str) -> int | None:
        value = sizes.get(axis, 1)  # a mesh that does not name an axis has none
        return value if isinstance(value, int) else None

    pipelines: list[tuple[int, ...]] = []
    for facts in known:
        ranks = facts.get("pp_ranks")
        if not isinstance(ranks, Sequence) or not all(isinstance(rank, int) for rank in ranks):
            continue
        if ranks and tuple(ranks) not in pipelines:
            pipelines.append(tuple(ranks))
    world = known[0].get("world_size")
    order = sizes.get("order")
    names = tuple(order.split("-")) if isinstance(order, str) else AXES
    return MeshInfo(
        num_ranks=world if isinstance(world, int) else num_ranks,
        pp=size("pp"),
        vpp=size("vpp"),
        tp=size("tp"),
        cp=size("cp"),
        dp=size("dp"),
        ep=size("ep"),
        pipelines=tuple(sorted(pipelines)),
        order=names if sorted(names) == sorted(AXES) else AXES,
    )


def mesh_with_declared_pipelines(mesh: MeshInfo, metadata: Sequence[Mapping[str, object]]) -> MeshInfo:
    """The mesh with the pipelines that a watched runtime named, also where not all of their ranks have a trace."""
    named: set[tuple[int, ...]] = set()
    for facts in metadata:
        ranks = facts.get("pp_ranks")
        if isinstance(ranks, Sequence) and ranks and all(isinstance(rank, int) for rank in ranks):
            named.add(tuple(ranks))
    if len({len(pipeline) for pipeline in named}) != 1:
        return mesh
    pp = len(next(iter(named)))
    return replace(mesh, pp=pp, pipelines=tuple(sorted(named)), in_order=False)


def mesh_from_stages(stages: Mapping[int, frozenset[int]], num_ranks: int) -> MeshInfo:
    """The mesh as the stages seen on each rank tell it.

    Ranks that hold the same stages are replicas; the i-th of each form the i-th pipeline. tp, cp and dp stay unknown unless
    there is just one replica.
    """
    holders: dict[frozenset[int], list[int]] = {}
    for rank in sorted(stages):
        holders.setdefault(stages[rank], []).append(rank)
    columns = _with_absent(holders) or [holders[key] for key in sorted(holders, key=min)]
    replicas = min((len(column) for column in columns), default=0)
    single = 1 if replicas == 1 else None
    return MeshInfo(
        num_ranks=num_ranks,
        pp=len(columns) or None,
        vpp=max((len(key) for key in holders), default=None),
        tp=single,
        cp=single,
        dp=single,
        ep=single,
        pipelines=tuple(tuple(column[index] for column in columns) for index in range(replicas)),
    )


def _with_absent(holders: Mapping[frozenset[int], list[int]]) -> list[list[int]]:
    """The columns of one looped pipeline that lacks traces in its middle; [] where stages and ranks do not say whose.

    Chunk c of place r is stage c·p + r, and the ranks that are there lie at equal distances in the order of their places.
    """
    chunks = max(map(len, holders), default=0)
    present = {min(stages): ranks[0] for stages, ranks in holders.items()}
    pp = max(present, default=0) + 1
    if chunks > 1:
        pp = min(after - before for stages in holders for before, after in pairwise(sorted(stages)))
    looped = all(sorted(stages) == list(range(min(stages), min(stages) + len(stages) * pp, pp)) for stages in holders)
    alone = all(len(ranks) == 1 for ranks in holders.values())
    if not looped or not alone or len(present) < 2 or len(present) == pp or max(present) >= pp:
        return []
    (first, rank), (last, other) = min(present.items()), max(present.items())
    stride, rest = divmod(other - rank, last - first)
    if rest or stride < 1 or any(own != rank + stride * (place - first) for place, own in present.items()):
        return []
    return [[number] for place in range(pp) if (number := rank + stride * (place - first)) >= 0]


def mesh_with_collectives(mesh: MeshInfo, comms: pd.DataFrame) -> MeshInfo:
    """The mesh of the ops with the axis that their collectives name, if it is one, and if its groups can be the replicas.

    Replicas that differ in one axis alone are as many as each of its collectives has members, where those say how many.
    """
    replicas = len(mesh.pipelines)
    rows = comms[~comms["kind"].isin(("send", "recv")) & ~comms["axis"].isin(_OF_PIPELINES)]
    named = set(rows["axis"].tolist())
    if (
        replicas < 2
        or replicas * (mesh.pp or 0) != mesh.num_ranks
        or len(named) != 1
        or not named <= {"tp", "cp", "dp"}
    ):
        return mesh
    if set(rows["group_size"].tolist()) - {replicas, -1}:
        return mesh
    (axis,) = named
    sizes = dict.fromkeys(("tp", "cp", "dp"), 1) | {str(axis): replicas}
    groups = [tuple(sorted(column)) for column in zip(*mesh.pipelines, strict=True)]
    for order in (AXES, ("pp", *(name for name in AXES if name != "pp"))):
        known = replace(mesh, tp=sizes["tp"], cp=sizes["cp"], dp=sizes["dp"], order=order)
        if all(known.group_of(rank, str(axis)) == group for group in groups for rank in group):
            return known
    return mesh


_OF_PIPELINES = ("pp", "embd", "mirror", "world")
"""Axes whose groups the pipelines and the number of ranks tell."""


def mesh_in_order(ranks: Sequence[int], num_ranks: int) -> MeshInfo:
    """One pipeline of all ranks that compute, in their order: what is taken where nothing tells the stages."""
    return MeshInfo(num_ranks, pp=len(ranks), vpp=1, tp=1, cp=1, dp=1, ep=1, pipelines=(tuple(ranks),), in_order=True)


def mesh_with_groups(mesh: MeshInfo, ops: pd.DataFrame, groups: Groups) -> MeshInfo:
    """The mesh of the ops with what the process groups tell: sizes of axes, the number of ranks, and pipelines.

    Pipelines of groups are taken where they fit the stages that labels tell: no two ranks of one may hold the same stages, and
    each rank with ops must be in one.
    """
    held = ops.loc[ops["stage"] >= 0].groupby("rank")["stage"].agg(frozenset).to_dict()
    compute = set(ops.loc[ops["microbatch"] >= 0, "rank"].tolist())
    fits = bool(groups.pipelines) and compute <= {rank for pipeline in groups.pipelines for rank in pipeline}
    for pipeline in groups.pipelines:
        stages = [held[rank] for rank in pipeline if rank in held]
        fits = fits and len(set(stages)) == len(stages)
    named = _beside(mesh, groups.sizes)
    num_ranks = max(mesh.num_ranks, groups.world_size or 0)
    pp = len(groups.pipelines[0]) if fits else mesh.pp or groups.sizes.get("pp")
    if groups.world_size and not multiply_up({**named, "pp": pp}, num_ranks):
        named |= dict.fromkeys(("tp", "cp", "dp"))
    return replace(
        mesh,
        num_ranks=num_ranks,
        pp=pp,
        tp=named["tp"],
        cp=named["cp"],
        dp=named["dp"],
        ep=named["ep"],
        pipelines=groups.pipelines if fits and compute else mesh.pipelines,
        in_order=mesh.in_order and not fits,
    )


def _beside(mesh: MeshInfo, sizes: Mapping[str, int]) -> dict[str, int | None]:
    """The axes' sizes as groups tell them; where one has several ranks, the ops alone cannot say that the others have one."""
    several = any(size > 1 for size in sizes.values())
    return {axis: sizes.get(axis, None if several else getattr(mesh, axis)) for axis in ("tp", "cp", "dp", "ep")}
