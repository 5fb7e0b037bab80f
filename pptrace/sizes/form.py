"""Forms of models: the shape of a layer, or its numbers alone."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Family(StrEnum):
    """Kinds of transformer layers, by the models that have them."""

    GPT = "gpt"  # LayerNorm, biases, learned positions, an MLP of two matrices with GELU
    LLAMA = "llama"  # RMSNorm, no biases, rotary positions, an MLP of three matrices with SwiGLU

    @property
    def is_gated(self) -> bool:
        """Return whether the MLP multiplies two inner layers: down(silu(gate(x)) · up(x))."""
        return self is Family.LLAMA

    @property
    def has_biases(self) -> bool:
        """Return whether linear layers and norms have biases, so that norms keep a mean of each token."""
        return self is Family.GPT

    @property
    def has_positions(self) -> bool:
        """Return whether positions are learned."""
        return self is Family.GPT

    @property
    def num_matrices(self) -> int:
        """Matrices of an MLP."""
        return 3 if self.is_gated else 2

    @property
    def inner_tensors(self) -> tuple[str, ...]:
        """Tensors as wide as the inner layer that an MLP saves for its backward, each operator by itself, as torch runs them."""
        return ("mlp_gate", "silu", "mlp_up", "product") if self.is_gated else ("mlp_in", "gelu")


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
    """Differences of a model from the runtime's GPT, whose form this is without arguments.

    ``width`` is that of the MLP's inner layer, None: 4 · hidden. ``gradient_bytes`` are those of one gradient, None: 32 bits at
    least. ``scores_stored``: the attention stores its scores, and a layer keeps what the formulas of arXiv 2205.05198 say.
    ``numbers``: of a layer nothing else is known.
    """

    family: Family = Family.GPT
    width: int | None = None
    gradient_bytes: int | None = None
    scores_stored: bool = False
    numbers: LayerNumbers | None = None


OF_OUR_GPT = ModelForm()
