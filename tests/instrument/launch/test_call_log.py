"""The call log: what one process writes down of its calls, read by another that the first does nothing for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from instrument.adapters.calls import Call, CallGroup
from instrument.launch.watch.call_log import NUM_CALLS, CallLog, _runs_on_device
from instrument.launch.watch.call_log_read import read_call_log, read_last_event
from pptrace.hang_diagnosis.calls import CallState, Group, Stream

GLOO = CallGroup("3", (0, 2, 3, 4), "gloo", "mesh_dp")
NCCL = CallGroup("4", (0, 1), "nccl", "undefined", "tp")
HOLDS_THE_LOCK = """
import ctypes, sys
from pathlib import Path
from instrument.adapters.calls import Call, CallGroup
from instrument.launch.watch.call_log import CallLog
log = CallLog(Path(sys.argv[1]))
log.posted(Call(0, "recv", CallGroup("0", (0, 1), "gloo"), 1, 64, 0))
print("posted", flush=True)
ctypes.PyDLL(None).sleep(60)
"""


def collective(number: int, sequence: int, group: CallGroup = GLOO, **more: object) -> Call:
    return Call(number, "all_reduce", group, -1, 16, sequence, **more)


def test_the_states_of_a_call_are_read_as_they_are_written(tmp_path: Path) -> None:
    log = CallLog(path := tmp_path / "rank0.calls")
    assert read_last_event(path) == 0
    sync, later, device = collective(0, 0), collective(1, 1, is_async=True), collective(2, 0, NCCL)
    states = []
    for step in (log.posted, log.returned):
        step(sync)
        states.append(read_call_log(path, 0).calls[0].state)
    for step in (log.posted, log.returned, log.waiting, log.failed):
        step(later)
        states.append(read_call_log(path, 0).calls[1].state)
    blocking, done, offered = CallState.BLOCKING, CallState.DONE, CallState.OFFERED
    for step in (log.posted, log.returned):
        step(device)
    states.append(read_call_log(path, 0).calls[2].state)
    assert states == [blocking, done, blocking, offered, blocking, CallState.FAILED, CallState.LAUNCHED]
    assert 0 < time.monotonic_ns() - read_last_event(path) < 10**10


def test_a_call_and_its_group_come_back_whole(tmp_path: Path) -> None:
    log = CallLog(path := tmp_path / "rank0.calls")
    log.posted(Call(0, "send", GLOO, 3, 1 << 40, 0, batch=5, tag=7))
    log.posted(Call(1, "broadcast", NCCL, 0, 12, 9))
    read = read_call_log(path, 2)
    first, second = read.calls
    facts = (first.kind, first.peer, first.num_bytes, first.seq, first.tag, first.launch)
    assert facts == ("send", 3, 1 << 40, 0, 7, 5)
    assert (first.group, first.group.label) == (Group("3", (0, 2, 3, 4)), "mesh_dp")
    facts = (second.kind, second.peer, second.seq, second.group.ranks, second.group.label)
    assert facts == ("broadcast", 0, 9, (0, 1), "tp")
    assert read.num_made == {Stream(first.group, 2, 3, 7): 1, Stream(second.group): 10}


def test_messages_are_counted_for_each_peer_direction_and_tag(tmp_path: Path) -> None:
    log = CallLog(path := tmp_path / "rank0.calls")
    for number, (kind, peer, tag) in enumerate(
        [("send", 1, 0), ("send", 1, 0), ("send", 1, 2), ("recv", 1, 0), ("send", 3, 0), ("send", 1, 0)]
    ):
        log.posted(Call(number, kind, GLOO, peer, 4, 99, tag=tag))
    read = read_call_log(path, 0)
    assert [call.seq for call in read.calls] == [0, 1, 0, 0, 0, 2]


def test_of_many_calls_the_last_are_kept_and_all_are_counted(tmp_path: Path) -> None:
    log = CallLog(path := tmp_path / "rank0.calls")
    other = CallGroup("9", (0, 7), "gloo")
    log.posted(collective(0, 4, other))
    for number in range(1, 3 * NUM_CALLS):
        log.posted(call := collective(number, number))
        log.returned(call)
    read = read_call_log(path, 0)
    assert [call.seq for call in read.calls] == list(range(2 * NUM_CALLS, 3 * NUM_CALLS))
    assert read.num_made == {Stream(Group("9", (0, 7))): 5, Stream(Group("3", GLOO.ranks)): 3 * NUM_CALLS}


def test_a_group_of_thousands_takes_little_room(tmp_path: Path) -> None:
    log = CallLog(path := tmp_path / "rank0.calls")
    ranks = tuple(range(0, 16_384, 1))
    log.posted(collective(0, 0, CallGroup("0", ranks, "gloo")))
    log.posted(collective(1, 0, CallGroup("1", ranks[::64], "gloo")))
    read = read_call_log(path, 0)
    assert [call.group.ranks for call in read.calls] == [ranks, ranks[::64]]


def test_a_forked_child_writes_nothing_into_the_log_of_its_parent(tmp_path: Path) -> None:
    log = CallLog(path := tmp_path / "rank0.calls")
    log.posted(collective(0, 0))
    if (child := os.fork()) == 0:
        log.posted(collective(1, 1))
        os._exit(0)
    os.waitpid(child, 0)
    read = read_call_log(path, 0)
    assert len(read.calls) == 1


@pytest.mark.parametrize("end", [signal.SIGSTOP, signal.SIGKILL])
def test_the_log_of_a_process_that_answers_nothing_can_be_read(tmp_path: Path, end: int) -> None:
    path = tmp_path / "rank0.calls"
    process = subprocess.Popen([sys.executable, "-c", HOLDS_THE_LOCK, str(path)], stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"posted\n"
        for _ in range(2):
            read = read_call_log(path, 0)
            assert [(call.kind, call.state) for call in read.calls] == [("recv", CallState.BLOCKING)]
            process.send_signal(end)
    finally:
        process.kill()
        process.communicate()


def test_a_log_for_which_there_is_no_room_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """A file with holes would be made, and end the process at a later write to its pages."""
    script = (
        "import resource, sys; from pathlib import Path; from instrument.launch.watch.call_log import CallLog\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try: CallLog(Path(sys.argv[1]))\n"
        "except OSError as err: print(err.strerror)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "log")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "File too large\n")
    log = tmp_path / "full"
    CallLog(log)
    assert log.stat().st_blocks * 512 >= log.stat().st_size


def test_what_is_no_call_log_is_none(tmp_path: Path) -> None:
    (tmp_path / "torn").write_bytes(b"PPTCALLS")
    assert (read_call_log(tmp_path / "torn", 0), read_last_event(tmp_path / "torn")) == (None, 0)
    assert (read_call_log(tmp_path / "absent", 0), read_last_event(tmp_path / "absent")) == (None, 0)


def test_calls_of_libraries_of_devices_run_on_one_and_no_others() -> None:
    assert all(map(_runs_on_device, ("nccl", "ncclx", "nccl2", "cuda:rccl", "xccl")))
    assert not any(map(_runs_on_device, ("gloo", "mpi", "cpu:gloo", "undefined", "cpu:gloo,cuda:nccl")))
