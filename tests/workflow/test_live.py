"""Following a run's live files: what is known of each step, and what is not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pptrace.errors import TraceError
from pptrace.live_records.file import live_files
from pptrace.report.live import cost_lines, step_line
from pptrace.workflow.live.follow import LiveRun, cost_of_run, require_live
from tests.support.live_run import STEP_NS, LiveFolder
from tests.support.programs import one_line, pptrace_here


def test_the_figures_of_a_step_are_those_of_its_ops(tmp_path: Path) -> None:
    LiveFolder(tmp_path).write_steps(3)
    steps = list(LiveRun(tmp_path).poll())
    assert [step.step for step in steps] == [0, 1, 2]
    for step in steps:
        assert step.step_ns == STEP_NS - 10**6
        for rank in step.ranks:
            assert rank.compute_ns == pytest.approx(4 * 15e6, rel=0.03)
            assert rank.bubble_ns is not None
            assert rank.compute_ns + rank.bubble_ns == step.span_ns
    assert steps[1].start_ns - steps[0].start_ns == STEP_NS


def test_a_step_waits_for_all_ranks_and_the_one_in_between_has_its_bounds_alone(tmp_path: Path) -> None:
    run = LiveFolder(tmp_path)
    follower = LiveRun(tmp_path)
    assert list(follower.poll()) == []
    run.write_steps(6)
    whole = live_files(tmp_path)[1].read_bytes()
    live_files(tmp_path)[1].write_bytes(whole[:-30])  # rank 1 is about to write its last step
    assert [step.step for step in follower.poll()] == [0, 1, 2, 3, 4]
    live_files(tmp_path)[1].write_bytes(whole)
    (last,) = follower.poll()
    assert last.step == 5
    skipped = list(LiveRun(tmp_path).poll())[4]
    assert not skipped.observed
    assert skipped.span_ns is None
    assert [rank.compute_ns for rank in skipped.ranks] == [None, None]


def test_a_reader_that_asks_for_the_last_steps_begins_with_a_key_record(tmp_path: Path) -> None:
    LiveFolder(tmp_path).write_steps(150)
    steps = list(LiveRun(tmp_path, last=10).poll())
    assert len(steps) < 100
    assert steps[-1].step == 149
    assert steps[-2].ranks[0].compute_ns == pytest.approx(4 * 15e6, rel=0.03)


def test_times_of_a_host_that_only_launches_are_no_compute(tmp_path: Path) -> None:
    LiveFolder(tmp_path, device="cuda:0 NVIDIA H100").write_steps(20, {1: 2.0})
    steps = list(LiveRun(tmp_path).poll())
    assert all(rank.compute_ns is None for step in steps for rank in step.ranks)
    assert not any(step.slow_ranks for step in steps)
    assert "launches" in steps[0].notes[0]
    assert steps[0].step_ns == STEP_NS - 10**6


def test_ranks_of_several_hosts_have_windows_of_their_own(tmp_path: Path) -> None:
    """Without messages nothing relates their clocks: what each computed is known, and what it waited for is not."""
    LiveFolder(tmp_path, hosts=2).write_steps(2)
    for step in LiveRun(tmp_path).poll():
        assert step.span_ns is None
        for rank in step.ranks:
            assert rank.compute_ns == pytest.approx(4 * 15e6, rel=0.03)
            assert rank.bubble_ns is None


def test_a_run_with_a_rank_that_never_wrote_is_read_when_it_is_over(tmp_path: Path) -> None:
    run = LiveFolder(tmp_path)
    run.write_steps(3)
    live_files(tmp_path)[1].unlink()
    assert list(LiveRun(tmp_path).poll()) == []
    run.status("failed")
    assert [step.step for step in LiveRun(tmp_path).poll()] == [0, 1, 2]


def test_lines_say_what_is_known_and_the_cost_has_its_interval(tmp_path: Path) -> None:
    run = LiveFolder(tmp_path, pp=4)
    run.write_steps(40)
    run.write_steps(4, {2: 1.5})
    *_, last = (step_line(step) for step in LiveRun(tmp_path).poll() if step.observed)
    assert "slow rank 2: its ops take" in last
    measured, counted = cost_lines(cost_of_run(tmp_path))
    assert "+0.00% of a step (95 % interval +0.00% to +0.00%, 8 unobserved steps)" in measured
    assert "0.05% of a step" in counted


def test_a_directory_without_live_files_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="pptrace run --live"):
        require_live(tmp_path)


def test_a_directory_of_several_runs_names_the_newest_and_a_missing_one_when_it_is_made(tmp_path: Path) -> None:
    for number, name in enumerate(("b", "a")):
        LiveFolder(tmp_path / name).write_steps(1)
        os.utime(tmp_path / name, (number, number))
    assert str(tmp_path / "a") in one_line(pptrace_here("live", tmp_path), 1)
    assert "made when the run begins" in one_line(pptrace_here("live", tmp_path / "c"), 1)


def test_the_text_says_once_why_figures_are_missing_and_how_the_run_ended(tmp_path: Path) -> None:
    run = LiveFolder(tmp_path, device="cuda")
    run.write_steps(3)
    run.status("failed")
    lines = pptrace_here("live", tmp_path).err.splitlines()
    assert len([line for line in lines if "compute is not known" in line]) == 1
    assert "'failed'" in lines[-1]
