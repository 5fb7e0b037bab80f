"""The mesh of ranks: the axes pp × dp × cp × tp, a rank's coordinates on them, and their process groups.

Ranks are ordered as in Megatron-LM, tp fastest, then cp, dp and pp:
rank = tp + size_tp · (cp + size_cp · (dp + size_dp · pp)); any other order of the axes can be asked for.
Groups carry the description ``mesh_<axis>``, so that traces name the axis.

Experts are spread over the same ranks: the dp · cp · tp ranks of a stage are edp · ep · etp of them too, etp fastest
(:func:`pptrace.axes.expert_group_of`).

Source of the rank arithmetic: Megatron-LM ``core/parallel_state.py``, ``RankGenerator``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from pptrace import axes
from pptrace.axes import MESH_ORDER, OF_EXPERTS, Axis
from pptrace.errors import UsageError
from pptrace.sizes.mesh import MeshAxes

AXES = tuple(reversed(MESH_ORDER))
"""The axes, slowest first in Megatron-LM's order."""
_LISTED = f"{', '.join(MESH_ORDER[:-1])} and {MESH_ORDER[-1]}"


@dataclass(frozen=True, slots=True)
class MeshShape(MeshAxes):
    """The mesh of a run.

    Raises:
        UsageError: an order that lacks an axis, or sizes of experts' axes that do not fit the others.
    """

    def __post_init__(self) -> None:
        if sorted(axes.without_ep(self.order)) != sorted(AXES) or self.order.count(Axis.EP) > 1:
            raise UsageError(
                f"the order of axes is {'-'.join(self.order)}; expected {_LISTED} once each, fastest first, such as "
                f"{'-'.join(MESH_ORDER)}, and ep at most once"
            )
        if min(self.ep, self.etp) < 1 or self.of_stage % (self.ep * self.etp):
            sizes = f"ep={self.ep}" if self.etp == 1 else f"ep={self.ep} · etp={self.etp}"
            raise UsageError(
                f"{sizes} does not divide the {self.of_stage} ranks of a stage (dp · cp · tp), over which experts are "
                "spread; choose a divisor"
            )

        self._check_place_of_ep()

    def _check_place_of_ep(self) -> None:
        """Refuse an order with ep in which experts would have other pipelines than the other layers, as Megatron-LM does."""
        if Axis.EP not in self.order or self.pp == 1 or self.ep * self.etp == 1:
            return
        before = self.order[: self.order.index(Axis.PP)]
        of_experts = {Axis.TP: self.etp, Axis.EP: self.ep, Axis.DP: self.edp}
        expected, found = (prod(sizes.get(axis, 1) for axis in before) for sizes in (self.sizes, of_experts))
        if expected != found:
            raise UsageError(
                f"the order of axes is {'-'.join(self.order)}: before pp it has {expected} ranks of attention and {found} of "
                "experts (etp in the place of tp, edp of dp), so that these would have other pipelines; put pp last"
            )

    def rank_of(self, pp: int, dp: int, cp: int, tp: int) -> int:
        """The global rank at a position, at 0 of any other axis; the inverse of ``coordinates_of``."""
        coordinates = {**dict.fromkeys(AXES, 0), Axis.PP: pp, Axis.DP: dp, Axis.CP: cp, Axis.TP: tp}
        return axes.rank_of(coordinates, self.sizes, self.order)

    def group_of(self, rank: int, axis: Axis) -> tuple[int, ...]:
        """The ranks that differ from this one in ``axis`` alone, itself included, in the order of their places on it."""
        return axes.group_of(rank, (axis,), self.sizes, self.order)

    def expert_group_of(self, rank: int, axis: Axis) -> tuple[int, ...]:
        """The ranks that share the experts of a stage with this one (EP), or each of them (ETP), or hold the same ones (EDP)."""
        return axes.expert_group_of(rank, axis, self.sizes, self.order, self.ep, self.etp)

    def groups_of(self, *along: Axis) -> list[tuple[int, ...]]:
        """The groups of ranks that differ in ``along`` alone, each in ascending order: Megatron's ``get_ranks("tp-dp")``."""
        if along and along[0] in OF_EXPERTS:
            return sorted({self.expert_group_of(rank, along[0]) for rank in range(self.world)})
        if Axis.DP_CP in along:
            along = (*along, Axis.DP, Axis.CP)
        return axes.groups_of(along, self.sizes, self.order)


