"""The type of what has a finding of its own within causes, and the replays by which its gain is known.

Certainty of a gain: its interval from how the steps vary, and the share of a step from which on it is mentioned.

Pipelines of a step meet in collectives inside their ops (tp, buckets of DDP, FSDP). Where an op waits there for one of another
pipeline, and that one begins sooner or computes less, it waits so much less.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from pptrace.analysis.matrix.step_matrix import StepMatrix
from pptrace.model.tables import Int64
from pptrace.slices import Slice, group_sums, last_like, reduce_groups

LEAST_SHARE = 0.02
"""A cause below this share of the step is not mentioned."""
LEAST_ANYWHERE = 0.05
"""The same of what every run has some of, wherever it has most of it: healthy runs have up to about 3 % each of ops that vary,
of transfers and of time between ops."""
FEWEST_STEPS = 5
"""With fewer steps there are too few to draw from: the interval of a gain is Student's."""
_STUDENT = {2: 6.3138, 3: 2.9200, 4: 2.3534}
"""95 % quantiles of Student's t by the number of steps, one more than its degrees of freedom."""
_NUM_SAMPLES = 1000
_MOST_ROUNDS = 3
"""Waits that follow make others follow."""


def gain_interval(of_steps: Int64) -> tuple[int | None, int | None]:
    """The 90 % interval of the mean over steps, by bootstrap, of two to four steps by Student's t; (None, None) of one, ns."""
    if len(of_steps) == 1:
        return None, None
    if len(of_steps) < FEWEST_STEPS:
        half = _STUDENT[len(of_steps)] * float(of_steps.std(ddof=1)) / len(of_steps) ** 0.5
        return int(np.floor(of_steps.mean() - half)), int(np.ceil(of_steps.mean() + half))
    size = (_NUM_SAMPLES, min(len(of_steps), _NUM_SAMPLES))
    chosen = np.random.default_rng(0).integers(0, len(of_steps), size)
    low, high = np.percentile(of_steps[chosen].mean(axis=1), (5, 95))
    return int(np.floor(low)), int(np.ceil(high))


def is_noise(of_steps: Int64) -> bool:
    """Return whether a mean over so many steps may be chance alone: its interval begins at 0, or below."""
    low, _ = gain_interval(of_steps)
    return low is not None and low <= 0 and len(of_steps) >= FEWEST_STEPS


LEAST_LOW = 0.25
"""Share of a gain: where its interval begins below this, it is that of single steps, which are outliers."""


class Reason(Struct, frozen=True, eq=False):
    """Reason why steps are slow, where more is known than the cause: ``gains`` are what each whole step would get back, ns.

    ``causes`` are the causes that its time is part of, that of the finding first. ``title`` has a place for its share of the
    step, ``detail`` says what was seen and what to do. Below ``least_share`` of the step it is not mentioned. ``is_cause``: the
    causes of steps have it apart already.
    """

    name: str
    causes: tuple[str, ...]
    where: Mapping[str, int | str]
    title: str
    detail: str
    gains: Int64
    evidence: Mapping[str, Any] = field(default_factory=dict)
    least_share: float = LEAST_SHARE
    is_cause: bool = False

    @property
    def gain(self) -> int:
        """Gain of a mean step, ns."""
        return int(self.gains.sum()) // len(self.gains)

    def is_finding(self, span: int) -> bool:
        """Return whether it is worth a line in steps of this length, ns: large, and not only by what happened in one of them."""
        low, _ = gain_interval(self.gains)
        is_sure = low is None or low >= LEAST_LOW * self.gain or len(self.gains) < FEWEST_STEPS
        return self.gain >= self.least_share * span and self.gain > 0 and is_sure


MOST = 0.5
"""A rank is named that has this share of what all ranks have."""


def time_by_rank(plans: Sequence[StepMatrix], times: Sequence[Int64]) -> dict[int, int]:
    """The sum of some times of ops, shape (windows, rows) in each plan, on each rank that has any, ns."""
    of_rank: dict[int, int] = {}
    for costs, ns in zip(plans, times, strict=True):
        ranks, number = np.unique(costs.ranks, return_inverse=True)
        of_windows = group_sums(ns.astype(np.int64), costs.table.rank, costs.table.pp).ravel()
        sums = reduce_groups(np.add, of_windows, number.ravel(), len(ranks))
        for rank, total in zip(ranks.tolist(), sums.tolist(), strict=True):
            of_rank[rank] = of_rank.get(rank, 0) + total
    return {rank: total for rank, total in of_rank.items() if total}


def where_most(of_rank: Mapping[int, int]) -> dict[str, int | str]:
    """The rank that has most of some times, by these of each rank; {} where none has."""
    rank = max(of_rank, key=of_rank.__getitem__, default=None)
    return {} if rank is None or of_rank[rank] < MOST * sum(of_rank.values()) else {"rank": rank}


def with_following_waits(costs: StepMatrix, changed: StepMatrix) -> StepMatrix:
    """The costs as they were ``changed``, with what ops wait for in collectives as much less as the change makes it."""
    waits, late_window = waits_with_late_windows(costs)
    if not len(waits):
        return changed
    own, late = (waits["window"], waits["row"]), (late_window, waits["late_row"])
    shorter = costs.durations.astype(np.int64) - changed.durations
    longer = np.clip(shorter[late] - shorter[own], 0, waits["longer"])
    already, saved, following = waits["ns"] - waits["longer"], longer, changed
    for _ in range(_MOST_ROUNDS):
        sooner, before = costs.starts - following.starts, saved
        saved = longer + np.clip(sooner[late] - sooner[own], 0, already)
        less = np.zeros(shorter.shape, dtype=np.int64)
        np.add.at(less, own, saved)
        less = np.minimum(less, np.minimum(changed.inner, changed.durations))
        following = replace(changed, durations=changed.durations - less)
        if np.array_equal(saved, before):
            break
    left = waits.with_columns({"ns": waits["ns"] - saved, "longer": waits["longer"] - longer})
    return replace(following, inner=changed.inner - less, waits=left.where(left["ns"] > 0))


def waits_with_late_windows(costs: StepMatrix) -> tuple[Slice, Int64]:
    """(the waits for ops in windows of the costs, these windows)."""
    waits, pp = costs.waits, costs.ranks.shape[1]
    members = (np.repeat(costs.step, pp), costs.ranks.ravel())
    found = last_like((costs.step[waits["window"]], waits["rank"]), members)
    is_known = found >= 0
    return waits.where(is_known), found[is_known] // pp


def gains(plans: Iterable[StepMatrix], changed: Iterable[StepMatrix]) -> Int64:
    """The gain of each step of all plans if they were as in ``changed``, by replay, ns."""
    return np.concatenate(
        [
            costs.lengths - with_following_waits(costs, other).lengths
            for costs, other in zip(plans, changed, strict=True)
        ]
    )


def gains_if_sooner(plans: Sequence[StepMatrix], removed: Sequence[Int64]) -> Int64:
    """The gain of each step of all plans if ranks were less late by some times, shape (windows, rows), ns."""
    return gains(plans, (costs.with_lateness(costs.lateness - ns) for costs, ns in zip(plans, removed, strict=True)))
