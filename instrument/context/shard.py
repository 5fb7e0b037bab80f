"""Sharding of sequences over context ranks, and the inverse.

A context-parallel group of cp = ring · ulysses ranks: Ulysses inside, the ring outside, so that the ranks of an
all-to-all are neighbours (USP, arXiv 2405.07719, section 4.1). Context rank = ulysses rank + ulysses · ring rank.

The ring cuts the sequence first. Balanced: into 2 · ring chunks, of which ring rank i holds chunks i and
2 · ring − 1 − i, which makes the work of causal attention equal on all ranks (Megatron-LM
``get_batch_on_this_cp_rank``). Contiguous: into one run of positions for each ring rank. What a ring rank holds is then
cut into consecutive pieces, one for each of its Ulysses ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from pptrace.errors import UsageError
from pptrace.sizes.context import causal_scores


class Layout(StrEnum):
    """The layout of a sequence over the ring."""

    BALANCED = "balanced"  # two chunks for each ring rank, one from either end
    CONTIGUOUS = "contiguous"  # one chunk for each ring rank, in order


class KeyExchange(StrEnum):
    """The way in which keys and values reach the ranks of a ring; values as of Megatron-LM's ``--cp-comm-type``."""

    P2P = "p2p"  # they rotate
    ALL_GATHER = "all_gather"  # each rank gets all of them at once


@dataclass(frozen=True, slots=True)
class ContextShape:
    """Sizes of the two ways of context parallelism, the layout of the ring, and how keys travel in it.

    Raises:
        UsageError: a size below 1.
    """

    ring: int = 1
    ulysses: int = 1
    layout: Layout = Layout.BALANCED
    exchange: KeyExchange = KeyExchange.P2P

    def __post_init__(self) -> None:
        for name in ("ring", "ulysses"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; context parallelism needs at least 1 rank")

    @property
    def size(self) -> int:
        """Ranks of the whole context-parallel group."""
        return self.ring * self.ulysses

    @property
    def divisor(self) -> int:
        """The number that must divide a sequence's length: 2 · cp if the ring is balanced, else cp."""
        return self.size * (2 if self.ring > 1 and self.layout is Layout.BALANCED else 1)

    def ring_rank(self, rank: int) -> int:
        """The index of a context rank in its ring."""
        return rank // self.ulysses

    def ring_groups(self) -> list[list[int]]:
        """Context ranks of every ring, in the order of the ring."""
        return [list(range(first, self.size, self.ulysses)) for first in range(self.ulysses)]

    def ulysses_groups(self) -> list[list[int]]:
        """Context ranks of every Ulysses group, in the order of the pieces that they hold."""
        return [list(range(first, first + self.ulysses)) for first in range(0, self.size, self.ulysses)]

    def check_sequence(self, sequence: int) -> None:
        """Raise UsageError where a sequence cannot be cut into equal shares."""
        if sequence < 1 or sequence % self.divisor:
            rule = "2·cp" if self.divisor > self.size else "cp"
            raise UsageError(
                f"sequence length {sequence} is not divisible by {rule} = {self.divisor} (cp={self.size}, "
                f"{self.layout}); choose a multiple of {self.divisor}"
            )

    def spans(self, sequence: int, rank: int) -> tuple[range, ...]:
        """The runs of positions that a context rank holds, in the order in which it holds them.

        Raises:
            UsageError: the sequence cannot be cut into equal shares.
        """
        self.check_sequence(sequence)
        share = sequence // self.size
        first = rank % self.ulysses * share
        pieces: list[range] = []
        for span in self._ring_spans(sequence, self.ring_rank(rank)):
            piece = span[max(first, 0) : max(first + share, 0)]
            first -= len(span)
            if piece:
                pieces.append(piece)
        return tuple(pieces)

    def _ring_spans(self, sequence: int, ring_rank: int) -> tuple[range, ...]:
        if self.ring == 1 or self.layout is Layout.CONTIGUOUS:
            share = sequence // self.ring
            return (range(ring_rank * share, (ring_rank + 1) * share),)
        chunk = sequence // (2 * self.ring)
        ends = (ring_rank, 2 * self.ring - 1 - ring_rank)
        return tuple(range(index * chunk, (index + 1) * chunk) for index in ends)


def imbalance_line(sequence: int, shape: ContextShape) -> str:
    """Say how many causal scores each ring rank computes under the contiguous layout."""
    contiguous, balanced = (causal_scores(sequence, shape.ring, balanced=balanced) for balanced in (False, True))
    each = " / ".join(f"{scores:,}" for scores in contiguous)
    return (
        f"contiguous: ring ranks compute {each} scores of a head and sequence; balanced they would compute {balanced[0]:,} each, "
        f"{max(contiguous) / balanced[0]:.2f} times fewer than the last one"
    )


def positions(shape: ContextShape, sequence: int, rank: int, device: torch.device | None = None) -> Tensor:
    """Position ids of a context rank's shard: (sequence / cp,) int64."""
    return torch.cat([torch.arange(span.start, span.stop, device=device) for span in shape.spans(sequence, rank)])


def shard_sequence(whole: Tensor, shape: ContextShape, rank: int, dim: int = 1) -> Tensor:
    """A context rank's shard of ``whole`` (tokens, targets, position ids, activations), whose sequence is ``dim``."""
    spans = shape.spans(whole.shape[dim], rank)
    return torch.cat([whole.narrow(dim, span.start, len(span)) for span in spans], dim)
