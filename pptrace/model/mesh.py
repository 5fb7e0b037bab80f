"""The mesh of a run: which ranks form a pipeline, and the sizes of the axes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from pptrace import axes
from pptrace.axes import MESH_ORDER, Axis


@dataclass(frozen=True, slots=True)
class MeshInfo:
    """The report's ``mesh``: sizes of the axes, None where nothing tells; and the pipelines of global ranks.

    ``in_order``: nothing tells the pipeline, so that all ranks with ops are taken for it, in their order. ``is_guess``: nothing
    tells how many ranks there were either; at least as many as the highest number says. ``known_pp_ranks`` are the pipeline
    ranks of
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
    order: tuple[str, ...] = MESH_ORDER
    in_order: bool = False
    is_guess: bool = False
    known_pp_ranks: tuple[tuple[int, int], ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether the pipeline may be another one: nothing tells it, and the run had ranks without ops in the traces."""
        return self.in_order and self.num_ranks > len(self.pipelines[0])

    def pipeline_of(self, rank: int) -> tuple[int, ...]:
        """The global ranks of the pipeline that ``rank`` belongs to, in pipeline order; () when unknown."""
        return next((pipeline for pipeline in self.pipelines if rank in pipeline), ())

    def lacks_ranks(self, rank: int, present: Collection[int]) -> bool:
        """Whether ranks of this one's pipeline are not among ``present``."""
        return bool(self.known_pp_ranks) or not set(self.pipeline_of(rank)) <= set(present)

    @property
    def num_pipeline_ranks(self) -> int | None:
        """The ranks of all pipelines together; None where their length is not known."""
        if not self.known_pp_ranks:
            return sum(map(len, self.pipelines))
        return None if self.pp is None else self.pp * len(self.pipelines)

    def pp_rank(self, rank: int) -> int | None:
        """The place of a rank in its pipeline; None when unknown."""
        if self.known_pp_ranks:
            place = dict(self.known_pp_ranks).get(rank, -1)
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
        pipeline = () if self.known_pp_ranks else self.pipeline_of(rank)
        if axis == "pp":
            return pipeline or None
        if axis == "embd":
            return (pipeline[0], pipeline[-1]) if pipeline and rank in (pipeline[0], pipeline[-1]) else None
        if axis == "mirror" and pipeline:
            place = pipeline.index(rank)
            return tuple(pipeline[index] for index in sorted((place, len(pipeline) - 1 - place)))
        if not set(names := axis.split("-")) <= set(MESH_ORDER):
            return None
        sizes = {name: getattr(self, name) or 1 for name in MESH_ORDER}
        return axes.group_of(rank, [Axis(name) for name in names], sizes, [Axis(name) for name in self.order])
