"""Following a run's live files: what is known of each step, and what is not."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from instrument.launch.record import write_json
from pptrace.analysis.explain import explain
from pptrace.errors import TraceError
from pptrace.live_records.codec import Flag, LiveStep, StepHead
from pptrace.live_records.file import MOST_PROGRAMS, LiveWriter, live_files, live_path
from pptrace.marks import Axis, Collective, CollectiveMark, OpMark, SpanKind, SpanMark, format_mark
from pptrace.model.traces import Trace
from pptrace.report.live import cost_lines, new_notes, step_line
from pptrace.schedule.actions import Action, Kind
from pptrace.workflow.analyse import MeasuredSteps, measure
from pptrace.workflow.live import follow
from pptrace.workflow.live.follow import (
    MOST_AT_ONCE,
    MOST_WAITING,
    LiveRun,
    LiveStepFigures,
    cost_of_run,
    require_live,
    status_of,
)
from tests.support.analysed import analyse
from tests.support.live_run import CLOCK, STEP_NS, LiveFolder
from tests.support.programs import one_line, pptrace_here


def test_the_figures_of_a_step_are_those_of_its_ops(tmp_path: Path) -> None:
    LiveFolder(tmp_path).write_steps(3)
    steps = list(LiveRun(tmp_path).poll())
    assert [step.step for step in steps] == [0, 1, 2]
    for step in steps:
        assert step.step_ns == STEP_NS - 10**6
        for rank in step.ranks:
            assert rank.compute_ns == pytest.approx(4 * 15e6, rel=0.03)
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


def test_steps_that_come_together_are_analysed_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that whoever follows keeps up with steps that come faster than one by one could be analysed."""
    analysed: list[int] = []

    def counted(traces: Sequence[Trace], num_ranks: int) -> MeasuredSteps:
        analysed.append(num_ranks)
        return measure(traces, num_ranks)

    monkeypatch.setattr(follow, "measure", counted)
    run, follower = LiveFolder(tmp_path), LiveRun(tmp_path)
    for num, analyses in ((1, 1), (2, 1), (3 * MOST_AT_ONCE, 3)):
        run.write_steps(num)
        assert len(list(follower.poll())) == num
        assert analysed == [2] * analyses
        analysed.clear()


def test_figures_are_those_of_the_report_without_what_explains_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LiveFolder(tmp_path, pp=4).write_steps(9, {2: 1.3})
    follower = LiveRun(tmp_path)
    (steps,) = follower.whole_steps()
    observed = [ranks for ranks in steps.values() if all(step.names for step in ranks.values())]
    reports = {step.step: step for step in analyse(follower.traces(observed), num_ranks=4).report.steps}
    assert all(step.causes for step in reports.values())
    monkeypatch.setattr(explain, "_explain_together", None)
    shown = {step.step: step for step in LiveRun(tmp_path).poll() if step.observed}
    assert list(shown) == list(reports) == [0, 1, 2, 3, 5, 6, 7, 8]
    for number, report in reports.items():
        assert shown[number].span_ns == report.span_ns
        for rank, of_report in zip(shown[number].ranks, report.ranks, strict=True):
            for name in ("compute_ns", "exposed_comm_ns", "bubble_ns", "not_compute_ns"):
                assert getattr(rank, name) == getattr(of_report, name)


def test_steps_of_other_numbers_of_microbatches_have_the_figures_of_their_own(tmp_path: Path) -> None:
    run, one_by_one = LiveFolder(tmp_path), LiveRun(tmp_path)
    numbers, alone = [4, 2, 8, 4, 4, 1, 4, 6, 2, 4, 4, 5], []
    for microbatches in numbers:
        run.write_steps(1, microbatches=microbatches)
        alone += one_by_one.poll()
    together = list(LiveRun(tmp_path).poll())
    assert together == alone
    for microbatches, step in zip(numbers, together, strict=True):
        for rank in step.ranks if step.observed else ():
            assert rank.compute_ns == pytest.approx(microbatches * 15e6, rel=0.03)
            assert rank.compute_ns + rank.bubble_ns == step.span_ns


def test_steps_with_ranges_in_yet_another_order_have_their_sums_and_the_reason(tmp_path: Path) -> None:
    run = LiveFolder(tmp_path, pp=1)
    for microbatches in range(1, MOST_PROGRAMS + 7):
        run.write_steps(1, {0: 0.1}, microbatches)
    observed = [step for step in LiveRun(tmp_path).poll() if step.observed]
    known, last = observed[MOST_PROGRAMS - 1], observed[-1]
    assert known.notes == ()
    assert known.ranks[0].compute_ns == pytest.approx(known.ranks[0].op_ns, rel=0.001)
    assert last.ranks[0].compute_ns is None
    assert last.ranks[0].op_ns == pytest.approx((MOST_PROGRAMS + 6) * 1.5e6, rel=0.03)
    assert "none of its first 16 orders" in last.notes[0]


