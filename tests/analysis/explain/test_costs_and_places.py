"""Costs of causes op by op, where causes are, and what is most to blame, counted one by one."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np

from pptrace.analysis.explain.causes import (
    at_places,
    late_members,
    merged,
)
from pptrace.analysis.whole_run import Cause
from tests.analysis.explain.op_by_op import WINDOWS, random_times, random_waits


def test_a_cause_is_at_places_of_a_twentieth_of_it_at_least() -> None:
    places = {("rank", 0): 95, ("rank", 3): 5}
    assert at_places("jitter", 1000, places) == [Cause("jitter", {"rank": 0}, 950), Cause("jitter", {"rank": 3}, 50)]
    small = {("rank", 0): 96, ("rank", 3): 4}
    assert at_places("waiting", 1000, small) == [Cause("jitter", {"rank": 0}, 1000)]
    assert at_places("pp", 7, {}) == [Cause("communication", {}, 7)]
    assert at_places("inner", 7, {("axis", "tp"): 0}) == [Cause("communication", {}, 7)]
    assert at_places("host", 7, {("rank", 1): 1, ("rank", 2): 1, ("rank", 3): 1}) == [
        Cause("host", {"rank": 1}, 3),
        Cause("host", {"rank": 2}, 2),
        Cause("host", {"rank": 3}, 2),
    ]


def test_causes_of_one_name_at_one_place_are_one() -> None:
    causes = [Cause("a", {"rank": 1}, 3), Cause("a", {"rank": 2}, 4), Cause("b", {}, 1), Cause("a", {"rank": 1}, -1)]
    assert merged(causes) == [Cause("a", {"rank": 1}, 2), Cause("a", {"rank": 2}, 4), Cause("b", {}, 1)]


def test_waits_of_a_window_are_for_the_ranks_of_those_that_came_last_as_far_as_they_are_slower_for_that() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        times = random_times(rng)
        waits = random_waits(rng, times)
        excess = np.array([[rng.choice((0, 5, 10**6)) for _ in range(times.table.pp)] for _ in range(WINDOWS)])
        of_ranks = late_members(waits, excess, times)
        for window in range(WINDOWS):
            late: Counter[tuple[int, int]] = Counter()
            for index in np.flatnonzero(waits.step == window).tolist():
                late[waits.late_step[index], times.table.rank[waits.late_row[index]]] += int(waits.ns[index])
            slower: Counter[tuple[str, int | str]] = Counter()
            rest: Counter[tuple[str, int | str]] = Counter()
            for (step, place), ns in late.items():
                at = "rank", times.windows[step].ranks[place]
                slower[at] += min(ns, excess[step, place])
                rest[at] += max(ns - excess[step, place], 0)
            assert of_ranks[window] == (slower, rest)
