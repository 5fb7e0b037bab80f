"""Findings from what steps would gain, and shares in words: of the typical step, with those of all steps where they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pptrace.analysis.gain_interval import gain_interval
from pptrace.analysis.result import Finding, Severity, StepReport, typical_of
from pptrace.analysis.step_parts import OUTSIDE
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
