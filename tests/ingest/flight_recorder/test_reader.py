"""torch's flight-recorder dumps: what a run that hangs waits for."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pptrace.errors import TraceError
from pptrace.ingest.common.byte_source import first_bytes
from pptrace.ingest.common.rank_names import rank_of_dump_name
from pptrace.ingest.flight_recorder.dump import read_dump
from pptrace.ingest.flight_recorder.reader import read_flight
from pptrace.ingest.formats import detect, read_file
from pptrace.model.traces import InputFormat
from pptrace.workflow.load import load
from tests.support import flight_recorder
from tests.support.flight_recorder import WORLD, Entry, write_dump

GROUPS = {"0 default_pg": range(4), "1 pipeline": (1, 3)}
entry = partial(flight_recorder.entry, group=("1", "pipeline"))


def dump(path: Path, entries: Sequence[Entry], as_json: bool = False) -> Path:
    return write_dump(path, entries, GROUPS, as_json=as_json)


@pytest.mark.parametrize("as_json", [True, False])
def test_a_dump_gives_its_communication_with_global_peers(tmp_path: Path, as_json: bool) -> None:
    entries = [
        entry("nccl:send 0->1", 1, "completed"),
        entry("nccl:_all_gather_base", 2, "completed", group=WORLD),
    ]
    path = dump(tmp_path / "nccl_trace_rank_1", entries, as_json)
    assert detect(first_bytes(path)) is InputFormat.OPLOG
    (trace,) = read_file(path, InputFormat.OPLOG)
    assert (trace.rank, trace.producer, trace.warnings) == (1, "torch flight recorder 2.10", ())
    rows = trace.comms[["kind", "axis", "peer", "group_size", "bytes", "start_ns", "end_ns"]].to_numpy().tolist()
    first = flight_recorder.BEGIN_NS + 1000
    assert rows == [
        ["send", "pp", 3, 2, 2048, first, first + 250_000],
        ["all_gather", "unknown", -1, 4, 2048, first + 1000, first + 251_000],
    ]


def test_a_rank_that_hangs_is_named_with_what_the_others_did(tmp_path: Path) -> None:
    done = entry("nccl:all_reduce", 11, "completed", group=WORLD)
    states = {0: ["completed"], 1: ["completed"], 2: [], 3: ["started"]}
    for rank, own in states.items():
        late = [entry("nccl:all_reduce", 12, state, group=WORLD) for state in own]
        dump(tmp_path / f"nccl_trace_rank_{rank}", [done, *late])
    report = load([tmp_path]).report
    assert (report.hang["verdict"], report.hang["ranks"]) == ("late", [2])
    (edge,) = report.hang["edges"]
    assert edge == {"rank": 3, "waits_for": [2], "call": "all_reduce", "group": "default_pg", "seq": 12}
    assert [line for info in report.inputs for line in info.warnings] == []


def test_a_call_that_waits_says_how_far_the_other_members_are(tmp_path: Path) -> None:
    for rank, states in enumerate((["completed"], ["started"], [], ["started"])):
        calls = [entry("nccl:all_reduce", 12, state, group=WORLD) for state in states]
        dump(tmp_path / f"nccl_trace_rank_{rank}", [entry("nccl:all_reduce", 11, "completed", group=WORLD), *calls])
    (trace,) = read_file(tmp_path / "nccl_trace_rank_3", InputFormat.OPLOG)
    states = "finished on rank 0; not complete either on rank 1; never called on rank 2"
    assert trace.warnings == (f"rank 3 waits in all_reduce, seq 12 of group default_pg: {states}",)


def test_members_that_are_no_ranks_are_not_known(tmp_path: Path) -> None:
    path = dump(tmp_path / "nccl_trace_rank_1", [entry("nccl:send 0->1", 1, "completed")], as_json=True)
    path.write_text(path.read_text().replace('"[1, 3]"', f"[1, {10**30}]"))
    (trace,) = read_file(path, InputFormat.OPLOG)
    assert trace.comms["peer"].tolist() == [1], "within the group"


def test_messages_that_wait_name_their_peer(tmp_path: Path) -> None:
    path = dump(tmp_path / "nccl_trace_rank_3", [entry("nccl:recv 1<-0", 7, "scheduled")])
    (trace,) = read_file(path, InputFormat.OPLOG)
    assert trace.warnings == ("rank 3 has not begun recv with rank 1, seq 7 of group pipeline",)


def test_messages_of_a_batch_have_the_state_of_its_end(tmp_path: Path) -> None:
    def batch(seq: int, state: str) -> list[dict[str, Any]]:
        members = [entry(name, seq, "scheduled") for name in ("nccl:send 0->1", "nccl:recv 0<-1")]
        return [*members, entry("nccl:coalesced", seq, state, input_sizes=[], input_dtypes=[])]

    path = dump(tmp_path / "nccl_trace_rank_1", [*batch(1, "completed"), *batch(2, "started")])
    (trace,) = read_file(path, InputFormat.OPLOG)
    assert trace.warnings == tuple(
        f"rank 1 waits in {kind} with rank 3, seq 2 of group pipeline" for kind in ("send", "recv")
    )
    assert trace.comms["kind"].tolist() == ["send", "recv"]
    assert [call.launch for call in read_dump(path).calls] == [2, 2, 5, 5]


def test_what_a_barrier_reduces_is_the_barrier(tmp_path: Path) -> None:
    path = dump(tmp_path / "nccl_trace_rank_1", [entry("nccl:all_reduce_barrier", 1, "completed")])
    assert [call.kind for call in read_dump(path).calls] == ["barrier"]


def test_groups_of_the_first_versions_are_numbers(tmp_path: Path) -> None:
    old = {"process_group": None, "pg_id": 0}
    path = dump(tmp_path / "nccl_trace_rank_1", [entry("nccl:send 1->0", 1, "completed", **old)])
    (call,) = read_dump(path).calls
    assert (call.group.name, call.peer) == ("default_pg", 0)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("planted",))


def test_a_pickle_with_code_in_it_is_refused_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(pickle.dumps({"pg_config": {}, "entries": [Evil()]}))
    with pytest.raises(TraceError, match=r"asks for posix\.mkdir"):
        read_file(path, detect(first_bytes(path)))
    assert not (tmp_path / "planted").exists()


def test_damaged_dumps_are_told_in_one_line(tmp_path: Path) -> None:
    whole = dump(tmp_path / "nccl_trace_rank_0", [entry("nccl:all_reduce", 1, "completed")]).read_bytes()
    path = tmp_path / "cut"
    for end in range(20, len(whole) - 1, 23):
        path.write_bytes(whole[:end])
        with pytest.raises(TraceError, match="damaged dump") as err:
            read_flight(path)
        assert "\n" not in str(err.value)


def test_a_dump_without_entries_keeps_its_rank_and_says_so(tmp_path: Path) -> None:
    for rank in (9, 11):
        dump(tmp_path / f"job_dump_{rank}", [entry("nccl:all_reduce", 1, "completed", group=WORLD)])
    for rank in (10, 12):  # equal files, and two ranks
        dump(tmp_path / f"job_dump_{rank}", [])
    report = load([tmp_path]).report
    assert [info.rank for info in report.inputs] == [9, 10, 11, 12]
    assert [bool(info.warnings) for info in report.inputs] == [False, True, False, True]
    assert "without entries" in report.inputs[1].warnings[0]


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("nccl_trace_rank_3", 3),
        ("job_dump_10", 10),
        ("fr.12.pkl", 12),
        ("x_dump_7.json", 7),
        ("rank4_step20.json", 4),
        ("dump", None),
    ],
)
def test_the_rank_of_a_dump_is_the_number_that_its_name_ends_with(name: str, rank: int | None) -> None:
    assert rank_of_dump_name(name) == rank


def test_of_gloo_a_retired_call_is_done(tmp_path: Path) -> None:
    entries = [entry("gloo:barrier", seq, "scheduled", retired=seq == 1) for seq in (1, 2)]
    assert [call.done for call in read_dump(dump(tmp_path / "a_dump_1", entries)).calls] == [True, False]
    timed_out = [entry("nccl:all_reduce", 1, "started", retired=True)]
    assert [call.done for call in read_dump(dump(tmp_path / "b_dump_1", timed_out)).calls] == [False]


@pytest.mark.parametrize(
    ("config", "numbers", "known", "expected"),
    [
        (("0", "33", "7"), (0, 1, 4), (), {0: "0", 1: "7", 4: "33"}),
        (("0", "33", "7"), (0, 1, 4), ((4, "33"),), {0: "0", 1: "7", 4: "33"}),
        (("0", "33", "7"), (0, 1, 4), ((1, "33"),), {1: "33"}),
        (("0", "07", "7"), (0, 1, 4), (), {}),
        (("0", "9" * 5000, "7"), (0, 1, 4), (), {}),
        (("0", "33", "7"), (0, 1), ((1, "7"),), {1: "7"}),
        (("0", "b7c1", "7"), (0, 1, 4), ((1, "b7c1"), (9, "7")), {1: "b7c1"}),
    ],
)
def test_numbers_of_groups_rise_as_their_names_do_where_no_call_tells_them(
    tmp_path: Path,
    config: Sequence[str],
    numbers: Sequence[int],
    known: Sequence[tuple[int, str]],
    expected: dict[int, str],
) -> None:
    calls = [entry("nccl:all_reduce", 1, "started", group=(name, "x"), pg_id=number) for number, name in known]
    groups = {f"{name} x": (0, 1) for name in config}
    path = write_dump(tmp_path / "a_dump_0", calls, groups, status=dict.fromkeys(numbers, (5, 4)))
    read = read_dump(path)
    assert {number: group.id for number, group in read.numbered_groups.items()} == expected
    assert (read.last_enqueued, read.last_completed) == (dict.fromkeys(numbers, 5), dict.fromkeys(numbers, 4))
