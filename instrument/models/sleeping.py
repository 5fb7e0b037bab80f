"""Stages whose forward and backward take a known time, to compare measured runs with simulated ones."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn


class _Sleep(torch.autograd.Function):
    """Identity in both directions; sleeps in each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        _sleep(x, forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        _sleep(gradients[0], ctx.backward_s)
        return gradients[0], None, None


class SleepingStage(nn.Module):
    """A stage that computes as before and then sleeps: on the host for a CPU stage, in the stream for a GPU's."""

    def __init__(self, stage: nn.Module, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.stage = stage
        self.forward_s = forward_s
        self.backward_s = backward_s

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = _Sleep.apply(self.stage(x), self.forward_s, self.backward_s)  # type: ignore[no-untyped-call]
        return output


def _sleep(where: Tensor, seconds: float) -> None:
    if not where.is_cuda:
        time.sleep(seconds)
        return
    kilohertz = torch.cuda.get_device_properties(where.device).clock_rate
    torch.cuda._sleep(int(seconds * kilohertz * 1000))  # type: ignore[no-untyped-call]
