"""Clipping by the global gradient norm, with and without a barrier between steps.

The norm is over the gradients of all stages, so that each rank's update depends on all ranks. Either all wait for each
other before they update (:class:`Synchronous`), or each updates with a partial norm and rolls back where that was
wrong (:class:`PostValidation`). Both give the parameters that ``torch.nn.utils.clip_grad_norm_`` and AdamW give in one
process, and skip a step whose gradients are not finite.

Source: zero bubble, arXiv 2401.10241, section 4 and appendix C.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor

from instrument.optim.adamw import AdamW
from instrument.optim.control_channel import ControlChannel
from instrument.recorder import Recorder
from instrument.route import copy_to_host
from pptrace.errors import UsageError
from pptrace.marks import SpanKind

Counted = Callable[[], Sequence[Tensor]]


class OptimizerSync(StrEnum):
    """The way in which the ranks of a pipeline agree on the gradient norm."""

    SYNCHRONOUS = "synchronous"  # all-reduced before the update
    POST_VALIDATION = "post-validation"  # reduced along the pipeline, and validated during the next step's warmup


class ClippedOptimizer(Protocol):
    """An optimizer whose steps depend on all ranks of the pipeline. Every rank calls every method.

    ``num_rollbacks`` counts updates of this rank that were rolled back.
    """

    num_rollbacks: int

    def optimize(self, step: int) -> None:
        """Update from the gradients in place, after the backward of a step."""
        ...

    def validate(self, step: int) -> bool:
        """Validate the update of the step before, if that is pending, and free its gradients.

        Returns:
            Whether forwards since then ran with wrong weights, on this rank or on another.
        """
        ...

    def finish(self, step: int) -> None:
        """Validate the last update, before the parameters are read elsewhere."""
        ...


class _Clipping:
    """State shared by both ways to agree on the norm.

    Args:
        optimizer: of this rank's parameters.
        counted: gives the gradients that this rank adds to the norm, which counts every parameter of the model once
            (:meth:`instrument.optim.gradient_sync.GradientSync.counted`).
        max_norm: gradients are scaled down to it.
    """

    def __init__(
        self,
        optimizer: AdamW,
        counted: Counted,
        max_norm: float,
        channel: ControlChannel,
        recorder: Recorder,
    ) -> None:
        require_norm(max_norm)
        self.num_rollbacks = 0
        self._optimizer = optimizer
        self._counted = counted
        self._max_norm = max_norm
        self._channel = channel
        self._recorder = recorder


class Synchronous(_Clipping):
    """Waits for the norm of all ranks before the update. Arguments as :class:`_Clipping` has them."""

    def optimize(self, step: int) -> None:
        with self._recorder.span(SpanKind.OPTIMIZER, step):
            total = self._channel.sum(sum_of_squares(self._counted()), step)
            _update(self._optimizer, clip_factor(total, self._max_norm))
        self._optimizer.zero_grad()

    def validate(self, step: int) -> bool:  # noqa: ARG002
        return False

    def finish(self, step: int) -> None:
        """Do nothing: no update is pending."""


class PostValidation(_Clipping):
    """Updates with the norm of the ranks up to this one; the norm of all comes back during the next step's warmup.

    Rank r receives the sum of squares of ranks 0 … r−1, adds that of its stages and sends the sum on. Where the sum so far
    is neither too large nor non-finite, it updates as if it were the whole; otherwise it waits. The last rank's sum is the whole
    one, which travels back p−1 → 0: each rank receives it in :meth:`validate`, and where its update was wrong rolls it
    back and repeats it with the scaled gradients, or skips it.

    Gradients stay in place until validated. Arguments as :class:`_Clipping` has them.
    """

    def __init__(
        self, optimizer: AdamW, counted: Counted, max_norm: float, channel: ControlChannel, recorder: Recorder
    ) -> None:
        super().__init__(optimizer, counted, max_norm, channel, recorder)
        self._is_first = channel.pp_rank == 0
        self._is_last = channel.pp_rank == channel.size - 1
        self._partial: float | None = None  # the sum of squares of the pending update

    def optimize(self, step: int) -> None:
        channel = self._channel
        with self._recorder.span(SpanKind.OPTIMIZER, step):
            stage_sum = channel.sum_of_stage(sum_of_squares(self._counted()), step)
            self._partial = stage_sum if self._is_first else channel.receive(channel.pp_rank - 1, step) + stage_sum
            # The rank before has validated its last update, so it has received what this rank sent back.
            channel.complete_sends(step)
            if not self._is_last:
                channel.post(self._partial, channel.pp_rank + 1, step)
            factor = clip_factor(self._partial, self._max_norm)
            if self._is_last or factor == 1.0:
                _update(self._optimizer, factor)

    def validate(self, step: int) -> bool:
        if self._partial is None:
            return False
        partial, channel = self._partial, self._channel
        total = partial if self._is_last else channel.receive(channel.pp_rank + 1, step)
        channel.complete_sends(step)
        if not self._is_first:
            channel.post(total, channel.pp_rank - 1, step)
        factor = clip_factor(total, self._max_norm)
        if factor != 1.0 and not self._is_last:
            self._amend(factor, clip_factor(partial, self._max_norm) == 1.0, step)
        self._partial = None
        self._optimizer.zero_grad()
        return factor != 1.0

    def finish(self, step: int) -> None:
        self.validate(step)
        self._channel.complete_sends(step)

    def _amend(self, factor: float | None, has_stepped: bool, step: int) -> None:
        with self._recorder.span(SpanKind.OPTIMIZER, step):
            if has_stepped:
                self._optimizer.roll_back()
                self.num_rollbacks += 1
            _update(self._optimizer, factor)


def make_clipped_optimizer(
    sync: OptimizerSync,
    optimizer: AdamW,
    counted: Counted,
    max_norm: float,
    channel: ControlChannel,
    recorder: Recorder,
) -> ClippedOptimizer:
    """Make a clipped optimizer; arguments as :class:`_Clipping` has them."""
    kind = Synchronous if sync is OptimizerSync.SYNCHRONOUS else PostValidation
    return kind(optimizer, counted, max_norm, channel, recorder)


def require_norm(max_norm: float) -> None:
    """Refuse a norm that nothing can be clipped to.

    Raises:
        UsageError: it is not a positive number.
    """
    if not 0 < max_norm < math.inf:
        raise UsageError(f"gradients cannot be clipped to a norm of {max_norm}; expected a positive number")


def clip_factor(sum_of_squares: float, max_norm: float) -> float | None:
    """The factor that scales gradients, at most 1; None where a gradient is not finite and the step is skipped.

    Source: ``torch.nn.utils.clip_grad_norm_``, which adds 1e-6 to the norm. A gradient that is not finite makes every
    sum that it is part of non-finite, so that the sum of squares carries the overflow with it.
    """
    if not math.isfinite(sum_of_squares):
        return None
    return min(1.0, max_norm / (math.sqrt(sum_of_squares) + 1e-6))


@torch.no_grad()
def sum_of_squares(gradients: Sequence[Tensor]) -> float:
    """Sum of squares of all gradients, in float64: finite wherever gradients of 32 bits or fewer are.

    On a device the host waits for this number's copy, and so for all work that the stream was given before: a step that clips
    ends with the launches drained, on every rank. Without clipping nothing waits.
    """
    if not gradients:
        return 0.0
    norms = torch._foreach_norm(list(gradients), 2, dtype=torch.float64)
    total = torch.stack(norms).square().sum()
    if not total.is_cuda:
        return total.item()
    return copy_to_host([total])[0].item()


def _update(optimizer: AdamW, factor: float | None) -> None:
    """Run a step with scaled gradients, or none if the factor is None."""
    if factor is None:
        return
    if factor < 1.0:
        optimizer.scale_gradients(factor)
    optimizer.step()
