"""Messages that are no activations as they are: a part for each rank of tp, or numbers of other bits.

Both are in the graph of the stage that sends and of the one that receives, so that gradients travel back in the same way:
inside ops, whose time has the casts, and in which the calls that gather parts are marked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from instrument.collectives import AxisGroup
from instrument.pipeline.microbatch_buffers import Tensors
from instrument.pipeline.p2p import Shape


@dataclass(frozen=True, slots=True, eq=False)
class Boundary:
    """Form of the messages of one run.

    Args:
        shapes: of the tensors that a stage of the plan passes on.
        dtype: of the model.
        sent_dtype: of messages.
        parts: the ranks of tp, each of which sends its part of what all of them have (Megatron-LM's former
            ``scatter_gather_tensors_in_pipeline``, arXiv 2104.04473, section 4.1); None: each sends all of it.
    """

    shapes: Callable[[int], Sequence[Shape]]
    dtype: torch.dtype
    sent_dtype: torch.dtype
    parts: AxisGroup | None = None

    def message_shapes(self, stage: int) -> Sequence[Shape]:
        """The shapes of the messages of a stage of the plan."""
        group, shapes = self.parts, self.shapes(stage)
        return shapes if group is None else [(torch.Size(shape).numel() // group.size,) for shape in shapes]

    def sent(self, outputs: Tensors) -> Tensors:
        """The messages of a stage's outputs."""
        messages = tuple(output.to(self.sent_dtype) for output in outputs)
        if self.parts is None:
            return messages
        return tuple(_Part.apply(message, self.parts) for message in messages)  # type: ignore[no-untyped-call]

    def received(self, stage: int, messages: Tensors) -> Tensors:
        """The outputs of a stage from its messages."""
        if self.parts is not None:
            each = zip(messages, self.shapes(stage), strict=True)
            messages = tuple(_Gathered.apply(part, self.parts).view(shape) for part, shape in each)  # type: ignore[no-untyped-call]
        return tuple(message.to(self.dtype) for message in messages)


class _Part(torch.autograd.Function):
    """This rank's part in forward, all-gather of the gradient's parts in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: AxisGroup) -> Tensor:
        ctx.group, ctx.shape = group, tensor.shape
        return tensor.reshape(-1).chunk(group.size)[group.rank].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_gather(gradient).view(ctx.shape), None


class _Gathered(torch.autograd.Function):
    """All-gather of the parts in forward, this rank's part of the gradient in backward: all ranks of tp have the same."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: AxisGroup) -> Tensor:
        ctx.group = group
        return group.all_gather(part)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.reshape(-1).chunk(ctx.group.size)[ctx.group.rank].clone(), None
