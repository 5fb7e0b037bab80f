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

from pptrace.errors import UsageError
from pptrace.schedule.outstanding import recomputed_cells
from pptrace.schedule.plan import Plan
from pptrace.sizes.flops import head_flops, layer_attention_flops, layer_flops, layer_mlp_flops
from pptrace.sizes.gpt_facts import GptFacts


@dataclass(frozen=True, slots=True)
class StepFlops:
    """FLOPs of one step, all ranks together. ``hardware`` counts recompute, ``model`` does not."""

    model: int
    hardware: int


def step_flops(facts: GptFacts, num_sequences: int, num_full: int = 0, tp: int = 1) -> StepFlops:
    """FLOPs of a step of ``num_sequences`` sequences of ``facts.sequence`` tokens.

    Args:
        facts: the whole model, with its recompute.
        num_sequences: B, of all microbatches.
        num_full: how many times a layer recomputes one sequence fully though ``facts`` do not say so
            (:func:`count_full`).
        tp: tensor-parallel ranks, to which the vocabulary is padded.

    Raises:
        UsageError: more full recomputes than layers × sequences, or some where layers differ.
    """
    every = range(sum(facts.layers_per_stage))
    num_passes = len(every) * num_sequences
    if not 0 <= num_full <= num_passes:
        raise UsageError(
            f"{num_full} full recomputes of {num_passes} passes through a layer; expected 0 to {num_passes}"
        )
    each = [(layer_flops(facts, layer), layer_mlp_flops(facts, layer)) for layer in every]
    layers = num_sequences * sum(total for total, _ in each)
    if num_full and len(set(each)) > 1:
        raise UsageError(
            "full recomputes of some microbatches are counted where all layers have equal experts, or none"
        )
    head = head_flops(facts.sequence, facts.hidden, facts.vocabulary_rows(tp) * tp)
    model = 3 * (layers + num_sequences * head)
    attention, mlp = sum(layer_attention_flops(facts, layer) for layer in every), sum(mlp for _, mlp in each)
    modules = sum({"core_attn": attention, "mlp": mlp}[name] for name in facts.recompute_modules)
    recomputed = {"none": 0, "selective": num_sequences * modules, "full": layers}
    in_full = num_full * layers // num_passes
    rest = recomputed[facts.recompute] * (num_passes - num_full) // num_passes
    return StepFlops(model, model + in_full + rest)


def count_full(
    plan: Plan, layer_partition: Sequence[Sequence[int]], microbatch_size: int, num_unrecomputed: int
) -> int:
    """Number of full recomputes of a sequence by a layer, in a step of one pipeline; see :func:`recomputed_cells`."""
    cells = [cell for rank in range(plan.pp) for cell in recomputed_cells(plan, rank, num_unrecomputed)]
    return microbatch_size * sum(len(layer_partition[plan.model_stage(cell.stage)]) for cell in cells)
