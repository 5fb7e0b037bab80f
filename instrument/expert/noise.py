"""Random numbers of the router, which belong to tokens: functions of (seed, step, layer, sequence, position).

A sequence is numbered within its step, through all microbatches and replicas, so that no mesh, microbatch size or order of the
microbatches changes a number, and a recomputed forward draws the same ones. They are hashes (SplitMix64) of those numbers,
computed for all tokens at once and equal to the bit on every device.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from instrument.seeds import mix


class Use(IntEnum):
    """Uses of random numbers; each has its own."""

    JITTER = 1
    SECOND_CHOICE = 2
    KEEP_SECOND = 3
    ROUTES = 4


@dataclass(frozen=True, slots=True)
class ForwardKey:
    """A forward of a layer: the seed of the run, the layer of the whole model, the step, and the microbatch of this pipeline."""

    seed: int = 0
    layer: int = 0
    step: int = 0
    microbatch: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class TokenIds:
    """Names of the tokens that a rank routes in a forward.

    Args:
        key: of the forward.
        sequences: (b,) int64, numbers of the sequences in their step.
        positions: (n,) int64, of this rank's tokens of each sequence.
    """

    key: ForwardKey
    sequences: Tensor
    positions: Tensor

    def uniform(self, use: Use, num: int) -> Tensor:
        """(b, n, num) float64 numbers of [0, 1)."""
        start = _signed(mix(self.key.seed, self.key.layer, self.key.step, use))
        of_sequence = _hash(_hash(start + _spread(self.sequences + 1)))
        of_token = _hash(of_sequence.unsqueeze(1) + _spread(self.positions + 1))
        index = torch.arange(1, num + 1, device=of_token.device)
        return _logical_shift(_hash(of_token.unsqueeze(2) + _spread(index)), 11).to(torch.float64) * 2.0**-53

    def gumbel(self, use: Use, num: int) -> Tensor:
        """(b, n, num) float64 numbers of Gumbel's distribution: added to logits, the largest is drawn by their softmax."""
        tiny = 2.0**-54  # so that no logarithm is of 0
        return -torch.log(-torch.log(self.uniform(use, num) + tiny))


def _signed(number: int) -> int:
    """A number of 64 bits as torch's int64 has it."""
    number &= 2**64 - 1
    return number - 2**64 if number >= 2**63 else number


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST, _SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def _spread(numbers: Tensor) -> Tensor:
    return numbers * _GOLDEN  # int64 wraps around


def _hash(state: Tensor) -> Tensor:
    """SplitMix64's finaliser."""
    state = (state ^ _logical_shift(state, 30)) * _FIRST
    state = (state ^ _logical_shift(state, 27)) * _SECOND
    return state ^ _logical_shift(state, 31)


def _logical_shift(state: Tensor, bits: int) -> Tensor:
    """Shift right, zeros coming in: int64 shifts copy the sign."""
    mask: int = 2 ** (64 - bits) - 1
    return (state >> bits) & mask
