"""Findings on what takes time outside the pipeline, from its last op to the first one of the next step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from pptrace.analysis.findings.shares import Shares
from pptrace.analysis.gain_interval import LEAST_ANYWHERE, LEAST_SHARE, gain_interval
from pptrace.analysis.part_words import OUTSIDE_WORDS
from pptrace.analysis.result import Finding, Severity, StepReport
from pptrace.analysis.step_parts import OUTSIDE
from pptrace.analysis.steps.outside_pipeline import COMPUTE, HOST, OTHER, UNKNOWN_RANK, UNRECORDED
from pptrace.model.tables import Int64

_OF_OTHERS = (UNRECORDED, UNKNOWN_RANK)
"""Parts that are the time of other ranks, which nothing tells: no gain is known."""
_ANYWHERE = ("optimizer", HOST, COMPUTE, OTHER)
"""Parts that every run has some of."""
_MOST_OF_IT = 0.5
"""A place with this share of a part is named."""


def outside_findings(steps: Sequence[StepReport]) -> Iterator[Finding]:
    """A finding for each part outside the pipeline that takes a share of the steps worth naming: their means."""
    known = [step for step in steps if step.outside is not None and not step.is_evaluation]
    periods = [step.period_ns or 0 for step in known]
    if {entry.part for step in known for entry in step.outside or ()} <= {OTHER}:
        return  # nothing was recorded there
    shares = Shares.of(steps, sum(periods) // len(periods))
    for part, (name, advice) in OUTSIDE_WORDS.items():
        places = _places(known, part) if advice else {}
        if not places:
            continue
        of_steps: Int64 = np.sum(list(places.values()), axis=0)
        gain = int(of_steps.mean())
        low, high = gain_interval(of_steps)
        is_noise = low is not None and low <= 0 and len(known) > 1
        if gain < (LEAST_ANYWHERE if part in _ANYWHERE else LEAST_SHARE) * shares.mean_ns or is_noise:
            continue
        place, most = max(places.items(), key=lambda item: int(item[1].sum()))
        where = dict((place,)) if int(most.sum()) >= _MOST_OF_IT * int(of_steps.sum()) and place[0] else {}
        at = "".join(f" ({kind} {name})" for kind, name in where.items())
        words, share = shares.text(f"{OUTSIDE}{part}", gain)
        yield Finding(
            Severity.WARNING,
            f"Outside the pipeline: {words} is {name}{at}",
            f"{gain / 1e6:,.1f} ms from the pipeline's last op to the next step's first one, a step takes "
            f"{sum(periods) / len(periods) / 1e6:,.1f} ms: {advice}",
            gain_ns=None if part in _OF_OTHERS else gain,
            evidence={"cause": part, "where": where, "share": share, "reason": name, "is_outside": True},
            gain_low_ns=None if part in _OF_OTHERS else low,
            gain_high_ns=None if part in _OF_OTHERS else high,
        )


def _places(steps: Sequence[StepReport], part: str) -> Mapping[tuple[str, int | str], Int64]:
    """The time of a part in each step, ns, by its place (("", "") for none)."""
    places: dict[tuple[str, int | str], Int64] = {}
    for index, step in enumerate(steps):
        for entry in step.outside or ():
            if entry.part == part:
                place = next(iter(entry.where.items()), ("", ""))
                places.setdefault(place, np.zeros(len(steps), dtype=np.int64))[index] += entry.ns
    return places