def read_order(text: str) -> tuple[Axis, ...]:
    """The order of axes as Megatron-LM writes it, fastest first: ``tp-cp-ep-dp-pp``; axes left out vary slowest.

    ep has no ranks of its own: with it, tp, ep and dp say how etp, ep and edp vary over the ranks of a stage.

    Raises:
        UsageError: a word that is no axis, or one that is repeated.
    """
    order = axes.complete_order(text.split("-"))
    if order is None:
        raise UsageError(
            f"the order of axes is {text!r}; expected {_LISTED}, fastest first, such as {'-'.join(MESH_ORDER)} or "
            "tp-cp-ep-dp-pp"
        )
    return order


def fit_shape(
    world: int,
    pp: int | None = None,
    dp: int | None = None,
    cp: int = 1,
    tp: int = 1,
    order: tuple[Axis, ...] = MESH_ORDER,
    ep: int = 1,
    etp: int = 1,
) -> MeshShape:
    """The shape that fills ``world`` ranks. A ``pp`` or ``dp`` left out takes what the others leave (pp first).

    Needs no process group, so that a mistake is reported before any rank waits for another.

    Raises:
        UsageError: a size below 1, sizes whose product is not the world, or an ``ep`` that the ranks of a stage do not
            divide into.
    """
    named = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
    sizes = {name: size for name, size in named.items() if size is not None}
    for name, size in sizes.items():
        if size < 1:
            raise UsageError(f"{name} is {size}; every axis of the mesh needs at least 1 rank")
    product_of_sizes = prod(sizes.values())
    text = " · ".join(f"{name}={size}" for name, size in sizes.items() if size != 1) or "a mesh of 1 rank"
    if world % product_of_sizes:
        raise UsageError(f"{text} does not divide the world of {world} ranks; choose sizes whose product is {world}")
    if len(sizes) == len(named) and product_of_sizes != world:
        raise UsageError(f"{text} fills {product_of_sizes} of {world} ranks; choose sizes whose product is {world}")
    rest = world // product_of_sizes
    pp, rest = (rest, 1) if pp is None else (pp, rest)
    dp = rest if dp is None else dp
    return MeshShape(pp, dp, cp, tp, order, ep, etp)


@dataclass(frozen=True, slots=True, eq=False)
class Mesh:
    """This rank's coordinates and the process groups it belongs to.

    ``groups`` has one of each axis, of dp × cp where both are larger than 1, and of ep and edp of a model with experts, of etp
    too where that is larger than 1.
    ``embedding`` joins the first and the last rank of each pipeline, which both hold a tied embedding; None on the ranks
    between, and where the pipeline has one rank. ``pp_reverse`` is a second group of a pipeline of two ranks: with a group for
    each direction, messages of both directions overlap in unbatched NCCL calls too. ``mirror`` joins pipeline ranks r and p−1−r
    where they hold copies of the same stages (DualPipe).
    """

    shape: MeshShape
    rank: int
    groups: Mapping[Axis, dist.ProcessGroup]
    pp_reverse: dist.ProcessGroup | None
    embedding: dist.ProcessGroup | None
    mirror: dist.ProcessGroup | None = None

    @property
    def coordinates(self) -> tuple[int, int, int, int]:
        """(pp, dp, cp, tp) of this rank."""
        return self.shape.coordinates_of(self.rank)

    @property
    def replicas(self) -> Axis:
        """The axis whose group holds equal parameters and different tokens: over it gradients and losses are averaged."""
        if self.shape.cp == 1:
            return Axis.DP
        return Axis.CP if self.shape.dp == 1 else Axis.DP_CP

    @property
    def cp_rank(self) -> int:
        return self.coordinates[2]

    @property
    def tp_rank(self) -> int:
        return self.coordinates[3]

    @property
    def pp_rank(self) -> int:
        return self.coordinates[0]

    @property
    def dp_rank(self) -> int:
        return self.coordinates[1]

    @property
    def pp_ranks(self) -> tuple[int, ...]:
        """Global ranks of this rank's pipeline, first stage first."""
        return self.shape.group_of(self.rank, Axis.PP)

    def global_rank(self, pp_rank: int) -> int:
        """The global rank of a pipeline rank in this rank's pipeline."""
        return self.pp_ranks[pp_rank]


