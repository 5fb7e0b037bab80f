"""Steps, their ranks and parts, and reasons for these, for tests of findings and sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from msgspec.structs import asdict, replace

from pptrace.analysis.findings.find import find
from pptrace.analysis.findings.reasons import with_reasons
from pptrace.analysis.result import Finding, RankStep, ScheduleSummary, StepReport
from pptrace.analysis.stragglers.detectors import Study
from pptrace.analysis.stragglers.reason import Reason
from pptrace.analysis.whole_run import Bubble, Cause, Waterfall
from pptrace.recognise.device.work import NO_DEVICE

SCHEDULE = ScheduleSummary("1f1b", 8, 4, 1, "metadata", ())


def by_cause(causes: Iterable[Cause] | None) -> Counter[str]:
    """Time of each cause at all its places, ns."""
    sums = Counter[str]()
    for cause in causes or ():
        sums[cause.cause] += cause.ns
    return sums


def parts_ns(
    compute: int,
    structural: int = 0,
    imbalance: int = 0,
    jitter: int = 0,
    communication: int = 0,
    host: int | None = None,
    unexplained: int = 0,
    *,
    straggler: int = 0,
    interaction: int = 0,
) -> Waterfall:
    """The parts of a step that has few of them, ns."""
    return Waterfall(compute, structural, imbalance, straggler, jitter, communication, host, interaction, unexplained)


def rank_step(
    rank: int = 0, compute: int | None = 0, exposed: int | None = 0, bubble: int | None = 0, **others: Any
) -> RankStep:
    """A rank in a window of 1,000 ns, without ops, calls and a device but for ``others``."""
    return replace(RankStep(rank, 0, 1_000, compute, exposed, bubble, {}, (), {}, NO_DEVICE, None, ()), **others)


def step_with(fall: Waterfall | None, span: int = 1000, causes: tuple[Cause, ...] | None = None) -> StepReport:
    """A step without ranks, whose causes are the parts of its waterfall, at no place, or those that are given."""
    if fall is not None and causes is None:
        causes = tuple(Cause(name, {}, ns) for name, ns in asdict(fall).items() if name != "compute" and ns is not None)
    lengths = {"step": 0, "start_ns": 0, "end_ns": span, "span_ns": span, "ideal_ns": 600}
    return StepReport(**lengths, bubble=Bubble(0.1, 0.1, 0.1, 0.1, fall), ranks=(), causes=causes)


def steps_with(*causes: Cause, num_steps: int = 4) -> list[StepReport]:
    """Steps of 1,000 ns which are all the same."""
    return [replace(step_with(None, causes=causes), step=number) for number in range(num_steps)]


def reason_with(
    gains: int | Sequence[int], causes: tuple[str, ...], name: str = "long sequences", **where: int
) -> Reason:
    """A reason that gains as much in each of four steps, or what is given in each step."""
    return Reason(
        name,
        causes,
        where,
        "Reason: {share}",
        "look",
        np.array([gains] * 4 if isinstance(gains, int) else gains),
        {"figure": 1},
    )


def findings_with(steps: Sequence[StepReport], *reasons: Reason, **known: Any) -> tuple[Finding, ...]:
    """The findings of steps of which reasons are parts of their own; ``known`` are other fields of their study."""
    study = Study(reasons=reasons, steps=tuple(step.step for step in steps), **known)
    named, study = with_reasons(steps, study)
    return find(named, SCHEDULE, study)
