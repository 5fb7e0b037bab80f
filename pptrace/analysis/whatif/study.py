"""The study of a run: its own replay first, then every change, the best first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean
from types import MappingProxyType

import numpy as np

from pptrace.analysis.core_waits import USUAL_CORE_WAIT
from pptrace.analysis.gain_interval import gain_interval
from pptrace.analysis.links.fit import latencies_of
from pptrace.analysis.matrix.step_matrix import StepMatrix
from pptrace.analysis.message_graph import Messaging
from pptrace.analysis.result import Finding, Report, typical_of
from pptrace.analysis.stragglers.late_receives import LATE_RECEIVES
from pptrace.analysis.whatif.change import Change, layers_of_stages, plan_of
from pptrace.analysis.whatif.frameworks import FRAMEWORKS, Framework
from pptrace.analysis.whatif.ideals import Ideal, parse_ideal
from pptrace.analysis.whatif.layer_memory import LayerMemory, MemoryLimit, layer_memory, peak_of_layers
from pptrace.analysis.whatif.measured_gains import MeasuredGains
from pptrace.analysis.whatif.memory import RankUse, predicted_peak, rank_uses
from pptrace.analysis.whatif.notes import UNCOUNTED, notes_of, warnings_of_costs
from pptrace.analysis.whatif.outside import OutsideTimes
from pptrace.analysis.whatif.paste import options_of
from pptrace.analysis.whatif.predict import FEWEST_STEPS, Baseline, predict, target_of, typical
from pptrace.analysis.whatif.replay import StepCosts, Target, costs_of_step, replay, replay_step
from pptrace.analysis.whatif.result import Scenario, Standing, WhatIf
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
from pptrace.errors import PptraceError, ScheduleError, UsageError
from pptrace.model.schedule_info import ScheduleInfo
from pptrace.model.tables import Int64
from pptrace.model.wording import counted
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import SCHEDULES
from pptrace.simulator import Simulation, peak_inflight

OnCount = Callable[[int, int], None]
"""Takes how many changes are predicted, and of how many."""
MOST_ERROR = 0.05
"""Largest error of the replay of the run itself, as a part of the step: beyond it nothing is predicted."""
_MOST_CELLS = 4_000_000
"""Ops of as many steps, evenly spaced, are replayed."""
_MOST_PLAN_OPS = 200_000
"""Larger plans of other schedules are built only where one is asked for by its name."""
_AS_SHORT = 1e-3
"""Part of a step by which two splits that are as good may differ for the first of them to be taken."""
_PREFETCH_DEPTHS = (1, 2)
_LEAST_GAIN = 0.005
"""Ideals that gain a smaller part of the step are left out of the table of all changes."""


@dataclass(frozen=True, eq=False)
class Study:
    """A run that changes are predicted of.

    ``name`` is its schedule's name in the report, ``uses`` the memory of its ranks, and ``memory_limit`` the most bytes that one
    may have. ``framework`` is None where what it can run is not known. ``doubts`` are lines about what all costs hang on;
    ``clocks_ns`` is what the clocks may be off by where that is much, and ``shares_device`` whether ranks have one GPU together.
    """

    baseline: Baseline
    name: str
    uses: Mapping[int, RankUse]
    warnings: tuple[str, ...]
    memory_limit: int | None = None
    sequences: int | None = None
    """Sequences of a microbatch, where that is known."""
    outside: OutsideTimes = field(default_factory=OutsideTimes)
    gains: MeasuredGains = field(default_factory=MeasuredGains)
    framework: Framework | None = None
    doubts: tuple[str, ...] = ()
    clocks_ns: int = 0
    shares_device: bool = False

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
            f"the replay of this run is {error:.1%} off (limit {MOST_ERROR:.0%}), so that no change is predicted from it; "
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
        work, peak = change.work(self.costs.plan), self._peak(change, plan)
        period, low, high = map(self.outside.period_of, (prediction.span, prediction.low, prediction.high))
        length = prediction.span if period is None else period
        lack = "" if self.framework is None else self.framework.lack(change, plan)
        notes = [lack] if lack else []
        notes += [*notes_of(change, plan, self.costs, self.framework), *self._notes_of_work(work)]
        scenario = Scenario(
            name=name,
            schedule=change.schedule or self.name,
            num_chunks=plan.num_chunks,
            num_microbatches=plan.num_microbatches,
            split=change.split or self.costs.layers if plan.chain_length == self.costs.num_stages else change.split,
            ideal=tuple(ideal.name for ideal in change.ideals),
            span_ns=prediction.span,
            low_ns=prediction.low,
            high_ns=prediction.high,
            gain_ns=round(self.measured_length * work) - length,
            bubble_ratio=prediction.bubble_ratio,
            peak_inflight=max(peak_inflight(plan)),
            peak_memory_bytes=peak,
            verified_span_ns=None,
            note="; ".join(notes),
            microbatch_size=change.microbatch_size,
            over_limit_bytes=None if peak is None or self.memory_limit is None else max(0, peak - self.memory_limit),
            paste=options_of(change, change.schedule or self.name, plan, self.costs, self.sequences),
            period_ns=period,
            period_low_ns=low,
            period_high_ns=high,
            link_speed=change.link_speed,
        )
        if (gains := self._measured_gains(change)) is not None:
            return replace(self._with_gains(scenario, gains), standing=Standing.IDEAL)
        doubt = self._doubt(scenario, plan)
        return replace(scenario, standing=_standing(scenario, doubt, is_lacking=bool(lack)), doubt=doubt)

    def is_measured(self, change: Change) -> bool:
        """Return whether the measured steps tell what a change gains: an ideal alone does nothing to the plan."""
        return self._measured_gains(change) is not None

    def _measured_gains(self, change: Change) -> Int64 | None:
        """The gain of each measured step by an ideal alone, ns; None of all else."""
        if len(change.ideals) != 1 or change != Change(ideals=change.ideals):
            return None
        return self.gains.gains(change.ideals[0])

    def _with_gains(self, scenario: Scenario, gains: Int64) -> Scenario:
        """The scenario of an ideal alone, with what the measured steps would get back: their mean, and its interval."""
        mean = int(gains.sum()) // len(gains)
        bounds = [mean if bound is None else bound for bound in gain_interval(gains)]
        span, high, low = (max(self.baseline.measured_span - gain, 0) for gain in (mean, *bounds))
        period, period_low, period_high = map(self.outside.period_of, (span, low, high))
        ideal = replace(scenario, span_ns=span, low_ns=low, high_ns=high, gain_ns=mean)
        return replace(ideal, period_ns=period, period_low_ns=period_low, period_high_ns=period_high)

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

    def _notes_of_work(self, work: float) -> Sequence[str]:
        """Assumption about what is outside the pipeline, of a step that does another amount of work."""
        has_other_work = self.outside.outside_ns is not None and not math.isclose(work, 1.0)
        return ("what is outside the pipeline is taken to stay as it is",) if has_other_work else ()

    def _peak(self, change: Change, plan: Plan) -> int | None:
        """The largest peak of a rank: from that of the same rank now, where its stages stay, else from that of its layers."""
        stays = change.split is None and plan.placement == self.costs.plan.placement
        if stays or self.memory_of_layers is None:
            return predicted_peak(self.uses, self.costs.plan, plan, change)
        layers = change.split or layers_of_stages(self.costs, plan.chain_length)
        return peak_of_layers(self.memory_of_layers, plan, layers, change.microbatch_size)

    @cached_property
    def memory_of_layers(self) -> LayerMemory | None:
        """The memory of the model's layers; None where it is not known, or ranks have several stages."""
        return layer_memory(self.uses, self.costs.layers) if self.costs.plan.num_stages == self.costs.plan.pp else None

    @cached_property
    def best_split(self) -> tuple[int, ...] | None:
        """The split with which the stage with most work has least, within the limit of memory; None where it is not known.

        Of several it is the first one whose step is predicted to be about as short as that of any.
        """
        limit = None
        if self.memory_limit is not None:
            if self.memory_of_layers is None:
                return None
            limit = MemoryLimit(self.memory_of_layers, self.memory_limit, peak_inflight(self.costs.plan))
        most = max(1, _MOST_CELLS // self.costs.work.size)
        splits = best_splits(self.costs, limit)[:most]
        if len(splits) < 2:
            return next(iter(splits), None)
        spans = [typical(replay(*self._target(Change(split=split))).spans) for split in splits]
        return next(split for split, span in zip(splits, spans, strict=True) if span <= min(spans) * (1 + _AS_SHORT))

    def picture(self, change: Change) -> Simulation:
        """The replay of the typical step with a change."""
        return replay_step(*self._target(change), self.typical_step)

    def step_costs(self, change: Change) -> StepCosts:
        """The costs of the typical step with a change, to be run."""
        return costs_of_step(*self._target(change), self.typical_step)

    def _target(self, change: Change) -> tuple[StageCosts, Target]:
        return target_of(self.baseline, change, plan_of(change, self.name, self.costs))

    @cached_property
    def typical_step(self) -> int:
        """The number of the step whose replay is the median."""
        spans = self.baseline.replayed.spans
        return int(np.unique(self.costs.step)[np.argsort(spans, kind="stable")[(len(spans) - 1) // 2]])


def _standing(scenario: Scenario, doubt: str, *, is_lacking: bool) -> Standing:
    if scenario.ideal or scenario.link_speed != 1:
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
) -> Study:
    """The study of a run from its report, the costs of its whole steps by plan, its schedule and the layers of its stages.

    ``latencies`` are those of links that are known from elsewhere, ``assumed`` is what a user takes for granted.

    Raises:
        PptraceError: there is no whole step with a plan.
        UsageError: W's share is given of a run that measured it.
    """
    whole = [costs for costs in plans if len(costs.step)]
    if not whole:
        raise PptraceError(
            "whatif: no whole step whose plan is known; expected a trace of all ranks of a pipeline with every op of at least "
            "one step (`pptrace analyze` says what is missing)"
        )
    costs = max(whole, key=lambda part: len(np.unique(part.step)))
    warnings = []
    if len(whole) > 1:
        num_steps = len(np.unique(costs.step))
        warnings.append(
            f"steps have {len(whole)} plans; predicted from the {num_steps} steps of the one that most have"
        )
    of_plan = set(costs.step.tolist())
    steps = [step for step in report.steps if step.step in of_plan]
    costs = costs.every(-(-costs.durations.size // _MOST_CELLS))
    spans = {step.step: step.span_ns for step in report.steps}
    numbers = np.unique(costs.step)
    measured = np.array([spans[number] or 0 for number in numbers.tolist()], dtype=np.int64)
    followed = schedule.plan_of(int(numbers[0]))
    assert followed is not None  # steps without a plan have no costs
    plan = followed.compute_only()
    if len(numbers) < FEWEST_STEPS:
        warnings.append(
            f"{counted(len(numbers), 'whole step')}: how steps vary is hardly known, and intervals come from the order of "
            f"microbatches; record at least {FEWEST_STEPS}"
        )
    known = {**latencies_of(report.links), **latencies}
    core_wait = fmean(wait.share for wait in report.core_waits) if report.core_waits else 0.0
    of_stages = stage_costs(plan, costs, layers, known)
    if of_stages.splits_backward and assumed.weight_share is not None:
        raise UsageError(f"--wgrad-share {assumed.weight_share:g}: the run measured W by itself; leave the option away")
    baseline = Baseline(with_assumed(of_stages, assumed), measured, core_wait)
    doubts = [*(doubt.line for doubt in report.doubts), *_warning_of_waits(baseline)]
    in_doubt = {doubt.cause for doubt in report.doubts}
    warnings += [*warnings_of_costs(baseline.costs), *_warnings_of_findings(report.findings)]
    if baseline.other_messaging:
        others = " or ".join(baseline.other_messaging)
        warnings.append(
            f"it is assumed that {baseline.messaging}; the steps fit as well if {others}: intervals cover that too"
        )
    typical_one = report.typical_step
    if len(whole) > 1 or typical_one is None or typical_one.step not in of_plan:  # others do other work
        typical_one = typical_of(steps)
    uses, outside = rank_uses(report.memory, plan), OutsideTimes.of(steps, typical_one, baseline.measured_span)
    return Study(
        baseline,
        report.schedule.name,
        uses,
        (*doubts, *warnings),
        memory_limit,
        outside=outside,
        gains=MeasuredGains.of(report, whole),
        framework=FRAMEWORKS.get(report.framework),
        doubts=tuple(doubts),
        clocks_ns=report.clock.uncertainty_ns or 0 if InDoubt.CLOCK in in_doubt else 0,
        shares_device=InDoubt.DEVICE in in_doubt,
    )


def _warnings_of_findings(findings: Sequence[Finding]) -> Iterator[str]:
    """Lines about what is slow by itself: a rank, whose stage is predicted to be as slow on other ranks and with other layers,
    and kernels that receive late.
    """
    for finding in findings:
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


def _warning_of_waits(baseline: Baseline) -> Iterator[str]:
    if baseline.core_wait > USUAL_CORE_WAIT:
        yield (
            f"ranks waited for a core for {baseline.core_wait:.1%} of the time, because of other work on the machine or more "
            "threads than cores: costs have that in them, and another run may wait otherwise (intervals allow for "
            f"{baseline.between_runs:.1%}); record on a quiet machine"
        )


def answer(study: Study, changes: Sequence[tuple[str, Change]], on_count: OnCount | None = None) -> WhatIf:
    """Predict changes by their names.

    ``on_count`` is called before each of them, and after the last one.

    Raises:
        PptraceError: one of the changes cannot be made.
    """
    scenarios: list[Scenario] = []
    for done, (name, change) in enumerate(changes if study.refusal is None else ()):
        if on_count is not None:
            on_count(done, len(changes))
        scenarios.append(study.scenario(change, name))
    if on_count is not None and study.refusal is None:
        on_count(len(changes), len(changes))
    return ranked(study, changes, scenarios)


def ranked(study: Study, changes: Sequence[tuple[str, Change]], scenarios: Sequence[Scenario]) -> WhatIf:
    """The answer from scenarios of changes, of all or of the first ones: what is sure to help first, then by standing and gain.

    What costs less than it does and gains next to nothing is left out of several changes.
    """
    baseline = study.baseline
    known = (baseline.measured_span, baseline.replay_span, baseline.error)
    periods = (study.outside.period_ns, study.outside.period_of(baseline.replay_span))
    if study.refusal is not None:
        lines = (*study.warnings, study.refusal)
        return WhatIf(*known, (), None, len(baseline.measured), lines, *periods, doubts=study.doubts)
    least = _LEAST_GAIN * study.measured_length if len(changes) > 1 else -math.inf
    is_alone = {name: change == Change(ideals=change.ideals, link_speed=change.link_speed) for name, change in changes}
    scenarios = [one for one in scenarios if not is_alone[one.name] or one.gain_ns >= least]
    order = list(Standing)
    best_first = sorted(scenarios, key=lambda scenario: (order.index(scenario.standing), -scenario.gain_ns))
    warnings = (*study.warnings, *_warnings_of_limit(study, scenarios))
    return WhatIf(
        *(*known, _with_front(best_first), study.today, len(baseline.measured), warnings, *periods),
        framework="" if study.framework is None else study.framework.name,
        doubts=study.doubts,
    )


def _warnings_of_limit(study: Study, scenarios: Sequence[Scenario]) -> Iterator[str]:
    if study.memory_limit is None:
        return
    unknown = [one.name for one in scenarios if one.peak_memory_bytes is None]
    if unknown:
        reason = (
            "the trace does not tell the memory of its ranks" if not study.uses else "nor what of it its layers have"
        )
        yield (
            f"--memory-limit: not known whether {counted(len(unknown), 'change')} would fit ({', '.join(unknown[:3])}"
            f"{', …' if len(unknown) > 3 else ''}): {reason}; record with `pptrace run`"
        )
    can_split = study.costs.layers is not None and study.costs.plan.num_stages == study.costs.plan.pp > 1
    if can_split and study.memory_of_layers is not None and study.best_split is None:
        yield "--memory-limit: no split of the layers over these stages fits"


def all_schedules(study: Study, change: Change) -> list[tuple[str, Change]]:
    """A change with every schedule of the catalogue that has such a plan, and the numbers of chunks that make sense for it."""
    return [(name, wanted) for name, wanted, _ in _schedules(study, change)]


def _schedules(study: Study, change: Change) -> Iterator[tuple[str, Change, Plan]]:
    for name, entry in SCHEDULES.items():
        chunks = [change.chunks] if change.chunks else [2, 4] if entry.takes_any_chunks else [None]
        for number in chunks:
            wanted = replace(change, schedule=name, chunks=number)
            plan = _built(study, wanted)
            if plan is not None:
                yield name if number is None else f"{name}, {number} chunks", wanted, plan


def _built(study: Study, change: Change) -> Plan | None:
    """The plan of a change with the layers that come of it; None where there is none of a size that is tried unasked."""
    plan = study.costs.plan
    size = plan.pp * (change.chunks or 2) * (change.microbatches or plan.num_microbatches) * 3
    if size > _MOST_PLAN_OPS:
        return None
    try:
        built = plan_of(replace(change, split=None), study.name, study.costs)
    except ScheduleError:
        return None
    return built if change.split is None or len(change.split) == built.chain_length else None


def _is_worth_a_try(plan: Plan, today: Plan) -> bool:
    """Return whether a plan is another one than that of the run, is none that has the whole model on every rank, and none with
    its backwards split to fill bubbles where that of the run has them split already.
    """
    has_pairs = any(action.parts for actions in plan.ranks for action in actions)
    is_today = (plan.ranks, plan.placement) == (today.ranks, today.placement)
    has_whole_model = plan.num_chains > today.num_chains and plan.chain_length <= plan.num_chains
    return not (is_today or has_whole_model or (plan.splits_backward and today.splits_backward and not has_pairs))


def all_changes(study: Study) -> list[tuple[str, Change]]:
    """All sensible changes of the run, each with its name."""
    plan, costs = study.costs.plan, study.costs
    own = (study.name, plan.num_chunks)
    changes = [
        (name, change)
        for name, change, made in _schedules(study, Change())
        if (change.schedule, made.num_chunks) != own and _is_worth_a_try(made, plan)
    ]
    changes += [(name, change) for change, name in _sizes(study)]
    if costs.transfer.any():
        changes.append(("links twice as fast", Change(link_speed=2.0)))
    if study.baseline.messaging is not Messaging.AHEAD:
        depths = [depth for depth in _PREFETCH_DEPTHS if depth < max(map(len, plan.ranks))]
        changes += [(prefetch_name(depth), Change(prefetch=depth)) for depth in depths]
    split = study.best_split
    if split is not None and split != costs.layers:
        changes.append((f"split {','.join(map(str, split))}", Change(split=split)))
    words = ("jitter", "communication", "host", *(("routing",) if costs.routed_work is not None else ()))
    outside = [f"outside={part}" for part in study.outside.of_parts]
    ideals = [*map(parse_ideal, (*words, *outside)), *_slowest(costs)]
    return [*changes, *((f"ideal {ideal.name}", Change(ideals=(ideal,))) for ideal in ideals)]


def prefetch_name(depth: int) -> str:
    """Words for receives that are posted so many ops before they are needed."""
    return f"receives posted {counted(depth, 'op')} ahead" if depth else "receives posted when needed"


def pictures(study: Study, changes: Sequence[tuple[str, Change]], result: WhatIf) -> list[tuple[str, Simulation]]:
    """The replay of a typical step as it was, and with the best change that can be made, each with its title."""
    best = next((one.name for one in result.scenarios if one.is_choice), None)
    chosen = [("as it was", Change()), *((name, change) for name, change in changes if name == best)]
    return [(name, study.picture(change)) for name, change in chosen] if result.scenarios else []


def _sizes(study: Study) -> Iterator[tuple[Change, str]]:
    """The same work in twice and in half as many microbatches."""
    number = study.costs.plan.num_microbatches
    changes = []
    if study.sequences is None or study.sequences % 2 == 0:
        changes.append(
            (Change(microbatches=2 * number, microbatch_size=0.5), f"{2 * number} microbatches of half the size")
        )
    if number % 2 == 0 and number > 1:
        changes.append(
            (
                Change(microbatches=number // 2, microbatch_size=2.0),
                f"{counted(number // 2, 'microbatch', 'microbatches')} of twice the size",
            )
        )
    if study.name in SCHEDULES:
        yield from (entry for entry in changes if _built(study, entry[0]) is not None)


def _slowest(costs: StageCosts) -> list[Ideal]:
    """The stage whose microbatch takes longest."""
    if costs.num_stages < 2:
        return []
    return [parse_ideal(f"stage={int(costs.typical.sum(axis=1).argmax())}")]


def _with_front(scenarios: Sequence[Scenario]) -> tuple[Scenario, ...]:
    """Mark the scenarios that no other one beats in both time and memory; the ideals are no choices."""
    choices = [one for one in scenarios if one.is_choice]
    bytes_known = all(one.peak_memory_bytes is not None for one in choices)

    def size(one: Scenario) -> float:
        return float(one.peak_memory_bytes or 0) if bytes_known else one.activations

    def is_beaten(one: Scenario) -> bool:
        return any(
            other.gain_ns >= one.gain_ns
            and size(other) <= size(one)
            and (other.gain_ns, -size(other)) != (one.gain_ns, -size(one))
            for other in choices
        )

    return tuple(replace(one, on_pareto_front=one.is_choice and not is_beaten(one)) for one in scenarios)
