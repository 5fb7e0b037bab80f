"""Findings about single steps: outliers, and changes of the steps' length within the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from pptrace.analysis.findings.outside import finding_of
from pptrace.analysis.result import Finding, Severity, StepReport
from pptrace.analysis.stragglers.reason import LEAST_SHARE, gain_interval
from pptrace.analysis.whole_run import BlamedOp, Cause, StepChange, StepOutlier, StepSeries

_MOST_OF_IT = 0.5
"""A cause or a place with this share of a difference is named."""


def findings_of_series(series: StepSeries, steps: Sequence[StepReport]) -> Iterator[Finding]:
    """Findings on ``steps``, all of the run in order.

    The first steps of a run are long wherever things are made at their first use: they are a finding where one rank delays them.
    Steps that have more microbatches than those that they are compared with (batch size ramp-up) are none.
    """
    order = [step.step for step in steps if step.span_ns is not None and not step.is_evaluation]
    work = {step.step: step.num_forwards for step in steps}
    outliers = [
        outlier
        for outlier in series.outliers
        if work[outlier.step] <= work[outlier.usual_step] and not _is_warmup(outlier, series, order)
    ]
    if finding := _of_outliers(outliers, order, series):
        yield finding
    for change in series.changes:
        if work[change.after_step] > work[change.before_step]:
            continue
        share = (len(order) - order.index(change.step)) / len(order)
        if finding := _of_change(change, share):
            yield finding


_FAR = 1.5


def _of_outliers(outliers: Sequence[StepOutlier], order: Sequence[int], series: StepSeries) -> Finding | None:
    if not outliers:
        return None
    excess = np.zeros(len(order), dtype=np.int64)
    number_of = {step: number for number, step in enumerate(order)}
    for outlier in outliers:
        excess[number_of[outlier.step]] = outlier.excess_ns
    if int(excess.sum()) // len(order) < LEAST_SHARE * series.median_ns:
        return None
    low, _ = gain_interval(excess)
    worst = outliers[0]
    main = _largest(worst.differences, worst.excess_ns)
    times = f"{worst.span_ns / worst.usual_ns:.1f} times the usual"
    counted = (
        f"{len(outliers)} of {len(order)} steps {'is' if len(outliers) == 1 else 'are'} "
        f"{'far ' * (worst.span_ns >= _FAR * worst.usual_ns)}longer than the others"
    )
    recurs = len(outliers) > 1 or (low is not None and low > 0)  # once is not enough to say that it happens again
    return finding_of(
        excess,
        f"Outliers: {counted}{_at(main)} (step {worst.step}: {times})",
        f"step {worst.step} takes {_ms(worst.excess_ns)} ms more than step {worst.usual_step}{_op_text(worst.ops)}; "
        "look at what that rank's host did then: input, checkpoints, garbage collection, neighbours",
        {
            "cause": main.cause if main else "unexplained",
            "where": dict(main.where) if main else {},
            "steps": [outlier.step for outlier in outliers],
        },
        Severity.WARNING if recurs else Severity.INFO,
    )


def _of_change(change: StepChange, share: float) -> Finding | None:
    """A finding where steps got longer, for the ``share`` of the run's steps since then."""
    longer = change.after_ns - change.before_ns
    gain = round(longer * share)
    if gain < LEAST_SHARE * change.before_ns:
        return None
    main = _largest(change.differences, longer)
    return Finding(
        Severity.WARNING,
        f"Slower since step {change.step}: steps take {longer / change.before_ns:.0%} longer than before{_at(main)}",
        f"compare step {change.before_step} ({_ms(change.before_ns)} ms) with step {change.after_step} "
        f"({_ms(change.after_ns)} ms): clocks, temperature, input lengths, neighbours",
        gain_ns=gain,
        evidence={
            "cause": main.cause if main else "unexplained",
            "where": dict(main.where) if main else {},
            "step": change.step,
        },
        gain_low_ns=0,
        gain_high_ns=longer,
    )


def _is_warmup(outlier: StepOutlier, series: StepSeries, order: Sequence[int]) -> bool:
    """Return whether it is one of the long steps that a run begins with, and no single rank delays it."""
    long = {outlier.step for outlier in series.outliers}
    first = next((number for number, step in enumerate(order) if step not in long), len(order))
    main = _largest(outlier.differences, outlier.excess_ns)
    return outlier.step in order[:first] and (main is None or "rank" not in main.where)


def _largest(differences: Sequence[Cause] | None, total_ns: int) -> Cause | None:
    """The difference that makes most of the total; None if none does."""
    return next((part for part in differences or () if part.ns >= _MOST_OF_IT * total_ns), None)


def _at(main: Cause | None) -> str:
    if main is None:
        return ""
    where = "".join(f" of {place} {name}" for place, name in main.where.items())
    return f", by {'compute' if main.cause == 'jitter' else main.cause}{where}"


def _op_text(ops: Sequence[BlamedOp]) -> str:
    return "".join(
        f"; most of its bubble is due to {op.kind} of microbatch {op.microbatch} on rank {op.rank} (stage {op.stage})"
        for op in ops
    )


def _ms(ns: int) -> str:
    return f"{ns / 1e6:,.1f}"
