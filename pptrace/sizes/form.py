"""Forms of models: the shape of a layer, or its numbers alone."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Norms(StrEnum):
    """The norms of a layer's attention and of its MLP."""

    BEFORE = "before"
    AFTER = "after"  # of what they make, before it is added (OLMo 2, arXiv 2501.00656)
    BOTH = "both"  # Gemma 2, arXiv 2408.00118


class QkNorm(StrEnum):
    """The norm of queries and keys."""

    NONE = "none"
    PLAIN = "plain"  # of each head, without weights (Llama 4)
    HEAD = "head"  # of each head, whose weights all heads have in common (Qwen3)
    ALL = "all"  # of all heads together (OLMo 2)


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads are made of ``kv_rank`` numbers
    of a token, queries of ``query_rank`` (None: of the token itself), each behind a norm. ``rotary`` of the numbers of a head's
    key are the token's, the same in all heads.
    """

    kv_rank: int
    rotary: int
    query_rank: int | None = None


@dataclass(frozen=True, slots=True)
class Window:
    """Keys that a query sees: the last ``size``, or those of its ``size`` tokens where a sequence is cut into chunks."""

    size: int
    is_chunk: bool = False

    def num_scores(self, tokens: int) -> int:
        """Scores of a head and sequence: twice the causal ones, which are s² of one that is no longer than the window; of each
        chunk its square.
        """
        size = min(self.size, tokens)
        if self.is_chunk:
            return tokens // size * size**2 + (tokens % size) ** 2
        return tokens**2 - (tokens - size) ** 2


@dataclass(frozen=True, slots=True)
class LayerNumbers:
    """A layer and the ends of a model by their numbers alone. Ranks of tp share the parameters equally, ranks of tp and cp the
    activations.

    ``activations`` and ``head_activations`` are bytes of one sequence, from its forward to its backward.
    """

    parameters: int
    activations: int
    embedding_parameters: int = 0
    head_parameters: int = 0
    head_activations: int = 0


@dataclass(frozen=True, slots=True)
class ModelForm:
    """Differences of a model from the runtime's GPT, whose form this is without arguments: LayerNorm, biases, learned positions,
    an MLP of two matrices with GELU.

    ``width`` is that of the MLP's inner layer, None: 4 · hidden. ``gradient_bytes`` are those of one gradient, None: 32 bits at
    least. ``scores_stored``: the attention stores its scores, and a layer keeps what the formulas of arXiv 2205.05198 say.
    ``numbers``: of a layer nothing else is known. ``is_gated``: the MLP has three matrices, down(silu(gate(x)) · up(x)).
    ``has_layer_norm``: norms have biases and keep a mean of each token; else they are RMSNorm. ``has_sinks``: a logit of each
    head joins its scores (gpt-oss). ``caps_logits``: they go through a tanh. ``head_dim`` is that of queries and keys, None:
    hidden / heads, ``value_dim`` that of values, None: the same. ``windows`` are those of the layers, None of one that sees
    all; () where all do. ``dense_layers`` have an MLP in a model with experts.
    """

    width: int | None = None
    gradient_bytes: int | None = None
    scores_stored: bool = False
    numbers: LayerNumbers | None = None
    is_gated: bool = False
    has_layer_norm: bool = True
    has_positions: bool = True
    has_qkv_biases: bool = True
    has_output_biases: bool = True
    has_mlp_biases: bool = True
    has_router_biases: bool = False
    has_sinks: bool = False
    caps_logits: bool = False
    norms: Norms = Norms.BEFORE
    qk_norm: QkNorm = QkNorm.NONE
    head_dim: int | None = None
    value_dim: int | None = None
    latent: Latent | None = None
    windows: tuple[Window | None, ...] = ()
    dense_layers: frozenset[int] = frozenset()

    @property
    def num_matrices(self) -> int:
        """Matrices of an MLP."""
        return 3 if self.is_gated else 2

    @property
    def inner_tensors(self) -> tuple[str, ...]:
        """Tensors as wide as the inner layer that an MLP saves for its backward, each operator by itself, as torch runs them."""
        return ("mlp_gate", "silu", "mlp_up", "product") if self.is_gated else ("mlp_in", "gelu")


OF_OUR_GPT = ModelForm()
