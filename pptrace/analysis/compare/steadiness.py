"""Steadiness of the steps of a run by the many ops inside each of them: evidence where there are only a few steps.

A step of a pipeline has dozens of ops of a kind on each stage, one per microbatch, which have the same to do. What these deviate
by is what disturbs a step: of m of them in a row, which vary each by itself, the sum varies √m times less, and a machine that is
busy for the whole of a run, which no step of it shows, has ops that vary. Where they hardly do, the run was quiet.
Only the part of the step that ops decide is known so well: how long they take, one after the other as the plan has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np

from pptrace.analysis.compare.bootstrap import FEWEST_STEPS, LASTING, USUAL_DEVIATION, Prior
from pptrace.analysis.matrix.step_matrix import StepMatrix
from pptrace.model.tables import Int64
from pptrace.schedule.message_graph import Messaging, make_graph

_FEWEST_ALIKE = 4
"""Fewer ops of a kind on a stage in a step do not show how much they vary."""
_LEAST_DEVIATION, _LEAST_LASTING = 0.02, 0.03
"""Shares by which steps of a run, and runs as a whole, may deviate however alike the ops of a step are: clocks of GPUs change,
and processes are placed anew.
"""


@dataclass(frozen=True, slots=True)
class Steadiness:
    """``deviation`` of an op from its likes, as a share; ``num_ops`` of a rank in a step; ``share`` of a step that ops decide."""

    deviation: float
    num_ops: float
    share: float

    @property
    def of_ops(self) -> Prior:
        """Prior of a sum of ops."""
        lasting = min(max(self.deviation, _LEAST_LASTING), LASTING)
        return Prior(max(self.deviation / sqrt(self.num_ops), _LEAST_DEVIATION), lasting)

    @property
    def of_steps(self) -> Prior:
        """Prior of a whole step, of which the rest varies as nothing is known of it."""
        ops, rest = self.of_ops, 1 - self.share
        return Prior(self.share * ops.deviation + rest * USUAL_DEVIATION, self.share * ops.lasting + rest * LASTING)


def steadiness_of(costs: StepMatrix | None, lengths: Int64) -> Steadiness | None:
    """Steadiness of a run; None where too few ops show it, and where the steps are many.

    Args:
        costs: of its windows.
        lengths: of its steps, ns.
    """
    if costs is None or costs.plan is None or not len(costs.step) or len(lengths) >= FEWEST_STEPS:
        return None  # many steps show by themselves how they vary
    variance = _variance(costs)
    if variance is None:
        return None
    graph = make_graph(costs.plan.compute_only(), Messaging.AHEAD)
    durations = costs.durations.astype(np.float64)
    alone = graph.ends(durations, np.zeros((len(durations), costs.transfers.shape[1]))).max(axis=1)
    length = float(np.median(lengths))
    share = min(float(np.median(alone)) / length, 1.0) if length > 0 else 0.0
    return Steadiness(sqrt(variance), durations.shape[1] / costs.table.pp, share)


def _variance(costs: StepMatrix) -> float | None:
    """The variance of ops about the mean of their kind on their stage in their step, as a share of it; a mean over ops."""
    table = costs.table
    _, of_row, counts = np.unique(
        np.stack((table.kind, table.stage), axis=1), axis=0, return_inverse=True, return_counts=True
    )
    of_row = of_row.reshape(-1)
    is_enough = counts >= _FEWEST_ALIKE
    if not is_enough.any():
        return None
    times, number = costs.durations[:, np.argsort(of_row, kind="stable")].astype(np.float64), counts[is_enough]
    firsts = np.cumsum(counts) - counts
    mean, of_squares = (np.add.reduceat(values, firsts, axis=1)[:, is_enough] / number for values in (times, times**2))
    squares = np.maximum(of_squares - mean**2, 0) * number / (number - 1)
    relative = np.divide(squares, mean**2, out=np.zeros_like(mean), where=mean > 0)
    return float(np.average(relative, axis=1, weights=number).mean())
