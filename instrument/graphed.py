"""A stage whose forward and backward are CUDA graphs, captured once and replayed for every microbatch.

A replay reads and writes the memory that was captured. So there is a pair of graphs for each microbatch that can be in flight on
the stage, a *slot*, taken by a forward and free again once its backward has run, or its graph of autograd is gone (a step that
is run anew). Slots share the parameters. Each has a pool of memory of its own, since backwards come in any order: one
microbatch's activations, its input, output and their gradients, and a gradient of every parameter, held from the capture on.

Gradients are passed on as copies: autograd takes over the first one that a parameter or an input gets, and the slot's next replay
would overwrite it (pytorch issue 181723). Outputs are not: the backward that frees the slot needs their gradient, which comes
from who has received them.

Sources: ``torch.cuda.make_graphed_callables``; Megatron-LM ``core/transformer/cuda_graphs.py``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pptrace.errors import ScheduleError
from pptrace.garbage import paused_gc


class GraphedStage(nn.Module):
    """A stage that replays its graphs wherever gradients are on; without, as in an evaluation, it computes as before.

    Args:
        stage: of one input and one output, on its device, with the parameters that it will keep: values may change, not memory.
        sample: an input of the shape, dtype and ``requires_grad`` that every input has; its values do not matter.
        num_slots: the most forwards whose backward has not run.

    Capturing waits for the device, and leaves gradients, random numbers and hooks of parameters as they are.
    """

    def __init__(self, stage: nn.Module, sample: Tensor, num_slots: int) -> None:
        super().__init__()
        self.stage = stage
        self._slots = [_Slot(stage, sample) for _ in range(num_slots)]

    def forward(self, x: Tensor) -> Tensor:
        """Compute the stage.

        Raises:
            ScheduleError: more microbatches are in flight than there are slots.
        """
        if not torch.is_grad_enabled():
            output: Tensor = self.stage(x)
            return output
        slot = next((slot for slot in self._slots if slot.is_free), None)
        if slot is None:
            raise ScheduleError(
                f"a forward begins while {len(self._slots)} wait for their backward, and the stage has as many captured graphs; "
                "capture one for each microbatch in flight"
            )
        return slot.run(x)


class _Slot:
    """One pair of graphs, and whose microbatch has them.

    Parameters are inputs of what is captured, as other tensors of the same memory, of which nothing is copied: hooks on them
    and their nodes of autograd are the training's own.
    """

    def __init__(self, stage: nn.Module, sample: Tensor) -> None:
        names, self._parameters = zip(*stage.named_parameters(), strict=True)

        def compute(x: Tensor, *values: Tensor) -> Tensor:
            output: Tensor = functional_call(stage, dict(zip(names, values, strict=True)), (x,))
            return output

        static = tuple(map(_in_same_memory, (sample.clone(), *self._parameters)))
        # A collection that finds graphs of a stage that is gone destroys them, which ends a capture: graphs of
        # make_graphed_callables are in cycles of references (pytorch issue 195397).
        with paused_gc(), warnings.catch_warnings():
            # The warm-up's stream, which joins the capture.
            warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream does not match")
            self._graphed: Callable[..., Tensor] = torch.cuda.make_graphed_callables(compute, static)  # type: ignore[assignment]
        self._node: ReferenceType[object] | None = None

    @property
    def is_free(self) -> bool:
        """Return whether no backward can come any more that reads what the last forward left."""
        return self._node is None or self._node() is None

    def run(self, x: Tensor) -> Tensor:
        output = self._graphed(x, *self._parameters)
        assert output.grad_fn is not None
        self._node = ref(output.grad_fn)
        output.grad_fn.register_hook(self._finish)
        return output

    def _finish(self, gradients: tuple[Tensor | None, ...], _: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Free the slot behind its backward, whose graph another thread may keep for a moment.

        Returns:
            The gradients of the input and of parameters, as copies unless they are added to one that is there.
        """
        self._node = None
        owners = (None, *self._parameters)
        return tuple(
            gradient if gradient is None or (owner is not None and owner.grad is not None) else gradient.clone()
            for owner, gradient in zip(owners, gradients, strict=True)
        )


def _in_same_memory(tensor: Tensor) -> Tensor:
    """A leaf of autograd with the same values."""
    return tensor.detach().requires_grad_(tensor.requires_grad)
