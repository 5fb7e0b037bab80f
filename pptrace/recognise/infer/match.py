"""Match of the evidence of ranks of a pipeline: ops and messages of each, and the runs of the schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pptrace.model.tables import Int64
from pptrace.recognise.infer.evidence import Messages, MismatchError
from pptrace.recognise.infer.rank_order import Channel, Grouped, Ops, grouped
from pptrace.schedule.plan import Plan

OrderedOp = tuple[str, int, int]
"""F or B, its number among those of its kind on its rank, and its start in ns."""


@dataclass(frozen=True, slots=True)
class RankMatch:
    """The ops and messages of one rank: ``groups`` has those of ops by what they are; ``others`` those of none, with which ranks
    agree on shapes or which carry evaluation. ``peers`` are the ranks at their other ends, −1 where there is none or it is
    unknown. ``stage`` is None where ranks of its pipeline have no trace.
    """

    rank: int
    stage: int | None
    forwards: Ops
    backwards: Ops
    groups: Mapping[Channel, Grouped]
    others: Mapping[Channel, Messages]
    peers: Mapping[Channel, int]

    def in_order(self, behind: Int64) -> list[OrderedOp]:
        """The ops in time order; ``behind`` is the forward of each backward."""
        forwards = zip(range(len(self.forwards)), self.forwards.start_ns.tolist(), strict=True)
        backwards = zip(behind.tolist(), self.backwards.start_ns.tolist(), strict=True)
        ops = [*(("F", *op) for op in forwards), *(("B", *op) for op in backwards)]
        return sorted(ops, key=lambda op: op[2])


@dataclass(frozen=True, slots=True)
class Unit:
    """One run of a schedule, from a first forward until no microbatch is in flight: the first of its forwards, which is that of
    its backwards, and how many of both there are.
    """

    first: int
    count: int

    def ops(self, row: Sequence[OrderedOp]) -> list[OrderedOp]:
        """The unit's ops of a rank, with their microbatches, in the order of time."""
        return [(kind, at - self.first, start) for kind, at, start in row if 0 <= at - self.first < self.count]


@dataclass(frozen=True, slots=True)
class Match:
    """All ranks of a pipeline, stage by stage, or some of them; ``units`` are their runs of the schedule, in order.

    ``behind`` is for each backward the index of its forward, ``is_behind_known`` whether that is more than the order of the
    forwards. ``plan`` is that of the largest unit, None where ranks have no trace; ``by_peers``: the messages name the ranks
    that they go to. ``units`` are () where nothing tells when the steps of a rank alone end.
    """

    ranks: tuple[RankMatch, ...]
    units: tuple[Unit, ...]
    behind: Int64
    is_behind_known: bool = True
    plan: Plan | None = None
    by_peers: bool = False

    @property
    def chain(self) -> tuple[int, ...]:
        return tuple(match.rank for match in self.ranks)

    def numbers(self) -> tuple[Int64, Int64]:
        """Unit and microbatch of each forward."""
        counts = np.array([unit.count for unit in self.units], dtype=np.int64)
        unit = np.repeat(np.arange(len(counts)), counts)
        return unit, np.arange(len(unit)) - np.repeat(np.cumsum(counts) - counts, counts)


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
        return messages.where(np.delete(np.arange(len(messages)), self.messages))


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
    trained: list[int] = []
    num_sent = num_backwards = 0
    for index, ran in zip(order.tolist(), is_backward[order].tolist(), strict=True):
        if ran:
            num_backwards += 1
        elif num_backwards:
            trained.append(index)
            num_sent += 1
        if num_backwards and num_sent == num_backwards * num_tensors:
            sizes.append(num_backwards)
            num_sent = num_backwards = 0
    if num_backwards:
        raise MismatchError("more backwards than forwards: some forwards were not recorded")
    return Outputs(np.array(trained[::-1], dtype=np.int64), num_tensors, tuple(sizes[::-1]))


def units_of(
    sizes: Sequence[int], rows: Sequence[Sequence[OrderedOp]], optimizers: Sequence[Int64]
) -> tuple[Unit, ...]:
    """The units in order, one after the other on all ranks; those of one microbatch each between which no optimizer ran, where
    there is one, as one: a step without a pipeline in it.

    Raises:
        MismatchError: they overlap; or an optimizer runs within one.
    """
    units: list[Unit] = []
    before = -1  # optimizers that ran before the last unit, if that is of one microbatch
    for size, end in zip(sizes, np.cumsum(sizes).tolist(), strict=True):
        unit = Unit(end - size, size)
        single = -1
        if size == 1 and len(optimizers[0]):
            single = int(np.searchsorted(optimizers[0], unit.ops(rows[0])[0][2]))
        if single >= 0 and single == before:
            units[-1] = replace(units[-1], count=units[-1].count + 1)
        else:
            units.append(unit)
        before = single
    for row, steps in zip(rows, optimizers, strict=True):
        latest = -1
        for unit in units:
            starts = [start for *_, start in unit.ops(row)]
            if starts[0] <= latest:
                raise MismatchError("the ranks do not run the same steps one after the other")
            latest = starts[-1]
            if np.searchsorted(steps, starts[0]) != np.searchsorted(steps, latest):
                raise MismatchError("an optimizer runs while microbatches are under way")
    return tuple(units)
