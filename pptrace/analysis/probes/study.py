"""Gains of a faster target, measured in steps in which everything else was delayed (:mod:`pptrace.schedule.probe`).

A probed step is compared with the steps without a probe before and after it. Ops are delayed; messages and pauses are not,
so they seem to be faster with the target. Their part of the critical path is taken off:

    slope = ops' share of the critical path − (probed length / length − 1) / epsilon

A slope of 0.4 says that a target that takes 1 % less makes a step 0.4 % shorter. As long as the critical path stays where it is,
that is the target's share of the path; where another path takes over before the target is 1 / (1 + epsilon) as long, less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from pptrace.analysis.aligned import AlignedRun
from pptrace.analysis.matrix.step_matrix import StepMatrix
from pptrace.analysis.probes.recorded import RecordedProbes, Windows, read_probes
from pptrace.analysis.probes.signed_rank import middle_of
from pptrace.analysis.result import StepReport
from pptrace.analysis.step_parts import CriticalPath
from pptrace.analysis.whole_run import ProbedTarget
from pptrace.model.tables import Int64
from pptrace.schedule.actions import Kind
from pptrace.schedule.plan import Plan
from pptrace.schedule.probe import Probe, probe_of
from pptrace.slices import Slice

CONFIDENCE = 0.95
FEWEST = 6
"""Probed steps that an interval needs: with fewer, all of them lie on one side too often by chance."""
_NOT_DELAYED = 0.2
"""Delays that differ by more than this part from what the ops come to are not those of the probe."""
_MISSED_NS, _OVERSLEPT_NS = 100_000, 5_000_000
"""Delays of a step may be so much shorter or longer than that, however short its ops are: a host does not wake up at once."""


@dataclass(frozen=True, slots=True)
class ProbedSteps:
    """Windows of a run's steps: ``probed`` are those of steps with a probe, at which nothing but the study of probes looks."""

    plain: Windows
    probed: Windows = ()
    recorded: RecordedProbes | None = None

    @classmethod
    def of(cls, facts: Mapping[int, Mapping[str, Any]], windows: Windows, step: int | None = None) -> ProbedSteps:
        """The windows divided; ``step`` is the only step of a report, which is shown whether it had a probe or not."""
        recorded = read_probes(facts) if step is None else None
        if recorded is None:
            return cls(windows)
        plain, probed = recorded.divided(windows)
        return cls(plain or windows, probed, recorded)

    def studied(
        self, steps: Sequence[StepReport], costs: Sequence[StepMatrix], plan: Plan | None, data: AlignedRun
    ) -> tuple[ProbedTarget, ...]:
        """Results of the probe of each target, in the order in which they were asked for.

        ``steps`` and ``costs`` are those of the steps without a probe.
        """
        if self.recorded is None:
            return ()
        paths = [step.critical_path for step in steps if step.critical_path is not None and step.critical_path.span_ns]
        study = _Study(self, self.recorded, paths, costs, plan, data)
        return tuple(map(study.of, self.recorded.probes))


