"""Floating-point operations of the forward of one sequence: matrix products alone, as the Megatron papers count them.

Backward takes twice as many. Sources: arXiv 2205.05198, appendix A; arXiv 2104.04473, section 5. What is counted, and what is
not: ``instrument/models/flops.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from pptrace.schedule.actions import Kind, iter_halves
from pptrace.sizes.expert_options import ExpertOptions
from pptrace.sizes.gpt_facts import GptFacts
from pptrace.sizes.step import StepVolume


def attention_flops(tokens: int, hidden: int, keys: int | None = None) -> int:
    """Scores, and their product with the values: 4·s²·h, the full square; over ``keys`` of another sequence 4·s·S·h."""
    return 4 * tokens * (tokens if keys is None else keys) * hidden


def attention_weights(facts: GptFacts) -> int:
    """Numbers of the matrices of a layer's attention, which each token is multiplied with."""
    latent, hidden, heads, both = facts.form.latent, facts.hidden, facts.heads, facts.head_dim + facts.value_dim
    if latent is None:
        return hidden * both * (heads + facts.kv_heads)
    queries = heads * facts.head_dim * (latent.query_rank or hidden) + hidden * (latent.query_rank or 0)
    keys = hidden * (latent.kv_rank + latent.rotary) + latent.kv_rank * heads * (both - latent.rotary)
    return queries + keys + heads * facts.value_dim * hidden


def mlp_flops(tokens: int, hidden: int, width: int, matrices: int = 2) -> int:
    """Matrices of h × width, 16·s·h² of two with width 4·h."""
    return 2 * matrices * tokens * hidden * width


def expert_flops(tokens: int, hidden: int, width: int, options: ExpertOptions, matrices: int = 2) -> int:
    """A layer's experts in place of its MLP, with router and shared MLP, whatever the routes."""
    outputs = options.num + options.shared.num_coefficients
    products = mlp_flops(tokens, hidden, options.top_k * width + options.shared_width, matrices)
    return products + 2 * tokens * hidden * outputs


def head_flops(tokens: int, hidden: int, rows: int) -> int:
    """The projection onto ``rows`` logits: 2·s·h·V."""
    return 2 * tokens * hidden * rows


def layer_flops(facts: GptFacts, layer: int) -> int:
    """The forward of one sequence through a layer of the model."""
    is_encoder, hidden, form = layer < facts.encoder_layers, facts.hidden, facts.form
    tokens, source, kv_width = facts.sequence, facts.source_length, facts.kv_heads * facts.head_dim
    if form.numbers is not None:
        return 2 * tokens * form.numbers.parameters
    tokens = source if is_encoder else tokens
    products = 2 * tokens * attention_weights(facts) + layer_attention_flops(facts, layer)
    if facts.encoder_layers and not is_encoder:
        # q and the output of a decoder's tokens, k and v of what an encoder has made of S: 4·s·h² + 4·S·h·k.
        products += 4 * hidden * (tokens * hidden + source * kv_width)
    if facts.experts is None or not facts.experts_of(layer):
        return products + layer_mlp_flops(facts, layer)
    options = facts.experts.of_layer(layer)
    return products + expert_flops(tokens, hidden, facts.expert_width, options, form.num_matrices)


def layer_mlp_flops(facts: GptFacts, layer: int) -> int:
    """The MLP of one sequence in a layer of the model; 0 of one with experts."""
    tokens = facts.source_length if layer < facts.encoder_layers else facts.sequence
    return 0 if facts.experts_of(layer) else mlp_flops(tokens, facts.hidden, facts.mlp_width, facts.form.num_matrices)


def layer_attention_flops(facts: GptFacts, layer: int) -> int:
    """The attention of one sequence in a layer of the model; in a decoder's over what its encoder has made too."""
    if layer < facts.encoder_layers:
        return attention_flops(facts.source_length, facts.hidden)
    cross = attention_flops(facts.sequence, facts.hidden, facts.source_length) if facts.encoder_layers else 0
    window = facts.form.windows[layer] if facts.form.windows else None
    num_scores = facts.sequence**2 if window is None else window.num_scores(facts.sequence)
    return 2 * num_scores * facts.heads * (facts.head_dim + facts.value_dim) + cross


