"""The matrices of a rank's experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from instrument.backward_split.split import Splittable
from pptrace.errors import UsageError


class OfExperts(nn.Module):
    """A module whose direct parameters are those of this rank's experts: their gradients are summed over edp alone."""


@dataclass(frozen=True, slots=True)
class Held:
    """The part of a layer's experts that a rank has: of each one, the ``rank``-th of ``size`` equal parts of its inner width."""

    experts: range
    rank: int = 0
    size: int = 1

    def part(self, width: int) -> slice:
        """The part of a width that this rank has.

        Raises:
            UsageError: the ranks do not divide the width.
        """
        if width % self.size:
            raise UsageError(
                f"experts of width {width} do not divide among etp={self.size} ranks; choose a multiple of {self.size}"
            )
        length = width // self.size
        return slice(self.rank * length, (self.rank + 1) * length)


class ExpertLinear(Splittable, OfExperts):
    """One of the two matrices W_e of each expert, and its bias b_e.

    The weights of all experts are one parameter, so that an expert without rows has a gradient, of zeros, and ranks report the
    same parameters ready. Where ranks share each expert, the inner layer's outputs and the outer's inputs are cut; the
    outer bias, which all of them have, is added by the first, and all see the gradients that it is the sum of.

    Args:
        held: this rank's part.
        features_in: of a whole expert.
        features_out: of a whole expert.
        is_inner: whether this is the inner layer.
    """

    def __init__(
        self,
        held: Held,
        features_in: int,
        features_out: int,
        is_inner: bool,
        bias: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.held = held
        self._rows = held.part(features_out) if is_inner else slice(0, features_out)
        self._columns = slice(0, features_in) if is_inner else held.part(features_in)
        num, rows, columns = len(held.experts), *(part.stop - part.start for part in (self._rows, self._columns))
        self.weight = nn.Parameter(torch.empty(num, rows, columns, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(num, rows, dtype=dtype)) if bias else None
        self._whole = (features_out, features_in)
        self.adds_bias = is_inner or held.rank == 0
        self.has_copies = not is_inner and held.size > 1

    @property
    def experts(self) -> range:
        """Ids of this rank's experts in the layer."""
        return self.held.experts

    @torch.no_grad()
    def take(self, whole: ExpertLinear) -> None:
        """Copy this rank's part of a layer that has all experts."""
        held = slice(self.experts.start, self.experts.stop)
        self.weight.copy_(whole.weight[held, self._rows, self._columns])
        if self.bias is not None and whole.bias is not None:
            self.bias.copy_(whole.bias[held, self._rows])

    @torch.no_grad()
    def draw(self, index: int, std: float, generator: torch.Generator) -> None:
        """Draw the whole matrix of one of this rank's experts, and keep this rank's part; its bias is 0."""
        whole = torch.empty(self._whole, dtype=self.weight.dtype).normal_(std=std, generator=generator)
        self.weight[index] = whole[self._rows, self._columns]
        if self.bias is not None:
            self.bias[index].zero_()


def expert_parameters(stage: nn.Module) -> list[nn.Parameter]:
    """The parameters of the experts of a stage, in the order of its modules."""
    modules = [module for module in stage.modules() if isinstance(module, OfExperts)]
    return [parameter for module in modules for parameter in module.parameters(recurse=False)]


def copied_biases(stage: nn.Module) -> list[nn.Parameter]:
    """The parameters of a stage's experts that every rank of etp has, where there are several."""
    modules = [module for module in stage.modules() if isinstance(module, ExpertLinear) and module.has_copies]
    return [module.bias for module in modules if module.bias is not None]
