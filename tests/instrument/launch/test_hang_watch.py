"""The launcher's verdict from call logs that are written here: what a rank has open, for how long, and how it ended."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Collection
from pathlib import Path

import pytest

from instrument.adapters.calls import UNHOOKED, Call, CallGroup
from instrument.launch.watch import hang_watch
from instrument.launch.watch.call_log import CallLog, call_log_path
from instrument.launch.watch.hang_watch import HangWatch, RankEnd, explain_end, with_locations
from instrument.launch.watch.motion import Usage, describe_rank, stayed_stopped
from instrument.launch.watch.python_motion import PythonMotion
from instrument.launch.watch.stacks import Frame, is_setting_up
from pptrace.hang_diagnosis.verdict import Diagnosis, sentence

WORLD = CallGroup("0", (0, 1, 2), "gloo", "default_pg")
ON_DEVICE = CallGroup("0", (0, 1, 2), "nccl", "default_pg")
ABORTED, KILLED = RankEnd(-6, "killed by SIGABRT"), RankEnd(-9, "killed by SIGKILL")


class Job:
    """Three ranks of a node, each with its log."""

    def __init__(self, folder: Path, world_size: int = 3, group: CallGroup = WORLD) -> None:
        self.group = group
        self.logs = [CallLog(call_log_path(folder, local)) for local in range(3)]
        self.watch = HangWatch(folder, lambda: {0: 0, 1: 1, 2: 2}, world_size)
        self.numbers = [0, 0, 0]
        self.open: dict[int, Call] = {}

    def post(self, rank: int, kind: str, sequence: int, peer: int = -1) -> None:
        call = Call(self.numbers[rank], kind, self.group, peer, 16, sequence)
        self.numbers[rank] += 1
        self.logs[rank].posted(call)
        self.open[rank] = call

    def finish(self, rank: int) -> None:
        self.logs[rank].returned(self.open.pop(rank))

    def fail(self, rank: int) -> None:
        self.logs[rank].failed(self.open.pop(rank))

    def verdict(self, usual: bool = True, stopped: Collection[int] = ()) -> tuple[str, tuple[int, ...]] | None:
        return verdict_of(self.watch.diagnose({}, usual=usual, stopped=stopped))

    def verdict_at_end(self, ends: dict[int, RankEnd]) -> tuple[str, tuple[int, ...]] | None:
        """The verdict on a run of which these ranks were the first to end."""
        return verdict_of(explain_end(self.watch.calls_at_end(ends), ends))


def verdict_of(diagnosis: Diagnosis) -> tuple[str, tuple[int, ...]] | None:
    return None if diagnosis.hang is None else (str(diagnosis.hang.verdict), diagnosis.hang.ranks)


def reduce_on_devices(folder: Path, *ranks: int) -> Job:
    """Three ranks that have queued an all-reduce on their devices, and these of them another."""
    job = Job(folder, group=ON_DEVICE)
    for sequence, members in enumerate([(0, 1, 2), ranks]):
        for rank in members:
            job.post(rank, "all_reduce", sequence)
            job.finish(rank)
    return job


class Time:
    """The monotonic clock, which goes on with the machine's and jumps when a test waits."""

    def __init__(self) -> None:
        self._ahead_ns, self._monotonic_ns = 0, time.monotonic_ns

    def now_ns(self) -> int:
        return self._monotonic_ns() + self._ahead_ns

    def wait(self, seconds: float) -> None:
        self._ahead_ns += round(seconds * 1e9)


@pytest.fixture(autouse=True)
def passing(monkeypatch: pytest.MonkeyPatch) -> Time:
    """The time of logs and watch, with waits that are too long for a busy machine to make one."""
    clock = Time()
    monkeypatch.setattr(time, "monotonic_ns", clock.now_ns)
    monkeypatch.setattr(hang_watch, "_LEAST_WAIT_S", 200.0)
    monkeypatch.setattr(hang_watch, "_SETTLE_S", 0.001)
    return clock


def test_a_short_wait_is_no_hang_and_a_long_one_is(tmp_path: Path, passing: Time) -> None:
    job = Job(tmp_path)
    for rank in (0, 1):
        job.post(rank, "all_reduce", 0)
    assert job.verdict() is None
    passing.wait(250)
    assert job.verdict() == ("late", (2,))


def test_a_rank_is_late_only_where_others_wait_longer_than_they_often_do(tmp_path: Path, passing: Time) -> None:
    job = Job(tmp_path)
    for rank in (0, 1):
        for sequence in range(4):
            job.post(rank, "all_reduce", sequence)
            passing.wait(100)
            job.finish(rank)
    for sequence in range(4):
        job.post(2, "all_reduce", sequence)
        job.finish(2)
    for rank in (0, 1):
        job.post(rank, "all_reduce", 4)
    passing.wait(220)
    assert job.verdict() is None
    assert "the ranks still move" in job.watch.diagnose({}).reason
    assert job.verdict(usual=False) == ("late", (2,))
    passing.wait(200)
    assert job.verdict() == ("late", (2,))


