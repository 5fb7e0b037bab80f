"""One file read on several cores is what one core reads, whatever happens to the helpers."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

import pptrace.ingest.kineto.reader as kineto
from pptrace.errors import TraceError
from pptrace.ingest.kineto.decode_pool import NUM_SLOTS, SLOT_BYTES, DecodePool, WorkerError
from pptrace.model.traces import Trace
from tests.ingest.conftest import Write
from tests.ingest.kineto.test_reader import same_events
from tests.support.extent import ALL
from tests.support.read import read_kineto

CORES = 3


class Patient(DecodePool):
    """Waits for helpers to start, so that small files are shared out too, and says what became of each block."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.offered: list[bool] = []
        self.processes = [worker._process for worker in self._workers]
        made.append(self)

    def offer(self, text: memoryview) -> bool:
        while any(not worker.started for worker in self._workers):
            for key, _ in self._answers_ready.select(60):
                self._read_answers(key.data)
        self.offered.append(super().offer(text))
        return self.offered[-1]


class Deadly(Patient):
    """One helper dies after some blocks."""

    def offer(self, text: memoryview) -> bool:
        if len(self.offered) == 5 and self.processes:
            self.processes[0].kill()
            self.processes[0].wait()
        return super().offer(text)


made: list[Patient] = []


@pytest.fixture(autouse=True)
def share_small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    made.clear()
    monkeypatch.setattr(kineto, "MIN_TEXT_BYTES", 0)
    monkeypatch.setattr(kineto, "DecodePool", Patient)


def events(num: int) -> list[dict[str, Any]]:
    """Of every kind that the reader looks at, in no order of time."""
    draw = random.Random(5)
    made = []
    for index in range(num):
        host = {"pid": 10, "tid": 11 + index % 3, "ts": draw.randrange(10**7) / 8, "dur": index % 50}
        made += [
            {"ph": "X", "cat": "cpu_op", "name": f"aten::op{draw.randrange(40)}", **host, "args": {"Ev Idx": index}},
            {"ph": "X", "cat": f"kind{index % 4}", "name": "of an unknown category", **host},
            {"ph": "s", "id": index, "cat": "ac2g", "name": "ac2g", **host},
            {
                "ph": "X", "cat": "kernel", "name": f"gemm{draw.randrange(9)}", **host, "pid": 0, "tid": 7,
                "args": {"device": 0, "stream": 7 + index % 2, "correlation": index},
            },
        ]  # fmt: skip
        if index % 50 == 0:
            call = {"Collective name": "allreduce", "In msg nelems": index, "dtype": "Float", "Group size": 4}
            ranks = {"Process Group Name": "1", "Process Group Ranks": "[0, 1, 2, 3]", "Rank": 2, "Seq": index}
            memory = {"Device Type": 1, "Device Id": 0, "Bytes": 8, "Total Allocated": index, "Total Reserved": index}
            made += [
                {"ph": "X", "cat": "cpu_op", "name": "record_param_comms", **host, "args": call | ranks},
                {"ph": "i", "name": "[memory]", "ts": host["ts"], "args": memory},
                {"ph": "M", "name": "process_name", "pid": index, "args": {"name": f"python {index}"}},
            ]
    return made


def assert_same(left: Trace, right: Trace) -> None:
    assert same_events(left.events, right.events)
    assert left.memory.equals(right.memory)
    assert (left.rank, left.warnings, left.metadata) == (right.rank, right.warnings, right.metadata)


def read_shared(path: Path) -> Trace:
    try:
        return read_kineto(path, CORES)
    finally:
        assert all(process.poll() is not None for pool in made for process in pool.processes)


COMPACT: dict[str, Any] = {}
INDENTED: dict[str, Any] = {"indent": 2}
LAYOUTS = [("trace.json", INDENTED), ("trace.json.gz", COMPACT)]


