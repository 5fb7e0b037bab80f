"""Floating-point operations of one training step, by the formulas of the Megatron papers.

B sequences of s tokens through l layers of hidden size h with a vocabulary of V: a layer's forward takes
24·B·s·h² (its four matrices) + 4·B·s²·h (scores, and their product with the values), the head's 2·B·s·h·V, and the
backward of each twice its forward. So the *model* FLOPs of a step are

    72·B·s·l·h²·(1 + s/(6h) + V/(12·l·h))

(arXiv 2205.05198, appendix A; arXiv 2104.04473, eq. 3, is the same with full recompute). *Hardware* FLOPs add what
recompute runs again: the attention's 4·B·s²·h per layer and an MLP's 16·B·s·h² (selective, as far as these are among its
modules), or a layer's whole forward (full).

The papers' q, k and v are as wide as h each. Grouped queries have narrower k and v, of width k = KV heads · head dim; the
fused projection is then h × (h + 2k), and the 24·B·s·h² of a layer 20·B·s·h² + 4·B·s·h·k, the same where k = h.

A layer with experts of width f has k · 4·B·s·h·f in place of the MLP's 16·B·s·h², the router's 2·B·s·h·E, and 4·B·s·h·f_s of
a shared MLP, with 2·B·s·h for each coefficient of it. They do not depend on the routes.

An encoder's layers have its S tokens in place of s; those of its decoder attend over these too, 4·B·s·h² + 4·B·S·h·k of
projections and 4·B·s·S·h of scores.

These are the FLOPs of all ranks of a pipeline together. Ranks of tp and of cp share out every product (but norms and what
else is not counted), so that a rank does 1/(tp·cp) of its layers' FLOPs, and MFU divides by all ranks of the world. Where
a KV head is copied to several ranks of tp, each multiplies for its copy: work that the model does not need, and that is
counted neither as model nor as hardware FLOPs.

What the papers count, and what they do not, holds here too:

- only matrix products: no norms, GELU, softmax, biases, nor the look-up in the embedding;
- the full s² square of the attention, though a causal mask makes half of it zero. A kernel that skips the masked half
  does less work than is counted;
- no recompute inside of a fused attention's backward, which runs the scores once more (2·B·s²·h per layer).

Two numbers differ from what is printed or run elsewhere. For selective recompute the paper's appendix has s/(3h) for
s/(6h): that is 12·B·s²·h more per layer, three times the attention's forward, where one forward (to 2s/(9h)) is what
runs. And torch ends a recompute as soon as backward has all that it needs: a layer's last matrix product (8·B·s·h²)
does not run again under full recompute unless the plan splits the backward, nor the attention's last (2·B·s²·h) under
selective recompute where the attention is not one fused kernel. Hardware FLOPs here are the papers', a whole forward.

V are the rows of the head, those that pad the vocabulary included, as Megatron-LM counts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from instrument.models.gpt_config import GptConfig, Recompute, RecomputeModule
from pptrace.errors import UsageError
from pptrace.schedule.outstanding import recomputed_cells
from pptrace.schedule.plan import Plan
from pptrace.sizes.flops import attention_flops, cross_projection_flops, expert_flops, mlp_flops, projection_flops


@dataclass(frozen=True, slots=True)
class StepFlops:
    """FLOPs of one step, all ranks together. ``hardware`` counts recompute, ``model`` does not."""

    model: int
    hardware: int


def step_flops(config: GptConfig, num_sequences: int, num_full: int = 0, tp: int = 1) -> StepFlops:
    """FLOPs of a step of ``num_sequences`` sequences of ``config.sequence`` tokens.

    Args:
        config: the whole model, with its recompute.
        num_sequences: B, of all microbatches.
        num_full: how many times a layer recomputes one sequence fully though ``config`` does not say so
            (:func:`count_full`).
        tp: tensor-parallel ranks, to which the vocabulary is padded.

    Raises:
        UsageError: more full recomputes than layers × sequences, or some where layers differ.
    """
    num_passes = config.layers * num_sequences
    if not 0 <= num_full <= num_passes:
        raise UsageError(
            f"{num_full} full recomputes of {num_passes} passes through a layer; expected 0 to {num_passes}"
        )
    each = [_layer_flops(config, index) for index in range(config.layers)]
    layers = num_sequences * sum(sum(parts) for parts in each)
    if num_full and len(set(each)) > 1:
        raise UsageError(
            "full recomputes of some microbatches are counted where all layers have equal experts, or none"
        )
    head = 2 * config.sequence * config.hidden * config.padded_vocabulary(tp)
    model = 3 * (layers + num_sequences * head)
    modules = 0
    if RecomputeModule.CORE_ATTN in config.recompute_modules:
        modules += num_sequences * sum(attention for _, attention, _ in each)
    if RecomputeModule.MLP in config.recompute_modules:
        without_experts = (mlp for index, (_, _, mlp) in enumerate(each) if not config.has_experts(index))
        modules += num_sequences * sum(without_experts)
    recomputed = {Recompute.NONE: 0, Recompute.SELECTIVE: modules, Recompute.FULL: layers}
    in_full = num_full * layers // num_passes
    rest = recomputed[config.recompute] * (num_passes - num_full) // num_passes
    return StepFlops(model, model + in_full + rest)


def _layer_flops(config: GptConfig, layer: int) -> tuple[int, int, int]:
    """The forward of one sequence through a layer: projections, attention, and MLP or experts."""
    hidden, kv_width = config.hidden, config.num_kv_heads * config.head_dim
    tokens = config.source_length if config.is_encoder(layer) else config.sequence
    projections, attention = projection_flops(tokens, hidden, kv_width), attention_flops(tokens, hidden)
    if 0 < config.encoder_layers <= layer:
        projections += cross_projection_flops(tokens, config.source_length, hidden, kv_width)
        attention += attention_flops(tokens, hidden, config.source_length)
    if config.experts is None or not config.has_experts(layer):
        return projections, attention, mlp_flops(tokens, hidden, 4 * hidden)
    experts = config.experts.of_layer(layer)
    return projections, attention, expert_flops(tokens, hidden, experts.width or 4 * hidden, experts)


def count_full(
    plan: Plan, layer_partition: Sequence[Sequence[int]], microbatch_size: int, num_unrecomputed: int
) -> int:
    """Number of full recomputes of a sequence by a layer, in a step of one pipeline; see :func:`recomputed_cells`."""
    cells = [cell for rank in range(plan.pp) for cell in recomputed_cells(plan, rank, num_unrecomputed)]
    return microbatch_size * sum(len(layer_partition[plan.model_stage(cell.stage)]) for cell in cells)