def test_calls_that_failed_with_a_rank_that_was_killed_are_waits_for_it(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.post(0, "barrier", 0)
    job.post(1, "send", 0, peer=2)
    job.fail(1)
    ends = {1: RankEnd(1, "failed with exit code 1"), 2: RankEnd(-9, "killed by SIGKILL; memory")}
    diagnosis = explain_end(job.watch.calls_at_end({1, 2}), ends)
    assert verdict_of(diagnosis) == ("missing", (2,))
    assert "rank 2 is gone (killed by SIGKILL without any communication call); ranks 0 and 1 only wait" in sentence(
        diagnosis
    )


def test_a_late_rank_beside_another_cause_is_named_only_where_others_wait_longer_than_they_often_do(
    tmp_path: Path, passing: Time
) -> None:
    job = Job(tmp_path)
    for sequence in range(4):
        for rank in range(3):
            job.post(rank, "all_reduce", sequence)
        passing.wait(100)
        for rank in range(3):
            job.finish(rank)
    job.post(0, "all_reduce", 4)
    passing.wait(220)
    ends = {1: KILLED}
    for usual, guilty in ((True, (1,)), (False, (1, 2))):
        diagnosis = job.watch.diagnose(ends, usual=usual)
        assert verdict_of(diagnosis) == ("missing", guilty)
        assert ("late: rank 2 is outside of any communication call" in sentence(diagnosis)) != usual
    assert job.verdict_at_end(ends) == ("missing", (1,)), "rank 2 may be about to come"
    assert job.verdict_at_end({1: KILLED, 2: KILLED}) == ("missing", (1, 2))


def test_a_rank_that_was_stopped_or_killed_holds_up_the_calls_that_all_have_queued(
    tmp_path: Path, passing: Time
) -> None:
    job = reduce_on_devices(tmp_path, 0, 1, 2)
    passing.wait(250)
    assert job.verdict() is None
    assert job.verdict(stopped={2}) == ("late", (2,))
    assert job.verdict_at_end({2: KILLED}) == ("missing", (2,))
    assert job.verdict_at_end({2: RankEnd(0, "ended normally")}) is None


def test_a_rank_that_is_stopped_for_an_instant_is_none_that_a_signal_stopped() -> None:
    stopped, running = Usage(1.0, 1.0, "T"), Usage(1.0, 1.0, "S")
    before = {0: stopped, 1: running, 2: stopped}
    assert stayed_stopped(before, {0: stopped, 1: stopped, 2: running, 3: stopped}) == {0}


def test_a_rank_that_was_stopped_in_a_call_is_said_to_be_in_it(tmp_path: Path, passing: Time) -> None:
    job = reduce_on_devices(tmp_path, 0, 1, 2)
    job.post(2, "recv", 0, peer=0)
    passing.wait(250)
    diagnosis = with_locations(job.watch.diagnose({}, stopped={2}), {2: "stopped by a signal (in recv)"})
    assert sentence(diagnosis).startswith("late: rank 2 is stopped by a signal (in recv), in recv #0 from rank 0; ")


def test_a_rank_that_aborts_because_another_is_gone_is_not_to_blame(tmp_path: Path) -> None:
    job = reduce_on_devices(tmp_path, 0, 1, 2)
    assert job.verdict_at_end({0: ABORTED, 2: KILLED}) == ("missing", (2,))
    assert job.verdict_at_end({0: ABORTED}) is None


@pytest.mark.parametrize(
    ("waiting", "ends", "verdict"),
    [
        ((0, 1), {0: ABORTED}, ("late", (2,))),
        ((0, 1), {0: ABORTED, 1: ABORTED, 2: KILLED}, ("missing", (2,))),
        ((0, 1), {2: ABORTED}, ("missing", (2,))),
        ((0,), {0: ABORTED, 1: ABORTED}, ("missing", (1,))),
    ],
)
def test_a_rank_that_aborts_is_gone_only_where_it_waited_for_none(
    tmp_path: Path, waiting: tuple[int, ...], ends: dict[int, RankEnd], verdict: tuple[str, tuple[int, ...]]
) -> None:
    assert reduce_on_devices(tmp_path, *waiting).verdict_at_end(ends) == verdict


def test_ranks_of_another_node_are_not_known(tmp_path: Path, passing: Time) -> None:
    job = Job(tmp_path, world_size=6)
    for log in job.logs:
        log.posted(Call(0, "barrier", CallGroup("0", tuple(range(6)), "gloo"), -1, 0, 0))
    passing.wait(250)
    assert job.verdict() is None


def test_collectives_of_cpp_are_waits_only_where_a_rank_has_posted_fewer(tmp_path: Path, passing: Time) -> None:
    job = Job(tmp_path)
    for rank in range(3):
        job.post(rank, UNHOOKED, 6)
    assert not job.watch.any_waits()
    assert job.verdict() is None
    for rank in (0, 1):
        job.post(rank, UNHOOKED, 9)
    passing.wait(250)
    assert job.watch.any_waits()
    assert job.verdict() == ("late", (2,))
    assert verdict_of(job.watch.diagnose({2: KILLED})) == ("missing", (2,))
    assert not job.watch.any_waits(ended={0, 1})
    assert job.watch.any_waits(ended={0})
    job.post(2, UNHOOKED, 9)
    assert not job.watch.any_waits()


def test_a_rank_that_lost_a_connection_in_a_collective_of_cpp_waited_in_it(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for rank in (0, 1):
        job.post(rank, UNHOOKED, 3)
    job.fail(0)
    seen = job.watch.calls_at_end({0, 2})
    hang = explain_end(seen, {2: RankEnd(0, "ended normally")}).hang
    assert (hang.verdict, hang.ranks, set(hang.hops)) == ("missing", (2,), {0, 1})


def test_a_script_that_goes_from_function_to_function_moves_and_a_loop_in_one_does_not(
    tmp_path: Path, passing: Time
) -> None:
    job, motion = Job(tmp_path), PythonMotion(CallLog(call_log_path(tmp_path, 0)))

    def elsewhere() -> None:
        motion.look()

    motion.look()
    passing.wait(100)
    for _ in range(3):
        motion.look()
    assert not job.watch.has_moved([0], 100)
    elsewhere()
    assert job.watch.has_moved([0, 1], 100)
    assert not job.watch.has_moved([1], 100)


@pytest.mark.parametrize("is_on", [True, False])
def test_no_collection_runs_while_the_frames_of_the_script_are_read(
    is_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to Python 3.11 one of them within ``f_back`` let the script leave the frame: a segmentation fault."""
    motion, seen, frames = PythonMotion(CallLog(call_log_path(tmp_path, 0))), [], sys._current_frames
    monkeypatch.setattr(sys, "_current_frames", lambda: (seen.append(gc.isenabled()), frames())[1])
    was_on = gc.isenabled()
    (gc.enable if is_on else gc.disable)()
    try:
        motion.look()
        assert gc.isenabled() is is_on
    finally:
        (gc.enable if was_on else gc.disable)()
    assert seen == [False]


def test_progress_is_a_call_or_a_step_of_any_rank(tmp_path: Path, passing: Time) -> None:
    job = Job(tmp_path)
    job.watch.stalled_s()
    passing.wait(100)
    assert job.watch.stalled_s() > 90
    job.post(1, "barrier", 0)
    assert job.watch.stalled_s() < 90
    assert job.watch.any_waits()
    job.finish(1)
    assert not job.watch.any_waits()


def test_a_rank_that_never_comes_to_make_the_groups_is_late(tmp_path: Path) -> None:
    job = Job(tmp_path)
    diagnosis = with_locations(job.watch.diagnose_setup({}, [0, 2]), {1: "asleep in <module> (train.py:3)"})
    assert verdict_of(diagnosis) == ("late", (1,))
    assert sentence(diagnosis).startswith(
        "late: rank 1 is asleep in <module> (train.py:3), outside of any communication call; ranks 0 and 2 only wait"
    )
    assert verdict_of(job.watch.diagnose_setup({1: RankEnd(0, "ended normally")}, [0, 2])) == ("missing", (1,))
    torch_file = "/x/site-packages/torch/distributed/distributed_c10d.py"
    assert is_setting_up((Frame(torch_file, 1, "init_process_group"), Frame("train.py", 2, "<module>")))
    assert not is_setting_up((Frame("train.py", 2, "init_process_group"),))


@pytest.mark.parametrize(
    ("now", "line"),
    [
        (Usage(11.0, 5.9, "R"), "computing in <module> (train.py:2)"),
        (Usage(11.0, 5.01, "S"), "asleep in <module> (train.py:2)"),
        (Usage(11.0, 5.0, "T"), "stopped by a signal (in <module> (train.py:2))"),
    ],
)
def test_what_a_rank_does_is_seen_from_outside(now: Usage, line: str) -> None:
    assert describe_rank(now, Usage(10.0, 5.0, "R"), (Frame("train.py", 2, "<module>"),)) == line
