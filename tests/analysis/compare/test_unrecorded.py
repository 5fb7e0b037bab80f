"""Comparison of runs without their recording: whose steps are compared, and how far their change may be off."""

from __future__ import annotations

import json
from math import hypot, log
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from pptrace.analysis.compare.recording import RecordedBoth, Recording, recording_of
from pptrace.analysis.compare.result import Comparison
from pptrace.analysis.compare.side import ComparedRun
from pptrace.analysis.report import RecordingReport
from pptrace.workflow.compare import read_compared
from tests.support.comparison import compare_runs
from tests.support.noisy_runs import NoisyRun
from tests.support.programs import ROOT

OBSERVED = ROOT.parent / "shared" / "data" / "gpu_observer"
STEP = 20_000_000
BLOCK = RecordingReport(
    recorded_step_ns=2 * STEP,
    predicted_step_ns=STEP,
    low_ns=round(0.8 * STEP),
    high_ns=round(1.25 * STEP),
    cost_per_event_ns=2_000.0,
    cost_source="trace",
    events_per_step=10_000,
    figures="unrecorded",
)
SHAPES = replace(BLOCK, settings={"record_shapes": True})


def cost(block: RecordingReport = BLOCK, steps: int = 0, format_name: str = "kineto") -> Recording:
    return recording_of(block, [format_name], np.full(steps, STEP))


def deviation(a: Recording, b: Recording) -> float:
    there, back = RecordedBoth(a, b).deviation, RecordedBoth(b, a).deviation
    assert there == pytest.approx(back)
    return there


@pytest.mark.skipif(not OBSERVED.is_dir(), reason="the recorded GPU runs of shared/data are not here")
def test_two_programs_of_equal_length_that_were_recorded_differently_do_not_differ() -> None:
    """Without a profiler their steps take 32.8 and 30.9 ms; with theirs 57.2 and 76."""
    walls = json.loads((OBSERVED / "walls_ms.json").read_text(encoding="utf-8"))
    small, mid = (float(np.median(walls[f"{program}.none"][10:15])) for program in ("small", "mid"))
    files = [OBSERVED / f"{name}.json.gz" for name in ("small.cpu_cuda", "mid.shapes")]
    found = compare_runs(*map(read_compared, files))
    assert found.verdict == "no difference"
    assert found.span.a_ns == pytest.approx(small * 1e6, rel=0.05)
    assert found.span.b_ns == pytest.approx(mid * 1e6, rel=0.05)
    assert found.span.low < mid / small - 1 < found.span.high
    assert found.recording.a.source == found.recording.b.source == "predicted"
    assert not any(part.significant for part in found.parts)
    assert len([line for line in found.warnings if line.startswith("the recordings differ: torch.profiler in A,")]) == 1
    recorded = compare_runs(*(read_compared(file, as_recorded=True) for file in files))
    assert recorded.verdict == "slower"
    assert recorded.recording.deviation == 0
    assert any("may be that of the recording alone" in line for line in recorded.warnings)


def test_errors_of_recordings_that_differ_are_independent() -> None:
    one = cost().deviation
    others = (
        cost(SHAPES),
        cost(format_name="nsys-sqlite"),
        cost(replace(BLOCK, events_per_step=12_000)),
        cost(replace(BLOCK, cost_source="measured")),
    )
    for other in others:
        assert deviation(cost(), other) == pytest.approx(hypot(one, one))


def test_errors_of_runs_that_were_recorded_alike_cancel() -> None:
    assert deviation(cost(), cost(replace(BLOCK, events_per_step=10_500))) == 0


def test_of_runs_that_were_recorded_alike_costs_that_differ_and_lengths_that_depend_on_them_count() -> None:
    dearer = cost(replace(BLOCK, cost_per_event_ns=2_200.0))
    assert deviation(cost(), dearer) == pytest.approx(10_000 * 200 / STEP)
    surer = cost(replace(BLOCK, low_ns=round(0.98 * STEP), high_ns=round(1.02 * STEP)))
    assert deviation(cost(), surer) == pytest.approx((cost().deviation or 0) - surer.deviation)


