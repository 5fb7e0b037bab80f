"""Sizes of the GPT, and the activations that it saves."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch

from pptrace.errors import UsageError
from pptrace.sizes.expert_options import ExpertOptions
from pptrace.sizes.gpt_facts import padded_vocabulary

NUM_BYTES = 256
"""The smallest vocabulary: the ids of a larger one beyond these occur in no text."""


class Recompute(StrEnum):
    """The activations that a block's forward saves (Megatron-LM's recompute granularity, arXiv 2205.05198)."""

    NONE = "none"  # every activation
    SELECTIVE = "selective"  # all but those of some modules, which run again
    FULL = "full"  # the block's input, from which all of it runs again


class RecomputeMethod(StrEnum):
    """The layers of a stage that recompute fully (Megatron-LM's ``recompute_method`` and ``recompute_num_layers`` N)."""

    UNIFORM = "uniform"  # all, N after each other as one: of each N the input of the first is saved
    BLOCK = "block"  # the first N; the others save every activation


class RecomputeModule(StrEnum):
    """Modules of a block that selective recompute runs again (Megatron-LM's ``recompute_modules``)."""

    CORE_ATTN = "core_attn"  # the attention between qkv and its output
    MLP = "mlp"  # the MLP, where a layer has one and no experts


@dataclass(frozen=True, slots=True)
class GptConfig:
    """Sizes of the whole model. ``sequence`` is the longest one that the learned positions allow.

    ``kv_heads`` below ``heads`` make attention grouped-query; None means as many as heads. ``dropout`` is the probability
    after the embedding, the attention and the MLP of each layer. ``experts`` stand in place of some layers' MLP.
    ``vocabulary`` is the number of token ids; embedding and head have rows for more, up to a multiple of
    ``vocabulary_multiple`` × tp, which the loss leaves out.
    ``recompute_method`` and ``recompute_num_layers`` are of full recompute, ``recompute_modules`` of selective one.
    The first ``encoder_layers`` make an encoder of ``encoder_sequence`` tokens (None: as many as ``sequence``), over whose output
    the others attend too; 0: there is none.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    tied: bool = False
    dtype: torch.dtype = torch.float32
    seed: int = 0
    recompute: Recompute = Recompute.NONE
    kv_heads: int | None = None
    dropout: float = 0.0
    experts: ExpertOptions | None = None
    vocabulary: int = NUM_BYTES
    vocabulary_multiple: int = 1
    recompute_method: RecomputeMethod = RecomputeMethod.UNIFORM
    recompute_num_layers: int = 1
    recompute_modules: tuple[RecomputeModule, ...] = (RecomputeModule.CORE_ATTN,)
    encoder_layers: int = 0
    encoder_sequence: int | None = None

    def __post_init__(self) -> None:
        sizes = ("layers", "hidden", "heads", "sequence", "kv_heads", "vocabulary", "vocabulary_multiple")
        for name in (*sizes, "recompute_num_layers", "encoder_sequence"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}; the model needs at least 1")
        if self.hidden % self.heads:
            raise UsageError(f"hidden size {self.hidden} does not divide into {self.heads} heads")
        if not 0 <= self.dropout < 1:
            raise UsageError(f"dropout is {self.dropout}; expected a probability from 0 up to, not including, 1")
        if not 0 <= self.encoder_layers < self.layers:
            raise UsageError(
                f"{self.encoder_layers} of {self.layers} layers are the encoder's; expected 0 or more, one left for the decoder"
            )
        if self.encoder_sequence is not None and not self.encoder_layers:
            raise UsageError("the encoder has a sequence length and no layers; give it some, or leave the length out")
        if self.encoder_layers and (self.tied or self.experts is not None):
            raise UsageError(
                "an encoder and its decoder have an embedding each and no experts: leave out tied embeddings and experts"
            )

    @property
    def source_length(self) -> int:
        """Tokens of a sequence that the encoder reads."""
        return self.sequence if self.encoder_sequence is None else self.encoder_sequence

    def is_encoder(self, layer: int) -> bool:
        """Return whether a layer is one of the encoder's, whose attention sees all tokens of the source."""
        return layer < self.encoder_layers

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has experts in place of its MLP."""
        return self.experts is not None and self.experts.in_layer(layer)

    def padded_vocabulary(self, tp: int) -> int:
        """Rows of embedding and head, over all ranks of tp."""
        return padded_vocabulary(self.vocabulary, self.vocabulary_multiple, tp)

    @property
    def num_kv_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads
