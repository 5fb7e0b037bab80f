"""Time of the steps outside their pipelines: it stays whatever the pipeline does, and may be made ideal itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pptrace.analysis.gain_interval import gain_interval
from pptrace.analysis.result import StepReport
from pptrace.analysis.steps.outside_pipeline import OTHER, OVERLAP, UNKNOWN_RANK, UNRECORDED
from pptrace.analysis.whatif.result import Scenario
from pptrace.errors import UsageError
from pptrace.model.tables import Int64
from pptrace.model.wording import listed

_NO_CHANGE = {OVERLAP, UNRECORDED, UNKNOWN_RANK}
"""Parts that take no time of their own, or that of ranks of which nothing tells what it is."""


@dataclass(frozen=True, slots=True)
class OutsideTimes:
    """Time from the start of the typical step to that of the next one, and what of it is outside the pipeline, ns: in all, and
    of each step by part. None where it is not known.

    ``outside_ns`` is negative where pipelines reach into the next step.
    """

    period_ns: int | None = None
    outside_ns: int | None = None
    of_parts: Mapping[str, Int64] = field(default_factory=dict)

    @classmethod
    def of(cls, steps: Sequence[StepReport], typical: StepReport | None, measured_span: int) -> OutsideTimes:
        """The times of training steps.

        Args:
            steps: those that are predicted from.
            typical: the one of the report that stands for them.
            measured_span: the typical span of their pipelines, ns.
        """
        known = [step for step in steps if step.outside is not None and not step.is_evaluation]
        if typical is None or typical.period_ns is None:
            return cls()
        parts = sorted({part.part for step in known for part in step.outside or ()} - _NO_CHANGE)
        if parts == [OTHER]:
            parts = []  # nothing was recorded there
        of_parts = {
            name: np.array([sum(part.ns for part in step.outside or () if part.part == name) for step in known])
            for name in parts
        }
        return cls(typical.period_ns, typical.period_ns - measured_span, of_parts)

    def period_of(self, span_ns: int) -> int | None:
        """The period of a step with a pipeline of this span, ns."""
        return None if self.outside_ns is None else span_ns + self.outside_ns

    def without(self, part: str, today: Scenario) -> Scenario:
        """The run without a part outside its pipeline.

        Raises:
            UsageError: nothing of the run is such a part.
        """
        if part in (UNRECORDED, UNKNOWN_RANK):
            raise UsageError(
                f"--ideal outside={part}: no gain is known: only the traces of these ranks tell why they come late"
            )
        if part not in self.of_parts or self.period_ns is None:
            has = listed(self.of_parts) if self.of_parts else "nothing that is known"
            raise UsageError(f"--ideal outside={part}: outside its pipeline this run has {has}")
        gain = int(self.of_parts[part].mean())
        low, high = gain_interval(self.of_parts[part])
        name = f"outside={part}"
        return replace(
            today,
            name=f"ideal {name}",
            ideal=(name,),
            low_ns=today.span_ns,
            high_ns=today.span_ns,
            gain_ns=gain,
            note="outside the pipeline, whose span stays",
            period_ns=self.period_ns - gain,
            period_low_ns=self.period_ns - (gain if high is None else high),
            period_high_ns=self.period_ns - (gain if low is None else low),
        )
