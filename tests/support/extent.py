"""Extent of what is tested: what continuous integration has time for, or everything where PPTRACE_ALL is set."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import product
from typing import Any

ALL = "PPTRACE_ALL" in os.environ


def by_turns(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cases of a grid: all combinations where everything is tested, else as many as the longest axis has values; those of the
    others take turns, so that each value comes up.
    """
    if ALL:
        return list(product(*axes))
    return [tuple(axis[number % len(axis)] for axis in axes) for number in range(max(map(len, axes)))]
