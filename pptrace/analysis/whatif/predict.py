"""Prediction of one change: its typical step, the interval of that, and what was assumed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from math import hypot, sqrt

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from pptrace.analysis.shared_devices import CORE_WAIT, USUAL_CORE_WAIT
from pptrace.analysis.whatif.change import Change, other_stage_maps, stage_map_of
from pptrace.analysis.whatif.collectives import other_assumptions, with_speeds
from pptrace.analysis.whatif.ideals import apply_ideal
from pptrace.analysis.whatif.recompute import SPLIT_COST, parts_after, with_recompute
from pptrace.analysis.whatif.replay import Graphs, Replayed, Target, changes_ops, replay, splits_otherwise
from pptrace.analysis.whatif.stage_costs import StageCosts, with_fixed_share, with_weight_share
from pptrace.analysis.whatif.stage_map import StageMap, stage_map
from pptrace.errors import ScheduleError
from pptrace.model.tables import Int64
from pptrace.schedule.message_graph import BESIDE_EACH_OTHER, Messaging
from pptrace.schedule.plan import Plan

FEWEST_STEPS = 5
"""With fewer whole steps their own spread says little, and steps are drawn from the microbatches of those that there are."""
_DRAWN_STEPS, _FEWEST_DRAWN, _DRAWN_WINDOWS = 20, 8, 1024
"""Steps that are drawn; and with many pipelines, whose longest varies little, no fewer than these, of about so many windows."""
_MANY_WINDOWS = 256
"""Windows from which on what is assumed is tried with the steps that there are, without drawing others."""
_MOST_FIXED = 0.06
"""Part of an op that may be the same however much it does: host work for each op, kernels that smaller parts fill less well."""
_BETWEEN_RUNS = 0.015
"""Part of a step by which two runs of the same program typically differ on the same machine, whatever their steps say."""
_NINE_IN_TEN = 1.645
"""Standard deviations within which nine in ten of normal values lie."""
_NUM_SAMPLES = 1000
_AS_CLOSE = 0.015
"""Difference of errors below which two ways of sending and receiving explain a run equally well."""
_INTERVAL = (5, 95)


class Baseline(Struct, frozen=True, eq=False, dict=True):
    """The run as it was: its costs, and the lengths of its steps, ns.

    ``core_wait`` is the share of the time for which a rank waited for a core, the mean over ranks; 0 where it is not known.
    ``posted`` is the run's plan with its sends and receives in their order, where that is another than lowering makes, and
    ``ways`` are those in which they may wait for each other.
    """

    costs: StageCosts
    measured: Int64
    core_wait: float = 0.0
    posted: Plan | None = None
    ways: tuple[Messaging, ...] = BESIDE_EACH_OTHER

    @property
    def between_runs(self) -> float:
        """The part of a step by which another run may differ, of nine in ten: more where ranks waited for cores."""
        beyond_usual = max(self.core_wait - USUAL_CORE_WAIT, 0.0)
        return hypot(_BETWEEN_RUNS, _NINE_IN_TEN * sqrt(2) * CORE_WAIT * beyond_usual)

    @cached_property
    def messaging(self) -> Messaging:
        """The way of sending and receiving with which the run's own replay comes closest to its steps.

        Where several come about as close, it is the first of them: many runs look the same with any, and others would not.
        """
        return self._as_close[0]

    @property
    def other_messaging(self) -> tuple[Messaging, ...]:
        """Ways that explain the steps about as well as that which is taken: with another schedule they may differ."""
        return self._as_close[1:] if self.costs.transfer.any() else ()

    @cached_property
    def _as_close(self) -> tuple[Messaging, ...]:
        errors = {messaging: self._error_of(replayed) for messaging, replayed in self._replays.items()}
        return tuple(messaging for messaging in errors if errors[messaging] <= min(errors.values()) + _AS_CLOSE)

    @cached_property
    def _replays(self) -> dict[Messaging, Replayed]:
        replays = {}
        for messaging in self.ways:
            with suppress(ScheduleError):
                own = Target(self.posted or self.costs.plan, identity_map(self.costs), messaging, graphs=self.graphs)
                replays[messaging] = replay(self.costs, own)
        return replays

    @cached_property
    def other_fixed(self) -> tuple[tuple[float, StageCosts], ...]:
        """Fixed parts that ops may have instead, as parts of the usual one, each with the costs; none where a user gives it."""
        if self.costs.assumed.fixed is not None:
            return ()
        parts = (0.0, _MOST_FIXED) if self.costs.fixed.any() else (_MOST_FIXED,)
        return tuple((part, with_fixed_share(self.costs, part)) for part in parts)

    @cached_property
    def graphs(self) -> Graphs:
        """Graphs of the run's own plan that were made so far."""
        return {}

    def _error_of(self, replayed: Replayed) -> float:
        return float(np.median(np.abs(replayed.spans - self.measured) / np.maximum(self.measured, 1)))

    @property
    def replayed(self) -> Replayed:
        return self._replays[self.messaging]

    @cached_property
    def measured_span(self) -> int:
        return typical(self.measured)

    @cached_property
    def replay_span(self) -> int:
        return typical(self.replayed.spans)

    @cached_property
    def error(self) -> float:
        """Distance of the replayed typical step from the measured one, as a part of it."""
        return abs(self.replay_span - self.measured_span) / self.measured_span if self.measured_span else 0.0

    @cached_property
    def error_of_steps(self) -> float:
        """The same of single steps: the median of theirs, or the error of the typical one where that is larger."""
        return max(self.error, self._error_of(self.replayed))


