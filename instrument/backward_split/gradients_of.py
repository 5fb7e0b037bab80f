"""The gradient of a parameter: its dtype, and this rank's part of it."""

from __future__ import annotations

import torch
from torch import Tensor

from pptrace.errors import PptraceError


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype in which ``.grad`` accumulates: the parameter's, unless its ``grad_dtype`` is another."""
    return parameter.dtype if parameter.grad_dtype is None else parameter.grad_dtype


def gradient_of(parameter: Tensor) -> Tensor:
    """The gradient; of a sharded one this rank's part.

    Raises:
        PptraceError: there is none.
    """
    if parameter.grad is None:
        raise PptraceError(
            f"a parameter of shape {tuple(parameter.shape)} has no gradient after the step; every parameter of a stage "
            "must take part in its forward"
        )
    return local(parameter.grad)


def add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Add to what ``.grad`` holds."""
    if parameter.grad is None:
        parameter.grad = gradient.to(gradient_dtype(parameter))
    else:
        parameter.grad += gradient


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or a tensor itself."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part
