"""Runs of a plan, one after the other: each ends where every rank has done all that it has begun."""

from __future__ import annotations

from collections.abc import Sequence

from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.plan import Plan


def runs_of(plan: Plan) -> list[list[tuple[Action, ...]]]:
    """The compute actions of each run, rank by rank; a usual schedule is one run, and so is a plan of one rank.

    A step that accumulates gradients over two calls of a schedule has two.
    """
    rows = [plan.compute_actions(rank) for rank in range(plan.pp)]
    if len(rows) == 1:
        return [rows]
    ends = [_ends_by_forwards(row) for row in rows]
    runs, begins = [], [0] * len(rows)
    for forwards in sorted(set.intersection(*map(set, ends))):
        of_rank = [end[forwards] for end in ends]
        runs.append([row[begin:end] for row, begin, end in zip(rows, begins, of_rank, strict=True)])
        begins = of_rank
    return runs


def _ends_by_forwards(row: Sequence[Action]) -> dict[int, int]:
    """Number of actions after which nothing is under way, by the number of forwards until then."""
    ends, forwards, under_way = {}, 0, 0
    for index, action in enumerate(row, 1):
        for half in action.halves:
            forwards += half.kind is Kind.F
            under_way += (half.kind is Kind.F) - (half.kind in (Kind.B, Kind.W))
        if not under_way:
            ends[forwards] = index
    return ends
