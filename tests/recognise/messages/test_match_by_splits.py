"""All-to-alls of uneven parts: matched by what members send each other, also where some recorded more calls than others."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from pptrace.recognise.messages.kernels_from_plan import have_splits, shifts_by_splits
from pptrace.slices import Slice

Matrix = Sequence[Sequence[int]]


def sides_of(calls: Sequence[Matrix | None], skipped: Sequence[int]) -> list[Slice]:
    """The calls as each member records them, without the first few; a call is what each sends to each, None for equal parts."""
    sides = []
    for member, skip in enumerate(skipped):
        splits, sizes = [], []
        for rows in calls[skip:]:
            if rows is None:
                splits.append("")
                sizes.append(16)
                continue
            sent, received = rows[member], [row[member] for row in rows]
            splits.append(",".join(map(str, sent)) + ">" + ",".join(map(str, received)))
            sizes.append(8 * max(sum(sent), sum(received)))
        sides.append(Slice({"splits": np.array(splits, dtype=object), "bytes": np.array(sizes)}))
    return sides


def drawn(seed: int, num_calls: int, num_members: int) -> list[Matrix | None]:
    """Random calls of tokens, each after one of counts, which has equal parts."""
    chance = random.Random(seed)
    members = range(num_members)
    calls: list[Matrix | None] = []
    for _ in range(num_calls):
        calls += [None, [[chance.randrange(100) for _ in members] for _ in members]]
    return calls


def test_members_that_recorded_more_calls_are_aligned() -> None:
    for seed in range(20):
        sides = sides_of(drawn(seed, 6, 3), (0, 4, 2))
        assert have_splits(sides)
        assert shifts_by_splits(sides) == [4, 0, 2]


def test_equally_many_calls_that_contradict_each_other_are_not_matched() -> None:
    calls = drawn(1, 4, 2)
    assert shifts_by_splits(sides_of(calls, (0, 0))) == [0, 0]
    other = sides_of(calls, (2, 0))
    cut = other[1].where(np.arange(6))
    assert shifts_by_splits([other[0], cut]) is None


def test_calls_that_are_all_the_same_tell_no_order() -> None:
    same: list[Matrix | None] = [[[5, 5], [5, 5]]] * 4
    assert shifts_by_splits(sides_of(same, (0, 1))) is None


def test_a_call_belongs_to_another_only_if_both_directions_agree() -> None:
    for wrong in ("5,3>5,9", "5,4>5,2"):  # the second member has sent 9 and not 2; has received 4 and not 3
        splits = (["5,3>5,2"], ["2,6>" + "3,6"], [wrong])
        sides = [Slice({"splits": np.array(texts, dtype=object), "bytes": np.array([64])}) for texts in splits]
        assert shifts_by_splits([sides[0], sides[1]]) == [0, 0]
        assert shifts_by_splits([sides[2], sides[1]]) is None
