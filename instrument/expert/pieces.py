"""A forward in pieces, and its backward in the same pieces, so that those of two microbatches can alternate.

Where rows travel the graph is cut: each piece has a graph of its own, and while the rows of one half of an overlapped pair are on
their way, the other half computes a piece (DualPipe, arXiv 2412.19437; Megatron-LM ``overlap_moe_expert_parallel_comm``). A
piece ends with the start of an all-to-all and the next begins with its wait; so all ranks of the group start them in one order,
because their pieces are the same.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from instrument.expert.exchange import Exchange
from instrument.sequence.dropout import MicrobatchKey

S = TypeVar("S")
T = TypeVar("T")
Pieces = Generator[None, None, T]
"""Pauses while something travels; returns its result."""


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """The end of a piece, where its graph ends, and the tensors with which the next begins."""

    exchange: Exchange
    edges: Sequence[GradientEdge]
    arrived: Tensor
    crossed: Sequence[Tensor]


class Tape:
    """The cuts of one forward, in their order."""

    __slots__ = ("_cuts",)

    def __init__(self) -> None:
        self._cuts: list[_Cut] = []

    def travel(
        self, exchange: Exchange, rows: Tensor, crossing: Sequence[Tensor]
    ) -> Pieces[tuple[Tensor, list[Tensor]]]:
        """Send rows, pause, and receive; ``crossing`` are all other tensors of this piece that a later one reads.

        Returns:
            The rows that came, and the crossing tensors, as leaves of the next piece.
        """
        pending = exchange.start(rows.detach())
        crossed = [tensor.detach().requires_grad_() for tensor in crossing]
        edges = [get_gradient_edge(tensor) for tensor in (rows, *crossing)]
        yield
        arrived = pending.wait().requires_grad_()
        self._cuts.append(_Cut(exchange, edges, arrived, crossed))
        return arrived, crossed

    @property
    def edges(self) -> list[GradientEdge]:
        """The ends of all pieces' graphs but the last one's."""
        return [edge for cut in self._cuts for edge in cut.edges]

    def backward(self, edges: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> Pieces[None]:
        """The backward of all pieces, the last first, from ``edges``, where the last one's graph ends."""
        while self._cuts:
            torch.autograd.backward(edges, gradients)
            cut = self._cuts.pop()
            assert cut.arrived.grad is not None
            pending = cut.exchange.mirrored.start(cut.arrived.grad)
            yield
            given = [pending.wait(), *(tensor.grad for tensor in cut.crossed)]
            pairs = [(end, part) for end, part in zip(cut.edges, given, strict=True) if part is not None]
            edges, gradients = [end for end, _ in pairs], [part for _, part in pairs]
        torch.autograd.backward(edges, gradients)


def run_through(pieces: Pieces[T]) -> T:
    """Run all pieces, one after another."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            result: T = end.value
            return result


def alternate(first: Pieces[T], second: Pieces[S]) -> tuple[T, S]:
    """Run the pieces of both in turn, until one of them has none left and the other goes on alone; the results of both."""
    results: dict[int, Any] = {}
    running: list[tuple[int, Pieces[Any]]] = [(0, first), (1, second)]
    while running:
        for index, pieces in tuple(running):
            try:
                next(pieces)
            except StopIteration as end:
                results[index] = end.value
                running.remove((index, pieces))
    return results[0], results[1]


@runtime_checkable
class InPieces(Protocol):
    """A stage whose forward can pause while something travels.

    No base class: ``fully_shard`` gives stages another class, which a second base would forbid.
    """

    def in_pieces(
        self,
        x: Tensor,
        tape: Tape,
        microbatch_key: MicrobatchKey = MicrobatchKey(),  # noqa: B008 — frozen
        recompute: bool = False,
    ) -> Pieces[Tensor]:
        """The stage's forward, of which ``tape`` keeps the cuts."""
        ...
