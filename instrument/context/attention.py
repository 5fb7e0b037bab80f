"""Attention over a sequence that is cut over context-parallel ranks: ring or gathered keys, Ulysses, both, or neither."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from instrument.collectives import AxisGroup
from instrument.context.gather import GatherAttention
from instrument.context.ring import RingAttention
from instrument.context.shard import ContextShape, KeyExchange
from instrument.context.ulysses import Ulysses, ulysses_kv_heads
from instrument.mesh import Mesh, make_groups
from instrument.recorder import Recorder
from instrument.route import Route
from pptrace.errors import UsageError
from pptrace.marks import Axis


@dataclass(frozen=True, slots=True, eq=False)
class ContextGroups:
    """The two groups of this rank, numbered as :class:`ContextShape` does; None where a group has one rank."""

    shape: ContextShape
    ring: AxisGroup | None
    ulysses: AxisGroup | None


def make_context_groups(
    mesh: Mesh, shape: ContextShape, recorder: Recorder, route: Route = Route.DIRECT
) -> ContextGroups:
    """Make the groups of both ways. Every rank of the world calls this, after :func:`instrument.mesh.make_mesh`.

    Where only one way has more than one rank it uses the mesh's group of the axis.

    Raises:
        UsageError: the shape does not fill the mesh's cp axis.
    """
    if shape.size != mesh.shape.cp:
        raise UsageError(
            f"ring={shape.ring} · ulysses={shape.ulysses} is {shape.size}, and cp is {mesh.shape.cp}; choose sizes "
            f"whose product is {mesh.shape.cp}"
        )
    if shape.ring > 1 and shape.ulysses > 1:
        return ContextGroups(
            shape,
            AxisGroup(_subgroup(mesh, shape.ring_groups(), "mesh_cp_ring"), Axis.CP, recorder, route),
            AxisGroup(_subgroup(mesh, shape.ulysses_groups(), "mesh_cp_ulysses"), Axis.CP, recorder, route),
        )
    whole = AxisGroup(mesh.groups[Axis.CP], Axis.CP, recorder, route)
    return ContextGroups(shape, whole if shape.ring > 1 else None, whole if shape.ulysses > 1 else None)


def check_context(shape: ContextShape, sequence: int, heads: int, kv_heads: int) -> None:
    """Raise UsageError where a sequence or its heads cannot be shared out; needs no process group.

    ``heads`` and ``kv_heads`` are those of one tensor-parallel rank.
    """
    shape.check_sequence(sequence)
    _check_heads(heads, kv_heads)
    ulysses_kv_heads(heads, kv_heads, shape.ulysses)


class ContextAttention:
    """Scaled-dot-product attention of a shard's queries over the whole sequence.

    Positions are those of :func:`instrument.context.shard.positions`. With both ways, all-to-alls run among neighbours
    and the ring among ranks that hold the same heads (USP, arXiv 2405.07719, section 4.1).
    """

    def __init__(self, groups: ContextGroups, causal: bool = True) -> None:
        self._causal = causal
        self._ulysses = None if groups.ulysses is None else Ulysses(groups.ulysses)
        over_keys = GatherAttention if groups.shape.exchange is KeyExchange.ALL_GATHER else RingAttention
        self._ring = None if groups.ring is None else over_keys(groups.ring, groups.shape.layout, causal)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(microbatch, heads, sequence / cp, head dim), k and v with KV heads, which divide heads → as ``q``.

        Every rank of the context group calls this, with equal shapes. Differentiable once, also inside a checkpoint,
        where backward runs the forward's communication again.

        Raises:
            UsageError: heads that cannot be shared out.
        """
        _check_heads(q.shape[1], k.shape[1])
        if self._ulysses is None:
            return self._attend(q, k, v)
        return self._ulysses.gather_heads(self._attend(*self._ulysses.scatter_heads(q, k, v)))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._ring is not None:
            return self._ring(q, k, v)
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=self._causal, enable_gqa=grouped)


def _check_heads(heads: int, kv_heads: int) -> None:
    if heads % kv_heads:
        raise UsageError(
            f"{heads} heads do not divide among {kv_heads} KV heads; choose KV heads that divide the heads"
        )


def _subgroup(mesh: Mesh, groups: list[list[int]], description: str) -> dist.ProcessGroup:
    """Make every group of context ranks for all coordinates on the other axes; return the one that has this rank."""
    members = [
        [whole[cp] for cp in context_ranks] for whole in mesh.shape.groups_of(Axis.CP) for context_ranks in groups
    ]
    group = make_groups(members, dist.get_backend(mesh.groups[Axis.CP]), description)
    assert group is not None, "every rank is in one group"
    return group
