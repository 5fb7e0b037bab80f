"""Needs of an action before it can start: the one definition of the dependencies between the actions of a plan.

F needs the forward of the previous stage. B and I need the forward of the same stage and the backward (B or I) of the next
one. W needs its I. An overlapped pair needs what both of its halves need.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from pptrace.schedule.actions import Action, Key, Kind

if TYPE_CHECKING:
    from pptrace.schedule.plan import Plan


class Output(IntEnum):
    """Output that an action leaves for others: each stage has one of each for every microbatch."""

    FORWARD = 0
    BACKWARD = 1  # of a B or an I: a stage has one or the other of a microbatch
    WEIGHT_GRAD = 2


OUTPUT_OF = {Kind.F: Output.FORWARD, Kind.B: Output.BACKWARD, Kind.I: Output.BACKWARD, Kind.W: Output.WEIGHT_GRAD}


@dataclass(frozen=True, slots=True)
class Need:
    """A dependency on the same microbatch's action of any of ``kinds``, ``hop`` stages further along the chain (−1, 0 or 1).

    A stage at the end of its chain has no such neighbour, and does not need it.
    """

    kinds: tuple[Kind, ...]
    hop: int

    @property
    def output(self) -> Output:
        return OUTPUT_OF[self.kinds[0]]


_OF_BACKWARD = (Need((Kind.F,), 0), Need((Kind.B, Kind.I), 1))
NEEDS: dict[Kind, tuple[Need, ...]] = {
    Kind.F: (Need((Kind.F,), -1),),
    Kind.B: _OF_BACKWARD,
    Kind.I: _OF_BACKWARD,
    Kind.W: (Need((Kind.I,), 0),),
}
"""The needs of each kind of simple compute action."""


def needs_of(plan: Plan, action: Action) -> tuple[tuple[Key, ...], ...]:
    """The dependencies of ``action``: for each, the keys of which any one satisfies it."""
    return tuple(
        tuple((kind, stage, half.microbatch) for kind in need.kinds)
        for half in action.halves
        for need in NEEDS.get(half.kind, ())
        if (stage := neighbour(plan, half.stage, need.hop)) is not None
    )


def neighbour(plan: Plan, stage: int, hop: int) -> int | None:
    """The stage ``hop`` (−1, 0 or 1) further along the chain of ``stage``; None beyond its ends."""
    if hop == 0:
        return stage
    return plan.previous_stage(stage) if hop < 0 else plan.next_stage(stage)


def ranks_at_ends(plan: Plan) -> frozenset[int]:
    """The pipeline ranks whose first action needs no other, or whose last one no other needs: these begin and end a step."""
    needed = {key for of_rank in plan.ranks for action in of_rank for need in needs_of(plan, action) for key in need}
    return frozenset(
        rank
        for rank, of_rank in enumerate(plan.ranks)
        if of_rank
        and (not any(needs_of(plan, of_rank[0])) or not needed.intersection(half.key for half in of_rank[-1].halves))
    )
