"""What a rank keeps of its microbatches, in bytes: a diagnosis, on a step of its own.

A step runs under a mode of torch's dispatcher that sees every tensor the step makes. Whenever a forward, or a backward
that leaves weight work behind, has run, those that are alive are what the rank holds: activations that backward will
read, inputs and outputs of stages, messages on their way, and what W has been left. Parameters and their gradients do
not count, nor do the temporaries inside of an op. This costs several times the step, so nothing of it is in the way of
a step that is not measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from instrument.backward_split.split import WeightWork
from instrument.data.text import Batch
from instrument.pipeline.ledger import Flight, Ledger
from instrument.pipeline.outstanding import Outstanding, outstanding
from instrument.pipeline.p2p import Cell
from instrument.pipeline.runtime import PipelineRuntime


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """One rank's step: what the plan says it holds at most, and what it held.

    ``peak_bytes`` is the most that was kept between two ops. ``allocator_bytes`` is, on a GPU, by how much the
    allocator's peak went over what was there before: with the temporaries inside of ops and with the gradients of
    parameters.
    """

    planned: Outstanding
    in_flight: int
    put_aside: int
    peak_bytes: int
    allocator_bytes: int | None = None

    @property
    def bytes_per_microbatch(self) -> float:
        """Of one chunk, on the average of those in flight."""
        return self.peak_bytes / self.in_flight


class StorageWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Knows the storages of all tensors that are made while it is on; holds none of them."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters = tuple(parameters)
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self._known = {_identity(parameter) for parameter in self._parameters}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in tree_iter(result):
            # A view of a parameter or of the batch is made here, its storage is not.
            if isinstance(made, Tensor) and _identity(made) not in self._known:
                storage = made.untyped_storage()
                weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._seen[_identity(made)] = (weak, storage.nbytes())
        return result

    def exempt(self, tensors: Iterable[Tensor]) -> None:
        """Never count these, which are not the step's."""
        for tensor in tensors:
            self._known.add(_identity(tensor))
            self._seen.pop(_identity(tensor), None)

    def live_bytes(self) -> int:
        """Of what was made and is alive, gradients of parameters apart."""
        # A weak reference keeps a storage's identity from being given to another.
        dead = [key for key, (weak, _) in self._seen.items() if weak.expired()]  # type: ignore[no-untyped-call]
        for key in dead:
            del self._seen[key]
        gradients = {_identity(parameter.grad) for parameter in self._parameters if parameter.grad is not None}
        return sum(num_bytes for key, (_, num_bytes) in self._seen.items() if key not in gradients)


class MemoryLedger(Ledger):
    """A ledger that looks at the bytes kept whenever there is more to keep.

    ``peak_bytes`` is the most that it saw.
    """

    def __init__(self, watch: StorageWatch) -> None:
        super().__init__()
        self._watch = watch
        self.peak_bytes = 0

    def open(self, cell: Cell, read: Tensor | None, output: Tensor) -> None:
        super().open(cell, read, output)
        self._look()

    def close(self, cell: Cell) -> Flight:
        self._look()  # the gradient that came for it is here, and its graph still is
        return super().close(cell)

    def put_aside(self, cell: Cell, work: Sequence[WeightWork]) -> None:
        super().put_aside(cell, work)
        self._look()

    def _look(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self._watch.live_bytes())


def measure(runtime: PipelineRuntime, batch: Batch, step: int) -> MemoryUse:
    """Run a step and say what this rank kept; every rank of the mesh calls it. The gradients are thrown away.

    Args:
        runtime: of this rank.
        batch: as for :meth:`~instrument.pipeline.runtime.PipelineRuntime.run`.
        step: a number for the ranges, that no other step has.
    """
    parameters = tuple(runtime.program.parameters())
    watch = StorageWatch(parameters)
    watch.exempt((batch.tokens, batch.targets))
    ledger = MemoryLedger(watch)
    is_gpu = batch.tokens.is_cuda
    before = _reset_allocator_peak() if is_gpu else 0
    make_ledger, runtime.make_ledger = runtime.make_ledger, lambda: ledger
    try:
        with watch:
            result = runtime.run(batch, step)
    finally:
        runtime.make_ledger = make_ledger
    for parameter in parameters:
        parameter.grad = None
    return MemoryUse(
        outstanding(runtime.program.plan, runtime.program.pp_rank),
        result.peak_in_flight,
        result.peak_put_aside,
        ledger.peak_bytes,
        torch.cuda.max_memory_allocated() - before if is_gpu else None,
    )


def _reset_allocator_peak() -> int:
    """What is allocated now, on the current GPU."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _identity(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]
