"""Which ranks form a pipeline, and which form a group of each axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

AXES = ("tp", "cp", "dp", "pp")
"""Axes from the fastest-varying to the slowest, as Megatron-LM orders ranks: rank = tp + t·(cp + c·(dp + d·pp))."""


@dataclass(frozen=True, slots=True)
class MeshInfo:
    """The report's ``mesh``: sizes of the axes, None where nothing tells; and the pipelines of global ranks."""

    num_ranks: int
    pp: int | None
    vpp: int | None
    tp: int | None
    cp: int | None
    dp: int | None
    ep: int | None
    pipelines: tuple[tuple[int, ...], ...] = ()
    order: tuple[str, ...] = AXES

    def pipeline_of(self, rank: int) -> tuple[int, ...]:
        """The global ranks of the pipeline that ``rank`` belongs to, in pipeline order; () when unknown."""
        return next((pipeline for pipeline in self.pipelines if rank in pipeline), ())

    def pp_rank(self, rank: int) -> int | None:
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
        pipeline = self.pipeline_of(rank)
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
        **{axis: size(axis) for axis in ("pp", "vpp", "tp", "cp", "dp", "ep")},
        pipelines=tuple(sorted(pipelines)),
        order=names if sorted(names) == sorted(AXES) else AXES,
    )


def mesh_from_stages(stages: Mapping[int, frozenset[int]], num_ranks: int) -> MeshInfo:
    """The mesh as the stages seen on each rank tell it.

    Ranks that hold the same stages are replicas; the i-th of each form the i-th pipeline. tp, cp and dp stay unknown unless
    there is just one replica.
    """
    holders: dict[frozenset[int], list[int]] = {}
    for rank in sorted(stages):
        holders.setdefault(stages[rank], []).append(rank)
    columns = [holders[key] for key in sorted(holders, key=min)]
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


def mesh_in_order(ranks: Sequence[int], num_ranks: int) -> MeshInfo:
    """One pipeline of all ranks that compute, in their order: what is taken where nothing tells the stages."""
    return MeshInfo(num_ranks, pp=len(ranks), vpp=1, tp=1, cp=1, dp=1, ep=1, pipelines=(tuple(ranks),))
