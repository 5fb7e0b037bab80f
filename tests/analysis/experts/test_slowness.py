"""Slowness of ranks, from exchanges on paper, against its definition rank by rank."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from pptrace.analysis.experts import waits
from pptrace.analysis.experts.exchanges import EXCHANGES
from pptrace.analysis.experts.waits import Floats, Waits, times_of_experts
from pptrace.model.tables import Int64
from pptrace.slices import Slice
from tests.support.extent import ALL

ROWS = {0: 100, 1: 20, 2: 100, 3: 20}
"""Rank → rows of its experts; ranks 0 and 1 are a stage, 2 and 3 the next."""


def exchanges(row_ns: dict[int, int], microbatches: int = 3) -> Slice:
    """Forwards of four ranks whose experts take ``row_ns`` of each row."""
    places = [(rank, microbatch) for microbatch in range(microbatches) for rank in ROWS]
    columns = {name: np.zeros(len(places), dtype=np.int64) for name in EXCHANGES}
    columns["rank"] = np.array([rank for rank, _ in places])
    columns["stage"] = columns["rank"] // 2
    columns["out_match"] = columns["back_match"] = np.array([2 * number + rank // 2 for rank, number in places])
    columns["rows"] = np.array([ROWS[rank] for rank, _ in places])
    columns["back_start_ns"] = np.array([row_ns[rank] * ROWS[rank] for rank, _ in places])
    return Slice(columns)


def test_ranks_that_take_as_long_for_each_row_are_equally_slow() -> None:
    assert Waits(exchanges(dict.fromkeys(ROWS, 10))).slowness == pytest.approx(dict.fromkeys(ROWS, 1.0))


def test_who_takes_less_than_all_others_is_not_slow() -> None:
    """Of one row nearly all is the time of launches; by what a row takes of many, it were slow."""
    given = exchanges({0: 10, 1: 50, 2: 12, 3: 20})
    few = np.isin(given["rank"], (1, 3))
    columns = {**given.columns, "rows": np.where(few, 1, given["rows"])}
    columns["back_start_ns"] = np.where(few, given["back_start_ns"] // 20, given["back_start_ns"])
    assert Waits(Slice(columns)).slowness[1] == pytest.approx(1.0)


@pytest.mark.parametrize(("microbatches", "known"), [(2, []), (3, [0, 1, 2, 3])])
def test_the_slowness_of_a_rank_stands_on_three_exchanges(microbatches: int, known: list[int]) -> None:
    waits = Waits(exchanges(dict.fromkeys(ROWS, 10), microbatches))
    assert (list(waits.slowness), waits.hardly_compared) == (known, [] if known else list(ROWS))


def one_by_one(exchanges: Slice) -> dict[int, float]:
    """The definition: of each rank the median, over its exchanges, of the time that it takes over what the others of the same
    groups, stage and direction would, by the medians of theirs; no more than over the least that these took.
    """
    times, found = times_of_experts(exchanges), {}
    took, rows, group, place = (times[name] for name in ("took", "rows", "group", "place"))
    for rank in np.unique(times["rank"]).tolist():
        is_own = times["rank"] == rank
        own = np.flatnonzero(is_own & (group >= 0))
        ratios = []
        for value in np.unique(place[own]).tolist():
            same = own[place[own] == value]
            others = (place == value) & ~is_own & (group >= 0) & np.isin(group, group[same])
            if (rows[others] > 0).all():
                same = same[rows[same] > 0]
            if others.any() and len(same):
                expected = expected_of(took[others], rows[others], times["slope"][same[0]], rows[same])
                most = np.maximum(took[same] / max(took[others].min(), 1), 1)
                ratios.append(np.minimum(took[same] / np.maximum(expected, 1), most))
        if sum(map(len, ratios)) >= 3:
            found[rank] = float(np.median(np.concatenate(ratios)))
    return found


def expected_of(took: Floats, rows: Int64, slope: float, own_rows: Int64) -> Floats:
    has_rows = rows > 0
    if has_rows.any():
        slope = min(slope, float(np.median(took[has_rows] / rows[has_rows])))
    return max(float(np.median(took - slope * rows)), 0.0) + slope * own_rows.astype(np.float64)


def random_exchanges(seed: int, num_ranks: int, num_calls: int, *, is_regular: bool) -> Slice:
    """Calls of random members, or of four groups that stay the same; some without rows, some whose rows or members are not
    known.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for match in range(num_calls):
        members = np.flatnonzero(np.arange(num_ranks) % 4 == match % 4)
        if not is_regular:
            members = rng.choice(num_ranks, rng.integers(1, num_ranks + 1), replace=False)
        backward, unmatched = rng.integers(0, 2), rng.random() < 0.05
        for rank in members.tolist():
            num = int(rng.choice([-1, 0, *rng.integers(0, 30, 8)]))
            took = max(0, num) * int(rng.integers(1, 9)) * int(rng.random() < 0.9) + int(rng.integers(0, 40))
            rows.append((rank, -1 if unmatched else match, int(rng.integers(0, 2)), backward, num, took))
    rank, match, stage, backward, num, took = np.array(rows).T
    columns = {name: np.zeros(len(rows), dtype=np.int64) for name in EXCHANGES}
    columns |= {"rank": rank, "out_match": match, "back_match": match, "rows": num, "back_start_ns": took}
    return Slice(columns | {"stage": stage if not is_regular else rank % 4 // 2, "backward": backward})


@pytest.mark.parametrize("seed", range(0, 30, 1 if ALL else 3))
@pytest.mark.parametrize("is_regular", [True, False], ids=["groups", "any members"])
def test_all_ranks_together_are_as_slow_as_one_by_one(seed: int, is_regular: bool) -> None:
    given = random_exchanges(seed, num_ranks=4 + 3 * (seed % 5), num_calls=3 + seed, is_regular=is_regular)
    assert Waits(given).slowness == one_by_one(given)


def test_the_work_grows_with_the_ranks_and_not_with_their_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in numbers that are sorted, whole groups being companions of all of their members."""
    numbers: Counter[int] = Counter()
    argsort = np.argsort
    for num_ranks in (32, 128):
        given = random_exchanges(1, num_ranks, 24, is_regular=True)

        def counted(values: Int64, num_ranks: int = num_ranks, **how: str) -> Int64:
            numbers[num_ranks] += len(values)
            return argsort(values, **how)

        with monkeypatch.context() as patch:
            patch.setattr(waits.np, "argsort", counted)
            _ = Waits(given).slowness
    assert numbers[128] < 8 * numbers[32]
