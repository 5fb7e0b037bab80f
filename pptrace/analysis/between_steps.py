"""Time between steps: from the last op of a step to the first of the next one nothing of the pipeline runs, and the windows of
steps, with all that is explained of them, do not have it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np

from pptrace.analysis.gain_interval import LEAST_ANYWHERE, gain_interval
from pptrace.analysis.result import Finding, MarkedStep, RankDevice, Severity, StepReport

BETWEEN_STEPS = "time between steps"
_UPDATE = ("GRAD_SYNC", "OPTIMIZER")
_EVALUATION = "EVAL"


def between_steps(
    steps: Sequence[StepReport], marked: Sequence[MarkedStep], device: Sequence[RankDevice]
) -> Finding | None:
    """The finding that steps of a pipeline begin late after the ones before; None where that is little, or not known.

    What ranks do there for the update (gradient sync, optimizer) is no part of it: of each pair of steps it is taken off as long
    as the rank that takes longest. Pairs with an evaluation between them are left out, as are all of a run without marks of steps
    on every rank, and of one on devices, whose work the host's marks do not bound.
    """
    if any(entry.breakdown.busy_ns is not None for entry in device):
        return None
    pairs = np.array(list(_pairs(steps, marked)), dtype=np.int64).reshape(-1, 2)
    if not len(pairs):
        return None
    lost, periods = pairs.T
    gain, period = int(lost.sum()) // len(lost), int(periods.sum()) // len(lost)
    if gain < LEAST_ANYWHERE * period:
        return None
    low, high = gain_interval(lost)
    if low is not None and low <= 0:
        return None
    share = gain / period
    return Finding(
        Severity.WARNING,
        f"Between steps: {share:.1%} of the time from step to step passes before the next one's first op",
        f"a step begins every {period / 1e6:,.1f} ms, and its own length does not have these {gain / 1e6:,.1f} ms: gradient "
        "sync and optimizer are not in them; look at what the ranks do between steps, that of stage 0 first: input, logging, "
        "checkpoints",
        gain_ns=gain,
        evidence={
            "cause": "unexplained",
            "where": {},
            "share": share,
            "reason": BETWEEN_STEPS,
            "period_ns": period,
            "num_pairs": len(lost),
        },
        gain_low_ns=low,
        gain_high_ns=high,
    )


def _pairs(steps: Sequence[StepReport], marked: Sequence[MarkedStep]) -> Iterator[tuple[int, int]]:
    """(time lost between them, time from start to start) of steps that follow each other, ns."""
    spans: dict[int, dict[int, Mapping[str, int]]] = {}
    for mark in marked:
        spans.setdefault(mark.step, {})[mark.rank] = mark.spans
    for first, second in pairwise(steps):
        if not all(
            step.has_pipeline and step.span_ns is not None and not step.is_evaluation for step in (first, second)
        ):
            continue
        of_first, of_second = spans.get(first.step, {}), spans.get(second.step, {})
        ranks = {rank.rank for rank in first.ranks}
        if second.step != first.step + 1 or not ranks <= set(of_first) or not ranks <= set(of_second):
            continue
        if any(_EVALUATION in of_rank for of_rank in (*of_first.values(), *of_second.values())):
            continue
        update = max(sum(of_rank.get(name, 0) for name in _UPDATE) for of_rank in of_first.values())
        yield max(second.start_ns - first.end_ns - update, 0), second.start_ns - first.start_ns
