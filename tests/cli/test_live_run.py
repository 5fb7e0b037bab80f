"""A run with ``--live``: its records agree with its traces, a slow rank is named, and other programs can follow it."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from instrument.examples.faults import Fault
from pptrace.analysis.result import RankStep
from pptrace.live_records.codec import MOST_BYTES
from pptrace.live_records.file import live_files
from pptrace.live_records.frames import frames
from pptrace.workflow.live.follow import LiveRun, LiveStepFigures, status_of
from pptrace.workflow.load import load
from tests.support.analysed import analyse
from tests.support.programs import ROOT, Ended, pptrace, sizes
from tests.support.programs import pptrace_here as here

pytestmark = pytest.mark.processes

_STEPS, _SLOW_SINCE = 20, 13
_TIMES = 3.0
"""Factor by which ops of the slow rank take longer: far more than what a busy machine adds to them."""
_SCRIPT = ROOT / "instrument" / "examples" / "train_gpt.py"
_ARGUMENTS = (
    *("--steps", str(_STEPS), "--sleep-forward", "20", "--sleep-backward", "40"),
    *sizes(layers=4, hidden=16, heads=2, seq=8, microbatches=2),
)


@dataclass(frozen=True)
class _Run:
    folder: Path
    ended: Ended
    while_running: list[LiveStepFigures]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> _Run:
    """Two ranks, steps 2 to 4 profiled as well; the ops of rank 1 take longer from a step on."""
    folder = tmp_path_factory.mktemp("live") / "run"
    seen: list[LiveStepFigures] = []
    over = threading.Event()

    def follow() -> None:
        live = LiveRun(folder)
        while not over.is_set():
            steps = list(live.poll())
            if status_of(folder) == "running":
                seen.extend(steps)
            time.sleep(0.05)

    follower = threading.Thread(target=follow)
    follower.start()
    try:
        fault = str(Fault("slow", (1,), _TIMES, since=_SLOW_SINCE))
        options = ("-n", "2", "--live", "--steps", "2:5", "--no-analyze", "-o", folder)
        ended = pptrace("run", *options, _SCRIPT, "--fault", fault, *_ARGUMENTS, forked=True)
    finally:
        over.set()
        follower.join()
    assert ended.code == 0, ended.err
    return _Run(folder, ended, seen)


@pytest.fixture(scope="module")
def lines(run: _Run) -> list[dict]:
    ended = here("live", str(run.folder), "--format", "json", "--log", f"jsonl:{run.folder.parent / 'log'}")
    assert ended.code == 0, ended.err
    return [json.loads(line) for line in ended.out.splitlines()]


def test_each_step_is_in_the_log_as_well(run: _Run, lines: list[dict]) -> None:
    logged = [json.loads(line) for line in (run.folder.parent / "log").read_text().splitlines()]
    assert [row["step"] for row in logged] == [line["step"] for line in lines]
    shares = [sum(value for name, value in row.items() if name.endswith("_share")) for row in logged]
    assert shares == [pytest.approx(1 if line["observed"] else 0) for line in lines]


def test_steps_come_while_the_run_goes_on(run: _Run) -> None:
    assert [step.step for step in run.while_running] == list(range(len(run.while_running)))
    assert len(run.while_running) >= _STEPS // 2


def test_every_step_is_one_line_of_json(lines: list[dict]) -> None:
    assert [line["step"] for line in lines] == list(range(_STEPS))
    assert [line["step"] for line in lines if not line["observed"]] == [4, 9, 14, 19]
    assert all(line["step_ns"] >= 2 * 60e6 for line in lines), "two microbatches that sleep 60 ms"
    assert lines[0]["deviation"] is None


def test_a_slow_rank_is_named_within_three_steps(lines: list[dict]) -> None:
    """Others only in steps that a busy machine made slow on them."""
    computed = {line["step"]: [rank["compute_ns"] for rank in line["ranks"]] for line in lines if line["observed"]}
    usual = [median(ranks) for ranks in zip(*(computed[n] for n in computed if n < _SLOW_SINCE), strict=True)]
    named = [(line["step"], slow["rank"], slow["excess"]) for line in lines for slow in line["slow_ranks"]]
    by_fault = [(step, excess) for step, rank, excess in named if rank == 1 and step >= _SLOW_SINCE]
    assert by_fault[0][0] <= _SLOW_SINCE + 2
    for step, rank, _ in named:
        assert (rank == 1 and step >= _SLOW_SINCE) or computed[step][rank] > 1.1 * usual[rank]
    assert median(excess for _, excess in by_fault) == pytest.approx(_TIMES - 1, rel=0.4)


def test_records_agree_with_the_traces_of_the_same_steps(run: _Run, lines: list[dict]) -> None:
    """Within the marks: of each range the profiler's own event, some µs on a busy machine, is outside the record's."""
    reports = {step.step: step for step in load([run.folder]).report.steps}
    assert sorted(reports) == [2, 3, 4]
    for number in (2, 3):  # step 4 is not observed
        report, line = reports[number], lines[number]
        assert line["span_ns"] == pytest.approx(report.span_ns, abs=1e6)
        for rank, live in zip(report.ranks, line["ranks"], strict=True):
            _agree(rank, live)


def _agree(rank: RankStep, live: dict) -> None:
    assert live["compute_ns"] == pytest.approx(rank.compute_ns, rel=0.01)
    assert live["not_compute_ns"] == pytest.approx(rank.not_compute_ns, abs=0.01 * rank.window_ns)
    assert live["bubble_ns"] == pytest.approx(rank.bubble_ns, abs=0.02 * rank.window_ns)
    assert live["compute_ns"] + live["exposed_comm_ns"] + live["bubble_ns"] == pytest.approx(rank.window_ns, abs=1e6)


def test_figures_of_steps_are_those_of_an_analysis_of_each_alone(run: _Run, lines: list[dict]) -> None:
    follower = LiveRun(run.folder)
    by_step = {number: ranks for steps in follower.whole_steps() for number, ranks in steps.items()}
    for number in (5, 6, 7, 13, 15, 18):
        (report,) = analyse(follower.traces([by_step[number]]), num_ranks=len(follower.files)).report.steps
        assert lines[number]["span_ns"] == report.span_ns
        for rank, live in zip(report.ranks, lines[number]["ranks"], strict=True):
            for name in ("compute_ns", "bubble_ns", "exposed_comm_ns", "not_compute_ns"):
                assert live[name] == getattr(rank, name)
            assert live["wait_ns"] == sum(comm.wait_ns for comm in rank.comms)


def test_a_step_of_a_rank_takes_at_most_4_kb(run: _Run) -> None:
    for path in live_files(run.folder).values():
        data = path.read_bytes()
        ends = [0, *(end for _, _, end in frames(BytesIO(data), len(data)))]
        assert max(after - before for before, after in pairwise(ends)) <= MOST_BYTES
        assert path.stat().st_size <= MOST_BYTES * _STEPS


def test_the_end_of_the_run_says_what_observing_cost(run: _Run) -> None:
    assert "--live: cost" in run.ended.err
    assert "unobserved step" in run.ended.err
    assert "as they counted it" in run.ended.err


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    ended = here("live", str(tmp_path))
    assert ended.code == 1
    assert "no live records" in ended.err
