"""Time of the steps outside their pipelines: it stays whatever the pipeline does, and may be made ideal itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from pptrace.analysis.gain_interval import gain_interval
from pptrace.analysis.outside_pipeline import OTHER, OVERLAP
from pptrace.analysis.result import Report
from pptrace.analysis.whatif.result import Scenario
from pptrace.errors import UsageError
from pptrace.model.tables import Int64
from pptrace.model.wording import listed


@dataclass(frozen=True, slots=True)
class OutsideTimes:
    """Typical time from step to step, and what of it is outside the pipeline, ns: in all, and of each step by part."""

    period_ns: int | None = None
    outside_ns: int | None = None
    of_parts: Mapping[str, Int64] = field(default_factory=dict)

    @classmethod
    def of(cls, report: Report) -> OutsideTimes:
        """The times of a report's training steps."""
        known = [step for step in report.steps if step.outside is not None and not step.is_evaluation]
        if not known:
            return cls()
        parts = sorted({part.part for step in known for part in step.outside or ()} - {OVERLAP})
        if parts == [OTHER]:
            parts = []  # nothing was recorded there
        of_parts = {
            name: np.array([sum(part.ns for part in step.outside or () if part.part == name) for step in known])
            for name in parts
        }
        typical = sorted(known, key=lambda step: step.period_ns or 0)[(len(known) - 1) // 2]
        period = typical.period_ns or 0
        return cls(period, period - (typical.span_ns or 0), of_parts)

    def period_of(self, span_ns: int) -> int | None:
        """The period of a step with a pipeline of this span."""
        return None if self.outside_ns is None else span_ns + self.outside_ns

    def without(self, part: str, today: Scenario) -> Scenario:
        """The run without a part outside its pipeline.

        Raises:
            UsageError: nothing of the run is such a part.
        """
        if part not in self.of_parts or self.period_ns is None:
            has = listed(self.of_parts) if self.of_parts else "nothing that is known"
            raise UsageError(f"--ideal outside={part}: outside its pipeline this run has {has}")
        gain = int(self.of_parts[part].mean())
        low, high = gain_interval(self.of_parts[part])
        name = f"outside={part}"
        span = self.period_ns - (self.outside_ns or 0)
        return replace(
            today,
            name=f"ideal {name}",
            ideal=(name,),
            span_ns=span,
            low_ns=span,
            high_ns=span,
            gain_ns=gain,
            note=f"outside the pipeline, whose span stays{_interval(low, high)}",
            period_ns=self.period_ns - gain,
        )


def _interval(low: int | None, high: int | None) -> str:
    """The interval of a gain in words; "" of one step."""
    return "" if low is None or high is None else f"; gain (90 %) {low / 1e6:,.2f} to {high / 1e6:,.2f} ms"
