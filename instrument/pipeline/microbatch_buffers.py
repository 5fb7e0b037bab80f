"""Tensors and graphs of a rank's microbatches between two actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from instrument.backward_split.split import WeightWork
from instrument.expert.pieces import Tape
from pptrace.errors import ScheduleError
from pptrace.schedule.actions import Cell

T = TypeVar("T")
Tensors = tuple[Tensor, ...]
"""The tensors that a stage passes to the next one, or their gradients: one, or several of other shapes."""


@dataclass(frozen=True, slots=True, eq=False)
class ForwardState:
    """One microbatch of one stage, between its forward and its backward.

    ``edges`` are where backward enters the graph. They replace the outputs, whose data is not needed once it has
    been sent (Megatron-LM drops it with ``deallocate_output_tensor``); the graph stays. ``tape`` has the graphs of all
    pieces of the forward but the last.
    """

    inputs: Tensors
    edges: Sequence[GradientEdge]
    tape: Tape


class MicrobatchBuffers:
    """Inputs, outputs, graphs and gradients of one step's microbatches. Each is put once and taken once; taking releases it."""

    def __init__(self) -> None:
        self._inputs: dict[Cell, Tensors] = {}
        self._outputs: dict[Cell, Tensors] = {}
        self._forwards: dict[Cell, ForwardState] = {}
        self._output_gradients: dict[Cell, Tensors] = {}
        self._input_gradients: dict[Cell, Tensors] = {}
        self._deferred_weight_grads: dict[Cell, Sequence[WeightWork]] = {}
        self.peak_in_flight = 0
        self.peak_deferred_weight_grads = 0

    def put_input(self, cell: Cell, received: Tensors) -> None:
        """Store what a stage will read, as leaves of its graph."""
        self._inputs[cell] = tuple(tensor.detach().requires_grad_() for tensor in received)

    def take_input(self, cell: Cell) -> Tensors:
        return _take(self._inputs, cell, "input")

    def begin_forward(self) -> None:
        """Count a forward that begins; the backward with which it takes turns may be done before it ends."""
        self.peak_in_flight = max(self.peak_in_flight, len(self._forwards) + 1)

    def put_forward(self, cell: Cell, inputs: Tensors, outputs: Tensors, tape: Tape | None = None) -> None:
        """Store the graph of a forward that has run, until :meth:`take_forward`."""
        self._forwards[cell] = ForwardState(inputs, [get_gradient_edge(output) for output in outputs], tape or Tape())

    def take_forward(self, cell: Cell) -> ForwardState:
        return _take(self._forwards, cell, "forward")

    def graphs(self) -> list[tuple[Cell, Node]]:
        """The graph of every forward whose backward has not run."""
        return [
            (cell, edge.node)
            for cell, forward in self._forwards.items()
            for edge in (*forward.edges, *forward.tape.edges)
        ]

    def put_output(self, cell: Cell, outputs: Tensors) -> None:
        self._outputs[cell] = tuple(output.detach() for output in outputs)

    def take_output(self, cell: Cell) -> Tensors:
        return _take(self._outputs, cell, "output")

    def put_output_gradient(self, cell: Cell, gradients: Tensors) -> None:
        self._output_gradients[cell] = gradients

    def take_output_gradient(self, cell: Cell) -> Tensors:
        return _take(self._output_gradients, cell, "gradient of the output")

    def put_input_gradient(self, cell: Cell, gradients: Tensors) -> None:
        self._input_gradients[cell] = gradients

    def take_input_gradient(self, cell: Cell) -> Tensors:
        return _take(self._input_gradients, cell, "gradient of the input")

    def defer_weight_grads(self, cell: Cell, work: Sequence[WeightWork]) -> None:
        """Store what the W of an I that has run needs, until :meth:`take_deferred_weight_grads`."""
        self._deferred_weight_grads[cell] = work
        self.peak_deferred_weight_grads = max(self.peak_deferred_weight_grads, len(self._deferred_weight_grads))

    def take_deferred_weight_grads(self, cell: Cell) -> Sequence[WeightWork]:
        return _take(self._deferred_weight_grads, cell, "input gradient")


def _take(store: dict[Cell, T], cell: Cell, what: str) -> T:
    try:
        return store.pop(cell)
    except KeyError:
        raise ScheduleError(
            f"stage {cell.stage} has no {what} of microbatch {cell.microbatch} at this point of the plan; "
            "validate the plan before running it"
        ) from None
