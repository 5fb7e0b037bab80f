"""Slopes of probed runs on paper, whose critical path is known: the target's share of it, or what another path leaves of that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import pytest

from pptrace.analysis.result import Report
from pptrace.analysis.whole_run import ProbedTarget
from pptrace.errors import UsageError
from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.plan import Plan
from pptrace.schedule.probe import PROBES, Probe, parse_probe, parse_probes, probe_of
from pptrace.schedule.registry import build
from pptrace.workflow.analyse import analyse
from tests.support.synthetic import START, Event, PaperRun, Recording, record, run_on_paper

Cost = Callable[[Action], int]
PLAN = build("1f1b", 3, 6)


@dataclass(frozen=True)
class Probed(Recording):
    """A recording in which the steps of a probe are others."""

    of_probe: Mapping[Probe, PaperRun] = None  # type: ignore[assignment]
    probes: tuple[Probe, ...] = ()

    def begin(self, step: int) -> int:
        return START + step * 2 * max(run.end for run in (self.run, *self.of_probe.values()))

    def events_of(self, rank: int) -> list[Event]:
        events = []
        for step in range(self.job.steps):
            probe = probe_of(self.probes, step)
            run = self.run if probe is None else self.of_probe[probe]
            events += self.events(run, rank, self.job.pipelines[0], step, self.begin(step))
        return events


def cost_of(action: Action) -> int:
    return {"F": 100_000, "B": 200_000, "I": 90_000, "W": 110_000}[action.kind] + 10_000 * (action.stage == 1)


def probed(
    plan: Plan,
    *probes: str,
    cost: Cost = cost_of,
    latency: int = 0,
    steps: int = 13,
    really: float = 1.0,
    only: int | None = None,
    step: int | None = None,
) -> Report:
    """The report of a run whose probed steps run on paper with ops as the probe says; ``really`` scales all delays, and but for
    the ops of the rank ``only``, where one is given, none are delayed.
    """
    parsed = parse_probes(probes)

    def delay(probe: Probe, action: Action) -> int:
        is_of = only is None or plan.placement[action.stage] == only
        return round(really * probe.epsilon * cost(action)) if probe.delays(action) and is_of else 0

    def longer(probe: Probe) -> Cost:
        return lambda action: cost(action) + delay(probe, action)

    runs = {probe: run_on_paper(plan, longer(probe), latency) for probe in parsed}
    plain = record(plan, cost, latency, steps=steps)
    recording = Probed(plain.job, plain.run, of_probe=runs, probes=parsed)
    traces = []
    for rank, trace in enumerate(recording.traces()):
        actions = plan.compute_actions(rank)
        delays = {
            str(number): sum(delay(probe, action) for action in actions)
            for number in range(steps)
            if (probe := probe_of(parsed, number)) is not None
        }
        facts = {"probes": list(probes), "delays_ns": delays}
        traces.append(replace(trace, metadata={**trace.metadata, PROBES: facts}))
    return analyse(traces, step=step).report


def of_targets(report: Report) -> list[tuple[str, float | None, float | None, float | None]]:
    return [(one.target, one.slope, one.critical_path_share, one.replayed_slope) for one in report.probes]


def test_the_slope_of_a_kind_is_its_share_of_the_critical_path() -> None:
    report = probed(
        PLAN, "F:0.25", "B:0.25", cost=lambda action: 100_000 if action.kind is Kind.F else 200_000, steps=25
    )
    assert of_targets(report) == [
        ("F", *[pytest.approx(1 / 3)] * 3),
        ("B", *[pytest.approx(2 / 3)] * 3),
    ]
    for one in report.probes:
        assert one.slope_low == one.slope_high == pytest.approx(one.slope)
        assert one.undelayed_share == 0
        assert one.reason is None


def test_what_is_not_delayed_is_taken_off_the_slope() -> None:
    plan = build("gpipe", 3, 4)
    (one,) = probed(plan, "F:0.25", latency=7_000).probes
    assert one.slope is not None
    assert one.undelayed_share is not None
    assert one.undelayed_share > 0.01
    assert one.slope == pytest.approx(one.critical_path_share, rel=1e-4)
    assert one.slope == pytest.approx(one.replayed_slope, rel=0.02)


def test_the_slowest_stage_has_its_share_and_one_that_is_not_on_the_path_nothing() -> None:
    def uneven(action: Action) -> int:
        return (4 if action.stage == 1 else 1) * (100_000 if action.kind is Kind.F else 200_000)

    report = probed(PLAN, "stage=1:0.2", "stage=2:0.2", cost=uneven, steps=29)
    heavy, light = report.probes
    assert heavy.slope == pytest.approx(heavy.critical_path_share)
    assert [heavy.slope, heavy.replayed_slope] == pytest.approx([6 * 4 / (6 * 4 + 1)] * 2)
    assert (light.slope, light.critical_path_share) == (pytest.approx(0, abs=1e-6), 0)


def test_where_another_path_takes_over_the_slope_is_less_than_the_share_as_the_replay_says() -> None:
    def close(action: Action) -> int:
        return (105 if action.stage == 0 else 100) * (1_000 if action.kind is Kind.F else 2_000)

    (one,) = probed(build("1f1b", 2, 8), "stage=0:0.5", cost=close).probes
    assert one.critical_path_share is not None
    assert one.slope is not None
    assert one.critical_path_share > 0.75
    assert one.slope < 0.25
    assert one.slope == pytest.approx(one.replayed_slope, abs=0.001)


def test_a_run_with_probes_is_otherwise_the_run_without_them() -> None:
    with_probes, without = probed(PLAN, "F:0.25"), analyse(record(PLAN, cost_of, steps=13).traces()).report
    assert [step.step for step in with_probes.steps] == list(range(0, 13, 2))
    assert with_probes.probes[0].steps == tuple(range(1, 13, 2))
    assert {step.span_ns for step in with_probes.steps} == {step.span_ns for step in without.steps}
    assert with_probes.step_series is not None
    assert with_probes.step_series.num_steps == 7
    gains, others = (
        [(found.evidence["cause"], found.gain_ns) for found in report.findings] for report in (with_probes, without)
    )
    assert ("structural", 613_332) in gains
    assert set(gains) <= set(others), (
        "steps beside probed ones are longer from start to start, of which findings are shares"
    )
    assert with_probes.links[0].count < without.links[0].count
    assert without.probes == ()


def test_a_probed_step_is_shown_when_it_is_asked_for() -> None:
    report = probed(PLAN, "F:0.25", step=3)
    assert [step.step for step in report.steps] == [3]
    assert report.probes == ()
    with pytest.raises(UsageError, match="no such step"):
        probed(PLAN, "F:0.25", step=30)


def test_too_few_steps_have_a_slope_without_an_interval() -> None:
    (one,) = probed(PLAN, "F:0.25", steps=11).probes
    assert one.slope == pytest.approx(one.critical_path_share)
    assert (one.slope_low, one.slope_high) == (None, None)
    assert one.reason is not None
    assert one.reason.startswith(
        "no interval: that takes 6 probed steps of a target, and there are 5; record more steps"
    )


@pytest.mark.parametrize(
    ("plan", "steps", "reason"),
    [
        (PLAN, 1, "no step with this probe is next to one without"),
        (
            build("dualpipe-v", 2, 4),
            13,
            "the plan overlaps ops of the target with others, which cannot be delayed alone",
        ),
    ],
)
def test_where_nothing_can_be_said_the_reason_is(plan: Plan, steps: int, reason: str) -> None:
    (one,) = probed(plan, "F:0.25", cost=lambda action: 300_000, steps=steps).probes
    assert one == ProbedTarget("F", 0.25, one.steps, reason=reason)


def test_a_target_that_the_run_does_not_have_has_no_slope() -> None:
    of_stage, of_kind = probed(PLAN, "stage=9:0.25", "W:0.25", steps=25).probes
    assert [of_stage.slope, of_kind.slope] == [None, None]
    assert of_stage.reason == of_kind.reason == "no op of the run is of this target"


@pytest.mark.parametrize("really", [0.0, 0.5, 1.5])
def test_delays_that_are_not_those_of_the_probe_leave_the_slope_unknown(really: float) -> None:
    (one,) = probed(PLAN, "F:0.25", cost=lambda action: 30_000_000, really=really).probes
    assert one.slope is None
    assert one.reason == "the ops of rank 0, 1, 2 were not delayed as the probe says"


def test_ranks_on_a_gpu_are_not_delayed_and_say_so() -> None:
    traces = record(PLAN, cost_of, steps=13).traces()
    fact = {"probes": ["F:0.25"], "delays_ns": {}, "on_device": True}
    (one,) = analyse([replace(trace, metadata={**trace.metadata, PROBES: fact}) for trace in traces]).report.probes
    assert one.slope is None
    assert one.reason == "ops of a GPU are not delayed: a host that sleeps delays no more than their launches"


def test_a_rank_that_nobody_delayed_leaves_the_slope_unknown() -> None:
    (one,) = probed(PLAN, "F:0.25", cost=lambda action: 30_000_000, only=0).probes
    assert one.slope is None
    assert one.reason == "the ops of rank 1, 2 were not delayed as the probe says"


@pytest.mark.parametrize(
    "fact",
    [
        None,
        3,
        [],
        {},
        {"probes": "F"},
        {"probes": ["G:1"]},
        {"probes": ["F:0.2"], "delays_ns": [1]},
        {"probes": ["F:0.2"], "delays_ns": {"a": 1}},
    ],
)
def test_a_damaged_fact_is_no_probe(fact: object) -> None:
    traces = record(build("1f1b", 2, 4), steps=3).traces()
    report = analyse([replace(trace, metadata={**trace.metadata, PROBES: fact}) for trace in traces]).report
    assert report.probes == ()
    assert len(report.steps) == 3


def test_each_probe_is_named_in_the_report() -> None:
    (one,) = probed(PLAN, "stage=2:0.125").probes
    assert isinstance(one, ProbedTarget)
    assert (one.target, one.epsilon) == ("stage=2", parse_probe("stage=2:0.125").epsilon)
