"""What a rank holds of its microbatches between two actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from instrument.backward_split.split import WeightWork
from instrument.pipeline.p2p import Cell
from pptrace.errors import ScheduleError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """One microbatch of one stage, between its forward and its backward.

    ``edge`` is where backward enters the graph. It takes the place of the output, whose data nobody needs once it has
    been sent (Megatron-LM drops it with ``deallocate_output_tensor``); the graph stays.
    """

    input: Tensor | None
    edge: GradientEdge


class Ledger:
    """Microbatch bookkeeping of one step. Each thing is put once and taken once; taking it lets go of it."""

    def __init__(self) -> None:
        self._inputs: dict[Cell, Tensor] = {}
        self._outputs: dict[Cell, Tensor] = {}
        self._flights: dict[Cell, Flight] = {}
        self._output_gradients: dict[Cell, Tensor] = {}
        self._input_gradients: dict[Cell, Tensor] = {}
        self._weights: dict[Cell, Sequence[WeightWork]] = {}
        self.peak_in_flight = 0
        self.peak_put_aside = 0

    def put_input(self, cell: Cell, received: Tensor) -> None:
        """What a stage will read: a leaf of its graph."""
        self._inputs[cell] = received.detach().requires_grad_()

    def take_input(self, cell: Cell) -> Tensor:
        return _take(self._inputs, cell, "input")

    def open(self, cell: Cell, read: Tensor | None, output: Tensor) -> None:
        """A forward has run; its graph lives until :meth:`close`."""
        self._flights[cell] = Flight(read, get_gradient_edge(output))
        self.peak_in_flight = max(self.peak_in_flight, len(self._flights))

    def close(self, cell: Cell) -> Flight:
        return _take(self._flights, cell, "forward")

    def put_output(self, cell: Cell, output: Tensor) -> None:
        self._outputs[cell] = output.detach()

    def take_output(self, cell: Cell) -> Tensor:
        return _take(self._outputs, cell, "output")

    def put_output_gradient(self, cell: Cell, gradient: Tensor) -> None:
        self._output_gradients[cell] = gradient

    def take_output_gradient(self, cell: Cell) -> Tensor:
        return _take(self._output_gradients, cell, "gradient of the output")

    def put_input_gradient(self, cell: Cell, gradient: Tensor) -> None:
        self._input_gradients[cell] = gradient

    def take_input_gradient(self, cell: Cell) -> Tensor:
        return _take(self._input_gradients, cell, "gradient of the input")

    def put_aside(self, cell: Cell, work: Sequence[WeightWork]) -> None:
        """An I has run; what its W needs lives until :meth:`take_weights`."""
        self._weights[cell] = work
        self.peak_put_aside = max(self.peak_put_aside, len(self._weights))

    def take_weights(self, cell: Cell) -> Sequence[WeightWork]:
        return _take(self._weights, cell, "input gradient")

    @property
    def is_empty(self) -> bool:
        """Whether everything has been taken, as at the end of a complete step."""
        return not (
            self._inputs
            or self._outputs
            or self._flights
            or self._output_gradients
            or self._input_gradients
            or self._weights
        )


def _take(store: dict[Cell, T], cell: Cell, what: str) -> T:
    try:
        return store.pop(cell)
    except KeyError:
        raise ScheduleError(
            f"stage {cell.stage} has no {what} of microbatch {cell.microbatch} at this point of the plan; "
            "validate the plan before running it"
        ) from None
