"""Findings on what takes time outside the pipeline, from its last op to the first one of the next step.

Findings from what steps would gain, and shares in words: of the typical step, with those of all steps where they differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pptrace.analysis.part_words import OUTSIDE_WORDS
from pptrace.analysis.result import Finding, Severity, StepReport, typical_of
from pptrace.analysis.steps.outside_pipeline import COMPUTE, HOST, OTHER, UNKNOWN_RANK, UNRECORDED
from pptrace.analysis.stragglers.reason import LEAST_ANYWHERE, LEAST_SHARE, gain_interval
from pptrace.analysis.whole_run import OUTSIDE
from pptrace.model.tables import Int64

_FAR_LESS = 0.5


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of the ``typical`` step, and of a mean one of ``mean_ns``."""

    typical: StepReport | None
    mean_ns: int

    @classmethod
    def of(cls, steps: Sequence[StepReport], mean_ns: int) -> Shares:
        """The shares of a run's steps."""
        return cls(typical_of(steps), mean_ns)

    def text(self, part: str, of_mean_ns: float) -> tuple[str, float]:
        """(words for the share of a part of which a mean step has ``of_mean_ns``, the first share in them).

        What hardly comes in the typical step has the share of all steps alone.
        """
        of_mean = of_mean_ns / self.mean_ns
        of_typical = self._of_typical(part)
        if of_typical is None:
            return f"{of_mean:.1%} of the step", of_mean
        if of_typical < _FAR_LESS * of_mean:
            return f"{of_mean:.1%} of all steps", of_mean
        also = "" if f"{of_typical:.0%}" == f"{of_mean:.0%}" else f" ({of_mean:.1%} of all steps)"
        return f"{of_typical:.1%} of the step{also}", of_typical

    def _of_typical(self, part: str) -> float | None:
        step = self.typical
        if step is None or not step.length_ns:
            return None
        if part.startswith(OUTSIDE):
            outside = step.outside or ()
            return sum(entry.ns for entry in outside if f"{OUTSIDE}{entry.part}" == part) / step.length_ns
        return None if step.parts is None else step.parts.get(part, 0) / step.length_ns


def finding_of(
    of_steps: Int64, title: str, detail: str, evidence: Mapping[str, Any], severity: Severity = Severity.WARNING
) -> Finding:
    """A finding by what each step would get back, ns: the mean, and its interval."""
    low, high = gain_interval(of_steps)
    return Finding(severity, title, detail, int(of_steps.sum()) // len(of_steps), evidence, low, high)


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
