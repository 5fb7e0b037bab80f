"""A rank's share of a microbatch, and the kernel of its attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend

from instrument.context.shard import ContextShape, KeyExchange
from instrument.context.ulysses import ulysses_kv_heads
from instrument.mesh import MeshShape
from instrument.models.gpt_config import GptConfig
from instrument.models.parallel import ParallelOptions
from instrument.tensor.heads import share_heads

FUSED = "scaled_dot_product_attention"


@dataclass(frozen=True, slots=True)
class RankForm:
    """Sizes of one rank's share of a microbatch; ``sequence``: activations between layers are sharded over tp (Megatron SP)."""

    config: GptConfig
    microbatch_size: int
    tp: int = 1
    context: ContextShape = ContextShape()  # noqa: RUF009 — frozen
    sequence: bool = False

    @classmethod
    def of(cls, config: GptConfig, microbatch_size: int, shape: MeshShape, options: ParallelOptions) -> RankForm:
        """The form of any rank of a mesh: all ranks have equal shares of a layer.

        Raises:
            UsageError: ``options.ulysses`` does not divide cp.
        """
        return cls(config, microbatch_size, shape.tp, options.context(shape.cp), options.sequence)

    @property
    def held(self) -> int:
        """Tokens of a microbatch that this rank's attention and MLP see: b·s / cp."""
        return self.microbatch_size * self.config.sequence // self.context.size

    @property
    def between(self) -> int:
        """Tokens of the activations between the layers: with SP a shard of :attr:`held`."""
        return self.held // self.tp if self.sequence else self.held

    @property
    def attention(self) -> str:
        """The attention that runs, in words."""
        if self.context.size == 1:
            return FUSED
        gathers = self.context.exchange is KeyExchange.ALL_GATHER
        over_ring = "attention over gathered keys" if gathers else "ring attention"
        if self.context.ulysses == 1:
            return over_ring
        return "Ulysses with " + (FUSED if self.context.ring == 1 else over_ring)


def fused_kernel(form: RankForm, device: torch.device) -> SDPBackend | None:
    """The kernel that torch chooses for the rank's fused attention; None where the ring runs instead."""
    if form.context.ring > 1:
        return None
    config, ulysses = form.config, form.context.ulysses
    share = share_heads(config.heads, config.num_kv_heads, 0, form.tp)
    heads = len(share.query) // ulysses
    kv_heads = ulysses_kv_heads(len(share.query), len(share.kv), ulysses) // ulysses
    rows = (config.sequence, config.head_dim)
    q, k = (
        torch.empty(form.microbatch_size, number, *rows, dtype=config.dtype, device=device, requires_grad=True)
        for number in (heads, kv_heads)
    )
    chosen = torch._fused_sdp_choice(q, k, k, is_causal=True, enable_gqa=heads != kv_heads)
    return SDPBackend(chosen)
