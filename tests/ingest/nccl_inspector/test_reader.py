"""Output of NCCL's Inspector: how long each call took, and when where it says so, by communicator and rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pptrace.errors import TraceError
from pptrace.ingest.common.byte_source import first_bytes
from pptrace.ingest.formats import detect, read_file
from pptrace.ingest.nccl_inspector.reader import read_nccl_inspector
from pptrace.model.traces import InputFormat
from pptrace.workflow.load import load
from tests.ingest import test_fuzz
from tests.ingest.nccl_inspector.inspector_files import START_US, Call, Comm, line, write_process, write_run

WORLD = Comm("0xabc", (0, 1, 2, 3))
TENSOR = [Comm("0x1e0", (0, 1), "TENSOR_MODEL_PARALLEL_GROUP"), Comm("0x1e1", (2, 3), "TENSOR_MODEL_PARALLEL_GROUP")]
OTHER = [Comm("0xd0", (0, 2)), Comm("0xd1", (1, 3))]
MB = 1 << 20


def calls_of(rank: int) -> list[Call]:
    """A rank joins the world once, its tensor-parallel group ten times, and another group for a gather and a message."""
    tensor, other = TENSOR[rank // 2], OTHER[rank % 2]
    late = 3 * rank
    calls = [Call(WORLD, "AllReduce", 0, MB, late, 100)]
    calls += [Call(tensor, "AllReduce", n, MB, 200 + 100 * n + late, 260 + 100 * n) for n in range(10)]
    calls.append(Call(other, "AllGather", 0, MB, 2000, 2100))
    way = "Send" if rank < 2 else "Recv"
    calls.append(Call(other, way, 1, 1 << 16, 2200 + late, 2300, peer=1 - other.ranks.index(rank)))
    return calls


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", {rank: calls_of(rank) for rank in range(4)})


def test_each_process_is_its_place_among_all(run: Path) -> None:
    """Not what its file or host is called: these have a 7 in their names."""
    report = load([run], cache=False).report
    assert {entry.format for entry in report.inputs} == {"nccl-inspector"}
    assert [(entry.rank, entry.num_events, entry.producer) for entry in report.inputs] == [
        (rank, 13, "NCCL Inspector v4.0") for rank in range(4)
    ]
    assert report.steps == ()


def test_calls_have_their_axis_where_a_name_tells_it_and_no_other(run: Path) -> None:
    """Neither steps nor backwards are there, so that what a group is used for tells nothing."""
    report = load([run], cache=False).report
    first = {(total.axis, total.kind): total for total in report.device[0].comms}
    assert set(first) == {("world", "all_reduce"), ("tp", "all_reduce"), ("unknown", "all_gather"), ("unknown", "send")}
    assert (report.mesh.tp, report.mesh.pp, report.mesh.dp) == (2, None, None)


def test_times_sizes_and_bandwidths_are_those_of_the_calls(run: Path) -> None:
    totals = {(total.axis, total.kind): total for total in load([run], cache=False).report.device[1].comms}
    reduced, gathered = totals["tp", "all_reduce"], totals["unknown", "all_gather"]
    assert (reduced.count, reduced.bytes, reduced.total_ns, reduced.busy_ns) == (10, 10 * MB, 570_000, 570_000)
    assert gathered.bytes == 2 * MB  # a size is that of one rank's part
    assert gathered.busbw_gbps == pytest.approx(2 * MB / 100_000 / 2)  # (n − 1)/n


def test_members_of_a_call_are_matched_and_the_last_one_begins_the_transfer(run: Path) -> None:
    comms = load([run], cache=False).data.comms
    whole = comms[comms["axis"] == "world"]
    assert whole["match"].nunique() == 1
    assert set(whole["transfer_start_ns"] - START_US * 1000) == {9_000}
    messages = comms[comms["kind"].isin(("send", "recv"))].set_index("rank")
    assert messages["peer"].to_dict() == {0: 2, 1: 3, 2: 0, 3: 1}
    assert messages.loc[0, "match"] == messages.loc[2, "match"] != messages.loc[1, "match"]
    per_call = comms[comms["axis"] == "tp"].groupby("match")["rank"].agg(lambda ranks: tuple(sorted(ranks)))
    assert per_call.value_counts().to_dict() == {(0, 1): 10, (2, 3): 10}


def test_without_event_timestamps_durations_are_known_and_nothing_that_needs_a_time(tmp_path: Path) -> None:
    analysis = load([write_run(tmp_path, {r: calls_of(r) for r in range(4)}, verbose=False)], cache=False)
    totals = {(total.axis, total.kind): total for total in analysis.report.device[0].comms}
    assert totals["tp", "all_reduce"].total_ns == 600_000
    assert totals["tp", "all_reduce"].algbw_gbps == pytest.approx(10 * MB / 600_000)
    assert {(total.busy_ns, total.overlap_ratio) for total in totals.values()} == {(None, None)}
    assert analysis.data.comms.empty  # no picture shows a call at the time at which it was written down
    assert analysis.report.clock.method == "none"
    assert any("NCCL_INSPECTOR_DUMP_VERBOSE=1" in line for line in analysis.report.warnings)


def test_one_file_of_many_does_not_say_its_rank_where_no_communicator_holds_all(tmp_path: Path) -> None:
    own = {rank: [call for call in calls_of(rank) if call.comm != WORLD] for rank in range(4)}
    report = load([write_run(tmp_path, own)], cache=False).report
    assert [entry.rank for entry in report.inputs] == [0, 1, 2, 3]
    assert sum("no rank is named in it" in line for line in report.warnings) == 4
    assert report.mesh.pp is None


def test_a_communicator_of_more_ranks_than_files_may_be_any_part_of_the_run(tmp_path: Path) -> None:
    write_run(tmp_path, {rank: calls_of(rank) for rank in (1, 3)})
    traces = [read_nccl_inspector(path)[0] for path in sorted(tmp_path.iterdir())]
    assert [trace.rank for trace in traces] == [None, None]
    assert [trace.distributed for trace in traces] == [{}, {}]


def test_places_in_different_communicators_are_no_ranks(tmp_path: Path) -> None:
    """Two of four processes, each of another pair: both pairs are as large as there are files."""
    own = {rank: [call for call in calls_of(rank) if call.comm in TENSOR] for rank in (1, 2)}
    analysis = load([write_run(tmp_path, own)], cache=False)
    assert any("their ranks are null" in line for line in analysis.report.warnings)
    assert (analysis.data.comms["match"] == -1).all()
    assert set(analysis.data.comms["axis"]) == {"tp"}


def test_messages_of_which_some_were_not_written_have_no_peer(tmp_path: Path) -> None:
    """Small ones are skipped and rings overflow: then the order of the others tells nothing."""
    for rank in range(4):
        other, way = OTHER[rank % 2], "Send" if rank < 2 else "Recv"
        numbers = [1, 2, 4] if rank < 2 else [1, 2, 3]
        peer = 1 - other.ranks.index(rank)
        calls = [Call(other, way, n, 1 << 16, 100 * n, 100 * n + 50, peer=peer) for n in numbers]
        write_process(tmp_path, rank, [Call(WORLD, "AllReduce", 0, MB, 0, 50), *calls])
    comms = load([tmp_path], cache=False).data.comms
    messages = comms[comms["kind"].isin(("send", "recv"))]
    assert messages[messages["kind"] == "send"]["peer"].unique().tolist() == [-1]
    assert (messages["match"] == -1).all()


def test_a_process_with_several_ranks_is_each_of_them(tmp_path: Path) -> None:
    calls = [Call(WORLD, "AllReduce", n, MB, 100 * n, 100 * n + 60) for n in range(3)]
    text = "\n".join(json.dumps(line(call, rank, 9000, verbose=True)) for call in calls for rank in range(4))
    path = tmp_path / "inspector.json"
    path.write_text(text)
    traces = read_nccl_inspector(path)
    assert [(trace.rank, trace.info.num_events) for trace in traces] == [(rank, 3) for rank in range(4)]
    assert detect(first_bytes(path)) is InputFormat.NCCL_INSPECTOR


def test_indented_objects_are_read_like_lines(tmp_path: Path) -> None:
    """As the plugin's own documentation prints them."""
    path = tmp_path / "one.json"
    path.write_text("\n".join(json.dumps(line(call, 0, 9000, verbose=True), indent=2) for call in calls_of(0)))
    (trace,) = read_nccl_inspector(path)
    assert trace.info.num_events == 13
    assert trace.warnings == ()