@pytest.mark.parametrize(("name", "layout"), LAYOUTS + [("trace.json", COMPACT), ("trace.json.gz", INDENTED)] * ALL)
def test_helpers_change_nothing(write: Write, name: str, layout: dict[str, Any]) -> None:
    path = write(events(6000), name, after={"pptrace": {"rank": 3}}, **layout)
    shared = read_shared(path)
    assert_same(shared, read_kineto(path))
    assert len(made[0].processes) == CORES - 1
    assert sum(made[0].offered) > 5
    assert len(shared.events.comm_args) == 120


def test_odd_types_and_control_characters_are_no_reason_to_refuse_a_block_whose_rank_is_heard(write: Write) -> None:
    odd: list[Any] = events(6000)
    for event in odd:
        if event["ph"] == "M":
            event["args"]["name"] = "python of rank 5"
    for event in odd[::997]:
        event["name"] = 7
    odd[::1999] = [7] * len(odd[::1999])
    text = json.dumps({"traceEvents": odd}, indent=1).encode()
    path = write(re.sub(rb"aten::op1\b", b"aten::\x01", text))
    shared = read_shared(path)
    assert len(made) == 1
    assert sum(made[0].offered) > 5
    assert_same(shared, read_kineto(path))
    assert shared.rank == 5
    assert any(line.startswith(f"left out {len(odd[::1999])} events") for line in shared.warnings)
    assert any(line.startswith("repaired") for line in shared.warnings)


def test_a_damaged_file_is_salvaged_as_by_one_reader(write: Write) -> None:
    text = json.dumps({"traceEvents": events(6000)}).encode()
    middle = len(text) // 2
    path = write(text[:middle] + text[middle + 3000 :])
    shared = read_shared(path)
    assert_same(shared, read_kineto(path))
    assert any("left out" in line for line in shared.warnings)


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_cut_file_keeps_what_stands_before_the_cut(write: Write, name: str) -> None:
    path = write(events(6000), name)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    shared = read_shared(path)
    assert_same(shared, read_kineto(path))
    assert any("trace ends early" in line for line in shared.warnings)


def test_the_file_of_a_helper_that_dies_is_read_again(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kineto, "DecodePool", Deadly)
    path = write(events(6000))
    shared = read_shared(path)
    assert len(made) == 2
    assert_same(shared, read_kineto(path))


def test_a_helper_that_does_not_start_is_done_without(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(events(1000))
    for executable in ("/bin/false", "/nowhere/python", ""):
        monkeypatch.setattr("sys.executable", executable)
        assert_same(read_shared(path), read_kineto(path))


def test_a_file_without_a_trace_ends_the_helpers(write: Write) -> None:
    with pytest.raises(TraceError, match="an empty list of trace events"):
        read_shared(write([]))


@pytest.mark.parametrize(
    ("phase", "line"), [("B", r"20000 begin/end pairs"), ("s", r"20000 events and no complete one")]
)
def test_what_helpers_find_of_other_kinds_is_counted(write: Write, phase: str, line: str) -> None:
    path = write([{"ph": phase, "name": "op", "ts": index, "pid": 1, "tid": 1} for index in range(20_000)])
    with pytest.raises(TraceError, match=line):
        read_shared(path)
    assert any(made[0].offered)


def test_helpers_that_have_not_started_are_not_waited_for() -> None:
    with DecodePool(2) as pool:
        assert list(pool.results()) == []


def test_a_helper_takes_no_more_blocks_than_it_has_room_for_and_none_that_is_too_long() -> None:
    with Patient(1) as pool:
        assert not pool.offer(memoryview(b"{" * (SLOT_BYTES + 1)))
        accepted = [pool.offer(memoryview(b'{"ph": "X"}' + b" " * 99)) for _ in range(NUM_SLOTS)]
        assert accepted == [True] * NUM_SLOTS
        ((collected, *_),) = pool.results()
        assert collected.num_events == NUM_SLOTS


def test_a_block_that_is_no_list_of_events_is_refused() -> None:
    with Patient(1) as pool:
        assert pool.offer(memoryview(b'{"ph": "X"'))
        with pytest.raises(WorkerError):
            pool.results()
