"""Match of the evidence of ranks of a pipeline: ops and messages of each, and the runs of the schedule."""

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

TO_NEXT: Mapping[MessageKind, str] = {("F", "send"): "to_next", ("B", "recv"): "from_next"}
"""The messages with the next rank, and their names among the channels."""
TO_PREVIOUS: Mapping[MessageKind, str] = {("F", "recv"): "from_previous", ("B", "send"): "to_previous"}


def peers_between(previous: int | None, following: int | None) -> dict[MessageKind, int]:
    """The ranks at the other ends of messages; −1 where there is none, or it is unknown."""
    before, after = (-1 if rank is None else rank for rank in (previous, following))
    return dict.fromkeys(TO_NEXT, after) | dict.fromkeys(TO_PREVIOUS, before)


@dataclass(frozen=True, slots=True)
class RankMatch:
    """The ops and messages of one rank: ``groups`` has those of ops by what they are; ``others`` those of none, with which ranks
    agree on shapes or which carry evaluation. ``stage`` is None where ranks of its pipeline have no trace.
    """

    rank: int
    stage: int | None
    forwards: Ops
    backwards: Ops
    groups: Mapping[MessageKind, Grouped]
    others: Mapping[MessageKind, Messages]
    peers: Mapping[MessageKind, int]


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


def numbers_of(units: Sequence[Unit]) -> tuple[Int64, Int64]:
    """Unit and microbatch of each forward, and of each backward."""
    counts = np.array([unit.count for unit in units], dtype=np.int64)
    unit = np.repeat(np.arange(len(counts)), counts)
    return unit, np.arange(len(unit)) - np.repeat(np.cumsum(counts) - counts, counts)
