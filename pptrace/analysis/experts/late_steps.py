"""The rank that others wait for most in the calls of experts of each step, and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pptrace.analysis.experts.lateness import (
    COMBINE,
    DISPATCH,
    SLOW,
    Lateness,
    is_often,
    lateness_of,
)
from pptrace.analysis.experts.routing import groups_of, mean_rows
from pptrace.analysis.experts.slowness import Floats, median_slowness, times_of_experts
from pptrace.analysis.experts.types import ExpertStep
from pptrace.model.tables import Int64
from pptrace.slices import Slice


def expert_steps(exchanges: Slice, steps: Iterable[int] = ()) -> tuple[ExpertStep, ...]:
    """The waits of each step with exchanges, and of ``steps`` without any, in the order of their numbers."""
    order = np.argsort(exchanges["step"], kind="stable")
    numbers, begins = np.unique(exchanges["step"][order], return_index=True)
    places = dict(zip(numbers.tolist(), np.split(order, begins[1:]), strict=False))
    waits = _Waits.of(exchanges)
    wanted = sorted({*steps, *(number for number in places if number >= 0)})
    return tuple(
        waits.in_step(number, places[number]) if number in places else _nothing_of(number) for number in wanted
    )


def _nothing_of(step: int) -> ExpertStep:
    return ExpertStep(step, None, None, None, None, None, None)


@dataclass(frozen=True, slots=True, eq=False)
class _Waits:
    """Waits and rows of all exchanges: their lateness in dispatches (``before``) and in combines (``after``), the number of their
    ``group`` and the members of each group, and of each group the most rows of a rank over the mean (``ratio``; NaN: not known).
    """

    ranks: Int64
    before: Lateness
    after: Lateness
    group: Int64
    num_members: Int64
    ratio: Floats
    has_most: Int64
    times: Slice

    @classmethod
    def of(cls, exchanges: Slice) -> _Waits:
        group, num_members = groups_of(exchanges)
        before, after = (lateness_of(exchanges, role) for role in (DISPATCH, COMBINE))
        mean = mean_rows(exchanges)
        known = np.flatnonzero(mean > 0)
        ratio = np.full(len(num_members), np.nan)
        np.fmax.at(ratio, group[known], exchanges["rows"][known] / mean[known])
        has_most = before.has_most.astype(np.int64)
        times = times_of_experts(exchanges)
        return cls(exchanges["rank"], before, after, group, num_members, ratio, has_most, times)

    def in_step(self, step: int, at: Int64) -> ExpertStep:
        """The waits of a step whose exchanges are at these places."""
        groups = np.unique(self.group[at])
        ratios = self.ratio[groups[groups >= 0]]
        ratios = ratios[~np.isnan(ratios)]
        ratio = float(ratios.mean()) if len(ratios) else None
        before, after = self.before.where(at), self.after.where(at)
        if (before.waited < 0).any():
            return ExpertStep(step, None, None, None, None, None, ratio)
        total = int((before.waited + after.waited).sum())
        ranks, number = np.unique(self.ranks[at], return_inverse=True)
        caused = np.zeros(len(ranks), dtype=np.int64)
        np.add.at(caused, number, before.caused + after.caused)
        most = int(caused.argmax())
        if not caused[most]:
            return ExpertStep(step, total, None, None, None, None, ratio)
        rank, late = int(ranks[most]), int(caused[most])
        return ExpertStep(step, total, rank, late, late / total, self._reason(rank, late, at), ratio)

    def _reason(self, rank: int, late_ns: int, at: Int64) -> str | None:
        """The reason for which others wait for a rank in a step."""
        own = at[self.ranks[at] == rank]
        met = at[np.isin(self.group[at], self.group[own])]
        waits = int((self.before.waited[met] + self.after.waited[met]).sum())
        if not is_often(late_ns / waits, float(np.mean(self.num_members[self.group[own]]))):
            return None
        before, after = self.before.caused[own], self.after.caused[own]
        if before.sum() >= after.sum():
            return "before"
        if median_slowness(self.times.where(met)).get(rank, 1.0) >= SLOW:
            return "slow"
        return "rows" if (after * self.has_most[own]).sum() > after.sum() / 2 else None
