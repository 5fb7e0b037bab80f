"""Reasons among the parts of a step: what has a finding of its own is a part of its own, as long as its replay says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec.structs import replace

from pptrace.analysis.result import StepReport
from pptrace.analysis.stragglers.communication import LATE_MEMBER
from pptrace.analysis.stragglers.detectors import Study
from pptrace.analysis.stragglers.hosts import LATE_LAUNCHES
from pptrace.analysis.stragglers.reason import Reason
from pptrace.analysis.whole_run import INTERACTION, Cause, StepSeries, Waterfall
from pptrace.model.tables import Int64


def mean_length(steps: Sequence[StepReport]) -> int:
    """The mean step, ns: from start to start, of those of which that is known, else the mean span."""
    known = [step.period_ns for step in steps if step.period_ns is not None]
    lengths = known or [step.span_ns or 0 for step in steps]
    return sum(lengths) // len(lengths)


def explained_steps(steps: Sequence[StepReport], series: StepSeries | None) -> list[StepReport]:
    """The steps whose causes are known, without outliers."""
    apart = {outlier.step for outlier in series.outliers} if series else set()
    return [step for step in steps if step.causes is not None and step.step not in apart]


def with_reasons(
    steps: Sequence[StepReport], study: Study, series: StepSeries | None = None
) -> tuple[tuple[StepReport, ...], Study]:
    """The steps with the reasons that have a finding as parts of their own, and the study without the others.

    A reason's part of a step is what its replay says the step would get back, as far as its causes and what several share go: it
    is taken out of them, from its own place first, then from the others in proportion. Of two reasons for the same time the one
    with the larger gain is named.
    """
    explained = explained_steps(steps, series)
    if not explained or not study.reasons:
        return tuple(steps), replace(study, reasons=())
    # of about the same time, that for which others wait says whose it is
    reasons = sorted(_to_name(study, explained), key=lambda one: -one.gain * (_ALIKE if one.name == LATE_MEMBER else 1))
    causes = {step.step: list(step.causes) for step in steps if step.causes is not None}
    replayed = _nearest(np.array(study.steps, dtype=np.int64), np.array(list(causes), dtype=np.int64))
    kept = []
    for reason in reasons:
        if reason.is_cause or len(reason.gains) != len(study.steps):
            kept.append(_with_gains_of_parts(reason, study.steps, causes))
            continue
        gains = dict(zip(causes, reason.gains[replayed].tolist(), strict=True))
        parts = {number: _with_part(causes[number], reason, gain) for number, gain in gains.items()}
        taken = sum(cause.ns for number in parts for cause in parts[number] if cause.reason == reason.name)
        if taken >= _MOST_OF_IT * sum(max(gain, 0) for gain in gains.values()):
            kept.append(reason)
            causes = parts
    named = (_with_causes(step, causes[step.step]) if kept and step.step in causes else step for step in steps)
    of_study = {reason.name: reason for reason in kept}
    return tuple(named), replace(
        study, reasons=tuple(of_study[reason.name] for reason in study.reasons if reason.name in of_study)
    )


def _with_gains_of_parts(reason: Reason, steps: Sequence[int], causes: Mapping[int, Sequence[Cause]]) -> Reason:
    """A reason that the causes of steps have apart, with what they have of it as its gains: one figure for both."""
    if not reason.is_cause or not causes.keys() >= set(steps):
        return reason
    of_steps = [sum(cause.ns for cause in causes[step] if cause.reason == reason.name) for step in steps]
    if not any(of_steps):
        return reason
    return replace(reason, gains=np.array(of_steps, dtype=np.int64))


def _nearest(replayed: Int64, steps: Int64) -> Int64:
    """The index of the step nearest to each one among those that were replayed: of very many, not all are."""
    if not len(replayed):
        return replayed
    order = np.argsort(replayed, kind="stable")
    right = np.searchsorted(replayed[order], steps).clip(0, len(replayed) - 1)
    left = (right - 1).clip(0)
    is_left = steps - replayed[order[left]] <= replayed[order[right]] - steps
    return order[np.where(is_left, left, right)]


_ALIKE = 1.1
_MOST_OF_IT = 0.5
"""Share of a reason's gain that its causes have to have left for it."""


def _to_name(study: Study, explained: Sequence[StepReport]) -> list[Reason]:
    """The reasons that have a finding. Devices tell what their hosts were late with, and where all ranks are late the cause says
    so. What others wait for inside their ops is what a rank is slower than its replicas by: the larger of the two is named.
    """
    length, has_devices = mean_length(explained), any(step.has_devices for step in explained)
    return [
        reason
        for reason in study.reasons
        if reason.is_finding(length)
        and not (reason.name == LATE_LAUNCHES and (has_devices or not reason.where))
        and not (
            reason.name == LATE_MEMBER
            and any(
                int(study.gains[at].mean()) > reason.gain
                for at in reason.where.items()
                if at in study.gains and (study.noise is None or at in study.noise.slow)
            )
        )
    ]


def _with_part(causes: Sequence[Cause], reason: Reason, ns: int) -> list[Cause]:
    """The causes with so much of them, as far as they go, as a reason's part."""
    if ns <= 0:
        return list(causes)
    left, kept = ns, list(causes)
    for name in (*reason.causes, INTERACTION):
        places = [
            index for index, cause in enumerate(kept) if cause.cause == name and not cause.reason and cause.ns > 0
        ]
        own = [index for index in places if reason.where.items() & kept[index].where.items()]
        for some in (own, [index for index in places if index not in own]):
            total = sum(kept[index].ns for index in some)
            taken, rest = min(left, total), total
            left -= taken
            for index in some:  # in proportion; the last one has what rounding leaves
                part = taken * kept[index].ns // rest
                taken, rest = taken - part, rest - kept[index].ns
                kept[index] = replace(kept[index], ns=kept[index].ns - part)
    return [*kept, Cause(reason.causes[0], dict(reason.where), ns - left, reason.name)]


def _with_causes(step: StepReport, causes: Sequence[Cause]) -> StepReport:
    """The step with other causes, the largest first."""
    ordered = tuple(sorted(causes, key=lambda cause: (-cause.ns, cause.cause, str(cause.where))))
    before = step.bubble.waterfall_ns
    knows_host = before is not None and before.host is not None
    parts = Waterfall.of(step.ideal_ns, ordered, knows_host=knows_host)
    return replace(step, causes=ordered, bubble=replace(step.bubble, waterfall_ns=parts))
