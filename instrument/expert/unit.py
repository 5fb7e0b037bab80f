"""Whole sequences, of which the ranks of tp and cp hold parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from instrument.collectives import AxisGroup
from instrument.context.shard import ContextShape, positions


@dataclass(frozen=True, slots=True, eq=False)
class SequenceParts:
    """The parts of sequences along dimension 1: cut over cp as attention needs it, and each part into pieces over tp."""

    tp: AxisGroup
    cp: AxisGroup
    context: ContextShape

    @property
    def size(self) -> int:
        """Ranks that share a sequence."""
        return self.tp.size * self.cp.size

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in place."""
        return self.cp.all_reduce(self.tp.all_reduce(x))

    def positions(self, held: int, device: torch.device) -> Tensor:
        """Positions (held,) in their sequences of this rank's ``held`` tokens of each."""
        return self._of_all(held, device)[self._own(held)]

    def whole(self, part: Tensor) -> Tensor:
        """(sequences, tokens of this rank, …) → the same of whole sequences, in their order."""
        if self.size == 1:
            return part
        gathered = self.cp.all_gather(self.tp.all_gather(part, 1), 1)
        return gathered[:, torch.argsort(self._of_all(part.shape[1], part.device))]

    def part(self, whole: Tensor) -> Tensor:
        """The inverse of :meth:`whole`."""
        return whole[:, self.positions(whole.shape[1] // self.size, whole.device)]

    def _own(self, held: int) -> slice:
        first = (self.cp.rank * self.tp.size + self.tp.rank) * held
        return slice(first, first + held)

    def _of_all(self, held: int, device: torch.device) -> Tensor:
        """Positions of the tokens of all ranks, one rank behind the other."""
        if self.cp.size == 1:
            return torch.arange(held * self.size, device=device)
        ranks = range(self.cp.size)
        return torch.cat([positions(self.context, held * self.size, rank, device) for rank in ranks])