def test_collectives_whose_ends_contradict_each_other_do_not_say_who_waited(tmp_path: Path) -> None:
    """That of rank 0 is over before rank 1 begins it, though both read one clock."""
    write_json(tmp_path / "run.json", {"status": "running"})
    ops = [OpMark(Action(kind, 0, 0), 0) for kind in (Kind.F, Kind.B)]
    marks = [*ops, CollectiveMark(Collective.ALL_REDUCE, Axis.DP, 2, 8, 0), SpanMark(SpanKind.STEP, 0)]
    facts = {"world_size": 2, "host": "a", "device": "cpu", "mesh": {"pp": 1, "dp": 2}, "clock": {"start": CLOCK}}
    for rank, lasts_ns in enumerate((3_000_000, 6_000_000)):
        writer = LiveWriter(live_path(tmp_path, rank))
        writer.facts({"rank": rank, **facts})
        begins = [0, lasts_ns, 2 * lasts_ns, 0]
        ends = [lasts_ns, 2 * lasts_ns, 2 * lasts_ns + 1_000_000, 15_000_000]
        program = writer.program(list(map(format_mark, marks)))
        writer.step(StepHead(0, Flag.OBSERVED, 0, 15_000_000, 2 * lasts_ns, 1_000_000), program, begins, ends)
    (step,) = LiveRun(tmp_path).poll()
    early, late = step.ranks
    assert (early.compute_ns, early.wait_ns, early.exposed_comm_ns, early.bubble_ns) == (6_000_000, None, None, None)
    assert (late.compute_ns, late.wait_ns) == (12_000_000, None)
    assert any("end before the other side has begun" in note for note in step.notes)


@pytest.mark.parametrize("both_write", [True, False])
def test_what_is_kept_of_a_long_run_does_not_grow_with_it(tmp_path: Path, both_write: bool) -> None:
    run, most = LiveFolder(tmp_path, device="cuda"), 0
    run.write_steps(MOST_WAITING + 500)
    if not both_write:  # rank 1 has been killed
        path = live_files(tmp_path)[1]
        path.write_bytes(path.read_bytes()[:20_000])
    for step in LiveRun(tmp_path).poll():
        if step.step % 100 == 0:
            most = max(most, sum(type(one) is LiveStep for one in gc.get_objects()))
    assert 0 < most <= 4 * MOST_AT_ONCE + (0 if both_write else MOST_WAITING)


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


def test_times_of_the_ranks_of_a_host_compare_whatever_each_has_read_of_the_wall_clock(tmp_path: Path) -> None:
    for name, wall_step_ns in (("even", 0), ("set", 40_000_000)):
        LiveFolder(tmp_path / name, wall_step_ns=wall_step_ns).write_steps(3)
    assert list(LiveRun(tmp_path / "set").poll()) == list(LiveRun(tmp_path / "even").poll())


def test_ranks_of_several_hosts_have_windows_of_their_own(tmp_path: Path) -> None:
    """Without messages nothing relates their clocks: what each computed is known, and what it waited for is not."""
    LiveFolder(tmp_path, hosts=2).write_steps(2)
    for step in LiveRun(tmp_path).poll():
        assert step.span_ns is None
        for rank in step.ranks:
            assert rank.compute_ns == pytest.approx(4 * 15e6, rel=0.03)
            assert rank.bubble_ns is None
        assert "clocks could not be related" in step.notes[0]


def test_a_run_with_a_rank_that_never_wrote_is_read_when_it_is_over(tmp_path: Path) -> None:
    run = LiveFolder(tmp_path)
    run.write_steps(3)
    live_files(tmp_path)[1].unlink()
    assert list(LiveRun(tmp_path).poll()) == []
    follower, num = LiveRun(tmp_path), 3 * MOST_AT_ONCE
    run.write_steps(num - 3)
    assert list(follower.poll()) == []
    run.status("failed")
    assert [list(steps) for steps in follower.whole_steps()] == [
        list(range(first, first + MOST_AT_ONCE)) for first in range(0, num, MOST_AT_ONCE)
    ]