def test_calls_timed_by_the_host_alone_are_counted_and_left_out(tmp_path: Path) -> None:
    calls = [
        Call(WORLD, "AllReduce", n, MB, n, n + 1, source=("kernel_gpu", "collective_cpu")[n % 2]) for n in range(5)
    ]
    (trace,) = read_nccl_inspector(write_process(tmp_path, 0, calls))
    assert trace.info.num_events == 3
    assert [line for line in trace.warnings if "left out 2 calls timed on the host" in line]


def test_a_cut_file_keeps_its_whole_lines(tmp_path: Path) -> None:
    path = write_process(tmp_path, 0, calls_of(0))
    text = path.read_bytes()
    path.write_bytes(text[: text.rindex(b'"coll_sn"')])
    (trace,) = read_nccl_inspector(path)
    assert trace.info.num_events == 11  # the last collective's line is cut, and the message's behind it is gone
    assert trace.warnings == ("left out 1 line that is truncated, damaged or impossible",)


def test_a_file_without_a_call_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "empty.log"
    path.write_text('{"header": {"id": "0x1", "rank": 0, "n_ranks": 2}, "coll_perf": 7}\n')
    with pytest.raises(TraceError, match="no call of NCCL that can be read"):
        read_file(path, InputFormat.NCCL_INSPECTOR)


def test_damage_of_any_kind_gives_a_report_or_one_error(tmp_path: Path) -> None:
    whole = write_process(tmp_path, 0, calls_of(0)).read_bytes()
    test_fuzz.run([("worker-7-pid100.log", whole)], test_fuzz.SEEDS, tmp_path)
