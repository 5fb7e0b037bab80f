"""Counting parameters once over tp, where some are sharded and others are whole on every rank.

What is summed over the whole model, such as the norm of the gradient, must count every entry once: of a shared-out
parameter each rank counts its part, of any other the first rank alone counts it. Source: Megatron-LM
``param_is_not_tensor_parallel_duplicate``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from instrument.backward_split.gradients_of import gradient_of


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """A parameter whose first ``rows`` rows a rank counts; all of them where it is None."""

    parameter: Tensor
    rows: int | None = None

    def gradient(self) -> Tensor:
        """The gradient of the rows that the rank counts."""
        return gradient_of(self.parameter)[: self.rows]


class HasShares(ABC):
    """A module some of whose parameters are shared out over tp."""

    @abstractmethod
    def shares(self) -> Iterable[Share]:
        """Shares of this module's direct parameters, not of its children's."""


def counted_shares(stages: Sequence[nn.Module], tp_rank: int) -> list[Share]:
    """The shares that a rank counts of its stages' parameters, each parameter once."""
    modules = [part for stage in stages for part in stage.modules()]
    shared = {id(s.parameter): s for part in modules if isinstance(part, HasShares) for s in part.shares()}
    whole = [Share(parameter) for parameter in nn.ModuleList(stages).parameters() if id(parameter) not in shared]
    return [*shared.values(), *(whole if tp_rank == 0 else ())]
