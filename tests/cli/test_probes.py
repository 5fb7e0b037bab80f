"""Runs with ``--probe``: the losses are those without, probed steps stand alone, and the report says what they showed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from instrument.launch.window import default_steps, parse_steps
from pptrace.schedule.probe import parse_probes
from pptrace.workflow.load import load
from tests.support.programs import EXAMPLE, Ended, pptrace, sizes

pytestmark = pytest.mark.processes

_MODEL = sizes(layers=4, hidden=16, heads=2, seq=8, microbatches=4)
_SLEEP = ("--sleep-forward", "10", "--sleep-backward", "20")
MARKED = """
import time, pptrace
for step in range(10):
    with pptrace.mark("step"):
        for microbatch in range(2):
            with pptrace.mark("forward", microbatch=microbatch, stage=0): time.sleep(0.02)
            with pptrace.mark("backward", microbatch=microbatch, stage=0): time.sleep(0.04)
"""


def losses(ended: Ended) -> list[str]:
    assert ended.code == 0, ended.err
    return re.findall(r"step +\d+ +loss +(\S+)", ended.out)


def test_a_probed_run_learns_the_same_and_says_what_a_faster_target_would_gain(tmp_path: Path) -> None:
    script = (EXAMPLE, "--steps", "16", *_MODEL)
    probed = pptrace(
        "run", "-n", "2", "--probe", "F:0.5", "--steps", "2:15", "-o", tmp_path / "run", *script, *_SLEEP, forked=True
    )
    plain = pptrace("run", "-n", "2", "--profiler", "none", "-o", tmp_path / "plain", *script, forked=True)
    assert losses(probed) == losses(plain)
    assert len(losses(plain)) == 16
    assert "What a faster target would gain" in probed.out

    analysis = load([tmp_path / "run"], as_recorded=True)
    report, ops = analysis.report, analysis.data.ops
    starts = ops[ops["kind"].isin(("F", "B"))].groupby("step")["start_ns"].min()
    assert [step.period_ns for step in report.steps] == [
        starts[step.step + 1] - starts[step.step] for step in report.steps[:-1]
    ] + [report.steps[-1].period_ns]
    assert report.recording is not None
    assert report.typical_step is not None
    assert report.recording.recorded_step_ns == pytest.approx(report.typical_step.length_ns, rel=0.1)
    assert [step.step for step in report.steps] == list(range(2, 15, 2))
    (one,) = report.probes
    assert (one.target, one.epsilon, one.steps, one.reason) == ("F", 0.5, tuple(range(3, 15, 2)), None)
    assert one.slope is not None
    assert one.slope_low is not None
    assert one.slope_high is not None
    assert one.critical_path_share == pytest.approx(1 / 3, abs=0.05)
    assert one.slope_low <= one.slope <= one.slope_high
    assert one.slope_low - 0.1 <= one.critical_path_share <= one.slope_high + 0.1  # wide on a busy machine


def test_ops_that_a_script_marks_itself_are_delayed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MARKED)
    run = tmp_path / "run"
    ended = pptrace("run", "--probe", "B:1", "--steps", "0:9", "-o", run, tmp_path / "train.py", forked=True)
    assert ended.code == 0, ended.err
    ops = load([run]).data.ops
    lengths = ops.assign(ns=ops["end_ns"] - ops["start_ns"], is_probed=ops["step"] % 2 == 1)
    medians = lengths.groupby(["kind", "is_probed"], observed=True)["ns"].median()
    assert medians["F", True] / medians["F", False] == pytest.approx(2, abs=0.6)  # a busy machine
    assert medians["B", True] / medians["B", False] == pytest.approx(1, abs=0.35)


@pytest.mark.parametrize(("probes", "window"), [((), "4:14"), (("F:0.1",), "2:19"), (("F:0.1", "B:0.1"), "2:35")])
def test_without_steps_each_probe_comes_eight_times(probes: tuple[str, ...], window: str) -> None:
    assert str(parse_steps(default_steps(parse_probes(probes)))) == window
