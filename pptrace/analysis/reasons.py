"""Reasons among the parts of a step: what has a finding of its own is a part of its own, as long as its replay says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from pptrace.analysis.result import StepReport
from pptrace.analysis.step_parts import INTERACTION, Cause, Waterfall
from pptrace.analysis.stragglers.hosts import LATE_LAUNCHES
from pptrace.analysis.stragglers.late_members import LATE_MEMBER
from pptrace.analysis.stragglers.reason import Reason
from pptrace.analysis.stragglers.study import Study
from pptrace.analysis.whole_run import StepSeries


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

    A reason's part of a step is what its replay says the step would get back. It is taken out of the reason's causes as far as
    they go, from its place first, then from the others in proportion; what they lack is time that several causes share.
    """
    explained = explained_steps(steps, series)
    if not explained or not study.reasons:
        return tuple(steps), replace(study, reasons=())
    reasons = tuple(_to_name(study, explained))
    apart = [reason for reason in reasons if not reason.is_cause and len(reason.gains) == len(study.steps)]
    order = np.argsort(study.steps, kind="stable")
    numbers = np.array(study.steps, dtype=np.int64)[order]
    named = []
    for step in steps:
        if step.causes is not None and apart:
            at = int(order[np.abs(numbers - step.step).argmin()])  # of very many steps some were replayed
            causes = list(step.causes)
            for reason in apart:
                causes = _with_part(causes, reason, int(reason.gains[at]))
            step = _with_causes(step, causes)
        named.append(step)
    return tuple(named), replace(study, reasons=reasons)


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
        and not (reason.name == LATE_MEMBER and _gain_of_place(study, reason.where) > reason.gain)
    ]


def _gain_of_place(study: Study, where: Mapping[str, int | str]) -> int:
    return max((int(study.gains[at].mean()) for at in where.items() if at in study.gains), default=0)


def _with_part(causes: Sequence[Cause], reason: Reason, ns: int) -> list[Cause]:
    """The causes with so much of them as a reason's part."""
    if ns <= 0:
        return list(causes)
    left, kept = ns, list(causes)
    for name in reason.causes:
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
    if left:
        shared = sum(cause.ns for cause in kept if cause.cause == INTERACTION)
        kept = [cause for cause in kept if cause.cause != INTERACTION] + [Cause(INTERACTION, {}, shared - left)]
    return [*kept, Cause(reason.causes[0], dict(reason.where), ns, reason.name)]


def _with_causes(step: StepReport, causes: Sequence[Cause]) -> StepReport:
    """The step with other causes, the largest first."""
    ordered = tuple(sorted(causes, key=lambda cause: (-cause.ns, cause.cause, str(cause.where))))
    before = step.bubble.waterfall_ns
    knows_host = before is not None and before.host is not None
    parts = Waterfall.of(step.ideal_ns, ordered, knows_host=knows_host)
    return replace(step, causes=ordered, bubble=replace(step.bubble, waterfall_ns=parts))
