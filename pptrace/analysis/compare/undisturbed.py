"""The step of a run without what other work on its machine took: every op and message as in the least disturbed of the steps.

A rank that waits for a core is late by what the machine did just then, which the next run does not meet again. Of each op and
each message of the plan, all by themselves, the steps in which it took least are those in which nobody disturbed it; replayed
together they are a step that the median of a busy machine's steps says little about, and that two runs of one program share.

Steadiness of the steps of a run by the many ops inside each of them: evidence where there are only a few steps.

A step of a pipeline has dozens of ops of a kind on each stage, one per microbatch, which have the same to do. What these deviate
by is what disturbs a step: of m of them in a row, which vary each by itself, the sum varies √m times less, and a machine that is
busy for the whole of a run, which no step of it shows, has ops that vary. Where they hardly do, the run was quiet.
Only the part of the step that ops decide is known so well: how long they take, one after the other as the plan has it.
"""

from __future__ import annotations

from math import hypot, sqrt

import numpy as np
from msgspec import Struct

from pptrace.analysis.compare.bootstrap import (
    FEWEST_STEPS,
    LASTING,
    RUN_TO_RUN,
    USUAL_DEVIATION,
    Prior,
    Typical,
    block_length,
    drawn_steps,
)
from pptrace.analysis.matrix.step_matrix import StepMatrix
from pptrace.model.tables import Floats, Int64
from pptrace.schedule.message_graph import Graph, Messaging, make_graph

_FEWEST_UNDISTURBED = 25
"""With fewer steps the least disturbed of them say little."""
_LEVEL = 0.04
"""The part of the steps in which an op takes less than what it is taken to take undisturbed."""
_NEXT_LEVEL = 0.12
_STILL_DISTURBED = 1.0
"""Standard deviation from run to run, in parts of how much longer the step is at the next level: where ops that are hardly
disturbed still differ much, the least ones are disturbed too. 26 runs of three programs, whose ranks waited for a core for 42 %
to 415 % of the time, all threads together, then deviated from their likes by 0.9 standard deviations at most (root mean square).
"""
_NUM_SAMPLES = 60
_MOST_CELLS = 20_000_000
"""Ops and messages × steps × samples that are drawn; of larger plans steps and then samples are fewer."""
_FEWEST_SAMPLES = 20


class OpTimes(Struct, frozen=True, eq=False):
    """Times of the ops of a plan with their delays (windows, rows) and of its messages (windows, messages), ns, and its graph.

    ``step`` is the number of each window's step, ``pipelines`` the windows of each pipeline.
    """

    step: Int64
    ops: Floats
    messages: Floats
    pipelines: tuple[Int64, ...]
    graph: Graph

    def undisturbed(self) -> Typical | None:
        """The undisturbed step and how certain it is; None with too few steps."""
        steps = np.unique(self.step)
        if len(steps) < _FEWEST_UNDISTURBED:
            return None
        cells = max(1, (self.ops.shape[1] + self.messages.shape[1]) * len(self.pipelines)) * len(steps)
        number = min(_NUM_SAMPLES, max(_FEWEST_SAMPLES, _MOST_CELLS // cells))
        usual, more = self._span(steps, _LEVEL), self._span(steps, _NEXT_LEVEL)
        sampled = np.array([self._span(steps[drawn], _LEVEL) for drawn in drawn_steps(len(steps))[:number]])
        return _typical(usual, more, sampled, len(steps))

    def _span(self, steps: Int64, level: float) -> float:
        """The length of the replayed step, ns; of several pipelines that of the longest."""
        lengths = []
        for windows in self.pipelines:
            chosen = windows[np.searchsorted(self.step[windows], steps)]
            ops, messages = (_level_of(values[chosen], level)[np.newaxis] for values in (self.ops, self.messages))
            lengths.append(float(self.graph.ends(ops, messages).max()))
        return max(lengths)


def least_disturbed(series: Int64) -> Typical | None:
    """Time of a part of the step in the least disturbed of a series of steps, ns; None with too few steps."""
    if len(series) < _FEWEST_UNDISTURBED:
        return None
    samples = _level_of(series[drawn_steps(len(series))].T, _LEVEL)
    usual, more = (float(_level_of(series, level)) for level in (_LEVEL, _NEXT_LEVEL))
    return _typical(usual, more, samples, len(series))


def _typical(usual: float, more: float, samples: Floats, num_steps: int) -> Typical:
    """A value at both levels, ns, with how much it varies in samples of blocks of so many steps."""
    num_blocks = num_steps / block_length(num_steps)
    run_to_run = hypot(RUN_TO_RUN * usual, _STILL_DISTURBED * (more - usual))
    return Typical(round(usual), float(samples.std(ddof=1)), max(num_blocks - 1, 1.0), run_to_run)


def _level_of(values: Floats | Int64, level: float) -> Floats:
    """The value of each column that this part of its rows is below: with any number of rows the same on average (Weibull)."""
    return np.percentile(values, 100 * level, axis=0, method="weibull")


def op_times(costs: StepMatrix | None) -> OpTimes | None:
    """The times of ops and messages of a plan; None without one, or where not all pipelines have all steps."""
    if costs is None or costs.plan is None:
        return None
    pipelines = tuple(costs.of_pipelines())
    if len({costs.step[windows].tobytes() for windows in pipelines}) != 1:
        return None
    graph = costs.graph or make_graph(costs.plan.compute_only(), Messaging.AHEAD)
    ops = costs.durations.astype(np.float64) + costs.delays
    return OpTimes(costs.step, ops, np.maximum(costs.transfers, 0).astype(np.float64), pipelines, graph)


_FEWEST_ALIKE = 4
"""Fewer ops of a kind on a stage in a step do not show how much they vary."""
_LEAST_DEVIATION, _LEAST_LASTING = 0.02, 0.03
"""Shares by which steps of a run, and runs as a whole, may deviate however alike the ops of a step are: clocks of GPUs change,
and processes are placed anew.
"""


class Steadiness(Struct, frozen=True):
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
