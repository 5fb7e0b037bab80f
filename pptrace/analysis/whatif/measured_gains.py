"""Gains of ideals, as the parts of the measured steps and the replays behind findings say: one figure for both.

An ideal alone changes no plan, so nothing has to be predicted: each step was explained, and its part is what it would be shorter
by. With another schedule, split or size, what becomes ideal is replayed along that plan (:mod:`pptrace.analysis.whatif.ideals`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pptrace.analysis.findings.reasons import explained_steps
from pptrace.analysis.matrix.step_matrix import StepMatrix
from pptrace.analysis.result import Report, StepReport
from pptrace.analysis.step_parts import UNEQUAL_ROUTES
from pptrace.analysis.stragglers.alike import Place, gain_of_place
from pptrace.analysis.stragglers.detectors import SHARED, Known, detect
from pptrace.analysis.stragglers.waits import LATE_RECEIVES
from pptrace.analysis.whatif.ideals import Ideal
from pptrace.model.tables import Int64

_CAUSES = ("jitter", "communication", "host")
_REASONS = {LATE_RECEIVES: "host", UNEQUAL_ROUTES: "routing"}
"""The ideal that a reason belongs to, where that is not its cause's."""


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredGains:
    """Gains of the explained steps by the word of an ideal, ns, shape (steps,), and the costs of the whole steps, ``plans``, by
    which gains of stages and ranks are replayed.
    """

    of_parts: Mapping[str, Int64] = field(default_factory=dict)
    plans: Sequence[StepMatrix] = ()

    @classmethod
    def of(cls, report: Report, plans: Sequence[StepMatrix]) -> MeasuredGains:
        """The gains of a run."""
        steps = explained_steps(report.steps, report.step_series)
        return cls(_gains_of_parts(steps) if steps else {}, [costs for costs in plans if len(costs.step)])

    def gains(self, ideal: Ideal) -> Int64 | None:
        """The gain of each step, ns; None of an ideal that only a replay of the plan tells."""
        if ideal.what in ("stage", "rank"):
            place = self._place(ideal)
            if place is None:
                return None
            _, plans = detect(SHARED, self.plans, Known())
            return gain_of_place(plans, place)
        return self.of_parts.get(ideal.name)

    def _place(self, ideal: Ideal) -> Place | None:
        """The place whose like tells what it should cost: of a rank without replicas, its only stage; None if there is none."""
        number = ideal.place
        if not isinstance(number, int) or not self.plans:
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


def _gains_of_parts(steps: Sequence[StepReport]) -> dict[str, Int64]:
    gains = {name: np.zeros(len(steps), dtype=np.int64) for name in (*_CAUSES, "routing")}
    for index, step in enumerate(steps):
        for cause in step.causes or ():
            name = _REASONS.get(cause.reason or "", cause.cause)
            if name in gains:
                gains[name][index] += cause.ns
    return gains