@dataclass(frozen=True, slots=True)
class _Study:
    windows: ProbedSteps
    recorded: RecordedProbes
    paths: Sequence[CriticalPath]
    costs: Sequence[StepMatrix]
    plan: Plan | None
    data: AlignedRun

    def of(self, probe: Probe) -> ProbedTarget:
        ratios = self._ratios(probe)
        known = ProbedTarget(probe.target_text, probe.epsilon, tuple(ratios))
        reason = self._reason(probe, list(ratios))
        if reason is not None:
            return replace(known, reason=reason)
        of_ops = median(_share(path) for path in self.paths)
        slope = middle_of([of_ops - (ratio - 1) / probe.epsilon for ratio in ratios.values()], CONFIDENCE)
        return replace(
            known,
            slope=slope.value,
            slope_low=slope.low,
            slope_high=slope.high,
            critical_path_share=median(_share(path, probe) for path in self.paths),
            replayed_slope=_replayed(probe, self.costs),
            undelayed_share=1 - of_ops,
            reason=None if slope.low is not None else _few(len(ratios)),
        )

    def _ratios(self, probe: Probe) -> dict[int, float]:
        """The length of each probed step over the mean of its neighbours; of steps that have any."""
        spans, neighbours = (_spans(windows, self.data) for windows in (self.windows.probed, self.windows.plain))
        ratios = {}
        for step in spans:
            known = [neighbours[other] for other in (step - 1, step + 1) if other in neighbours]
            if known and probe_of(self.recorded.probes, step) == probe:
                ratios[step] = spans[step] * len(known) / sum(known)
        return ratios

    def _reason(self, probe: Probe, steps: Sequence[int]) -> str | None:
        """Reason why nothing is known of a target; None where it can."""
        if not steps:
            return "no step with this probe is next to one without"
        if self.recorded.on_device:
            return "ops of a GPU are not delayed: a host that sleeps delays no more than their launches"
        if not self.paths:
            return "the critical path of the steps without a probe is not known"
        if self.plan is not None and any(probe.divides(action) for row in self.plan.ranks for action in row):
            return "the plan overlaps ops of the target with others, which cannot be delayed alone"
        ranks = sorted({rank for window in self.windows.probed for rank in window.ranks})
        if not any(_of_target(probe, self.data.rows.of_rank(rank).ops).any() for rank in ranks):
            return "no op of the run is of this target"
        off = [str(rank) for rank in ranks if not self._is_delayed(probe, rank, steps)]
        return f"the ops of rank {', '.join(off)} were not delayed as the probe says" if off else None

    def _is_delayed(self, probe: Probe, rank: int, steps: Sequence[int]) -> bool:
        """Return whether a rank was delayed for about as long as its ops in the probed steps say."""
        ops = self.data.rows.of_rank(rank).ops
        lengths = (ops["end_ns"] - ops["start_ns"])[np.isin(ops["step"], steps) & ~_of_target(probe, ops)].sum()
        expected = probe.epsilon / (1 + probe.epsilon) * float(lengths)
        slept = sum(self.recorded.delays_ns.get(rank, {}).get(step, 0) for step in steps)
        missed, overslept = (_NOT_DELAYED * expected + ns * len(steps) for ns in (_MISSED_NS, _OVERSLEPT_NS))
        return expected - missed <= slept <= expected + overslept


def _few(count: int) -> str:
    return (
        f"no interval: that takes {FEWEST} probed steps of a target, and there {'is' if count == 1 else 'are'} {count}; "
        "record more steps (without --steps there are enough)"
    )


def _spans(windows: Windows, data: AlignedRun) -> dict[int, int]:
    """The length of each step, that of its longest pipeline, ns; of those whose times compare."""
    spans: dict[int, int] = {}
    for window in windows:
        if data.is_comparable(window):
            spans[window.step] = max(window.span_ns, spans.get(window.step, 0))
    return spans


def _share(path: CriticalPath, probe: Probe | None = None) -> float:
    """The share of a critical path that is the target's ops, or any."""
    ops = (part for part in path.ops if probe is None or probe.is_target(Kind(part.kind), part.stage))
    return sum(part.ns for part in ops) / path.span_ns


def _of_target(probe: Probe, ops: Slice) -> npt.NDArray[np.bool_]:
    """The ops of a rank that are of the target, as a mask; no pair, of which neither half is where a slope is known."""
    is_target = ops["stage"] == probe.target if isinstance(probe.target, int) else ops["kind"] == str(probe.target)
    of_target: npt.NDArray[np.bool_] = is_target & (ops["kind"] != str(Kind.OVERLAP_F_B))
    return of_target


def _replayed(probe: Probe, plans: Sequence[StepMatrix]) -> float | None:
    """The slope that replays of the steps without a probe show, with all but the target longer, messages and pauses as well."""
    slopes = [_replayed_slopes(probe, costs) for costs in plans]
    return float(np.median(np.concatenate(slopes))) if slopes else None


def _replayed_slopes(probe: Probe, costs: StepMatrix) -> npt.NDArray[np.float64]:
    """The slope of each step."""
    longer = 1 + probe.epsilon
    transfers, moving = _times(longer, costs.transfers), _times(longer, costs.moving)
    durations = np.where(_is_target(probe, costs), costs.durations, _times(longer, costs.durations))
    later = costs.with_lateness(_times(longer, costs.lateness))
    changed = replace(later, durations=durations, transfers=transfers, moving=moving)
    slopes: npt.NDArray[np.float64] = longer - changed.lengths / costs.lengths
    return slopes / probe.epsilon


def _times(factor: float, values: Int64) -> Int64:
    """The known ones of some times (0 and more) longer by a factor."""
    longer: Int64 = np.where(values > 0, np.rint(factor * values), values).astype(np.int64)
    return longer


def _is_target(probe: Probe, costs: StepMatrix) -> npt.NDArray[np.bool_]:
    table = costs.table
    is_target: npt.NDArray[np.bool_] = (
        table.stage == probe.target if isinstance(probe.target, int) else table.kind == probe.target.code
    )
    return is_target
