"""Measure the bytes that a rank keeps of its microbatches: a diagnosis, on a separate step.

A step runs under a mode of torch's dispatcher that sees every tensor the step makes. Whenever a forward, or a backward
that leaves weight work behind, has run, those that are alive are what the rank holds: activations that backward will
read, inputs and outputs of stages, messages in transit, and what W needs. Parameters and their gradients do
not count, nor do the temporaries inside of an op. This costs several times the step, so other steps
run without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from instrument.backward_split.split import WeightWork
from instrument.data.text import Batch
from instrument.expert.pieces import Tape
from instrument.expert_counts import ExpertCounts
from instrument.pipeline.microbatch_buffers import ForwardState, MicrobatchBuffers, Tensors
from instrument.pipeline.runtime import PipelineRuntime
from pptrace.schedule.actions import Cell
from pptrace.schedule.outstanding import Outstanding, outstanding


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory of one rank in one step: the plan's peak counts, and the measured ones.

    ``peak_bytes`` is the most that was kept between two ops. ``allocator_bytes`` is, on a GPU, by how much the
    allocator's peak went over what was there before: with the temporaries inside of ops and with the gradients of
    parameters. ``routes`` to experts are those of the step, as
    :meth:`~instrument.expert_counts.ExpertCounts.facts` has them.
    """

    planned: Outstanding
    in_flight: int
    deferred_weight_grads: int
    peak_bytes: int
    routes: Mapping[str, object] | None
    allocator_bytes: int | None = None

    @property
    def bytes_per_microbatch(self) -> float:
        """Bytes of one microbatch in one chunk, averaged over those in flight."""
        return self.peak_bytes / self.in_flight


class StorageWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracks the storages of all tensors that are made while it is active, without keeping them alive."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters = tuple(parameters)
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self._exempt = {_identity(parameter) for parameter in self._parameters}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            # A view of a parameter or of the batch is new here, its storage is not.
            if isinstance(tensor, Tensor) and _identity(tensor) not in self._exempt:
                storage = tensor.untyped_storage()
                weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._seen[_identity(tensor)] = (weak, storage.nbytes())
        return result

    def exempt(self, tensors: Iterable[Tensor]) -> None:
        """Exempt these tensors, which are not the step's, from all counts."""
        for tensor in tensors:
            self._exempt.add(_identity(tensor))
            self._seen.pop(_identity(tensor), None)

    def live_bytes(self) -> int:
        """Bytes of the tracked storages that are alive, without gradients of parameters."""
        # A weak reference keeps a storage's identity from being reused.
        dead = [key for key, (weak, _) in self._seen.items() if weak.expired()]  # type: ignore[no-untyped-call]
        for key in dead:
            del self._seen[key]
        gradients = {_identity(parameter.grad) for parameter in self._parameters if parameter.grad is not None}
        return sum(num_bytes for key, (_, num_bytes) in self._seen.items() if key not in gradients)


class MeasuredBuffers(MicrobatchBuffers):
    """Buffers that count the live bytes whenever more is stored, without ``counts``; ``peak_bytes`` is the maximum."""

    def __init__(self, watch: StorageWatch, counts: ExpertCounts) -> None:
        super().__init__()
        self._watch = watch
        self._counts = counts
        self.peak_bytes = 0

    def put_forward(self, cell: Cell, inputs: Tensors, outputs: Tensors, tape: Tape | None = None) -> None:
        super().put_forward(cell, inputs, outputs, tape)
        self._update_peak()

    def take_forward(self, cell: Cell) -> ForwardState:
        self._update_peak()  # the gradient that came for it is here, and its graph still is
        return super().take_forward(cell)

    def defer_weight_grads(self, cell: Cell, work: Sequence[WeightWork]) -> None:
        super().defer_weight_grads(cell, work)
        self._update_peak()

    def _update_peak(self) -> None:
        self._watch.exempt(self._counts.tensors())
        self.peak_bytes = max(self.peak_bytes, self._watch.live_bytes())


def measure(runtime: PipelineRuntime, batch: Batch, step: int) -> MemoryUse:
    """Run a step and measure what this rank kept; every rank of the mesh calls it. The gradients are discarded.

    Args:
        runtime: of this rank.
        batch: as for :meth:`~instrument.pipeline.runtime.PipelineRuntime.run`.
        step: number of the step in the ranges, used by no other step.
    """
    parameters = tuple(runtime.program.parameters())
    watch = StorageWatch(parameters)
    watch.exempt(batch.tensors)
    is_gpu = batch.tokens.is_cuda
    before = _reset_allocator_peak() if is_gpu else 0
    with runtime.program.recorder.counting_routes() as routes:
        buffers = MeasuredBuffers(watch, routes)
        make_buffers, runtime.make_buffers = runtime.make_buffers, lambda: buffers
        try:
            with watch:
                result = runtime.run(batch, step)
        finally:
            runtime.make_buffers = make_buffers
    for parameter in parameters:
        parameter.grad = None
    return MemoryUse(
        outstanding(runtime.program.plan, runtime.program.pp_rank),
        result.peak_in_flight,
        result.peak_deferred_weight_grads,
        buffers.peak_bytes,
        routes.facts(),
        torch.cuda.max_memory_allocated() - before if is_gpu else None,
    )


def _reset_allocator_peak() -> int:
    """Reset the peak of the current GPU's allocator; return the bytes allocated now."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _identity(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]
