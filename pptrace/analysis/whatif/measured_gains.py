"""Gains that the measured steps tell without a prediction: of ideals alone, and of what is outside the pipeline.

An ideal alone changes no plan: each step was explained, and its part is what it would be shorter by, one figure with the parts of
the steps and the replays behind findings. With another schedule, split or size, what becomes ideal is replayed along that plan
(:mod:`pptrace.analysis.whatif.ideals`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from pptrace.analysis.findings.reasons import explained_steps
from pptrace.analysis.matrix.step_matrix import StepMatrix
from pptrace.analysis.report import Report
from pptrace.analysis.result import StepReport
from pptrace.analysis.steps.outside_pipeline import OTHER, OVERLAP, UNKNOWN_RANK, UNRECORDED
from pptrace.analysis.stragglers.alike import Place, gain_of_place, slow_rank
from pptrace.analysis.stragglers.communication import LATE_RECEIVES
from pptrace.analysis.stragglers.detectors import SHARED, Known, detect
from pptrace.analysis.stragglers.reason import gain_interval
from pptrace.analysis.whatif.ideals import Ideal
from pptrace.analysis.whatif.result import Scenario
from pptrace.analysis.whole_run import UNEQUAL_ROUTES
from pptrace.errors import UsageError
from pptrace.model.tables import Int64
from pptrace.model.wording import listed

_CAUSES = ("jitter", "communication", "host")
_REASONS = {LATE_RECEIVES: "host", UNEQUAL_ROUTES: "routing"}
"""The ideal that a reason belongs to, where that is not its cause's."""


class MeasuredGains(Struct, frozen=True, eq=False):
    """Gains of the explained steps by the word of an ideal, ns, shape (steps,), and the costs of the whole steps, ``plans``, by
    which gains of stages and ranks are replayed.
    """

    of_parts: Mapping[str, Int64] = field(default_factory=dict)
    plans: Sequence[StepMatrix] = ()

    @classmethod
    def of(cls, report: Report, plans: Sequence[StepMatrix]) -> MeasuredGains:
        """The gains of a run, whose ``plans`` have a whole step at least."""
        steps = explained_steps(report.steps, report.step_series)
        gains = {name: np.zeros(len(steps), dtype=np.int64) for name in (*_CAUSES, "routing")} if steps else {}
        for index, step in enumerate(steps):
            for cause in step.causes or ():
                name = _REASONS.get(cause.reason or "", cause.cause)
                if name in gains:
                    gains[name][index] += cause.ns
        return cls(gains, plans)

    def gains(self, ideal: Ideal) -> Int64 | None:
        """The gain of each step, ns; None of an ideal that only a replay of the plan tells."""
        if ideal.what in ("stage", "rank"):
            if not self.plans:
                return None
            _, plans = detect(SHARED, self.plans, Known())
            if (place := self._place(ideal)) is not None:
                return gain_of_place(plans, place)
            slow = slow_rank(plans) if ideal.what == "rank" else None  # its finding has the same gain
            return slow.gains if slow is not None and slow.where["rank"] == ideal.place else None
        return self.of_parts.get(ideal.name)

    def _place(self, ideal: Ideal) -> Place | None:
        """The place whose like tells what it should cost: of a rank without replicas, its only stage; None if there is none."""
        number = ideal.place
        if not isinstance(number, int):
            return None
        if ideal.what == "stage":
            return ("stage", number) if all(number < costs.table.num_stages for costs in self.plans) else None
        stages: set[int] = set()
        for costs in self.plans:
            if not (costs.ranks == number).any():
                return None
            if len(np.unique(costs.ranks, axis=0)) > 1:
                return "rank", number
            is_own = (costs.ranks[0] == number)[costs.table.rank]
            stages.update(costs.table.stage[is_own].tolist())
        return ("stage", stages.pop()) if len(stages) == 1 else None


_NO_CHANGE = {OVERLAP, UNRECORDED, UNKNOWN_RANK}
"""Parts that take no time of their own, or that of ranks of which nothing tells what it is."""


class OutsideTimes(Struct, frozen=True):
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
        less = "; the typical step has less of it than the mean step, which the gain is of: ms is its pipeline"

        def period(saved_ns: int) -> int:
            """The typical step's: at least its pipeline, where others have more of the part than it has."""
            return max(int(self.period_ns or 0) - saved_ns, today.span_ns)

        return replace(
            today,
            name=f"ideal {name}",
            ideal=(name,),
            low_ns=today.span_ns,
            high_ns=today.span_ns,
            gain_ns=gain,
            note=f"outside the pipeline, whose span stays{less * (self.period_ns - gain < today.span_ns)}",
            period_ns=period(gain),
            period_low_ns=period(gain if high is None else high),
            period_high_ns=period(gain if low is None else low),
        )
