"""The live recorder of a rank: which steps and ranges it writes, and that a range costs little and keeps nothing."""

from __future__ import annotations

import errno
import gc
import os
import time
import weakref
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import pytest
import torch

from instrument.launch.recording.live import SKIP_EVERY, LiveRecorder
from instrument.launch.recording.user_marks import UserMarks
from instrument.recorder import Recorder
from pptrace.analysis.slow_rank import OpTimes, op_times
from pptrace.live_records.codec import Flag, LiveStep
from pptrace.live_records.file import MOST_PROGRAMS, LiveFile, live_path
from pptrace.live_records.frames import FACTS, frames
from pptrace.marks import AwaitMark, Axis, CallMark, Collective, OpMark, SpanKind, Transfer, parse_mark
from pptrace.schedule.actions import Action, Kind
from pptrace.workflow.analyse import measure
from pptrace.workflow.live.follow import LiveRun

FORWARD, SEND = Action(Kind.F, 0, 0), Action(Kind.SEND_F, 0, 0)


class Message:
    """A message with a tensor, as the runtime's."""

    index = None

    def __init__(self) -> None:
        self.action, self.tensor = SEND, torch.zeros(3)

    def transfer(self) -> Transfer:
        return Transfer(self.action, 1, 12)


@dataclass
class Steps:
    """The rank as the marks of a script see it."""

    recorder: Recorder
    num_steps: int = 0

    def look(self) -> None: ...

    def take_step_marks(self) -> None: ...

    def begin_step(self) -> None: ...

    def end_step(self) -> None: ...


def make(folder: Path) -> tuple[LiveRecorder, Recorder]:
    facts = {"rank": 0, "world_size": 1}
    live = LiveRecorder(folder, 0, lambda: facts, lambda: facts)
    return live, Recorder(lambda: False, live=live.rows)


def written(folder: Path) -> list[LiveStep]:
    return list(LiveFile(live_path(folder, 0)).poll())


def run_step(live: LiveRecorder, recorder: Recorder, step: int, collectives: int = 0) -> None:
    live.begin_step(step)
    with recorder.span(SpanKind.STEP, step):
        message = Message()
        with recorder.p2p([message], Axis.PP, step), recorder.wait(message, step):
            assert recorder.communicating or not live.rows.on
        with recorder.op(FORWARD, step):
            for _ in range(collectives):
                handle = recorder.new_handle()
                with recorder.collective(Collective.ALL_REDUCE, Axis.TP, 2, 8, step, handle):
                    pass
                with recorder.awaiting(Axis.TP, step, handle):
                    pass
    live.end_step(step, profiled=False)


def test_every_fifth_step_has_its_bounds_alone(tmp_path: Path) -> None:
    live, recorder = make(tmp_path)
    for step in range(12):
        run_step(live, recorder, step)
    live.close()
    steps = written(tmp_path)
    assert [step.head.step for step in steps] == list(range(12))
    assert [step.head.step for step in steps if not step.names] == [SKIP_EVERY - 1, 2 * SKIP_EVERY - 1]
    assert all(step.head.dur_ns > 0 for step in steps)
    assert [name.split()[0] for name in steps[0].names] == ["pp1:wait", "pp1:p2p", "pp1:0F0", "pp1:STEP"]
    assert len({id(step.names) for step in steps if step.names}) == 1, "written once"
    begin, end = steps[0].begin_ns, steps[0].end_ns
    assert begin[3] <= begin[1] <= begin[0] <= end[0] <= end[1] <= begin[2] <= end[2] <= end[3]


def test_an_unobserved_step_makes_no_range_and_is_not_listened_to(tmp_path: Path) -> None:
    live, recorder = make(tmp_path)
    live.begin_step(SKIP_EVERY - 1)
    assert not recorder.listening
    assert recorder.op(FORWARD, 4) is recorder.span(SpanKind.STEP, 4), "the shared range that is not recorded"
    live.begin_step(SKIP_EVERY)
    assert recorder.listening
    live.close()
    assert not recorder.listening


def test_a_call_and_its_wait_have_a_number_of_their_step(tmp_path: Path) -> None:
    live, recorder = make(tmp_path)
    for step in range(3):
        run_step(live, recorder, step, collectives=2)
    live.close()
    for step in written(tmp_path):
        marks = [parse_mark(name) for name in step.names]
        assert [mark.handle for mark in marks if isinstance(mark, AwaitMark)] == [0, 1]


def test_a_wait_for_what_another_step_posted_and_garbage_collections_are_left_out(tmp_path: Path) -> None:
    live, recorder = make(tmp_path)
    live.begin_step(0)
    with recorder.awaiting(Axis.TP, 0, 77), recorder.span(SpanKind.GC, 0):
        pass
    assert live.rows.rows == []
    live.close()


