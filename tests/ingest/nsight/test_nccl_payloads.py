"""Payloads of NCCL's ranges, in which it describes its calls: groups, ranks, bytes and peers of Nsight Systems exports."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pptrace.analysis.aligned import AlignedRun
from pptrace.ingest.nsight.reader import read_nsight
from pptrace.model.report_table import Amount
from pptrace.model.traces import Category
from pptrace.report.tables import tables_of
from pptrace.workflow.load import load
from tests.ingest.nsight_files import SESSION, Process, Report, write_report
from tests.support.synthetic import MAIN_THREAD, START, Event

PAIR, ALL = 0x1BAD_0000_0000_0001, 0xFACE_0000_0000_0002  # the second one does not fit into a signed number of 64 bits
US = 1_000

Call = tuple[str, Mapping[str, Any]]


def of(group: int, num_bytes: int, **more: int) -> dict[str, Any]:
    return {"NCCL communicator ID": group, "Message size [bytes]": num_bytes, **more}


def joins(group: int, size: int, rank: int) -> Call:
    return "ncclCommInitRankConfig", {
        "NCCL communicator ID": group,
        "No. of ranks": size,
        "Rank": rank,
        "CUDA device": 0,
    }


def process(pid: int, calls: Sequence[Call], device: int) -> tuple[Process, list[tuple[int, int, str]]]:
    """(a process that makes these calls, each with a kernel; pid, start and payload of each)."""
    events: list[Event] = []
    payloads = []
    for number, (name, payload) in enumerate(calls):
        start, correlation = START + 100 * US * number, 1 + number
        events.append(Event(Category.ANNOTATION, name, start, start + 20 * US, thread=MAIN_THREAD))
        payloads.append((pid, start - SESSION, json.dumps(payload)))
        if "Message size [bytes]" in payload:
            launch = Event(Category.RUNTIME, "cudaLaunchKernel", start + US, start + 2 * US, thread=MAIN_THREAD)
            events.append(replace(launch, correlation=correlation))
            kernel = f"ncclDevKernel_{name.removeprefix('nccl')}_Sum_f32_RING_LL(x)"
            events.append(
                Event(Category.KERNEL, kernel, start + 30 * US, start + 60 * US, device, 7, correlation=correlation)
            )
    return Process(pid, events), payloads


def written(path: Path, processes: Sequence[Sequence[Call]], *, by_id: bool = False) -> Path:
    """The export of processes that make these calls; their payloads are texts of the table, or its strings."""
    made = [process(100 + index, calls, index) for index, calls in enumerate(processes)]
    write_report(Report([each for each, _ in made]), path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("ALTER TABLE NVTX_EVENTS ADD COLUMN jsonTextId INTEGER")
        connection.execute("ALTER TABLE NVTX_EVENTS ADD COLUMN jsonText TEXT")
        for number, (pid, start, text) in enumerate(payload for _, payloads in made for payload in payloads):
            where = (1 << 48 | pid << 24 | MAIN_THREAD, start)
            value: str | int = text
            if by_id:
                value = 10_000 + number
                connection.execute("INSERT INTO StringIds VALUES (?, ?)", (value, text))
            column = "jsonTextId" if by_id else "jsonText"
            connection.execute(
                f"UPDATE NVTX_EVENTS SET {column} = ? WHERE globalTid = ? AND start = ?", (value, *where)
            )
        connection.commit()
    return path


def calls_of(rank: int) -> list[Call]:
    """Of four ranks, in pairs 0-1 and 2-3: place in its pair is rank % 2."""
    pair = PAIR + rank // 2
    name = "ncclRecv" if rank % 2 else "ncclSend"
    return [
        joins(ALL, 4, rank),
        joins(pair, 2, rank % 2),
        ("ncclAllReduce", of(ALL, 4096)),
        ("ncclAllGather", of(pair, 1000)),
        ("ncclReduceScatter", of(pair, 1000)),
        ("ncclBroadcast", of(ALL, 64, Root=3)),
        (name, of(pair, 256, **{"Peer rank": 1 - rank % 2})),
    ]


def data_of(*paths: Path) -> AlignedRun:
    return load(list(paths), cache=False).data


@pytest.mark.parametrize("by_id", [False, True])
def test_calls_have_the_bytes_groups_and_peers_that_nccl_names(tmp_path: Path, by_id: bool) -> None:
    """The processes' ranks are their places in the communicator of them all, in whichever order they are in the file."""
    path = written(tmp_path / "a.sqlite", [calls_of(rank) for rank in (2, 0, 3, 1)], by_id=by_id)
    comms = data_of(path).comms
    assert set(comms["rank"]) == {0, 1, 2, 3}
    sizes = comms.groupby("kind")[["bytes", "group_size"]].agg(set)
    assert sizes.loc["all_reduce"].tolist() == [{4096}, {4}]
    assert sizes.loc["all_gather"].tolist() == sizes.loc["reduce_scatter"].tolist() == [{2000}, {2}], (
        "two parts of 1,000"
    )
    assert sizes.loc["broadcast"].tolist() == [{64}, {4}]
    assert (comms["match"] >= 0).all()
    messages = comms[comms["kind"].isin(["send", "recv"])].set_index("rank").sort_index()
    assert messages["peer"].to_dict() == {0: 1, 1: 0, 2: 3, 3: 2}, "peers are named by their places in the pair"