@dataclass(frozen=True, slots=True)
class StageFlops:
    """Forward FLOPs of one microbatch of a stage on one rank of tp and cp, and what a recompute runs again of them."""

    forward: int
    again: int
    again_fully: int


def stage_flops(facts: GptFacts, model_stage: int, tp: int, cp: int) -> StageFlops:
    """FLOPs of a stage of the model, shared by the ranks of tp and cp."""
    layers, tokens = facts.layers_of(model_stage), facts.sequence
    of_layers = sum(layer_flops(facts, layer) for layer in layers)
    head = 0
    if model_stage == len(facts.layers_per_stage) - 1:
        numbers = facts.form.numbers
        head = head_flops(tokens, facts.hidden, facts.vocabulary_rows(tp) * tp)
        head = 2 * tokens * numbers.head_parameters if numbers is not None else head
    attention = sum(layer_attention_flops(facts, layer) for layer in layers)
    again = {"none": 0, "selective": attention, "full": of_layers}
    return StageFlops(
        *(facts.microbatch_size * num // (tp * cp) for num in (of_layers + head, again[facts.recompute], of_layers))
    )


def op_flops(facts: GptFacts, model_stage: int, tp: int, cp: int) -> dict[str, dict[str, int]]:
    """FLOPs of one op of a stage of the model on one rank of tp and cp, by its kind and by kind of work.

    A backward multiplies twice as much as its forward, of which the gradients of weights (W) have half of the linear layers, and
    none of the attention. {} where the sizes alone do not tell: sequences or documents whose lengths vary, experts, copied heads
    of keys, other recompute than of all layers or of their attention.
    """
    again = set(facts.recompute_of(model_stage))
    is_varying = facts.shortest_sequence is not None or facts.shortest_document is not None
    if facts.experts is not None or facts.form.numbers is not None or facts.kv_heads % tp or facts.sleeps or is_varying:
        return {}
    if not again <= {"none", "selective", "full"} or facts.recompute_microbatches_beyond is not None:
        return {}
    parts, share = stage_flops(facts, model_stage, tp, cp), facts.microbatch_size / (tp * cp)
    of_layers = sum(layer_attention_flops(facts, layer) for layer in facts.layers_of(model_stage))
    attention = int(of_layers * share)
    linear = parts.forward - attention
    full = facts.recompute_of(model_stage).count("full") / max(len(facts.layers_of(model_stage)), 1)
    again_attention = attention if "selective" in again else int(full * attention)
    again_linear = int(full * (parts.again_fully - attention))
    return {
        "F": {"matmul": linear, "attention": attention},
        "B": {"matmul": 2 * linear + again_linear, "attention": 2 * attention + again_attention},
        "I": {"matmul": linear + again_linear, "attention": 2 * attention + again_attention},
        "W": {"matmul": linear, "attention": 0},
    }


def rank_flops(volume: StepVolume, rank: int) -> tuple[int, int]:
    """(model, hardware) FLOPs of a global rank in one step; hardware counts recompute."""
    pp_rank, plan, mesh = volume.pp_rank(rank), volume.plan, volume.mesh
    of_stage = cache(lambda stage: stage_flops(volume.facts, plan.model_stage(stage), mesh.tp, mesh.cp))
    recomputed, model, hardware = volume.fully_recomputed(pp_rank), 0, 0
    for half in iter_halves(plan.ranks[pp_rank]):
        if half.kind not in (Kind.F, Kind.B, Kind.I, Kind.W):
            continue
        flops = of_stage(half.stage)
        products = flops.forward * (2 if half.kind is Kind.B else 1)
        model, hardware = model + products, hardware + products
        if half.kind in (Kind.B, Kind.I):
            is_full = (half.stage, half.microbatch) in recomputed
            hardware += flops.again_fully if is_full else flops.again
    return model, hardware
