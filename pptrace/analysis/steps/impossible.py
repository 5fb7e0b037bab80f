"""Steps whose parts cannot be: one of them is longer than the step itself, since times in the traces contradict each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pptrace.analysis.matrix.step_matrix import StepMatrix
from pptrace.analysis.result import StepReport
from pptrace.model.wording import listed


def without_impossible(
    steps: Sequence[StepReport], costs: Sequence[StepMatrix]
) -> tuple[tuple[StepReport, ...], tuple[StepMatrix, ...], str]:
    """The steps, null of what those are made of that have an impossible part, the costs of the others, and a line that says so.

    The replay that takes a step apart runs its ops one after the other on each rank. Where a recorder has stretched them, or one
    rank's clock has another unit, it takes many times as long as the step did.
    """
    numbers = [
        step.step
        for step in steps
        if step.span_ns is not None and any(abs(ns) > step.span_ns for ns in (step.span_parts or {}).values())
    ]
    if not numbers:
        return tuple(steps), tuple(costs), ""
    kept = [costs_of.of_windows(np.flatnonzero(~np.isin(costs_of.step, numbers))) for costs_of in costs]
    line = (
        f"step {listed(map(str, numbers))}: parts would be longer than the step: times of ops and messages in the traces "
        "contradict each other, and what it is made of is null; pptrace doctor says what is known of the recording"
    )
    without = tuple(
        replace(step, ideal_ns=None, causes=None, bubble=replace(step.bubble, waterfall_ns=None))
        if step.step in numbers
        else step
        for step in steps
    )
    return without, tuple(costs_of for costs_of in kept if len(costs_of.step)), line
