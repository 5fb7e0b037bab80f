"""The MLP that all tokens go through besides their experts, and what is made of both."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from instrument.backward_split import split
from instrument.sequence.partial import HasPartial
from instrument.tensor.linear import ColumnParallelLinear, RowParallelLinear
from instrument.tensor.region import Region
from pptrace.sizes.expert_options import Shared


class Coefficient(HasPartial, split.Linear):
    """The layer of a gate (one output) or of both coefficients (two), whole on every rank of tp."""

    def __init__(self, hidden: int, how: Shared, region: Region, dtype: torch.dtype | None = None) -> None:
        is_residual = how is Shared.RESIDUAL
        super().__init__(hidden, 2 if is_residual else 1, bias=is_residual, dtype=dtype)
        self.is_partial = region.shards_sequence


class SharedMlp(nn.Module):
    """An MLP cut over tp, and how its output is joined with the experts' (:class:`Shared`).

    It runs in two parts, of which one can be computed while tokens travel to their experts, the other while they travel back.
    """

    def __init__(
        self, hidden: int, width: int, how: Shared, region: Region, bias: bool, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        self.how = how
        self.inner = ColumnParallelLinear(hidden, width, region, bias, dtype)
        self.outer = RowParallelLinear(width, hidden, region, bias, dtype)
        self.coefficient = None if how is Shared.ADDED else Coefficient(hidden, how, region, dtype)

    def begin(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """(…, hidden) tokens → what :meth:`end` takes, and the coefficients of :meth:`join`."""
        coefficients = None
        if self.coefficient is not None:
            logits = self.coefficient(x)
            coefficients = logits.softmax(-1) if self.how is Shared.RESIDUAL else logits.sigmoid()
        return F.gelu(self.inner(x)), coefficients

    def end(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.outer(hidden)
        return output

    def join(self, routed: Tensor, output: Tensor, coefficients: Tensor | None) -> Tensor:
        """Join the outputs of the experts and of this MLP."""
        if coefficients is None:
            return routed + output
        if self.how is Shared.GATED:
            return routed + coefficients * output
        return coefficients[..., :1] * routed + coefficients[..., 1:] * output

    def take(self, whole: SharedMlp) -> None:
        """Copy this rank's part of the whole MLP's values."""
        for ours, theirs in ((self.inner, whole.inner), (self.outer, whole.outer)):
            ours.take(theirs.weight, theirs.bias)
        if self.coefficient is not None and whole.coefficient is not None:
            self.coefficient.load_state_dict(whole.coefficient.state_dict())