def test_lines_say_what_is_known_and_the_cost_has_its_interval(tmp_path: Path) -> None:
    run = LiveFolder(tmp_path, pp=4)
    run.write_steps(40)
    run.write_steps(4, {2: 1.5})
    *_, last = (step_line(step) for step in LiveRun(tmp_path).poll() if step.observed)
    assert "slow rank 2: its ops take" in last
    measured, counted = cost_lines(cost_of_run(tmp_path))
    assert "+0.00% of a step (95 % interval +0.00% to +0.00%, 8 unobserved steps)" in measured
    assert "0.05% of a step" in counted
    live_files(tmp_path)[3].unlink()  # as where another node has it
    assert [measured, counted] == list(cost_lines(cost_of_run(tmp_path)))


def test_a_directory_without_live_files_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="pptrace run --live"):
        require_live(tmp_path)


def test_a_directory_of_several_runs_names_the_newest_and_a_missing_one_when_it_is_made(tmp_path: Path) -> None:
    for number, name in enumerate(("b", "a")):
        LiveFolder(tmp_path / name).write_steps(1)
        os.utime(tmp_path / name, (number, number))
    assert str(tmp_path / "a") in one_line(pptrace_here("live", tmp_path), 1)
    assert "made when the run begins" in one_line(pptrace_here("live", tmp_path / "c"), 1)


def test_of_the_steps_that_are_there_the_last_ones_are_printed(tmp_path: Path) -> None:
    LiveFolder(tmp_path).write_steps(90)
    lines = pptrace_here("live", tmp_path, "--once", "--last", "3").out.splitlines()
    assert [line.split()[1] for line in lines] == ["87", "88", "89"]


def test_a_reason_that_differs_in_its_numbers_is_said_once(tmp_path: Path) -> None:
    texts, noted = [f"step {number} of rank 0 and {number + 1}: lost" for number in range(3)], set[str]()
    steps = [LiveStepFigures(0, 0, 1, True, None, None, None, (), notes=(text,)) for text in texts]
    assert [note for step in steps for note in new_notes(step, noted)] == ["step 0 of rank 0 and 1: lost"]


def test_the_text_says_once_why_figures_are_missing_and_how_the_run_ended(tmp_path: Path) -> None:
    run = LiveFolder(tmp_path, device="cuda")
    run.write_steps(3)
    run.status("failed")
    lines = pptrace_here("live", tmp_path).err.splitlines()
    assert len([line for line in lines if "compute is not known" in line]) == 1
    assert "'failed'" in lines[-1]


def test_records_that_end_before_their_ranks_do_are_said_to(tmp_path: Path) -> None:
    run = LiveFolder(tmp_path)
    run.write_steps(6)
    assert "the live records end" not in pptrace_here("live", tmp_path, "--once").err
    seen = [{"rank": rank, "steps_seen": 6} for rank in (0, 1)]
    write_json(tmp_path / "run.json", {"status": "ok", "ranks": seen})
    assert "the live records end" not in pptrace_here("live", tmp_path).err
    whole = live_files(tmp_path)[1].read_bytes()
    live_files(tmp_path)[1].write_bytes(whole[:-30])
    line = (
        "pptrace: the live records end with step 4: what rank 1 wrote after it is cut (a full disk, or a killed rank)"
    )
    write_json(tmp_path / "run.json", {"status": "ok", "ranks": ["?", {"rank": 1}]})
    assert pptrace_here("live", tmp_path).err.splitlines()[-1] == line
    write_json(tmp_path / "run.json", {"status": "ok", "ranks": seen})
    assert pptrace_here("live", tmp_path, "--last", "1").err.splitlines()[-1] == f"{line}; rank 1 went on to step 5"
    live_files(tmp_path)[1].write_bytes(whole[:40])
    assert "end before the first step does: what rank 1 wrote" in pptrace_here("live", tmp_path).err


def test_a_run_whose_launcher_is_gone_and_whose_ranks_are_quiet_was_killed(tmp_path: Path) -> None:
    LiveFolder(tmp_path).write_steps(3)
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        gone = ended.pid

    def status(host: str, pid: object, age_s: float) -> str | None:
        write_json(tmp_path / "run.json", {"status": "running", "host": f"{host}-0a1b2c3d", "pid": pid})
        for path in (tmp_path / "run.json", *live_files(tmp_path).values()):
            os.utime(path, (time.time() - age_s,) * 2)
        return status_of(tmp_path)

    here = socket.gethostname()
    assert status(here, gone, 5) == status(here, os.getpid(), 600) == status("elsewhere", gone, 600) == "running"
    assert status(here, None, 600) == status(here, 10**30, 600) == "running"
    assert status(here, gone, 600) == "killed"
    assert "'killed'" in pptrace_here("live", tmp_path).err.splitlines()[-1]  # and it does not wait for more
