"""Traces of Ascend NPUs, from synthetic files in the form of torch_npu's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pptrace.errors import TraceError
from pptrace.ingest.ascend.reader import read_ascend
from pptrace.ingest.formats import detect
from pptrace.ingest.inputs.resolve import open_inputs
from pptrace.ingest.sniff import sniff_ascend
from pptrace.model.damage import KINDS, Damage
from pptrace.model.traces import Category, Events, InputFormat, Trace
from pptrace.recognise.device.work import breakdown, device_work
from pptrace.workflow.load import load
from tests.ingest import test_fuzz
from tests.ingest.ascend.ascend_files import (
    HCCL,
    MAIN,
    MESSAGE_NS,
    T0,
    collective,
    metadata,
    pipeline_steps,
    step,
    task,
    write_rank,
)
from tests.support.read import read_traces


def _rows(events: Events, name: str) -> list[int]:
    return [row for row, code in enumerate(events.name_id.tolist()) if events.names[code] == name]


def _read(tmp_path: Path, **options: bool) -> Trace:
    (trace,) = read_ascend(write_rank(tmp_path, 0, step(**options)))
    return trace


def test_device_time_is_that_of_tasks_and_of_collectives_counted_once(tmp_path: Path) -> None:
    work = device_work(_read(tmp_path).events)
    found = breakdown(work)
    assert (found.compute_ns, found.communication_ns, found.memory_ns) == (40_000, 20_000, 5_000)
    assert found.overlap_ratio == pytest.approx(1 / 3)
    assert found.busy_ns == 20_000 + 5_000 + 40_000


def test_analyses_counters_and_parts_of_collectives_are_no_events(tmp_path: Path) -> None:
    names = _read(tmp_path).events.names
    assert not {"Computing", "HBM 0/Read", "Memcpy", "Notify Wait", "SDMA"} & set(names)


def test_a_wait_on_a_stream_is_no_work(tmp_path: Path) -> None:
    events = _read(tmp_path).events
    assert [events.category[row] for row in _rows(events, "EVENT_WAIT")] == [Category.DEVICE_SYNC]


def test_a_collective_lies_on_the_stream_of_its_tasks(tmp_path: Path) -> None:
    events = _read(tmp_path).events
    (row,) = _rows(events, "hcom_allReduce__586_0_1")
    assert (events.stream[row], events.device[row], events.dur_ns[row]) == (4, 1, 30_000)


def test_work_is_launched_where_its_operator_was_enqueued(tmp_path: Path) -> None:
    events = _read(tmp_path).events
    product = _rows(events, "aclnnMm_MatMulV2")[0]
    launched = [row for row in _rows(events, "Enqueue") if events.correlation[row] == events.correlation[product]]
    assert [(int(events.thread[row]), int(events.start_ns[row]) - T0) for row in launched] == [(MAIN, 2_600)]


def test_work_without_a_queue_is_launched_by_its_call(tmp_path: Path) -> None:
    events = _read(tmp_path, with_calls=True).events
    (copy,) = _rows(events, "MEMCPY_ASYNC")
    (call,) = _rows(events, "AscendCL@aclrtMemcpyAsync")
    assert events.correlation[copy] == events.correlation[call] > 0
    assert not _rows(events, "HostToDevice")


def test_where_calls_are_not_recorded_the_arrow_says_when_work_was_launched(tmp_path: Path) -> None:
    events = _read(tmp_path).events
    (copy,) = _rows(events, "MEMCPY_ASYNC")
    (launch,) = _rows(events, "HostToDevice")
    assert events.correlation[copy] == events.correlation[launch] > 0
    assert (events.start_ns[launch] - T0, events.dur_ns[launch], events.thread[launch]) == (30_500, 0, MAIN)
    assert events.category[launch] == Category.RUNTIME


def test_work_whose_launch_is_not_there_has_no_correlation(tmp_path: Path) -> None:
    events = _read(tmp_path).events
    assert events.correlation[_rows(events, "aclnnMm_MatMulV2")[1]] == -1


def test_ranges_of_the_program_are_told_from_operators(tmp_path: Path) -> None:
    events = _read(tmp_path).events
    for name in ("ProfilerStep#7", "forward_step"):
        assert events.category[_rows(events, name)[0]] == Category.ANNOTATION
    for name in ("aclnnMm", "aten::mm"):
        assert events.category[_rows(events, name)[0]] == Category.CPU_OP


def test_a_collective_has_its_bytes_and_group(tmp_path: Path) -> None:
    path = write_rank(tmp_path, 1, step(1, "group_name_3"))
    (trace,) = read_ascend(path)
    (args,) = trace.events.comm_args.to_dict("records")
    assert (args["collective"], args["in_bytes"], args["out_bytes"]) == ("allReduce", 4_000, 4_000)
    assert (args["group_id"], args["group_description"], args["group_ranks"]) == ("group_name_3", "dp", "[0, 1]")
    assert (args["src"], args["dst"], args["seq"]) == (-1, -1, -1)
    assert (trace.rank, trace.distributed["world_size"]) == (1, 2)


@pytest.mark.parametrize(
    ("name", "dtype", "sent", "received"),
    [
        ("hcom_allGather__586_0_1", "BFP16", 200, 400),
        ("hcom_reduceScatter__586_0_1", "FP16", 400, 200),
        ("hcom_send__586_0_1", "INT8", 100, 100),
        ("hcom_alltoallv__586_0_1", "FP32", -1, -1),
        ("hcom_batchSendRecv__586_0_1", "INVALID_TYPE", -1, -1),
    ],
)
def test_bytes_are_known_where_the_count_tells_them(
    tmp_path: Path, name: str, dtype: str, sent: int, received: int
) -> None:
    lane = metadata(HCCL, "Communication", {0: "Group group_name_3 Communication"})
    (trace,) = read_ascend(write_rank(tmp_path, 0, [*lane, collective(name, T0, 50, 3, 100, dtype)]))
    assert trace.events.comm_args[["in_bytes", "out_bytes"]].to_numpy().tolist() == [[sent, received]]


def test_collectives_of_one_lane_at_the_same_time_lie_on_streams_of_their_own(tmp_path: Path) -> None:
    calls = (collective(f"hcom_send__1_{n}_1", T0 + n, 50, n + 1, 1) for n in range(3))
    events = [*metadata(HCCL, "HCCL", {0: "Group 0 Communication"}), *calls]
    (trace,) = read_ascend(write_rank(tmp_path, 0, events))
    assert len(set(trace.events.stream.tolist())) == 3


def test_a_collective_without_a_usable_time_is_left_out(tmp_path: Path) -> None:
    damaged = collective("hcom_send__1_0_1", T0, 50, 1, 1) | {"ts": "x"}
    whole = collective("hcom_send__1_1_1", T0, 50, 2, 1)
    events = [*metadata(HCCL, "HCCL", {0: "Group 0 Communication"}), damaged, whole]
    (trace,) = read_ascend(write_rank(tmp_path, 0, events))
    assert [trace.events.names[code] for code in trace.events.name_id.tolist()] == ["hcom_send__1_1_1"]
    assert trace.events.comm_args["event"].tolist() == [0]


def test_facts_of_the_job_come_from_the_files_next_to_the_trace_without_its_environment(tmp_path: Path) -> None:
    trace = _read(tmp_path)
    assert trace.rank == 0
    assert trace.metadata == {"host_name": "node-7", "recording": {"record_shapes": True}}
    assert "SECRET" not in json.dumps(trace.distributed)


@pytest.mark.parametrize(
    ("apart_ns", "described", "is_one"), [(2_100, True, True), (100_000, True, False), (2_100, False, False)]
)
def test_ranks_whose_hosts_started_at_one_time_have_one_clock_though_their_folders_do_not_name_it(
    tmp_path: Path, apart_ns: int, described: bool, is_one: bool
) -> None:
    """Not where nobody knows who is in their groups: then it is not known how much of a collective waits."""
    for rank in range(2):
        folder = write_rank(tmp_path, rank, step(rank, "group_name_3"), described=described).parent.parent
        (info,) = folder.glob("profiler_info_*.json")
        end = {"collectionTimeEnd": T0 + rank * apart_ns, "MonotonicTimeEnd": 10**15}
        info.write_text(json.dumps({"rank_id": rank, "end_info": end}))
        folder.rename(tmp_path / f"rank{rank}_ascend_pt")
    clock = load([tmp_path], cache=False).report.clock
    assert (clock.method == "same-host") is is_one


_MEMORY = """Component,Timestamp(us),Total Allocated(MB),Total Reserved(MB),Total Active(MB),Stream Ptr,Device Type
APP,10.000\t,,2109.5,,,NPU:1
PTA,20.500\t,1.5,4.0,1.5,897357296,NPU:1
PTA+GE,20.500\t,9.5,9.0,1.5,897357296,NPU:1
PTA,10.250\t,0.5,4.0,0.5,904703504,NPU:1
PTA,30.000\t,7.0,8.0,0.5,904703504,NPU:0
PTA,x,1.0,4.0,0.5,904703504,NPU:1
PTA,40.0
"""


def test_memory_is_that_of_torchs_allocator_on_the_traces_device(tmp_path: Path) -> None:
    path = write_rank(tmp_path, 1, step())
    path.with_name("memory_record.csv").write_text(_MEMORY)
    (trace,) = read_ascend(path)
    mib = 2**20
    assert trace.memory.to_numpy().tolist() == [[1, 10_250, mib // 2, 4 * mib], [1, 20_500, 3 * mib // 2, 4 * mib]]


def test_a_record_of_memory_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    path = write_rank(tmp_path, 1, step())
    path.with_name("memory_record.csv").write_text("a,b\n1,2\n")
    (trace,) = read_ascend(path)
    assert len(trace.memory) == 0
    assert any(line.startswith("memory_record.csv cannot be read") for line in trace.warnings)


def test_a_rank_that_nothing_tells_is_not_known(tmp_path: Path) -> None:
    path = tmp_path / "trace_view.json"
    path.write_text(json.dumps(step()))
    (trace,) = read_ascend(path)
    assert trace.rank is None


def test_a_folder_of_ranks_is_one_job_without_the_files_that_describe_it(tmp_path: Path) -> None:
    for rank in range(2):
        write_rank(tmp_path, rank, step(rank, "group_name_3"))
    inputs = open_inputs([tmp_path])
    assert [file.format for file in inputs.files] == [InputFormat.ASCEND] * 2
    assert inputs.warnings == (), "each rank has a folder by nature"
    report = load([tmp_path], cache=False).report
    (found,) = report.steps
    assert found.step == 7
    assert [rank.compute_ns for rank in found.ranks] == [40_000, 40_000]
    calls = [call for rank in found.ranks for call in rank.comms]
    assert [(call.axis, call.kind, call.bytes) for call in calls] == [("dp", "all_reduce", 4_000)] * 2


def test_a_pipeline_is_recognised_as_in_any_profile(tmp_path: Path) -> None:
    """Two stages, four microbatches: (4 + 1) · 3 ms, and the four messages that nobody hides, of which 12 ms a rank computes."""
    for rank in range(2):
        write_rank(tmp_path, rank, pipeline_steps(rank), described=False)
    report = load([tmp_path], cache=False).report
    assert (report.framework, report.schedule.name) == ("torch.distributed.pipelining", "1f1b")
    assert (report.schedule.num_microbatches, report.mesh.pp) == (4, 2)
    span = 15_000_000 + 4 * MESSAGE_NS
    assert [step.span_ns for step in report.steps] == [span] * 3
    assert {rank.bubble_ns for step in report.steps for rank in step.ranks} == {span - 12_000_000}


def test_files_of_other_profilers_are_not_taken_for_it() -> None:
    kineto = b'{"schemaVersion": 1, "traceEvents": [{"ph": "X", "cat": "cpu_op", "ts": "1.0", "args": {"Fwd thread id": 0}}]}'
    assert not sniff_ascend(kineto)
    assert not sniff_ascend(b'[{"ph": "X", "ts": 1.0, "args": {"Fwd thread id": 0}}]')
    assert detect(json.dumps(step()).encode()) is InputFormat.ASCEND


def test_a_cut_file_gives_what_is_before_the_cut_and_says_so(tmp_path: Path) -> None:
    path = write_rank(tmp_path, 0, step())
    text = path.read_bytes()
    path.write_bytes(text[: text.index(b'"EVENT_WAIT"')])
    (trace,) = read_ascend(path)
    assert np.count_nonzero(trace.events.category == Category.KERNEL) == 3
    assert any("ends early" in line and "may be missing" in line for line in trace.warnings)
    assert [KINDS[kind] for kind in trace.damage.kind.tolist()] == [Damage.CUT_FILE]


@pytest.mark.parametrize(
    "content", ["", "[]", "[1, 2]", '{"a": 1}', "nothing", '[{"ph": "C", "name": "x", "ts": "1", "pid": 1}]']
)
def test_files_without_an_event_are_one_clear_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "trace_view.json"
    path.write_text(content)
    with pytest.raises(TraceError, match=r"trace_view\.json: .*expected.*torch_npu"):
        read_ascend(path)
    for given in () if content else (path, tmp_path):
        with pytest.raises(TraceError, match=r"trace_view\.json: .*expected.*torch_npu"):
            read_traces(open_inputs([given]))


def test_odd_arguments_do_no_harm(tmp_path: Path) -> None:
    odd = task("Add", T0, 100, 2, "AI_CORE")
    odd["args"] = {"Task Type": 3, "connection_id": "x"}
    none = task("Mul", T0 + 200, 100, 2, "AI_CORE")
    none["args"] = None
    missing = task("Sub", T0 + 400, 100, 2, "AI_CORE")
    del missing["args"]
    (trace,) = read_ascend(write_rank(tmp_path, 0, [*step(), odd, none, missing]))
    found = {name: int(trace.events.category[_rows(trace.events, name)[0]]) for name in ("Add", "Mul", "Sub")}
    assert found == dict.fromkeys(("Add", "Mul", "Sub"), Category.KERNEL)


def test_damaged_files_give_a_report_or_one_error(tmp_path: Path) -> None:
    test_fuzz.run([("trace_view.json", json.dumps(step(with_calls=True)).encode())], test_fuzz.SEEDS, tmp_path)
