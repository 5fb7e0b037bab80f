"""Result of matching all ranks of a pipeline: ops and messages of each, and the runs of the schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pptrace.model.tables import Int64
from pptrace.recognise.infer.rank_order import Grouped, Messages, Ops
from pptrace.recognise.infer.schedule_runs import Unit
from pptrace.schedule.plan import Plan

MessageKind = tuple[str, str]
"""F or B, send or recv."""


@dataclass(frozen=True, slots=True)
class RankMatch:
    """The ops and messages of one rank: ``groups`` has those of ops by what they are; ``others`` those of none, with which ranks
    agree on shapes or which carry evaluation.
    """

    rank: int
    forwards: Ops
    backwards: Ops
    groups: Mapping[MessageKind, Grouped]
    others: Mapping[MessageKind, Messages]


@dataclass(frozen=True, slots=True)
class PipelineMatch:
    """A chain of ranks, stage by stage, with what each did; ``units`` are its runs of the schedule, in order.

    ``plan`` is that of the largest unit; ``by_peers`` says whether the messages name the ranks that they go to; ``behind`` is for
    each backward the index of its forward, ``is_behind_known`` whether that is more than the order of the forwards.
    """

    ranks: tuple[RankMatch, ...]
    units: tuple[Unit, ...]
    plan: Plan
    by_peers: bool
    behind: Int64
    is_behind_known: bool

    @property
    def chain(self) -> tuple[int, ...]:
        return tuple(match.rank for match in self.ranks)


def numbers_of(units: Sequence[Unit]) -> tuple[Int64, Int64]:
    """Unit and microbatch of each forward, and of each backward."""
    counts = np.array([unit.count for unit in units], dtype=np.int64)
    unit = np.repeat(np.arange(len(counts)), counts)
    return unit, np.arange(len(unit)) - np.repeat(np.cumsum(counts) - counts, counts)
