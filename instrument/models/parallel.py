"""One rank's share of its layers along tp and cp."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from instrument.collectives import AxisGroup, axis_group
from instrument.context.attention import ContextAttention, check_context, make_context_groups
from instrument.context.shard import ContextShape, KeyExchange, Layout, positions
from instrument.expert.groups import ExpertGroups, expert_groups
from instrument.mesh import Mesh, MeshShape
from instrument.recorder import Recorder
from instrument.route import Route
from instrument.sequence.dropout import DropoutSeeds
from instrument.sequence.shards import local_part
from instrument.tensor.heads import share_heads
from instrument.tensor.region import Region
from pptrace.errors import UsageError
from pptrace.marks import Axis
from pptrace.sizes.expert_options import ExpertOptions, check_experts


@dataclass(frozen=True, slots=True)
class ParallelOptions:
    """Options of tensor and context parallelism, without the sizes of the axes.

    ``sequence`` shards activations between the layers over tp (Megatron SP), ``overlap`` overlaps their communication with
    the GEMMs. ``ulysses`` ranks of cp exchange heads, and cp / ulysses form the ring, over which
    ``layout`` lays sequences out and ``exchange`` brings keys.
    """

    sequence: bool = False
    overlap: bool = False
    ulysses: int = 1
    layout: Layout = Layout.BALANCED
    exchange: KeyExchange = KeyExchange.P2P

    def context(self, cp: int) -> ContextShape:
        """The ring and Ulysses sizes of cp ranks.

        Raises:
            UsageError: ``ulysses`` does not divide cp.
        """
        if self.ulysses < 1 or cp % self.ulysses:
            raise UsageError(f"ulysses={self.ulysses} does not divide cp={cp}; choose a divisor of {cp}")
        return ContextShape(cp // self.ulysses, self.ulysses, self.layout, self.exchange)


@dataclass(frozen=True, slots=True, eq=False)
class Parallel:
    """One rank's share: its tensor-parallel region, its attention, which positions of a sequence it holds, and with whom it
    shares experts.
    """

    region: Region
    attention: ContextAttention | None
    context: ContextShape
    cp_rank: int
    seeds: DropoutSeeds
    experts: ExpertGroups | None = None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool = True, documents: Sequence[int] | None = None
    ) -> Tensor:
        """Attention: (microbatch, heads, sequence / cp, head dim), k and v with KV heads → as ``q``.

        With ``documents`` within each of so many tokens, whose scores alone are computed. Over cp ``causal`` and whole sequences.
        """
        if documents is not None:
            of_q, of_k, of_v = (torch.split(tensor, list(documents), 2) for tensor in (q, k, v))
            return torch.cat([self.attend(*each, causal) for each in zip(of_q, of_k, of_v, strict=True)], 2)
        if self.attention is not None:
            return self.attention(q, k, v)
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])

    def with_microbatches(self, num_microbatches: int, dp_rank: int) -> Parallel:
        """The share with what layers with experts have to know of the microbatches of a step: how much a loss inside them
        counts, and which sequences theirs are (:class:`instrument.expert.groups.ExpertGroups`).
        """
        if self.experts is None:
            return self
        weight = self.context.size / num_microbatches
        first = dp_rank * num_microbatches
        return replace(self, experts=replace(self.experts, loss_weight=weight, first_microbatch=first))

    def positions(self, held: int, device: torch.device, documents: Sequence[int] | None = None) -> Tensor:
        """Position ids of this rank's activations, if its batch holds ``held`` tokens of each sequence; they begin anew in each
        of the ``documents``.
        """
        if documents is None:
            position_ids = positions(self.context, held * self.context.size, self.cp_rank, device)
        else:
            position_ids = torch.cat([torch.arange(length, device=device) for length in documents])
        return local_part(position_ids, 0, self.region.group) if self.region.shards_sequence else position_ids

    def activation_length(self, sequence: int) -> int:
        """Tokens of a sequence in this rank's activations between layers."""
        held = sequence // self.context.size
        return held // self.region.group.size if self.region.shards_sequence else held


def alone(seed: int = 0) -> Parallel:
    """The share of a rank that has whole layers; needs no process group."""
    region = Region(AxisGroup(None, Axis.TP, Recorder()))
    return Parallel(region, None, ContextShape(), 0, DropoutSeeds(seed, (0, 0), 0))


def make_parallel(
    mesh: Mesh, options: ParallelOptions, recorder: Recorder, route: Route = Route.DIRECT, seed: int = 0
) -> Parallel:
    """Make this rank's share. Every rank of the world calls this, after :func:`instrument.mesh.make_mesh`.

    Args:
        mesh: of this rank.
        options: checked by :func:`check_parallel`.
        recorder: writes the ranges.
        route: direct, or host-staged where several ranks share a GPU.
        seed: of the dropout masks.
    """
    region = Region(axis_group(mesh, Axis.TP, recorder, route), options.sequence, options.overlap)
    context = options.context(mesh.shape.cp)
    attention = None
    if context.size > 1:
        attention = ContextAttention(make_context_groups(mesh, context, recorder, route))
    seeds = DropoutSeeds(seed, (mesh.dp_rank, mesh.cp_rank), mesh.tp_rank)
    return Parallel(region, attention, context, mesh.cp_rank, seeds, expert_groups(mesh, context, recorder, route))


def check_parallel(
    shape: MeshShape,
    options: ParallelOptions,
    sequence: int,
    heads: int,
    kv_heads: int,
    experts: ExpertOptions | None = None,
) -> None:
    """Refuse sizes that cannot be sharded, before any process group is made.

    Raises:
        UsageError: heads that neither divide nor can be copied, a sequence that does not divide, or experts that do not.
    """
    share_heads(heads, kv_heads, 0, shape.tp)
    context = options.context(shape.cp)
    check_context(context, sequence, heads // shape.tp, max(1, kv_heads // shape.tp))
    held = sequence // shape.cp
    if options.sequence and held % shape.tp:
        of_rank = f", {held} for each of cp={shape.cp}," if shape.cp > 1 else ""
        raise UsageError(
            f"sequence length {sequence}{of_rank} does not divide into sequence shards for tp={shape.tp} ranks; choose a "
            f"multiple of {math.lcm(context.divisor, shape.cp * shape.tp)}"
        )
    if experts is not None:
        check_experts(experts, shape.ep, shape.tp, held)
    elif shape.ep > 1:
        raise UsageError(f"ep is {shape.ep} and the model has no experts to share out; give it some, or leave ep out")
