"""Match whole steps, where traces of ranks begin or end within one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np

from pptrace.recognise.infer.rank_order import Evidence, MismatchError

Match = TypeVar("Match")


def match_whole_steps(
    evidence: Mapping[int, Evidence], match: Callable[[Mapping[int, Evidence]], Match]
) -> tuple[Match, tuple[str, ...]]:
    """The result of ``match``; if needed, without the part of the traces before the first optimizer step that all ranks have,
    or after the last one, with a warning: traces may be cut off within a step.

    Raises:
        MismatchError: there is no match either way.
    """
    try:
        return match(evidence), ()
    except MismatchError as err:
        problem = err
    count = min(len(rank_evidence.optimizers) for rank_evidence in evidence.values())
    for first, last in ((None, count), (-count, None), (-count, -1)):
        if count < (1 if first is None else 2):
            continue
        parts = {rank: _cut(rank_evidence, first, last) for rank, rank_evidence in evidence.items()}
        try:
            matched = match(parts)
        except MismatchError:
            continue
        where = (
            "behind the last"
            if first is None
            else "before the first"
            if last is None
            else "before the first or behind the last"
        )
        return matched, (f"left out what is {where} optimizer step that all ranks have: {problem}",)
    raise problem


def _cut(evidence: Evidence, first: int | None, last: int | None) -> Evidence:
    """Evidence between two of a rank's optimizers, by their indices; None: from its beginning, or to its end."""
    times = evidence.optimizers
    begin = np.iinfo(np.int64).min if first is None else int(times[first]) + 1
    end = np.iinfo(np.int64).max if last is None else int(times[last - 1 if last > 0 else last]) + 1
    return evidence.between(begin, end)
