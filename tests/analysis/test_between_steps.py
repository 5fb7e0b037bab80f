"""Time between steps, on figures worked out by hand: steps of 100 that begin every 130, with an update of 5."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pptrace.analysis.between_steps import between_steps
from pptrace.analysis.result import Finding, MarkedStep, OpSummary, RankDevice, RankStep, StepReport
from pptrace.analysis.step_parts import Bubble
from pptrace.model.device import DeviceBreakdown

NO_DEVICE = DeviceBreakdown(None, None, None, None, None, None, None, None)
BUSY = DeviceBreakdown(0, 100, 83, 60, 20, 3, 17, 0.5)
OPS = (OpSummary("F", 0, 0, 0, "steady", 0, 50), OpSummary("B", 0, 0, 0, "steady", 50, 100))
UPDATE = {"GRAD_SYNC": 1, "OPTIMIZER": 4}


def run_of(*numbers: int, period: int = 130) -> tuple[list[StepReport], list[MarkedStep]]:
    ranks = [RankStep(rank, 0, 100, 90, 0, 10, {}, (), {}, NO_DEVICE, None, OPS) for rank in range(2)]
    bubble = Bubble(0.1, 0.1, None, None, None)
    steps = [StepReport(n, n * period, n * period + 100, 100, bubble, tuple(ranks)) for n in numbers]
    marked = [
        MarkedStep(rank, n, n * period, n * period + 105, {**UPDATE, "GC": 99} if rank else {"OPTIMIZER": 2})
        for n in numbers
        for rank in range(2)
    ]
    return steps, marked


def found(steps: Sequence[StepReport], marked: Sequence[MarkedStep]) -> Finding | None:
    return between_steps(steps, marked, [RankDevice(0, NO_DEVICE)])


def test_what_passes_between_steps_is_a_finding_without_the_longest_update() -> None:
    finding = found(*run_of(2, 3, 4, 5))
    assert finding is not None
    assert (finding.gain_ns, finding.gain_low_ns, finding.gain_high_ns) == (25, 25, 25)
    assert finding.evidence["period_ns"] == 130
    assert finding.evidence["share"] == 25 / 130
    assert finding.title.startswith("Between steps: 19.2% of the time")


@pytest.mark.parametrize("period", [105, 110])
def test_less_than_a_twentieth_is_none(period: int) -> None:
    assert found(*run_of(2, 3, 4, period=period)) is None


def test_steps_that_do_not_follow_each_other_say_nothing() -> None:
    assert found(*run_of(2, 4, 6)) is None
    assert found(*run_of(3)) is None


def test_without_marks_on_every_rank_and_with_an_evaluation_between_nothing_is_known() -> None:
    steps, marked = run_of(2, 3)
    assert found(steps, marked) is not None
    assert found(steps, marked[:-1]) is None
    assert found(steps, []) is None
    assert found(steps, [*marked[:-1], replace(marked[-1], spans={"EVAL": 3})]) is None


def test_steps_on_clocks_that_do_not_compare_and_on_devices_have_none() -> None:
    steps, marked = run_of(2, 3)
    assert found([replace(step, span_ns=None) for step in steps], marked) is None
    assert between_steps(steps, marked, [RankDevice(0, NO_DEVICE), RankDevice(1, BUSY)]) is None
