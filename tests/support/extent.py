"""Extent of what is tested: what continuous integration has time for, or everything where PPTRACE_ALL is set."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any, TypeVar

T = TypeVar("T")

ALL = "PPTRACE_ALL" in os.environ


def by_turns(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cases of a grid: all combinations where everything is tested, else as many as the longest axis has values; those of the
    others take turns, so that each value comes up.
    """
    if ALL:
        return list(product(*axes))
    return [tuple(axis[number % len(axis)] for axis in axes) for number in range(max(map(len, axes)))]


def pairwise(
    cases: Sequence[T],
    settings_of: Callable[[T], dict[str, Any]],
    cost_of: Callable[[T], float],
    elsewhere: Sequence[T] = (),
) -> list[T]:
    """Few cheap cases in which every two settings that some case has together occur together, where they do in none of
    ``elsewhere``, which other tests have.
    """
    known = {pair for case in elsewhere for pair in combinations(settings_of(case).items(), 2)}
    pairs = [(case, set(combinations(settings_of(case).items(), 2)) - known) for case in cases]
    missing = set().union(*(of_case for _, of_case in pairs))
    chosen = []
    while missing:
        chosen.append(max(pairs, key=lambda each: len(each[1] & missing) / cost_of(each[0])))
        missing -= chosen[-1][1]
    for each in sorted(chosen, key=lambda each: -cost_of(each[0])):  # what later ones have as well
        others = [other for other in chosen if other is not each]
        if each[1] <= set().union(*(of_case for _, of_case in others)):
            chosen = others
    return [case for case, _ in chosen]