def test_ranks_of_files_that_name_them_meet_by_their_places_in_communicators(tmp_path: Path) -> None:
    paths = [written(tmp_path / f"rank{rank}.sqlite", [calls_of(rank)]) for rank in range(4)]
    comms = data_of(*paths).comms
    messages = comms[comms["kind"].isin(["send", "recv"])].set_index("rank").sort_index()
    assert messages["peer"].to_dict() == {0: 1, 1: 0, 2: 3, 3: 2}


def test_ranks_of_which_a_part_was_recorded_keep_their_numbers_and_say_nothing_of_places(tmp_path: Path) -> None:
    report = load([written(tmp_path / f"rank{rank}.sqlite", [calls_of(rank)]) for rank in (1, 2)], cache=False).report
    assert report.mesh.num_ranks == 4
    assert not any("communicator" in line for line in report.warnings)


def test_processes_of_a_report_that_are_a_part_of_a_communicator_have_no_rank_by_it(tmp_path: Path) -> None:
    path = written(tmp_path / "node.sqlite", [[joins(ALL, 4, rank), ("ncclAllReduce", of(ALL, 64))] for rank in (3, 2)])
    assert [trace.rank for trace in read_nsight(path)] == [None, None], (
        "their pair may be a group of more jobs than one"
    )


def test_without_the_beginning_of_a_communicator_sizes_that_follow_from_it_are_unknown(tmp_path: Path) -> None:
    path = written(tmp_path / "rank0.sqlite", [calls_of(0)[2:]])
    (trace,) = read_nsight(path)
    sizes = dict(zip(trace.events.comm_args["group_size"], trace.events.comm_args["out_bytes"], strict=False))
    assert set(trace.events.comm_args["group_size"]) == {-1} == set(sizes)
    sent = trace.events.comm_args.iloc[-1]
    assert (sent["src"], sent["dst"]) == (-1, 1)
    kinds = [trace.events.names[code] for code in trace.events.name_id[trace.events.comm_args["event"]]]
    by_kind = dict(zip(kinds, trace.events.comm_args["in_bytes"].tolist(), strict=True))
    assert by_kind == {
        "ncclAllReduce": 4096,
        "ncclAllGather": -1,
        "ncclReduceScatter": -1,
        "ncclBroadcast": 64,
        "ncclSend": 256,
    }


@pytest.mark.parametrize(
    "payload",
    [
        {"NCCL communicator ID": "x", "Message size [bytes]": -5},
        {"Message size [bytes]": 2**70},
        [],
        {"NCCL communicator ID": 0, "No. of ranks": 2, "Rank": 2},
    ],
)
def test_a_payload_that_cannot_be_is_of_no_call(tmp_path: Path, payload: Any) -> None:
    path = written(tmp_path / "rank0.sqlite", [[("ncclAllReduce", payload), *calls_of(0)]])
    (trace,) = read_nsight(path)
    first = trace.events.comm_args.iloc[0]
    assert (first["in_bytes"], first["group_id"], first["group_size"]) == (-1, "", -1)
    assert (trace.events.comm_args["in_bytes"] == 4096).sum() == 1, "the others are read"


def test_without_steps_the_calls_of_processes_of_a_report_say_what_they_waited(tmp_path: Path) -> None:
    """Rank 1's all-reduce is of a call later, by 100 us: rank 0 waits for it as long as its own kernel of 30 us runs."""
    late: list[Call] = [joins(ALL, 2, 1), ("ncclGroupEnd", {}), ("ncclAllReduce", of(ALL, 64))]
    report = load(
        [written(tmp_path / "a.sqlite", [[joins(ALL, 2, 0), ("ncclAllReduce", of(ALL, 64))], late])], cache=False
    ).report
    assert [total.wait_ns for entry in report.device for total in entry.comms] == [30 * US, 0]
    (table,) = [table for table in tables_of(report, None, Amount.WHOLE) if table.key == "comm-totals"]
    assert [row[-1] for row in table.rows] == ["0.030", "0.00"]
    alone = load([written(tmp_path / "rank0.sqlite", [calls_of(0)])], cache=False).report
    assert {total.wait_ns for entry in alone.device for total in entry.comms} == {None}
    (table,) = [table for table in tables_of(alone, None, Amount.WHOLE) if table.key == "comm-totals"]
    assert "waiting ms" not in table.columns


def test_calls_of_an_old_nccl_have_their_bytes_alone(tmp_path: Path) -> None:
    calls: list[Call] = [("ncclBroadcast", {"Bytes": 128, "Root": 0}), ("ncclAllReduce", {"Message size [bytes]": 32})]
    comms = data_of(written(tmp_path / "rank0.sqlite", [calls])).comms
    assert comms.set_index("kind")["bytes"].to_dict() == {"broadcast": 128, "all_reduce": 32}
