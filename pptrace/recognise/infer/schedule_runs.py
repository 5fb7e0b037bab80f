"""Runs of a schedule in the order of a pipeline's ops: from a first forward until no microbatch is in flight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pptrace.model.tables import Int64
from pptrace.recognise.infer.rank_order import Bools, Grouped, Messages, MismatchError, grouped

Op = tuple[str, int, int]
"""F or B, its number among those of its kind on its rank, and its start in ns."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One run of a schedule: the first of its forwards, which is that of its backwards, and how many of both there are."""

    first: int
    count: int

    def cells(self, row: Sequence[Op], stage: int) -> Iterator[str]:
        """The unit's ops of a rank, with their microbatches, in the order of time."""
        return (f"{stage}{kind}{index - self.first}" for kind, index, _ in row if self._has(index))

    def starts(self, row: Sequence[Op]) -> list[int]:
        return [start for _, index, start in row if self._has(index)]

    def _has(self, index: int) -> bool:
        return self.first <= index < self.first + self.count


@dataclass(frozen=True, slots=True)
class Outputs:
    """Messages between two ranks with outputs that backwards followed: their indices, of ``num_tensors`` for each forward.

    ``sizes`` are those of units in order.
    """

    messages: Int64
    num_tensors: int
    sizes: tuple[int, ...] = ()

    def of(self, messages: Messages) -> Grouped:
        group = np.arange(len(self.messages), dtype=np.int64) // self.num_tensors
        return grouped(messages.where(self.messages), group)

    def others(self, messages: Messages) -> Messages:
        """The messages between the ranks that belong to none."""
        is_other: Bools = ~np.isin(np.arange(len(messages)), self.messages)
        return messages.where(is_other)


def trained_outputs(sent_ns: Int64, backward_ns: Int64, num_tensors: int) -> Outputs:
    """The units of a rank that sends outputs on: found from the end, since a backward always has its forward before it, and what
    no backward follows (evaluation, the agreeing on shapes) is none.

    Args:
        sent_ns: when messages with outputs were posted, ``num_tensors`` for each forward.
        backward_ns: when backwards began.

    Raises:
        MismatchError: a backward has no forward.
    """
    is_backward = np.concatenate((np.zeros(len(sent_ns), dtype=bool), np.ones(len(backward_ns), dtype=bool)))
    order = np.argsort(np.concatenate((sent_ns, backward_ns)), kind="stable")[::-1]
    sizes: list[int] = []
    kept: list[int] = []
    num_sent = num_backwards = 0
    for index_of_event, ran in zip(order.tolist(), is_backward[order].tolist(), strict=True):
        if ran:
            num_backwards += 1
        elif num_backwards:
            kept.append(index_of_event)
            num_sent += 1
        if num_backwards and num_sent == num_backwards * num_tensors:
            sizes.append(num_backwards)
            num_sent = num_backwards = 0
    if num_backwards:
        raise MismatchError("more backwards than forwards: some forwards were not recorded")
    return Outputs(np.array(kept[::-1], dtype=np.int64), num_tensors, tuple(sizes[::-1]))


def units_of(sizes: Sequence[int], rows: Sequence[Sequence[Op]], optimizers: Sequence[Int64]) -> tuple[Unit, ...]:
    """The units in order, one after the other on all ranks; those of one microbatch each between which no optimizer ran, where
    there is one, as one: a step without a pipeline in it.

    Raises:
        MismatchError: they overlap; or an optimizer runs within one.
    """
    units = [Unit(int(after) - size, size) for size, after in zip(sizes, np.cumsum(sizes), strict=True)]
    if len(optimizers[0]):
        units = _joined(units, rows[0], optimizers[0])
    for row, steps in zip(rows, optimizers, strict=True):
        latest = -1
        for unit in units:
            starts = unit.starts(row)
            if starts[0] <= latest:
                raise MismatchError("the ranks do not run the same steps one after the other")
            latest = starts[-1]
            if np.searchsorted(steps, starts[0]) != np.searchsorted(steps, latest):
                raise MismatchError("an optimizer runs while microbatches are under way")
    return tuple(units)


def _joined(units: Sequence[Unit], row: Sequence[Op], optimizers: Int64) -> list[Unit]:
    joined: list[Unit] = []
    before: tuple[bool, int] | None = None
    for unit in units:
        is_single_and_optimizer = (unit.count == 1, int(np.searchsorted(optimizers, unit.starts(row)[0])))
        if unit.count == 1 and is_single_and_optimizer == before:
            joined[-1] = replace(joined[-1], count=joined[-1].count + 1)
        else:
            joined.append(unit)
        before = is_single_and_optimizer
    return joined
