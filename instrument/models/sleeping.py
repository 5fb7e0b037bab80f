"""Stages whose forward and backward sleep for a given time, to compare measured runs with simulated ones."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from instrument.backward_split.split import Splittable
from instrument.linear_map import LinearMap
from instrument.recorder import Recorder
from instrument.sequence.dropout import MicrobatchKey


@dataclass(frozen=True, slots=True)
class _SleepWork:
    """The part of a sleeping backward that belongs to the weights."""

    device: torch.device
    seconds: float
    part: str

    def run(self) -> None:
        _spend(self.device, self.seconds, self.part)


class SleepingStage(Splittable, nn.Module):
    """A stage that computes as before and then sleeps: on the host for a CPU stage, in the stream for a GPU's.

    ``weight_s`` is the part of ``backward_s`` that W sleeps where the backward is split; None: half of it. ``part`` names the
    part of the model that would have taken the time. ``length`` is the length of the inputs (their second size) for which the
    times are, and others take a part of them; None: all sleep as long. Sequences that are packed of documents take the part of
    scores that these have of those of a whole sequence.
    """

    def __init__(
        self,
        stage: nn.Module,
        forward_s: float,
        backward_s: float,
        weight_s: float | None = None,
        part: str = "layers",
        length: int | None = None,
    ) -> None:
        super().__init__()
        self.stage = stage
        self.forward_s = forward_s
        self.backward_s = backward_s
        self.weight_s = backward_s / 2 if weight_s is None else weight_s
        self.part = part
        self.length = length

    def forward(self, x: Tensor, *others: Tensor, **kwargs: object) -> Tensor | tuple[Tensor, ...]:
        share, key = 1.0 if self.length is None else x.shape[1] / self.length, kwargs.get("microbatch_key")
        if isinstance(key, MicrobatchKey) and key.documents is not None:
            share *= sum(length**2 for length in key.documents) / sum(key.documents) ** 2
        output = self.stage(x, *others, **kwargs)
        first, *rest = (output,) if isinstance(output, Tensor) else output
        slept = _Sleep.of(first, partial(self._sleep_forward, share), partial(self._sleep_backward, share))
        return (slept, *rest) if rest else slept

    def _sleep_forward(self, share: float, x: Tensor) -> Tensor:
        _spend(x.device, share * self.forward_s, self.part)
        return x.clone()

    def _sleep_backward(self, share: float, gradient: Tensor) -> Tensor:
        seconds, device = self.backward_s, gradient.device
        if self.queue is not None and self.queue.collects:
            self.queue.put(_SleepWork(device, share * self.weight_s, self.part))
            seconds -= self.weight_s
        _spend(device, share * seconds, self.part)
        return gradient


class _Sleep(LinearMap):
    """Identity in both directions; sleeps in each."""


def _spend(device: torch.device, seconds: float, part: str) -> None:
    """Sleep within the range of a part of the model."""
    with _RECORDER.part(part):
        _sleep(device, seconds)


_RECORDER = Recorder()


def _sleep(device: torch.device, seconds: float) -> None:
    if device.type != "cuda":
        time.sleep(seconds)
        return
    kilohertz = torch.cuda.get_device_properties(device).clock_rate
    torch.cuda._sleep(int(seconds * kilohertz * 1000))  # type: ignore[no-untyped-call]
