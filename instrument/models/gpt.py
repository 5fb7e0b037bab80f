"""A byte-level GPT that can be cut into stages anywhere between its layers.

Pre-norm transformer blocks with causal scaled-dot-product attention and a GELU MLP, learned positions, a final norm and
a head, whose weight may be the embedding's (tied). Every part draws its initial values from a generator of its own,
seeded by its place in the model, so that any cut gives the same parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from instrument.pipeline import split
from pptrace.errors import UsageError

VOCABULARY = 256  # bytes


class Recompute(StrEnum):
    """What a block's forward keeps for its backward (Megatron-LM's recompute granularity, arXiv 2205.05198)."""

    NONE = "none"  # every activation
    SELECTIVE = "selective"  # all but the attention's between qkv and its output, which run again
    FULL = "full"  # the block's input, from which all of it runs again


@dataclass(frozen=True, slots=True)
class GptConfig:
    """Sizes of the whole model. ``sequence`` is the longest one that the learned positions allow."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    tied: bool = False
    dtype: torch.dtype = torch.float32
    seed: int = 0
    recompute: Recompute = Recompute.NONE

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "sequence"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; the model needs at least 1")
        if self.hidden % self.heads:
            raise UsageError(f"hidden size {self.hidden} does not divide into {self.heads} heads")


class Embedding(nn.Module):
    """(microbatch, sequence) bytes → (microbatch, sequence, hidden)."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.tokens = split.Embedding(VOCABULARY, config.hidden, dtype=config.dtype)
        self.positions = split.Embedding(config.sequence, config.hidden, dtype=config.dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden: Tensor = self.tokens(tokens) + self.positions(places)
        return hidden


class Block(nn.Module):
    """One transformer layer; (microbatch, sequence, hidden) in and out."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        hidden, dtype = config.hidden, config.dtype
        self.heads = config.heads
        self.recompute = config.recompute
        self.attention_norm = nn.LayerNorm(hidden, dtype=dtype)
        self.qkv = split.Linear(hidden, 3 * hidden, dtype=dtype)
        self.attention_out = split.Linear(hidden, hidden, dtype=dtype)
        self.mlp_norm = nn.LayerNorm(hidden, dtype=dtype)
        self.mlp_in = split.Linear(hidden, 4 * hidden, dtype=dtype)
        self.mlp_out = split.Linear(4 * hidden, hidden, dtype=dtype)

    def forward(self, x: Tensor, recompute: bool = False) -> Tensor:
        """``recompute``: fully, this time, whatever the model's own recompute is."""
        return _again(self._compute, x) if recompute or self.recompute is Recompute.FULL else self._compute(x)

    def _compute(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x))
        attended = _again(self._attend, qkv) if self.recompute is Recompute.SELECTIVE else self._attend(qkv)
        x = x + self.attention_out(attended)
        hidden: Tensor = x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))
        return hidden

    def _attend(self, qkv: Tensor) -> Tensor:
        batch, sequence, width = qkv.shape
        q, k, v = qkv.view(batch, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return attended.transpose(1, 2).reshape(batch, sequence, width // 3)


class Head(nn.Module):
    """(microbatch, sequence, hidden) → logits (microbatch, sequence, 256)."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden, dtype=config.dtype)
        self.projection = split.Linear(config.hidden, VOCABULARY, bias=False, dtype=config.dtype)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.projection(self.norm(x))
        return logits


class GptStage(nn.Module):
    """The part of the model from one layer to another; parameter names are the same in every cut.

    The first stage takes bytes (microbatch, sequence), the last returns logits; between stages travels (microbatch,
    sequence, hidden).
    """

    def __init__(self, config: GptConfig, layers: Sequence[int]) -> None:
        super().__init__()
        self.embedding = Embedding(config) if 0 in layers else None
        self.blocks = nn.ModuleDict({str(layer): Block(config) for layer in layers})
        self.head = Head(config) if config.layers - 1 in layers else None
        self._initialise(config)

    def forward(self, x: Tensor, recompute: bool = False) -> Tensor:
        """With ``recompute`` every layer keeps its input alone, this time; embedding and head keep theirs anyway."""
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x, recompute=recompute)
        return x if self.head is None else self.head(x)

    def _initialise(self, config: GptConfig) -> None:
        if self.embedding is not None:
            _draw(self.embedding, config, place=0)
        for layer, block in self.blocks.items():
            _draw(block, config, place=1 + int(layer))
        if self.head is not None:
            _draw(self.head, config, place=1 + config.layers)
            if config.tied:  # the values of the embedding, wherever that is
                first = Embedding(config)
                _draw(first, config, place=0)
                self.head.projection.weight = first.tokens.weight


def make_stages(config: GptConfig, cut: Sequence[Sequence[int]], stages: Sequence[int]) -> dict[int, GptStage]:
    """The modules of some stages of one rank.

    A tied embedding whose two ends are both among them is one parameter; otherwise each end has a copy, and the owner
    sums their gradients (:mod:`instrument.pipeline.gradients`).
    """
    made = {stage: GptStage(config, cut[stage]) for stage in stages}
    ends = (made.get(0), made.get(len(cut) - 1))
    if config.tied and ends[0] is not None and ends[1] is not None:
        if ends[0].embedding is None or ends[1].head is None:
            raise UsageError(f"stage 0 must hold layer 0 and the last stage layer {config.layers - 1}; found {cut}")
        ends[1].head.projection.weight = ends[0].embedding.tokens.weight
    return made


def tied_weight(stages: dict[int, GptStage]) -> nn.Parameter | None:
    """This rank's copy of a tied embedding, if it has one end of it and another rank the other."""
    ends = [
        weight
        for stage in stages.values()
        for name, weight in stage.named_parameters()
        if name in ("embedding.tokens.weight", "head.projection.weight")
    ]
    return ends[0] if len(ends) == 1 else None


def _again(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``function(x)``, of which only x is kept: backward runs it again. Nothing in a block draws random numbers."""
    output: Tensor = checkpoint(function, x, use_reentrant=False, preserve_rng_state=False)
    return output


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over all tokens of a microbatch; logits (…, 256), targets (…) bytes."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def _draw(module: nn.Module, config: GptConfig, place: int) -> None:
    """Initial values by place: normal weights, zero biases, unit norms (GPT-2's, without its depth scaling)."""
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + place)
    for part in module.modules():
        if isinstance(part, nn.LayerNorm):
            nn.init.ones_(part.weight)
            nn.init.zeros_(part.bias)
        elif isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=0.02, generator=generator)
            if isinstance(part, nn.Linear) and part.bias is not None:
                nn.init.zeros_(part.bias)
