"""Messages that are no activations as they are: a part for each rank of tp, or numbers of other bits.

Both are in the graph of the stage that sends and of the one that receives, so that gradients travel back in the same way:
inside ops, whose time has the casts, and in which the calls that gather parts are marked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from instrument.collectives import AxisGroup
from instrument.linear_map import LinearMap
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
        return tuple(_cut(message, self.parts) for message in messages)

    def received(self, stage: int, messages: Tensors) -> Tensors:
        """The outputs of a stage from its messages."""
        if self.parts is not None:
            each = zip(messages, self.shapes(stage), strict=True)
            messages = tuple(_joined(part, self.parts).view(shape) for part, shape in each)
        return tuple(message.to(self.dtype) for message in messages)


class _Part(LinearMap):
    """This rank's part in forward, all-gather of the gradient's parts in backward."""


class _Gathered(LinearMap):
    """All-gather of the parts in forward, this rank's part of the gradient in backward: all ranks of tp have the same."""


def _cut(message: Tensor, group: AxisGroup) -> Tensor:
    return _Part.of(message, partial(_own, group), lambda gradient: group.all_gather(gradient).view(message.shape))


def _joined(part: Tensor, group: AxisGroup) -> Tensor:
    return _Gathered.of(part, group.all_gather, partial(_own, group))


def _own(group: AxisGroup, tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).chunk(group.size)[group.rank].clone()
