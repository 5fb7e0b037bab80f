"""Context parallelism in closed form: scores that each rank of a ring computes, and from which length on it hides its keys."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pptrace.sizes.gpt_facts import GptFacts

_BACKWARD_WORK = 2.5
"""Matrix products of an attention's backward over those of its forward: five and two (FlashAttention-2, arXiv 2307.08691)."""


def causal_scores(sequence: int, ring: int, *, balanced: bool) -> tuple[int, ...]:
    """Causal scores that each rank of a ring computes of one head and sequence.

    Contiguous: rank i has L = s / ring queries, which see all keys of i ranks before it and L (L + 1) / 2 of its own. Balanced:
    each has an equal part of s (s + 1) / 2.
    """
    if balanced:
        return (sequence * (sequence + 1) // (2 * ring),) * ring
    length = sequence // ring
    return tuple(length * (length + 1) // 2 + rank * length**2 for rank in range(ring))


def hiding_chunk(
    flops_per_byte: float, item_bytes: int, kv_share: float = 1.0, scores_share: float = 1.0, *, sum_bytes: int = 0
) -> float:
    """Positions of a rank from which on a step of the ring computes as long as its keys travel.

    C queries over C keys are 4·C²·d FLOPs, and their keys and values 2·C·d items: C ≥ F / B with 16-bit items, F / B being FLOP/s
    over bytes/s (Ring Attention, arXiv 2310.01889, section 3).

    Args:
        flops_per_byte: F / B.
        kv_share: KV heads over heads.
        scores_share: part of the C² scores that a step computes: a half where they are causal and balanced.
        sum_bytes: width of the gradients that travel with the keys in backward; 0 for forward.
    """
    work = 4 * scores_share * (_BACKWARD_WORK if sum_bytes else 1.0)
    return flops_per_byte * 2 * kv_share * (item_bytes + sum_bytes) / work


@dataclass(frozen=True, slots=True)
class RingHiding:
    """The shortest sequences whose keys a ring hides behind causal attention, forward and backward, tokens."""

    forward: int
    backward: int


def hiding_sequences(facts: GptFacts, cp: int, flops_per_byte: float) -> RingHiding:
    """The lengths for the balanced ring of a model on ``cp`` context ranks, all of which form it but for those of Ulysses."""
    ring, unit = cp // facts.ulysses, 2 * cp

    def length(sum_bytes: int) -> int:
        share = facts.kv_heads / facts.heads
        chunk = hiding_chunk(flops_per_byte, facts.item_bytes, share, 0.5, sum_bytes=sum_bytes)
        return math.ceil(chunk * ring / unit) * unit

    return RingHiding(length(0), length(facts.sum_bytes))
