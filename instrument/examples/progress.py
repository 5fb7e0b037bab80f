"""Printed progress: a line per step with loss, time, tokens per second and MFU."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from instrument.models.flops import StepFlops
from instrument.models.peaks import Peak


@dataclass(frozen=True, slots=True)
class Work:
    """Work of a step: tokens and FLOPs of all ``world`` ranks; ``peak`` is one rank's."""

    tokens: int
    flops: StepFlops
    world: int
    peak: Peak | None

    def heading(self) -> str:
        """One line: the divisor of MFU and its source."""
        if self.peak is None:
            return "the peak of this device is unknown, so there is no MFU; give it with --peak-tflops"
        return f"MFU: of {_per_second(self.peak.flops_per_s)} per rank ({self.peak.source})"

    def rates(self, seconds: float) -> str:
        """Tokens and model FLOPs per second, and both utilisations (arXiv 2205.05198, appendix A): FLOPs / (time ×
        ranks × peak), of the model's FLOPs (MFU) and, where recompute adds to them, of the hardware's (HFU)."""
        words = [f"{self.tokens / seconds:10,.0f} tokens/s", _per_second(self.flops.model / seconds)]
        words.append(f"MFU {self._utilisation(self.flops.model, seconds)}")
        if self.flops.hardware != self.flops.model:
            words.append(f"HFU {self._utilisation(self.flops.hardware, seconds)}")
        return "   ".join(words)

    def _utilisation(self, flops: int, seconds: float) -> str:
        if self.peak is None:
            return "–"
        return f"{100 * flops / (seconds * self.world * self.peak.flops_per_s):.1f} %"


class Progress:
    """Prints one line per step, for whose work it asks.

    On a GPU a step's line is printed during the next step, so that reading the loss waits for no pending work, and the step's
    time is the device's.
    """

    def __init__(self, work_of: Callable[[int], Work]) -> None:
        self._work_of = work_of
        self._started = 0.0
        self._began: torch.cuda.Event | None = None
        self._waiting: tuple[int, Tensor, torch.cuda.Event, torch.cuda.Event] | None = None

    def begin(self, device: torch.device) -> None:
        """Start the clock of the next step."""
        self._started = time.perf_counter()
        self._began = _record() if device.type == "cuda" else None

    def add(self, step: int, loss: Tensor) -> None:
        """End the step that began last, and print it or the one before."""
        if self._began is None:
            self._print(step, float(loss), time.perf_counter() - self._started)
            return
        self.finish()
        host = torch.empty_like(loss, device="cpu", pin_memory=True).copy_(loss, non_blocking=True)
        self._waiting = (step, host, self._began, _record())

    def finish(self) -> None:
        """Print the pending step, if there is one."""
        if self._waiting is None:
            return
        step, loss, began, ended = self._waiting
        self._waiting = None
        ended.synchronize()
        self._print(step, float(loss), began.elapsed_time(ended) / 1e3)

    def _print(self, step: int, loss: float, seconds: float) -> None:
        print(
            f"step {step:4d}   loss {loss:7.4f}   {seconds * 1e3:8.1f} ms   {self._work_of(step).rates(seconds)}",
            flush=True,
        )


def _record() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _per_second(flops: float) -> str:
    return f"{flops / 1e12:,.1f} TFLOP/s" if flops >= 1e11 else f"{flops / 1e9:,.2f} GFLOP/s"