def test_a_recorded_step_is_off_by_what_it_may_be_longer() -> None:
    recorded = cost(replace(BLOCK, figures="recorded", recorded_step_ns=round(1.01 * STEP)))
    assert recorded.deviation == pytest.approx(log(1.01))
    assert deviation(recorded, recorded) == 0
    assert deviation(recorded, cost()) == pytest.approx(hypot(log(1.01), cost().deviation or 0))


def test_measured_steps_are_compared_from_eight_of_them_on_and_have_no_error_of_a_prediction() -> None:
    few, many = cost(steps=7), cost(steps=8)
    assert few.measured is None
    assert few.of_side.source == "predicted"
    assert many.measured is not None
    assert many.of_side.source == "measured"
    assert many.deviation == 0
    recorded = cost(replace(BLOCK, figures="recorded"), steps=8)
    assert recorded.measured is None
    assert recorded.of_side.source is None


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        (cost(), cost(SHAPES), "taken out"),
        (cost(replace(BLOCK, figures="recorded")), cost(replace(SHAPES, figures="recorded")), "allowed for"),
        (cost(), cost(RecordingReport(), format_name="nsys-sqlite"), "may be that of the recording alone"),
    ],
)
def test_recordings_that_differ_are_one_line(a: Recording, b: Recording, words: str) -> None:
    (line,) = RecordedBoth(a, b).lines()
    assert line.startswith(f"the recordings differ: {a.settings} in A, {b.settings} in B")
    assert words in line
    assert list(RecordedBoth(a, a).lines()) == []


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> tuple[ComparedRun, ComparedRun]:
    """Two runs, of which the second is 10 % slower."""
    folder: Path = tmp_path_factory.mktemp("tables")
    usual, slower = (
        read_compared(NoisyRun(slower=by).write(folder / f"{seed}.csv", seed)) for seed, by in enumerate((0.0, 0.1))
    )
    return usual, slower


def compared(table: tuple[ComparedRun, ComparedRun], a: Recording, b: Recording) -> Comparison:
    return compare_runs(replace(table[0], recording=a), replace(table[1], recording=b))


def test_what_is_not_known_of_the_cost_widens_the_interval_and_unmarks_parts(
    table: tuple[ComparedRun, ComparedRun],
) -> None:
    alike, apart = compared(table, cost(), cost()), compared(table, cost(), cost(SHAPES))
    assert (alike.verdict, apart.verdict) == ("slower", "no difference")
    assert alike.span.change == apart.span.change
    assert alike.span.low == compare_runs(*table).span.low
    assert apart.recording.deviation == pytest.approx(hypot(cost().deviation or 0, cost().deviation or 0))
    assert log(1 + apart.span.high) - log(1 + (apart.span.change or 0)) == pytest.approx(
        1.96 * apart.recording.deviation, rel=0.05
    )
    assert any(part.significant for part in alike.parts)
    assert not any(part.significant for part in apart.parts)


def test_steps_that_were_timed_unrecorded_are_the_typical_ones(table: tuple[ComparedRun, ComparedRun]) -> None:
    period = table[0].figures.lengths
    both = [replace(run, figures=replace(run.figures, period=run.figures.lengths)) for run in table]
    measured = Recording("torch.profiler", is_unrecorded=True, measured=period // 2, deviation=0.0)
    found = compared((both[0], both[1]), measured, cost())
    assert found.span.a_ns == np.sort(period // 2)[(len(period) - 1) // 2]
    assert found.num_steps.a == len(period)
    a, b = (replace(run, figures=replace(run.figures, period=None)) for run in table)
    spans = compared((a, b), measured, cost())
    assert spans.span.a_ns == np.sort(a.figures.span)[(len(period) - 1) // 2], "spans of pipelines are no periods"
