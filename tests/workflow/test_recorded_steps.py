"""The recording's steps are those of the report: one length for one step, wherever it stands."""

from __future__ import annotations

import numpy as np
import pytest

from pptrace.workflow.load import load
from pptrace.workflow.unrecorded import _RankSteps, _typical
from tests.support.extent import ALL
from tests.support.programs import SAMPLES


@pytest.mark.parametrize("sample", ["uneven_p4", "zbv_p4", "experts_pp2_ep2", *["1f1b_p4", "dualpipe_p4"] * ALL])
def test_the_recorded_step_is_the_typical_one_of_the_recording(sample: str) -> None:
    report = load([SAMPLES / sample], as_recorded=True).report
    assert report.recording.recorded_step_ns == report.typical_step.period_ns
    assert (report.recording.predicted_step_ns, report.recording.figures) == (None, "recorded")
    assert report.recording.reason == "the recorded figures are asked for"


def test_the_predicted_step_is_that_of_the_traces_read_without_their_recording() -> None:
    """Two ways to it: the replay of the graph, and all of the analysis once more of traces with other times."""
    report = load([SAMPLES / "1f1b_p4"]).report
    assert report.recording.figures == "unrecorded"
    assert report.recording.predicted_step_ns == pytest.approx(report.typical_step.period_ns, rel=1e-3)


def test_marks_that_hold_more_than_their_ops_predict_nothing_and_a_reason_says_so() -> None:
    """The only step of this run begins a second before its first op, while other ranks start to record."""
    recording = load([SAMPLES / "gpu_nccl_1f1b_p4"]).report.recording
    assert (recording.recorded_step_ns, recording.predicted_step_ns) == (None, None)
    assert (recording.reason or "").startswith("marks of steps are not as long as the steps by their ops")


def test_the_last_step_lasts_as_long_beyond_its_range_as_steps_begin_after_theirs() -> None:
    """Ranges of 10 end to end, of which the first op comes after 2, 3 and 3: the period of the last one is 10 too."""
    steps = {0: _RankSteps(np.arange(3), np.array([2, 13, 23]), usual=1, marked_ns=10, end_ns=30, is_marked=True)}
    assert steps[0].over_ns == 33
    assert _typical(steps) == 10
    one = {0: _RankSteps(np.arange(1), np.array([3]), usual=0, marked_ns=0, end_ns=10, is_marked=True)}
    assert _typical(one) == 10