def test_watched_calls_are_numbered_within_the_step(tmp_path: Path) -> None:
    live, recorder = make(tmp_path)
    for step in range(2):
        live.begin_step(step)
        for sequence in (10 * step, 10 * step + 1):
            with recorder.mark(CallMark("all_reduce", "0", sequence, 4, step)):
                assert recorder.communicating
        with recorder.mark(OpMark(FORWARD, step, has_phase=False)):
            pass
        live.end_step(step, profiled=True)
    live.close()
    first, second = written(tmp_path)
    assert first.names == second.names
    assert [mark.sequence for mark in map(parse_mark, first.names) if isinstance(mark, CallMark)] == [0, 1]
    assert second.head.flags & Flag.PROFILED


def test_ops_that_the_script_marks_itself_are_ops_of_the_record(tmp_path: Path) -> None:
    live, recorder = make(tmp_path)
    for step in range(2):
        live.begin_step(step)
        with recorder.span(SpanKind.STEP, step):
            for kind in ("forward", "backward"):
                with UserMarks(Steps(recorder)).open(kind, 0, 3):
                    time.sleep(0.001)
            with UserMarks(Steps(recorder)).open("evaluate", None, None):
                pass
        live.end_step(step, profiled=False)
    live.close()
    steps = written(tmp_path)
    run = LiveRun(tmp_path)
    whole = [ranks for some in run.whole_steps() for ranks in some.values()]
    times = op_times(measure(run.traces(whole), num_ranks=1).data)
    for number, step in enumerate(steps):
        lengths_ns = (step.end_ns - step.begin_ns).tolist()
        assert step.names == (*(f"pptrace.mark {kind} stage=0 microbatch=3" for kind in "FB"), "pp1:STEP step=0")
        assert times[number] == {0: {("F", 0): OpTimes(1, lengths_ns[0]), ("B", 0): OpTimes(1, lengths_ns[1])}}
        assert step.head.op_ns == pytest.approx(sum(lengths_ns[:2]), abs=3000)
        assert step.head.comm_ns == 0


def test_orders_of_ranges_beyond_the_most_keep_their_sums(tmp_path: Path) -> None:
    live, recorder = make(tmp_path)
    steps = [step for step in range(40) if step % SKIP_EVERY != SKIP_EVERY - 1][: MOST_PROGRAMS + 2]
    for number, step in enumerate(steps):
        run_step(live, recorder, step, collectives=number)
    live.close()
    records = [step for step in written(tmp_path) if Flag.OBSERVED in step.head.flags]
    assert [bool(step.names) for step in records] == [True] * MOST_PROGRAMS + [False] * 2
    assert records[-1].head.op_ns > 0
    assert records[-1].head.comm_ns > 0


def test_facts_are_written_when_they_change(tmp_path: Path) -> None:
    facts: dict[str, object] = {"rank": 0}
    live = LiveRecorder(tmp_path, 0, lambda: dict(facts), lambda: facts)
    recorder = Recorder(lambda: False, live=live.rows)
    for step in range(3):
        run_step(live, recorder, step, collectives=step)  # each has ranges of its own
    facts["plan"] = "1f1b"
    run_step(live, recorder, 3, collectives=7)
    live.close()
    data = live_path(tmp_path, 0).read_bytes()
    kinds = [kind for kind, _, _ in frames(BytesIO(data), len(data))]
    assert kinds.count(FACTS) == 2
    file = LiveFile(live_path(tmp_path, 0))
    list(file.poll())
    assert file.facts == facts


def test_no_record_keeps_a_message_alive(tmp_path: Path) -> None:
    live, recorder = make(tmp_path)
    live.begin_step(0)
    message = Message()
    tensor = weakref.ref(message.tensor)
    with recorder.p2p([message], Axis.PP, 0), recorder.wait(message, 0):
        pass
    del message
    gc.collect()
    assert tensor() is None
    live.close()


def test_a_full_disk_ends_the_records_with_one_line_and_not_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    live, recorder = make(tmp_path)
    for step in range(2):
        run_step(live, recorder, step)
    write, room = os.write, [9, 4096, 20]

    def write_into_full_disk(fd: int, data: bytes) -> int:
        """Write what there is room for, the first record in two parts, and fail once there is none."""
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data[: room.pop(0)])

    monkeypatch.setattr(os, "write", write_into_full_disk)
    for step in range(2, 6):
        run_step(live, recorder, step)
    live.begin_step(6)
    assert not recorder.listening
    live.close()
    monkeypatch.undo()
    assert [step.head.step for step in written(tmp_path)] == [0, 1, 2]
    assert capfd.readouterr().err.splitlines() == [
        f"pptrace: {live_path(tmp_path, 0)}: cannot be written (No space left on device): its records end; the script goes on"
    ]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="no /proc")
def test_the_wait_for_a_core_is_read(tmp_path: Path) -> None:
    live, recorder = make(tmp_path)
    run_step(live, recorder, 0)
    live.close()
    (step,) = written(tmp_path)
    assert 0 <= step.head.core_wait_ns <= step.head.dur_ns


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    live, recorder = make(tmp_path)
    run_step(live, recorder, 0)
    if (pid := os.fork()) == 0:
        live.leave_child()
        run_step(live, recorder, 1)
        os._exit(int(recorder.listening))
    assert os.waitpid(pid, 0)[1] == 0
    live.close()
    assert [step.head.step for step in written(tmp_path)] == [0]
