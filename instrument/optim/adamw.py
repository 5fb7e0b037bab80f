"""AdamW whose last step can be taken back."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pptrace.errors import PptraceError, UsageError

WEIGHT_DECAY = 1e-2  # as torch's


class AdamW:
    """``torch.optim.AdamW``, to the bit of its foreach form, with an inverse of the last step.

    The inverse needs nothing but the gradients, which therefore have to stay in ``.grad`` until the step is
    validated. It is exact up to rounding in the parameters' dtype, so low-precision parameters do not come back. Source:
    zero bubble, arXiv 2401.10241, appendix C.

    Args:
        parameters: each once.
        lr: may be changed between steps.
        betas: decay of the moments, between 0 and 1: the inverse divides by them.
        eps: added to the denominator.
        weight_decay: decoupled; lr · weight_decay is below 1, since the inverse divides by the difference.

    Raises:
        UsageError: a setting for which there is no inverse.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = WEIGHT_DECAY,
    ) -> None:
        if not all(0 < beta < 1 for beta in betas):
            raise UsageError(f"AdamW's betas are {betas}; a step can be taken back if both lie between 0 and 1")
        self.parameters = tuple(parameters)
        self.lr = lr
        self.num_steps = 0
        self._betas = betas
        self._eps = eps
        self._weight_decay = weight_decay
        self._first_moments = [torch.zeros_like(parameter) for parameter in self.parameters]
        self._second_moments = [torch.zeros_like(parameter) for parameter in self.parameters]
        self._last_lr: float | None = None

    @property
    def moments(self) -> list[Tensor]:
        """The first and the second moments of all parameters."""
        return [*self._first_moments, *self._second_moments]

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters from the gradients.

        Raises:
            UsageError: the learning rate leaves nothing of the parameters, so that no inverse exists.
        """
        if not self.parameters:
            return
        gradients = gradients_of(self.parameters)
        decay_factor = self._decay_factor(self.lr)
        self._last_lr = self.lr
        self.num_steps += 1
        beta1, beta2 = self._betas
        torch._foreach_mul_(self.parameters, decay_factor)
        torch._foreach_lerp_(self._first_moments, gradients, 1 - beta1)
        torch._foreach_mul_(self._second_moments, beta2)
        torch._foreach_addcmul_(self._second_moments, gradients, gradients, 1 - beta2)
        torch._foreach_addcdiv_(self.parameters, self._first_moments, self._denominators(), -self._step_size(self.lr))

    @torch.no_grad()
    def roll_back(self) -> None:
        """Undo the last step: the same operations inverted, in reverse order. ``.grad`` is as it was in that step.

        Raises:
            PptraceError: there is no step, or the last one has been undone already.
        """
        if not self.parameters:
            return
        if self._last_lr is None:
            raise PptraceError("AdamW has no step to take back; only the last one can be, and only once")
        gradients = gradients_of(self.parameters)
        beta1, beta2 = self._betas
        torch._foreach_addcdiv_(
            self.parameters, self._first_moments, self._denominators(), self._step_size(self._last_lr)
        )
        torch._foreach_div_(self.parameters, self._decay_factor(self._last_lr))
        self._last_lr = None
        self.num_steps -= 1
        if self.num_steps == 0:  # then they were 0, and rounding would leave something else
            torch._foreach_zero_(self._first_moments)
            torch._foreach_zero_(self._second_moments)
            return
        torch._foreach_add_(self._first_moments, gradients, alpha=beta1 - 1)
        torch._foreach_div_(self._first_moments, beta1)
        torch._foreach_addcmul_(self._second_moments, gradients, gradients, beta2 - 1)
        torch._foreach_div_(self._second_moments, beta2)
        torch._foreach_clamp_min_(self._second_moments, 0.0)  # rounding may leave less than nothing, which has no root

    @torch.no_grad()
    def scale_gradients(self, factor: float) -> None:
        """Multiply every gradient in place, as clipping does."""
        if self.parameters:
            torch._foreach_mul_(gradients_of(self.parameters), factor)

    def zero_grad(self) -> None:
        """Free the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def _decay_factor(self, lr: float) -> float:
        """The factor by which weight decay scales a parameter."""
        decay_factor = 1 - lr * self._weight_decay
        if decay_factor <= 0:
            raise UsageError(
                f"lr {lr} with weight decay {self._weight_decay} leaves nothing of a parameter to take back"
            )
        return decay_factor

    def _step_size(self, lr: float) -> float:
        beta1, _ = self._betas
        return lr / (1 - beta1**self.num_steps)

    def _denominators(self) -> tuple[Tensor, ...]:
        _, beta2 = self._betas
        roots = torch._foreach_sqrt(self._second_moments)
        torch._foreach_div_(roots, (1 - beta2**self.num_steps) ** 0.5)
        torch._foreach_add_(roots, self._eps)
        return tuple(roots)


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """The gradients, in order.

    Raises:
        PptraceError: a parameter has none.
    """
    gradients = []
    for parameter in parameters:
        if parameter.grad is None:
            raise PptraceError(
                f"a parameter of shape {tuple(parameter.shape)} has no gradient; an optimizer step needs those of all "
                "parameters, and to take it back they have to be kept"
            )
        gradients.append(parameter.grad)
    return gradients
