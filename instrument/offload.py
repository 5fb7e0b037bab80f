"""Activations that wait for their backward in the memory of the host.

What a stage's forward saves is copied there, to pinned memory from a GPU, and back when the backward reads it, by torch's hooks
of saved tensors: in the stream of the op, whose time has the copies, in ranges that name them. Parameters stay where they are;
what several operators save is copied for each. The loss and its logits are none of a stage's forward, and stay too.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from instrument.pipeline.microbatch_buffers import Tensors
from instrument.recorder import Recorder
from instrument.route import copy_to_device, host_buffer

TO_HOST, FROM_HOST = "activations to the host", "activations from the host"
"""The names of the ranges of copies, as parts of the model."""


class OffloadingStage(nn.Module):
    """A stage that computes as before and keeps what it saves on the host; on CPUs, where that is the same memory, as copies."""

    def __init__(self, stage: nn.Module, recorder: Recorder) -> None:
        super().__init__()
        self.stage = stage
        self._recorder = recorder

    def forward(self, *inputs: Tensor, **kwargs: object) -> Tensor | Tensors:
        stays = {parameter.untyped_storage().data_ptr() for parameter in self.stage.parameters()}

        def pack(saved: Tensor) -> tuple[Tensor, torch.device | None]:
            if saved.untyped_storage().data_ptr() in stays:
                return saved, None
            with self._recorder.part(TO_HOST):
                return host_buffer(saved.shape, saved).copy_(saved, non_blocking=True), saved.device

        def unpack(packed: tuple[Tensor, torch.device | None]) -> Tensor:
            copy, device = packed
            if device is None:
                return copy
            with self._recorder.part(FROM_HOST):
                return copy_to_device(copy, device)

        with saved_tensors_hooks(pack, unpack):
            output: Tensor | Tensors = self.stage(*inputs, **kwargs)
        return output