class Prediction(Struct, frozen=True):
    """The typical step after a change, ns: its length with the 90 % interval, and bubble over compute.

    ``split_cost`` is the part of a B by which I and W together are longer at one end of the interval; 0 where that is no matter.
    """

    span: int
    low: int
    high: int
    bubble_ratio: float
    split_cost: float = 0.0


def typical(spans: Int64) -> int:
    """The lower median: a step that there is."""
    return int(np.sort(spans)[(len(spans) - 1) // 2])


def identity_map(costs: StageCosts) -> StageMap:
    layers = costs.layers or (1,) * costs.num_stages
    return stage_map(layers, layers, costs.ends())


def predict(baseline: Baseline, change: Change, plan: Plan) -> Prediction:
    """Predict the typical step of a change that makes a plan.

    The replay of the change is scaled as the replay of the run as it was has to be to give what was measured. The interval is
    that of the median over steps, wider by the error of the run's own replay, by what runs of one program differ, by what the
    assumptions may change, and by what splitting backwards may cost.

    Raises:
        UsageError: a split does not fit the plan.
    """
    costs, target = target_of(baseline, change, plan)
    replayed = replay(costs, target)
    factor = baseline.measured_span / baseline.replay_span if baseline.replay_span else 1.0
    usual = float(typical(replayed.spans))  # drawn steps may all be longer
    own = _bounds(costs, target, replayed)
    variants, of_fixed = _variants(baseline, change, costs, target), _of_fixed_parts(baseline, change, costs, target)
    split_cost = _split_cost(costs, target)
    split = _split_ratio(costs, target, split_cost)
    bounds = [(usual, usual), own, *_bounds_of_variants((costs, target), own, variants)]
    bounds = [(low * min(split, 1.0), high * max(split, 1.0)) for low, high in bounds]
    bounds += _bounds_of_variants((costs, target), own, of_fixed)
    margin = baseline.error_of_steps + baseline.between_runs
    span = round(usual * factor)
    return Prediction(
        span=span,
        low=max(0, int(np.floor(min(low for low, _ in bounds) * factor * (1 - margin)))),
        high=int(np.ceil(max(high for _, high in bounds) * factor * (1 + margin))),
        bubble_ratio=float(np.median(replayed.bubble_ratios)),
        split_cost=split_cost,
    )


def target_of(baseline: Baseline, change: Change, plan: Plan) -> tuple[StageCosts, Target]:
    """(the costs with what is ideal, the plan and what it is made of) of a change.

    Raises:
        UsageError: a split or an ideal does not fit the run.
    """
    costs = baseline.costs
    graphs = baseline.graphs if plan is costs.plan else {}
    if plan is costs.plan and change.prefetch is None:
        plan = baseline.posted or plan
    target = Target(
        plan,
        stage_map_of(costs, change, plan.chain_length, plan.name),
        baseline.messaging if change.prefetch is None else Messaging.BLOCKING_RECEIVES,
        change.prefetch or 0,
        scale=change.microbatch_size,
        link_speed=change.link_speed,
        placement=change.placement,
        graphs=graphs,
    )
    return changed_costs(costs, change, plan), target


def changed_costs(costs: StageCosts, change: Change, plan: Plan, **assumed: bool) -> StageCosts:
    """The costs with other speeds of collectives (``assumed``: of :func:`with_speeds`), other recompute, and what is ideal.

    Raises:
        UsageError: the run has no such axis, stage or rank.
    """
    costs = with_speeds(costs, change.collective_speeds, **assumed)
    if change.recompute_layers is not None:
        costs = with_recompute(costs, parts_after(costs, change.recompute_layers, plan.chain_length))
    for ideal in change.ideals:
        costs = apply_ideal(costs, ideal)
    return costs


def _bounds(costs: StageCosts, target: Target, replayed: Replayed) -> tuple[float, float]:
    """The 90 % interval of the typical step: by bootstrap over steps, or with few of them that of drawn steps; ns."""
    if len(replayed.spans) < FEWEST_STEPS:
        spans = np.concatenate((replay(_drawn(costs), target).spans, replayed.spans))
        return float(np.percentile(spans, _INTERVAL[0])), float(np.percentile(spans, _INTERVAL[1]))
    size = (_NUM_SAMPLES, min(len(replayed.spans), _NUM_SAMPLES))
    chosen = np.random.default_rng(0).integers(0, len(replayed.spans), size)
    low, high = np.percentile(np.median(replayed.spans[chosen], axis=1), _INTERVAL)
    return float(low), float(high)


def _bounds_of_variants(
    usual: tuple[StageCosts, Target], own: tuple[float, float], variants: Iterable[tuple[StageCosts, Target]]
) -> Iterator[tuple[float, float]]:
    """The interval of the typical step with each of other assumptions, ns.

    Of many windows some are replayed both ways: the interval is then that with the usual ones, ``own``, times the ratio of both.
    """
    costs, target = usual
    is_large = costs.few is not costs or len(costs.step) >= _MANY_WINDOWS
    length = typical(replay(costs.few, target).spans) if is_large else 0
    for other, other_target in variants:
        with suppress(ScheduleError):  # the plan cannot run to its end so
            replayed = replay(other.few, other_target)
            if length:
                ratio = typical(replayed.spans) / length
                yield own[0] * ratio, own[1] * ratio
            else:
                yield _bounds(other, other_target, replayed)


def _variants(
    baseline: Baseline, change: Change, costs: StageCosts, target: Target
) -> Iterator[tuple[StageCosts, Target]]:
    """The costs and targets with other assumptions: on W where the plan splits backwards that the run did not; on how late an op
    begins whatever it does, where ops do more or less than the measured ones; that messages are all latency, where that is not
    known and would change the step; the other ways in which the run may send and receive; and another reading of what is in its
    stages, where these are divided anew. What a user takes for granted is not varied.
    """
    if change.prefetch is None:
        yield from ((costs, replace(target, messaging=messaging)) for messaging in baseline.other_messaging)
    is_known = costs.splits_backward or costs.assumed.weight_share is not None
    ends = () if is_known or not target.plan.splits_backward else (0.0, 1.0)
    yield from ((with_weight_share(costs, costs.shares.of_weights(end)), target) for end in ends)
    if costs.delay.any() and changes_ops(costs, target):
        yield costs, replace(target, scales_delays=True)
    for assumed in other_assumptions(costs, change.collective_speeds):
        yield changed_costs(baseline.costs, change, target.plan, **assumed), target
    if target.changes_messages and not costs.knows_latency:
        yield costs, replace(target, latency_share=1.0)
    if not target.stages.is_identity:
        maps = other_stage_maps(baseline.costs, change, target.plan.chain_length, target.plan.name)
        yield from ((costs, replace(target, stages=stages)) for stages in maps)


def _of_fixed_parts(
    baseline: Baseline, change: Change, costs: StageCosts, target: Target
) -> Iterator[tuple[StageCosts, Target]]:
    """The same with other fixed parts of ops, where ops do more or less than the measured ones: I and W together are longer by
    one of them than a B, so that what splitting costs is in them.
    """
    if changes_ops(costs, target):
        for part, fixed in baseline.other_fixed:
            other = fixed if costs is baseline.costs else with_fixed_share(costs, part)
            stages = stage_map_of(fixed, change, target.plan.chain_length, target.plan.name)
            yield other, replace(target, stages=stages)


def _split_cost(costs: StageCosts, target: Target) -> float:
    """The part of a B by which I and W together may be longer, as measured where the run has both; 0 where the plan splits what
    was measured split, and where a user says what of an op any takes.
    """
    if costs.assumed.fixed is not None or not splits_otherwise(costs, target):
        return 0.0
    return SPLIT_COST if costs.split_cost is None else costs.split_cost


def _split_ratio(costs: StageCosts, target: Target, split_cost: float) -> float:
    """The typical step with this cost of splitting in parts of that without it."""
    if not split_cost:
        return 1.0
    usual, other = (typical(replay(costs.few, one).spans) for one in (target, replace(target, split_cost=split_cost)))
    return other / usual if usual else 1.0


def _drawn(costs: StageCosts) -> StageCosts:
    """Steps drawn from those that there are, each with its microbatches in another order."""
    rng = np.random.default_rng(0)
    steps = np.unique(costs.step)
    windows: list[int] = []
    numbers: list[int] = []
    orders = []
    num_drawn = max(_FEWEST_DRAWN, min(_DRAWN_STEPS, _DRAWN_WINDOWS * len(steps) // len(costs.step)))
    for number, step in enumerate(rng.choice(steps, num_drawn).tolist()):
        of_step = np.flatnonzero(costs.step == step).tolist()
        order = rng.permutation(costs.plan.num_microbatches // costs.plan.num_chains)
        windows += of_step
        numbers += [number] * len(of_step)
        orders += [np.concatenate([order + chain * len(order) for chain in range(costs.plan.num_chains)])] * len(
            of_step
        )
    return costs.drawn(np.array(windows), np.array(numbers), np.array(orders))
