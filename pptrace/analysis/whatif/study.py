"""The study of a run: its costs and its own replay, by which a change is predicted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from statistics import fmean
from types import MappingProxyType

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from pptrace.analysis.early_receives.repair import RepairedOrder
from pptrace.analysis.early_receives.types import EarlyReceives
from pptrace.analysis.links.peaks import latencies_of
from pptrace.analysis.matrix.step_matrix import StepMatrix
from pptrace.analysis.memory.types import MemoryReport
from pptrace.analysis.report import Report
from pptrace.analysis.result import typical_of
from pptrace.analysis.shared_devices import USUAL_CORE_WAIT, waiting_words
from pptrace.analysis.stragglers.communication import LATE_RECEIVES
from pptrace.analysis.stragglers.reason import gain_interval
from pptrace.analysis.whatif.change import Change, layers_of_stages, plan_of
from pptrace.analysis.whatif.collectives import KnownOfCollectives
from pptrace.analysis.whatif.frameworks import FRAMEWORKS, Framework, options_of
from pptrace.analysis.whatif.measured_gains import MeasuredGains, OutsideTimes
from pptrace.analysis.whatif.measured_layers import measured_layers
from pptrace.analysis.whatif.memory import (
    LayerMemory,
    RankUse,
    layer_memory,
    peak_of_layers,
    predicted_peak,
    rank_uses,
    uses_with_recompute,
)
from pptrace.analysis.whatif.notes import UNCOUNTED, note_on_split, notes_of, warnings_of_costs
from pptrace.analysis.whatif.predict import FEWEST_STEPS, Baseline, predict, target_of, typical
from pptrace.analysis.whatif.recompute import parts_after
from pptrace.analysis.whatif.replay import Target, costs_of_step, replay, replay_step
from pptrace.analysis.whatif.result import Scenario, Standing
from pptrace.analysis.whatif.split import best_splits
from pptrace.analysis.whatif.stage_costs import (
    NOTHING_ASSUMED,
    Assumed,
    Latencies,
    StageCosts,
    stage_costs,
    with_assumed,
)
from pptrace.analysis.whole_run import InDoubt
from pptrace.errors import PptraceError, UsageError
from pptrace.model.schedule_info import ScheduleInfo
from pptrace.model.tables import Int64
from pptrace.model.wording import as_ranges, counted
from pptrace.schedule.message_graph import Messaging
from pptrace.schedule.plan import Plan
from pptrace.simulator import Simulation, peak_inflight

MOST_ERROR = 0.05
"""Largest error of the replay of the run itself, as a part of the step: beyond it nothing is predicted."""
_MOST_CELLS = 4_000_000
"""Ops of as many steps, evenly spaced, are replayed."""
_AS_SHORT = 1e-3
"""Part of a step by which two splits that are as good may differ for the first of them to be taken."""


class Study(Struct, frozen=True, eq=False, dict=True):
    """A run that changes are predicted of.

    ``name`` is its schedule's name in the report, ``uses`` the memory of its ranks, and ``memory_limit`` the most bytes that one
    may have. ``framework`` is None where what it can run is not known. ``doubts`` are lines about what all costs hang on;
    ``clocks_ns`` is what the clocks may be off by where that is much, ``shares_device`` whether ranks have one GPU together, and
    ``has_experts`` whether tokens travel to experts.
    """

    baseline: Baseline
    name: str
    uses: Mapping[int, RankUse]
    warnings: tuple[str, ...]
    memory_limit: int | None = None
    memory: MemoryReport | None = None
    sequences: int | None = None
    """Sequences of a microbatch, where that is known."""
    tells_shapes: bool = False
    """Each message tells its shape first, as where lengths of sequences vary, so that no receive can be posted ahead of it."""
    outside: OutsideTimes = field(default_factory=OutsideTimes)
    gains: MeasuredGains = field(default_factory=MeasuredGains)
    framework: Framework | None = None
    doubts: tuple[str, ...] = ()
    clocks_ns: int = 0
    shares_device: bool = False
    has_experts: bool = False
    order: RepairedOrder | None = None
    """A better order of sends and receives, where some hold up others."""
    early_receives: EarlyReceives | None = None
    """The report's part on them."""

    @property
    def costs(self) -> StageCosts:
        return self.baseline.costs

    @property
    def measured_length(self) -> int:
        """The measured step, ns: its period where that is known, else its pipeline's span."""
        return self.baseline.measured_span if self.outside.period_ns is None else self.outside.period_ns

    @property
    def refusal(self) -> str | None:
        """The reason why no change is predicted: the replay of the run itself is too far off; None where it is not."""
        error = self.baseline.error
        if error <= MOST_ERROR:
            return None
        return (
            f"the replay of this run is {error:.2%} off (limit {MOST_ERROR:.0%}), so that no change is predicted from it; "
            "`pptrace analyze` says what the time is that ops and messages do not explain"
        )

    @cached_property
    def today(self) -> Scenario:
        """The run as it was."""
        return self.scenario(Change(), "as it was")

    def scenario(self, change: Change, name: str) -> Scenario:
        """Predict a change.

        Raises:
            PptraceError: there is no such plan, or the run has no such stage, rank or number of layers.
        """
        outside = [ideal for ideal in change.ideals if ideal.what == "outside"]
        if outside:
            if change != Change(ideals=(outside[0],)):
                raise UsageError(f"--ideal {outside[0].name} goes with no other change: it is outside the pipeline")
            return replace(self.outside.without(str(outside[0].place), self.today), standing=Standing.IDEAL)
        plan = plan_of(change, self.name, self.costs)
        prediction = predict(self.baseline, change, plan)
        span, low, high = prediction.span, prediction.low, prediction.high
        gains = self._measured_gains(change)
        if gains is not None:  # the measured steps tell what would be got back: their mean, and its interval
            gain = int(gains.sum()) // len(gains)
            bounds = [gain if bound is None else bound for bound in gain_interval(gains)]
            span, high, low = (max(self.baseline.measured_span - shorter, 0) for shorter in (gain, *bounds))
        period, period_low, period_high = map(self.outside.period_of, (span, low, high))
        work, peak = change.work(self.costs.plan), self._peak(change, plan)
        if gains is None:
            gain = round(self.measured_length * work) - (span if period is None else period)
        lack = "" if self.framework is None else self.framework.lack(change, plan)
        notes = [*([lack] if lack else []), *notes_of(change, plan, self.costs, self.framework)]
        if prediction.split_cost:
            notes.append(note_on_split(prediction.split_cost, self.costs))
        if change.recompute_layers is not None and peak is None:
            notes.append("its memory is not known: the trace does not tell what layers keep with and without recompute")
        if self.outside.outside_ns is not None and not math.isclose(work, 1.0):
            notes.append("what is outside the pipeline is taken to stay as it is")
        scenario = Scenario(
            name=name,
            schedule=change.schedule or self.name,
            num_chunks=plan.num_chunks,
            num_microbatches=plan.num_microbatches,
            split=change.split or self.costs.layers if plan.chain_length == self.costs.num_stages else change.split,
            ideal=tuple(ideal.name for ideal in change.ideals),
            span_ns=span,
            low_ns=low,
            high_ns=high,
            gain_ns=gain,
            bubble_ratio=prediction.bubble_ratio,
            peak_inflight=max(peak_inflight(plan)),
            peak_memory_bytes=peak,
            verified_span_ns=None,
            note="; ".join(notes),
            microbatch_size=change.microbatch_size,
            over_limit_bytes=None if peak is None or self.memory_limit is None else max(0, peak - self.memory_limit),
            paste=options_of(change, change.schedule or self.name, plan, self.costs, self.sequences),
            period_ns=period,
            period_low_ns=period_low,
            period_high_ns=period_high,
            link_speed=change.link_speed,
            collective_speeds=dict(change.collective_speeds),
        )
        doubt = self._doubt(scenario, plan) if gains is None else ""
        return replace(scenario, standing=_standing(scenario, doubt, is_lacking=bool(lack)), doubt=doubt)

    def is_measured(self, change: Change) -> bool:
        """Return whether the measured steps tell what a change gains: an ideal alone does nothing to the plan."""
        return self._measured_gains(change) is not None

    def _measured_gains(self, change: Change) -> Int64 | None:
        """The gain of each measured step by an ideal alone, ns; None of all else."""
        if len(change.ideals) != 1 or change != Change(ideals=change.ideals):
            return None
        return self.gains.gains(change.ideals[0])

    def _doubt(self, scenario: Scenario, plan: Plan) -> str:
        """The reason, besides its interval, why a change is not sure to help; "" where there is none."""
        if self.shares_device:
            return "ranks share a GPU, and what ops take there depends on what the other ranks run"
        if not scenario.is_shorter:
            return ""
        if plan.num_chains > self.costs.plan.num_chains:
            return f"{scenario.name} has every stage on two ranks, and {UNCOUNTED}"
        if scenario.gain_ns <= self.clocks_ns:
            return f"the clocks may be off by {self.clocks_ns / 1e6:,.2f} ms, more than is gained"
        return ""

    def _peak(self, change: Change, plan: Plan) -> int | None:
        """The largest peak of a rank: from that of the same rank now, where its stages stay, else from that of its layers."""
        stays = change.split is None and plan.placement == self.costs.plan.placement
        uses, of_layers = self.uses, self.memory_of_layers
        if change.recompute_layers is not None:
            parts = parts_after(self.costs, change.recompute_layers, plan.chain_length)
            layers = self.costs.layers or (1,) * self.costs.num_stages
            uses = uses_with_recompute(uses, self.memory, self.costs.plan, layers, parts)
            of_layers = layer_memory(uses, self.costs.layers) if uses and of_layers is not None else None
        if stays or of_layers is None:
            return predicted_peak(uses, self.costs.plan, plan, change)
        of_stages = change.split or layers_of_stages(self.costs, plan.chain_length)
        return peak_of_layers(of_layers, plan, of_stages, change.microbatch_size)

    @cached_property
    def memory_of_layers(self) -> LayerMemory | None:
        """The memory of the model's layers; None where it is not known, or ranks have several stages."""
        return layer_memory(self.uses, self.costs.layers) if self.costs.plan.num_stages == self.costs.plan.pp else None

    @cached_property
    def best_split(self) -> tuple[int, ...] | None:
        """The split with which the stage with most work has least, within the limit of memory; None where it is not known.

        Of several it is the first one whose step is predicted to be about as short as that of any.
        """
        fits = None
        if self.memory_limit is not None:
            if self.memory_of_layers is None:
                return None
            fits = partial(self.memory_of_layers.fits, self.memory_limit, peak_inflight(self.costs.plan))
        most = max(1, _MOST_CELLS // self.costs.work.size)
        splits = best_splits(self.costs, fits)[:most]
        if len(splits) < 2:
            return next(iter(splits), None)
        spans = [typical(replay(*self._target(Change(split=split))).spans) for split in splits]
        return next(split for split, span in zip(splits, spans, strict=True) if span <= min(spans) * (1 + _AS_SHORT))

    def picture(self, change: Change) -> Simulation:
        """The replay of the typical step with a change."""
        return replay_step(*self._target(change), self.typical_step)

    def step_costs(self, change: Change) -> tuple[Target, Int64, Int64]:
        """(the plan with a change, what its rows take in the typical step, what its messages take), ns, to be run."""
        costs, target = self._target(change)
        return target, *costs_of_step(costs, target, self.typical_step)

    def _target(self, change: Change) -> tuple[StageCosts, Target]:
        return target_of(self.baseline, change, plan_of(change, self.name, self.costs))

    @cached_property
    def typical_step(self) -> int:
        """The number of the step whose replay is the median."""
        spans = self.baseline.replayed.spans
        return int(np.unique(self.costs.step)[np.argsort(spans, kind="stable")[(len(spans) - 1) // 2]])


def _standing(scenario: Scenario, doubt: str, *, is_lacking: bool) -> Standing:
    if scenario.ideal or scenario.link_speed != 1 or scenario.collective_speeds:
        return Standing.IDEAL
    if is_lacking:
        return Standing.LACKING
    if scenario.over_limit_bytes:
        return Standing.OVER_LIMIT
    if scenario.gain_ns <= 0:
        return Standing.NO_GAIN
    return Standing.SURE if scenario.is_shorter and not doubt else Standing.UNSURE


def study_run(
    report: Report,
    plans: Sequence[StepMatrix],
    schedule: ScheduleInfo,
    layers: tuple[int, ...] | None,
    memory_limit: int | None = None,
    latencies: Latencies = MappingProxyType({}),
    assumed: Assumed = NOTHING_ASSUMED,
    order: RepairedOrder | None = None,
) -> Study:
    """The study of a run from its report, the costs of its whole steps by plan, its schedule and the layers of its stages.

    ``latencies`` are those of links that are known from elsewhere, ``assumed`` is what a user takes for granted. ``order`` is
    that of the run's sends and receives, and a better one.

    Raises:
        PptraceError: there is no whole step with a plan.
        UsageError: W's share is given of a run that measured it.
    """
    whole = [costs for costs in plans if len(costs.step)]
    if not whole:
        lacking = sorted(set(range(report.mesh.num_ranks)) - {entry.rank for entry in report.device})
        number = "rank" if len(lacking) == 1 else "ranks"
        without = f": there is no trace of {number} {as_ranges(lacking)}" if lacking else ""
        raise PptraceError(
            f"whatif: no whole step whose plan is known{without}; expected a trace of all ranks of a pipeline with every op of "
            "at least one step (`pptrace analyze` says what is missing)"
        )
    of_most = max(whole, key=lambda part: len(np.unique(part.step)))
    matrix = of_most.every(-(-of_most.durations.size // _MOST_CELLS))
    numbers = np.unique(matrix.step).tolist()
    followed = schedule.plan_of(numbers[0])
    assert followed is not None  # steps without a plan have no costs
    plan = followed.compute_only()
    costs = stage_costs(plan, matrix, layers, {**latencies_of(report.links), **latencies}, report.recompute)
    of_collectives = KnownOfCollectives.of(report.collectives, report.steps)
    costs = replace(costs, collectives=of_collectives, measured=measured_layers(report.stages, plan, layers))
    if costs.splits_backward and assumed.weight_share is not None:
        raise UsageError(f"--wgrad-share {assumed.weight_share:g}: the run measured W by itself; leave the option away")
    spans = {step.step: step.span_ns or 0 for step in report.steps}
    measured = np.array([spans[number] for number in numbers], dtype=np.int64)
    core_wait = fmean(wait.share for wait in report.core_waits) if report.core_waits else 0.0
    baseline = Baseline(with_assumed(costs, assumed), measured, core_wait)
    if order is not None:
        baseline = replace(baseline, posted=order.posted, ways=tuple(dict.fromkeys((order.messaging, *Messaging))))
    of_plan = set(of_most.step.tolist())
    steps, typical_step = [step for step in report.steps if step.step in of_plan], report.typical_step
    if len(whole) > 1 or typical_step is None or typical_step.step not in of_plan:  # others do other work
        typical_step = typical_of(steps)
    doubts = tuple(_doubts(report, baseline))
    in_doubt = {doubt.cause for doubt in report.doubts}
    return Study(
        baseline,
        report.schedule.name,
        rank_uses(report.memory, plan),
        (*doubts, *_warnings(report, baseline, len(whole), len(of_plan))),
        memory_limit,
        report.memory,
        outside=OutsideTimes.of(steps, typical_step, baseline.measured_span),
        gains=MeasuredGains.of(report, whole),
        framework=FRAMEWORKS.get(report.framework),
        doubts=doubts,
        clocks_ns=report.clock.uncertainty_ns or 0 if InDoubt.CLOCK in in_doubt else 0,
        shares_device=InDoubt.DEVICE in in_doubt,
        has_experts=report.experts is not None or (report.mesh.ep or 1) > 1,
        order=order,
        early_receives=report.early_receives,
    )


def _doubts(report: Report, baseline: Baseline) -> Iterator[str]:
    """Lines about what all costs hang on."""
    yield from (doubt.line for doubt in report.doubts)
    if baseline.core_wait > USUAL_CORE_WAIT:
        yield (
            f"{waiting_words(baseline.core_wait)}: costs have that in them, and another run may wait otherwise (intervals allow "
            f"for {baseline.between_runs:.1%}); record on a quiet machine"
        )


def _warnings(report: Report, baseline: Baseline, num_plans: int, num_steps: int) -> Iterator[str]:
    """Lines about the steps that are predicted from, about what is slow by itself (a rank, whose stage is predicted to be as slow
    on other ranks and with other layers; kernels that receive late), and about how messages travel.
    """
    if num_plans > 1:
        yield f"steps have {num_plans} plans; predicted from the {num_steps} steps of the one that most have"
    if len(baseline.measured) < FEWEST_STEPS:
        yield (
            f"{counted(len(baseline.measured), 'whole step')}: how steps vary is hardly known, and intervals come from the order "
            f"of microbatches; record at least {FEWEST_STEPS}"
        )
    yield from warnings_of_costs(baseline.costs)
    for finding in report.findings:
        if finding.evidence.get("reason") == LATE_RECEIVES:
            yield (
                f"{finding.evidence['share']:.0%} of the step passes in receive kernels that run on after their data was sent: "
                "the ops that read it are predicted to start as late under every schedule"
            )
        where = finding.evidence.get("where") or {}
        if finding.evidence.get("cause") == "straggler" and "rank" in where:
            rank = where["rank"]
            yield (
                f"rank {rank} is slower than its replicas: changes of schedule, chunks and split take its stage to cost as much "
                f"wherever it is, which is wrong where the rank itself is slow; predict with --ideal rank={rank} first"
            )
    if baseline.other_messaging:
        others = " or ".join(baseline.other_messaging)
        yield f"it is assumed that {baseline.messaging}; the steps fit as well if {others}: intervals cover that too"
