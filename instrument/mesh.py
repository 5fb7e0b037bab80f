"""Where this process stands among all ranks: the axes pp × dp × cp × tp and their process groups.

Ranks are ordered as in Megatron-LM, tp fastest, then cp, dp and pp:
rank = tp + size_tp · (cp + size_cp · (dp + size_dp · pp)).
Groups carry the description ``mesh_<axis>``, so that traces name the axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from types import MappingProxyType

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pptrace.errors import UsageError
from pptrace.marks import Axis

AXES = (Axis.PP, Axis.DP, Axis.CP, Axis.TP)
"""Slowest first: the dimensions of the DeviceMesh."""


@dataclass(frozen=True, slots=True)
class MeshShape:
    """Size of every axis."""

    pp: int
    dp: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """In the order of :data:`AXES`."""
        return (self.pp, self.dp, self.cp, self.tp)

    @property
    def world(self) -> int:
        return prod(self.sizes)

    def coordinates_of(self, rank: int) -> tuple[int, int, int, int]:
        """(pp, dp, cp, tp) of a global rank."""
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return (pp, dp, cp, tp)

    def rank_of(self, pp: int, dp: int, cp: int, tp: int) -> int:
        """The global rank at a position; the inverse of :meth:`coordinates_of`."""
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))


def fit_shape(world: int, pp: int | None = None, dp: int | None = None, cp: int = 1, tp: int = 1) -> MeshShape:
    """The shape that fills ``world`` ranks. A ``pp`` or ``dp`` left out takes what the others leave (pp first).

    Needs no process group, so that a mistake is told before any rank waits for another.

    Raises:
        UsageError: a size below 1, or sizes whose product is not the world.
    """
    named = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
    sizes = {name: size for name, size in named.items() if size is not None}
    for name, size in sizes.items():
        if size < 1:
            raise UsageError(f"{name} is {size}; every axis of the mesh needs at least 1 rank")
    given = prod(sizes.values())
    text = " · ".join(f"{name}={size}" for name, size in sizes.items() if size != 1) or "a mesh of 1 rank"
    if world % given:
        raise UsageError(f"{text} does not divide the world of {world} ranks; choose sizes whose product is {world}")
    if len(sizes) == len(named) and given != world:
        raise UsageError(f"{text} fills {given} of {world} ranks; choose sizes whose product is {world}")
    rest = world // given
    pp, rest = (rest, 1) if pp is None else (pp, rest)
    dp = rest if dp is None else dp
    return MeshShape(pp, dp, cp, tp)


@dataclass(frozen=True, slots=True, eq=False)
class Mesh:
    """This rank's place, and the groups it belongs to.

    ``embedding`` joins the first and the last rank of each pipeline, which both hold a tied embedding; None on the
    ranks between, and where the pipeline has one rank. ``pp_reverse`` is a second group of a pipeline of two ranks:
    with a group for each direction, messages of both directions overlap in unbatched NCCL calls too.
    """

    shape: MeshShape
    rank: int
    device_mesh: DeviceMesh
    groups: Mapping[Axis, dist.ProcessGroup]
    pp_reverse: dist.ProcessGroup | None
    embedding: dist.ProcessGroup | None

    @property
    def coordinates(self) -> tuple[int, int, int, int]:
        """(pp, dp, cp, tp) of this rank."""
        return self.shape.coordinates_of(self.rank)

    @property
    def pp_rank(self) -> int:
        return self.coordinates[0]

    @property
    def dp_rank(self) -> int:
        return self.coordinates[1]

    @property
    def pp_ranks(self) -> tuple[int, ...]:
        """Global ranks of this rank's pipeline, first stage first."""
        return tuple(self.global_rank(pp_rank) for pp_rank in range(self.shape.pp))

    def global_rank(self, pp_rank: int) -> int:
        """The global rank of a pipeline rank of this rank's own pipeline."""
        _, dp, cp, tp = self.coordinates
        return self.shape.rank_of(pp_rank, dp, cp, tp)


def make_mesh(shape: MeshShape, device_type: str, backend: str) -> Mesh:
    """Make the groups of every axis. Every rank of the world calls this, after ``init_process_group``.

    Args:
        shape: sizes of the axes.
        device_type: "cpu" or "cuda": where tensors that go through the groups live.
        backend: "gloo" or "nccl".

    Raises:
        UsageError: the shape does not fill the world.
    """
    world = dist.get_world_size()
    if shape.world != world:
        raise UsageError(f"a mesh of {shape.world} ranks {shape} does not fill the world of {world} ranks")
    names = tuple(str(axis) for axis in AXES)
    # Naming a backend makes DeviceMesh open a group of its own for an axis that spans the world, instead of taking
    # the default group, whose description names no axis.
    overrides: dict[int | str, str] = dict.fromkeys(names, backend)
    device_mesh = init_device_mesh(
        device_type,
        shape.sizes,
        mesh_dim_names=names,
        backend_override=overrides,  # type: ignore[arg-type]
    )
    groups = {axis: device_mesh.get_group(str(axis)) for axis in AXES}
    return Mesh(
        shape,
        dist.get_rank(),
        device_mesh,
        MappingProxyType(groups),
        _end_to_end_group(shape, backend, "mesh_pp_reverse") if shape.pp == 2 else None,
        _end_to_end_group(shape, backend, "mesh_embd") if shape.pp > 1 else None,
    )


def _end_to_end_group(shape: MeshShape, backend: str, description: str) -> dist.ProcessGroup | None:
    """The group of the first and last rank of this rank's pipeline, or None for the ranks between them."""
    mine = None
    rank = dist.get_rank()
    for dp, cp, tp in product(range(shape.dp), range(shape.cp), range(shape.tp)):
        ends = [shape.rank_of(0, dp, cp, tp), shape.rank_of(shape.pp - 1, dp, cp, tp)]
        group = dist.new_group(ends, backend=backend, group_desc=description)
        if rank in ends:
            mine = group
    return mine