def make_mesh(shape: MeshShape, device_type: str, backend: str, mirrored: bool = False, experts: bool = False) -> Mesh:
    """Make the groups of every axis. Every rank of the world calls this, after ``init_process_group``.

    Args:
        shape: sizes of the axes.
        device_type: "cpu" or "cuda": where tensors that go through the groups live.
        backend: "gloo" or "nccl".
        mirrored: with the ``mirror`` groups, which a plan of two chains needs.
        experts: with the groups of ep, etp and edp, which a model with experts needs.

    Raises:
        UsageError: the shape does not fill the world.
    """
    world = dist.get_world_size()
    if shape.world != world:
        raise UsageError(f"a mesh of {shape.world} ranks {shape} does not fill the world of {world} ranks")
    slowest_first = tuple(reversed(axes.without_ep(shape.order)))
    names = tuple(str(axis) for axis in slowest_first)
    # Naming a backend makes DeviceMesh open a separate group for an axis that spans the world, instead of taking
    # the default group, whose description names no axis. Torch before 2.8 cannot.
    can_override = "backend_override" in inspect.signature(init_device_mesh).parameters
    overrides: dict[str, Any] = {"backend_override": dict.fromkeys(names, backend)} if can_override else {}
    device_mesh = init_device_mesh(
        device_type, tuple(shape.sizes[axis] for axis in slowest_first), mesh_dim_names=names, **overrides
    )
    groups = {axis: device_mesh.get_group(str(axis)) for axis in AXES}
    both = make_groups(shape.groups_of(Axis.DP_CP), backend, "mesh_dp-cp") if min(shape.dp, shape.cp) > 1 else None
    if both is not None:
        groups[Axis.DP_CP] = both
    of_experts = (Axis.EP, Axis.EDP, *((Axis.ETP,) if shape.etp > 1 else ()))
    for axis in of_experts if experts else ():
        along = make_groups(shape.groups_of(axis), backend, f"mesh_{axis}")
        assert along is not None  # every rank is in one group of each
        groups[axis] = along
    return Mesh(
        shape,
        dist.get_rank(),
        MappingProxyType(groups),
        _end_to_end_group(shape, backend, "mesh_pp_reverse") if shape.pp == 2 else None,
        _end_to_end_group(shape, backend, "mesh_embd") if shape.pp > 1 else None,
        _mirror_group(shape, backend) if mirrored else None,
    )


def _end_to_end_group(shape: MeshShape, backend: str, description: str) -> dist.ProcessGroup | None:
    """The group of the first and last rank of this rank's pipeline, or None for the ranks between them."""
    ends = [(pipeline[0], pipeline[-1]) for pipeline in shape.groups_of(Axis.PP)]
    return make_groups(ends, backend, description)


def _mirror_group(shape: MeshShape, backend: str) -> dist.ProcessGroup | None:
    """The group of this rank and the rank as far from the pipeline's other end; None for the one in the middle."""
    pairs = [(line[rank], line[-1 - rank]) for line in shape.groups_of(Axis.PP) for rank in range(shape.pp // 2)]
    return make_groups(pairs, backend, "mesh_mirror")


def make_groups(groups: Sequence[Sequence[int]], backend: str, description: str) -> dist.ProcessGroup | None:
    """Make all of these process groups, as every rank of the world must; return the one that has this rank, or None."""
    group_of_rank = None
    for members in groups:
        group = dist.new_group(list(members), backend=backend, group_desc=description)
        if dist.get_rank() in members:
            group_of_rank = group
    return group_of_rank
