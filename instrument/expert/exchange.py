"""Rows on their way: between the ranks that share experts (ep), and between those that share each expert (etp).

A journey of rows is started and ended apart, in forward and in backward, where something is to be computed meanwhile: backward
starts the way back where forward ended the way there, and waits for it where forward started. What autograd made in between
runs in between again: of what is ready, it runs first what was made last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd import Function

from instrument.collectives import AxisGroup, Pending
from instrument.linear_map import LinearMap


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """An all-to-all of rows: ``sent`` and ``received`` rows to and from each rank; None: equally many."""

    group: AxisGroup
    sent: Sequence[int] | None = None
    received: Sequence[int] | None = None

    @property
    def mirrored(self) -> Exchange:
        """The way back."""
        return Exchange(self.group, self.received, self.sent)

    def run(self, rows: Tensor) -> Tensor:
        if self.sent is None or self.received is None:
            return self.group.all_to_all(rows)
        return self.group.all_to_all_rows(rows, self.sent, self.received)

    def start(self, rows: Tensor) -> Pending[Tensor]:
        """:meth:`run`, started; ``rows`` must not be written to until the wait."""
        if self.sent is None or self.received is None:
            return self.group.start_all_to_all(rows)
        return self.group.start_all_to_all_rows(rows, self.sent, self.received)


def travel(rows: Tensor, exchange: Exchange) -> Tensor:
    """All-to-all of rows in forward, of their gradients back in backward."""
    if exchange.group.size == 1:
        return rows
    return _Travel.of(rows, exchange.run, exchange.mirrored.run)


class Journey:
    """:func:`travel` in two parts. The rows set out when it is made; :meth:`arrive` waits for them, once."""

    __slots__ = ("_ticket", "exchange", "going", "returning")

    def __init__(self, rows: Tensor, exchange: Exchange) -> None:
        self.exchange = exchange
        self.going: Pending[Tensor] | None = None
        self.returning: Pending[Tensor] | None = None
        self._ticket: Tensor | None = _Depart.apply(rows, self)  # type: ignore[no-untyped-call]

    def arrive(self) -> Tensor:
        ticket, self._ticket = self._ticket, None  # or the graph would hold itself
        rows: Tensor = _Arrive.apply(ticket, self)  # type: ignore[no-untyped-call]
        return rows


def gather_rows(rows: Tensor, of_rank: Sequence[int] | None, group: AxisGroup) -> Tensor:
    """The rows of all ranks of ``group``, ``of_rank`` of each (None: equally many); backward sums their gradients where they
    came from.
    """
    if group.size == 1:
        return rows
    return _GatherRows.of(rows, partial(_gather, of_rank, group), partial(_scatter, of_rank, group))


def scatter_rows(rows: Tensor, of_rank: Sequence[int] | None, group: AxisGroup) -> Tensor:
    """The sum over the ranks of ``group`` of this rank's rows; the inverse way of :func:`gather_rows`."""
    if group.size == 1:
        return rows
    return _ScatterRows.of(rows, partial(_scatter, of_rank, group), partial(_gather, of_rank, group))


def _gather(of_rank: Sequence[int] | None, group: AxisGroup, rows: Tensor) -> Tensor:
    """gloo gathers equal parts alone: of uneven ones each rank gets the same rows by an all-to-all."""
    if of_rank is None:
        return group.all_gather(rows)
    return group.all_to_all_rows(rows.repeat(group.size, 1), [len(rows)] * group.size, of_rank)


def _scatter(of_rank: Sequence[int] | None, group: AxisGroup, rows: Tensor) -> Tensor:
    if of_rank is None:
        return group.reduce_scatter(rows)
    own = of_rank[group.rank]
    return group.all_to_all_rows(rows, of_rank, [own] * group.size).view(group.size, own, rows.shape[1]).sum(0)


class _Travel(LinearMap):
    """An all-to-all, and back."""


class _GatherRows(LinearMap):
    """The rows of all ranks, and the sum of their gradients."""


class _ScatterRows(LinearMap):
    """The sum of all ranks' rows, and the gradients of all."""


class _Depart(Function):
    """Rows → an empty tensor, which ties the arrival to them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, journey: Journey) -> Tensor:
        ctx.journey = journey
        journey.going = journey.exchange.start(rows)
        return rows.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.journey.returning.wait(), None


class _Arrive(Function):
    @staticmethod
    def forward(ctx: Any, ticket: Tensor, journey: Journey) -> Tensor:  # noqa: ARG004
        ctx.journey = journey
        assert journey.going is not None
        return journey.going.wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.journey.returning = ctx.journey.exchange.mirrored.start(gradients[0])
        return gradients[0].new_empty(0), None
