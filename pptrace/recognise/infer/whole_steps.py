"""Match whole steps, where traces of ranks begin or end within one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from pptrace.recognise.infer.rank_order import Evidence, Match, MismatchError, outcome_of


def match_whole_steps(
    evidence: Mapping[int, Evidence], match: Callable[[Mapping[int, Evidence]], Match]
) -> tuple[Match | MismatchError, tuple[str, ...]]:
    """The result of ``match``; if needed, without the part of the traces before the first optimizer step that all ranks have,
    or after the last one, with a warning: traces may be cut off within a step. The reason where there is no match either way.
    """
    problem = outcome_of(partial(match, evidence))
    if not isinstance(problem, MismatchError):
        return problem, ()
    count = min(len(rank_evidence.optimizers) for rank_evidence in evidence.values())
    both = "before the first or behind the last"
    for first, last, where in (
        (None, count, "behind the last"),
        (-count, None, "before the first"),
        (-count, -1, both),
    ):
        if count >= (1 if first is None else 2):
            parts = {rank: _cut(of_rank, first, last) for rank, of_rank in evidence.items()}
            matched = outcome_of(partial(match, parts))
            if not isinstance(matched, MismatchError):
                return matched, (f"left out what is {where} optimizer step that all ranks have: {problem}",)
    return problem, ()


def _cut(evidence: Evidence, first: int | None, last: int | None) -> Evidence:
    """Evidence between two of a rank's optimizers, by their indices; None: from its beginning, or to its end."""
    times = evidence.optimizers
    begin = np.iinfo(np.int64).min if first is None else int(times[first]) + 1
    end = np.iinfo(np.int64).max if last is None else int(times[last - 1 if last > 0 else last]) + 1
    return evidence.between(begin, end)
