"""The mesh of a run: which ranks form a pipeline, and the sizes of the axes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from pptrace import axes
from pptrace.axes import MESH_ORDER, OF_EXPERTS, Axis


class MeshSizes(Struct, frozen=True):
    """The sizes of a run's mesh: those of ``pp``, ``tp``, ``cp`` and ``dp`` multiply up to ``num_ranks``."""

    #: ranks of the run, those without a trace included; where nothing says how many, at least as many as the numbers of ranks and
    #: of their messages' peers come to
    num_ranks: int
    #: size of the axis; null as ``tp``, and where messages go to ranks of which nothing else is known
    pp: int | None = None
    vpp: int | None = None  #: stages per rank (virtual pipeline); null where the chunks are not known
    tp: int | None = None  #: size of the axis; null where it is unknown, or sizes do not multiply up
    cp: int | None = None  #: size of the axis; null as ``tp``
    dp: int | None = None  #: size of the axis; null as ``tp``
    ep: int | None = None  #: size of the axis, which shares the ranks of ``dp`` · ``cp`` · ``tp``; null as ``tp``

    @property
    def axes(self) -> dict[str, int | None]:
        """The size of each axis, and the chunks per rank."""
        return {name: getattr(self, name) for name in MeshSizes.__struct_fields__ if name != "num_ranks"}


class MeshInfo(MeshSizes, frozen=True, kw_only=True):
    """The sizes of a mesh, and its pipelines as global ranks.

    ``in_order``: the pipeline is unknown, and all ranks with ops are assumed to form it, in ascending order. ``is_guess``: the
    number of ranks is unknown too; it is at least the highest rank + 1. ``known_pp_ranks`` are (global rank, pipeline rank, -1 if
    unknown) of the ranks with a trace, where the global ranks of the others are unknown and missing in ``pipelines``. ``is_cut``:
    ranks of the pipelines exchange messages with ranks in none, so that the pipelines are longer. ``etp``: ranks that share each
    expert, None where it is unknown how experts are spread over the ranks of a stage.
    """

    pipelines: tuple[tuple[int, ...], ...] = ()
    order: tuple[str, ...] = MESH_ORDER
    in_order: bool = False
    is_guess: bool = False
    known_pp_ranks: tuple[tuple[int, int], ...] = ()
    is_cut: bool = False
    etp: int | None = None

    @property
    def sizes(self) -> MeshSizes:
        """The sizes alone."""
        return MeshSizes(self.num_ranks, **self.axes)

    def size_of(self, axis: str) -> int | None:
        """The size of an axis; None where unknown, 1 of an axis that has no field."""
        size: int | None = getattr(self, axis, 1)
        return size

    def with_sizes(self, sizes: Mapping[str, int | None]) -> MeshInfo:
        """The mesh with other sizes of axes; those of axes that have no field are left out."""
        known: dict[str, Any] = {str(axis): size for axis, size in sizes.items() if axis in self.axes}
        return replace(self, **known)

    @property
    def is_open(self) -> bool:
        """Return whether the assumed pipeline may be wrong: it is unknown, and some ranks have no ops in the traces."""
        return self.in_order and self.num_ranks > len(self.pipelines[0])

    def pipeline_of(self, rank: int) -> tuple[int, ...]:
        """The global ranks of the pipeline that ``rank`` belongs to, in pipeline order; () if unknown."""
        return next((pipeline for pipeline in self.pipelines if rank in pipeline), ())

    def lacks_ranks(self, rank: int, present: Collection[int]) -> bool:
        """Return whether the pipeline of ``rank`` has ranks that are not in ``present``."""
        return self.is_cut or bool(self.known_pp_ranks) or not set(self.pipeline_of(rank)) <= set(present)

    @property
    def num_pipeline_ranks(self) -> int | None:
        """Number of ranks of all pipelines; None where their length is unknown."""
        if self.is_cut:
            return None
        if not self.known_pp_ranks:
            return sum(map(len, self.pipelines))
        return None if self.pp is None else self.pp * len(self.pipelines)

    def pp_rank(self, rank: int) -> int | None:
        """The pipeline rank of a global rank; None if unknown."""
        if self.known_pp_ranks:
            known = dict(self.known_pp_ranks).get(rank, -1)
            return known if known >= 0 else None
        pipeline = self.pipeline_of(rank)
        return pipeline.index(rank) if pipeline else None

    def group_of(self, rank: int, axis: str, size: int | None = None) -> tuple[int, ...] | None:
        """The global ranks of the group of ``axis`` that ``rank`` belongs to; None if unknown.

        With a ``size`` that divides the group's, only the block of that size around ``rank``: Ulysses within a
        ring (USP, arXiv 2405.07719).
        """
        group = self._full_group(rank, axis)
        if group is None or size is None or not 0 < size < len(group) or len(group) % size:
            return group
        first = group.index(rank) // size * size
        return group[first : first + size]

    def _full_group(self, rank: int, axis: str) -> tuple[int, ...] | None:
        if axis == "world":
            return tuple(range(self.num_ranks))
        pipeline = () if self.known_pp_ranks else self.pipeline_of(rank)
        if axis == "pp":
            return pipeline or None
        if axis == "embd":
            return (pipeline[0], pipeline[-1]) if pipeline and rank in (pipeline[0], pipeline[-1]) else None
        if axis == "mirror" and pipeline:
            pp_rank = pipeline.index(rank)
            return tuple(pipeline[index] for index in sorted((pp_rank, len(pipeline) - 1 - pp_rank)))
        sizes = {name: self.size_of(name) or 1 for name in MESH_ORDER}
        order = [Axis(name) for name in self.order]
        if axis in OF_EXPERTS and self.ep is not None and self.etp is not None:
            return axes.expert_group_of(rank, Axis(axis), sizes, order, self.ep, self.etp)
        if not set(names := axis.split("-")) <= set(MESH_ORDER):
            return None
        return axes.group_of(rank, [Axis(name) for name in names], sizes, order)
