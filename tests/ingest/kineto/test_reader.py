from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pptrace
from pptrace.errors import TraceError
from pptrace.ingest.kineto.reader import read_ranks
from pptrace.model.tables import COMM_ARGS, MEMORY
from pptrace.model.traces import Category, Events, InputFormat
from pptrace.report.recording import damage_in
from tests.ingest.conftest import Op, Write
from tests.support.extent import by_turns
from tests.support.read import read_kineto


def names_of(events: Events) -> list[str]:
    return [events.names[code] for code in events.name_id]


def same_events(left: Events, right: Events) -> bool:
    arrays = ("category", "name_id", "start_ns", "dur_ns", "device", "stream", "thread", "correlation")
    same = all(np.array_equal(getattr(left, name), getattr(right, name)) for name in arrays)
    return same and left.names == right.names and left.comm_args.equals(right.comm_args)


def kernel(name: str = "gemm", ts: float = 1.0, dur: float = 1.0, **args: Any) -> dict[str, Any]:
    fields = {"device": 0, "stream": 7, "correlation": 5} | args
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": ts, "dur": dur, "args": fields}


def test_a_host_event_keeps_its_thread_and_has_no_device(write: Write, op: Op) -> None:
    trace = read_kineto(write([op(cat="cuda_runtime", args={"correlation": 9, "External id": 3})]))
    events = trace.events
    assert trace.format is InputFormat.KINETO
    assert (events.category[0], events.thread[0], events.correlation[0]) == (Category.RUNTIME, 11, 9)
    assert (events.device[0], events.stream[0]) == (-1, -1)
    assert (events.start_ns[0], events.dur_ns[0], events.end_ns[0]) == (1_000_500, 2_250, 1_002_750)


def test_a_kernel_has_device_and_stream_and_no_thread(write: Write) -> None:
    events = read_kineto(write([kernel(device=2, stream=0)])).events
    assert (events.category[0], events.device[0], events.stream[0], events.thread[0]) == (Category.KERNEL, 2, 0, -1)


def test_device_annotations_take_device_and_stream_from_process_and_thread(write: Write, op: Op) -> None:
    event = op(cat="gpu_user_annotation", pid=3, tid="stream 40", args={"External id": 1})
    events = read_kineto(write([event])).events
    assert (events.category[0], events.device[0], events.stream[0]) == (Category.DEVICE_ANNOTATION, 3, 40)


def test_a_cpu_op_with_a_stream_stays_on_the_host(write: Write, op: Op) -> None:
    events = read_kineto(write([op(args={"stream": 7, "device": 0})])).events
    assert (events.category[0], events.stream[0], events.thread[0]) == (Category.CPU_OP, -1, 11)


CATEGORIES = {
    Category.CPU_OP: ("Operator", "cpu_op"),
    Category.ANNOTATION: ("user_annotation",),
    Category.RUNTIME: ("Runtime", "cuda_runtime", "cuda_driver"),
    Category.PYTHON: ("python_function",),
    Category.OVERHEAD: ("overhead",),
    Category.OTHER: ("Trace",),
    Category.KERNEL: ("Kernel", "kernel", "mtia_ccp_events"),
    Category.MEMCPY: ("Memcpy", "gpu_memcpy"),
    Category.MEMSET: ("Memset", "gpu_memset"),
    Category.DEVICE_ANNOTATION: ("gpu_user_annotation",),
    Category.DEVICE_SYNC: ("cuda_sync",),
}


@pytest.mark.parametrize(
    ("name", "category"), [(name, category) for category, names in CATEGORIES.items() for name in names]
)
def test_categories_of_every_age_are_known(write: Write, op: Op, name: str, category: Category) -> None:
    trace = read_kineto(write([op(cat=name)]))
    assert trace.events.category[0] == category
    assert trace.warnings == ()


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("__amd_rocclr_copyBuffer.kd", Category.MEMCPY),
        ("__amd_rocclr_copyBufferRectAligned", Category.MEMCPY),
        ("MEMORY_COPY_HOST_TO_DEVICE", Category.MEMCPY),
        ("__amd_rocclr_fillBufferAligned.kd", Category.MEMSET),
        ("__amd_rocclr_initHeap.kd", Category.KERNEL),
        ("copyBuffer.kd", Category.KERNEL),
    ],
)
def test_kernels_by_which_the_runtime_of_rocm_copies_and_fills_move_memory(
    write: Write, op: Op, name: str, category: Category
) -> None:
    events = read_kineto(write([kernel(name), op(name=name)])).events
    assert sorted(events.category.tolist()) == sorted([Category.CPU_OP, category])


def test_copies_and_waits_of_mtia_are_no_kernels_though_of_one_category_and_have_no_launches(
    write: Write, op: Op
) -> None:
    """As in HolisticTraceAnalysis' public traces: kernels have correlations, requests of the DMA engines none."""
    mtia = partial(op, cat="mtia_ccp_events", pid=9)
    work = [
        mtia(name="dma_request", ts=10, dur=5, args={"stream": 1, "direction": "DEVICE_TO_HOST", "size": 16}),
        mtia(name="fc-dtype_Float", ts=20, dur=30, args={"stream": 1, "correlation": 7}),
        mtia(name="dma_request", ts=60, dur=5, args={"stream": 1, "direction": "DEVICE_TO_HOST", "size": 16}),
        mtia(name="event_wait", ts=70, dur=500, args={"stream": 1, "wait_on_stream": 104}),
        mtia(name="event_record", ts=570, dur=1, args={"stream": 1}),
    ]
    call = op(cat="mtia_runtime", name="runFunction - job_prep_and_submit_for_execution", ts=1, args={"correlation": 7})
    trace = read_kineto(write([call, *work, op(cat="kernel", name="event_wait", ts=600, dur=1)]))
    of_name = dict(zip(np.array(trace.events.names)[trace.events.name_id], trace.events.category, strict=True))
    assert of_name["fc-dtype_Float"] == of_name["event_wait"] == Category.KERNEL  # the last one, which is CUDA's
    assert of_name["dma_request"] == Category.MEMCPY
    assert of_name["event_record"] == trace.events.category[-2] == Category.DEVICE_SYNC
    report = pptrace.load(write([call, *work]), cache=False).report
    assert damage_in(report.recording) == []
    device = report.device[0].breakdown
    assert (device.compute_ns, device.memory_ns) == (30_000, 10_000)


@pytest.mark.parametrize(
    "name",
    ["ProfilerStep#3", "Optimizer.step#SGD.step", "Optimizer.zero_grad#SGD.zero_grad", "enumerate(DataLoader)#x"],
)
def test_ranges_that_old_versions_write_as_operators_are_ranges(write: Write, op: Op, name: str) -> None:
    written = [op(cat="Operator", name=name), op(cat="Operator", name="aten::add"), op(cat="Kernel", name=name)]
    events = read_kineto(write(written)).events
    categories = {Category.ANNOTATION: 1, Category.CPU_OP: 1, Category.KERNEL: 1}
    assert {code: int((events.category == code).sum()) for code in categories} == categories


def test_unknown_categories_are_kept_and_named(write: Write, op: Op) -> None:
    trace = read_kineto(write([op(cat="quantum_op"), op(cat=...)]))
    assert trace.events.category.tolist() == [Category.OTHER] * 2
    assert trace.warnings == (
        "events of unknown categories are read as host events, so that device work among them does not count: "
        "'none', 'quantum_op'",
    )


def test_flows_counters_and_other_phases_are_no_rows(write: Write, op: Op) -> None:
    others = [
        {"ph": phase, "name": "x", "pid": 1, "tid": 1, "ts": 1, "id": 1, "args": {}} for phase in "stfbneNODPiICMEpv?"
    ]
    trace = read_kineto(write([*others, op()]))
    assert len(trace.events) == 1
    assert trace.warnings == ()


LAYOUTS: list[dict[str, Any]] = [{}, {"separators": (",", ":")}, {"indent": 2}, {"indent": 1}, {"indent": "\t"}]


@pytest.mark.parametrize(("layout", "name"), by_turns(LAYOUTS, ["trace.json", "trace.json.gz", "trace"]))
def test_layout_and_compression_change_nothing(write: Write, op: Op, layout: dict[str, Any], name: str) -> None:
    content = [op(ts=index, args={"shapes": [{"a": 1}, {"b": [2, {}]}, "},{"]}) for index in range(6000)]
    plain = read_kineto(write(content, "plain.json", {"schemaVersion": 1}, {"more": [{"x": 1}, {"y": 2}]}))
    other = read_kineto(write(content, name, {"schemaVersion": 1}, {"more": [{"x": 1}, {"y": 2}]}, **layout))
    assert len(other.events) == 6000
    assert same_events(plain.events, other.events)
    assert other.warnings == ()


def test_a_bare_list_of_events_is_a_trace(write: Write, op: Op) -> None:
    trace = read_kineto(write(json.dumps([op(), op()]).encode()))
    assert (len(trace.events), trace.warnings, trace.producer) == (2, (), "chrome trace")


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("base", [1711964646000000000, "1711964646000000000", 1.711964646e18])
def test_the_base_time_is_added_wherever_it_stands(write: Write, op: Op, where: str, base: Any) -> None:
    path = write([op(ts=4458676522690.655)], **{where: {"baseTimeNanoseconds": base}})
    assert read_kineto(path).events.start_ns.tolist() == [1711964646000000000 + 4458676522690655]


def test_a_base_time_that_is_none_is_said(write: Write, op: Op) -> None:
    trace = read_kineto(write([op()], before={"baseTimeNanoseconds": "yesterday"}))
    assert trace.events.start_ns.tolist() == [1_000_500]
    assert "'yesterday'" in trace.warnings[0]


def test_events_of_equal_start_are_sorted_longer_first(write: Write, op: Op) -> None:
    content = [op("inner", 5, 1), op("outer", 5, 9), op("early", 1, 1), op("middle", 5, 4)]
    assert names_of(read_kineto(write(content)).events) == ["early", "outer", "middle", "inner"]


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(order=st.permutations(range(12)), key_order=st.randoms(use_true_random=False))
def test_the_order_of_events_and_keys_changes_nothing(write: Write, op: Op, order: list[int], key_order: Any) -> None:
    content = [op(f"op{index % 3}", index // 4, 1 + index % 2, tid=index) for index in range(8)]
    content += [kernel(f"k{index}", 2, 1, correlation=index + 1) for index in range(3)]
    content += [kernel("ncclDevKernel", 1, 1, **{"Collective name": "allreduce", "Group size": 2})]
    shuffled = [content[index] for index in order]
    shuffled = [dict(key_order.sample(list(event.items()), len(event))) for event in shuffled]
    assert same_events(read_kineto(write(content)).events, read_kineto(write(shuffled, "shuffled.json")).events)


def test_numbers_as_text_and_odd_ids_are_read(write: Write, op: Op) -> None:
    content = [op(ts="1700000000000000.123", dur="0.001", pid="Spans", tid="77"), op(ts=1700000000000001, tid=None)]
    events = read_kineto(write(content)).events
    assert events.start_ns.tolist() == [1700000000000000123, 1700000000000001000]
    assert events.dur_ns.tolist() == [1, 2250]
    assert events.thread.tolist() == [77, -1]


def test_wrong_types_cost_only_the_field(write: Write, op: Op) -> None:
    content = [
        op(ts=1, name=7),
        op(ts=2, args=[1]),
        op(ts=3, args=None),
        op(ts=4, cat=None),
        op(ts=5, name=None, tid=[1]),
        {"ph": "i", "name": "[memory]", "pid": [1], "ts": 1, "args": {"Bytes": 8}},
    ]
    content += [kernel(ts=6, stream={"a": 1}, correlation="12"), kernel(ts=7, correlation=2**64 - 1)]
    trace = read_kineto(write(content))
    assert names_of(trace.events) == ["", "aten::mm", "aten::mm", "aten::mm", "", "gemm", "gemm"]
    assert trace.events.correlation.tolist() == [-1, -1, -1, -1, -1, 12, -1]
    assert [line.partition(":")[2] for line in trace.warnings] == [" 'none'"]
    assert trace.memory["allocated_bytes"].tolist() == [8]


def test_nodes_of_autograd_and_messages_keep_their_sequence_numbers(write: Write, op: Op) -> None:
    """Operators have that of the next node of their thread; a node without, as of an accumulated gradient, joins nothing."""
    node, sequence_args = "autograd::engine::evaluate_function: ", {"Sequence number": 7, "Fwd thread id": 1}
    events = [
        op(ts=1, name=node + "MmBackward0", args=sequence_args),
        op(ts=2, name=node + "torch::autograd::AccumulateGrad", args={"Ev Idx": 3}),
        op(ts=3, name="c10d::send", args=sequence_args | {"Sequence number": 9}),
        op(ts=4, name="aten::mm", args=sequence_args),
        op(ts=5, name=node + "AddBackward0", args={"Sequence number": -1}),
        op(ts=6, name=node + "AddBackward0"),
    ]
    assert read_kineto(write(events)).events.correlation.tolist() == [7, -1, 9, 7, -1, -1]


def test_correlation_zero_joins_nothing(write: Write) -> None:
    events = read_kineto(write([kernel(correlation=0), kernel(correlation=2**32 - 1)])).events
    assert events.correlation.tolist() == [-1, -1]


def test_the_producers_of_several_ages_are_named(write: Write, op: Op) -> None:
    facts: list[tuple[dict[str, Any], str]] = [
        ({"schemaVersion": 1, "pptrace": {"versions": {"torch": "2.13.0+cpu"}}}, "torch 2.13.0+cpu kineto"),
        ({"schemaVersion": 1, "cuda_runtime_version": 12010}, "kineto schema 1 (CUDA 12.1)"),
        ({"schemaVersion": 1, "hip_runtime_version": 60443483}, "kineto schema 1 (HIP 6.4)"),
        ({"deviceProperties": []}, "kineto"),
        ({}, "chrome trace"),
    ]
    assert [read_kineto(write([op()], before=members)).producer for members, _ in facts] == [name for _, name in facts]


@pytest.mark.parametrize("where", ["before", "after"])
def test_the_pptrace_object_is_kept_whole(write: Write, op: Op, where: str) -> None:
    ours = {"rank": 3, "mesh": {"pp": 4}, "plan": [["0F0"]], "clock": {"offset_ns": 12345678901234567}}
    info = {"rank": 9, "world_size": 16}
    trace = read_kineto(write([op()], **{where: {"pptrace": ours, "distributedInfo": info}}))
    assert (trace.metadata, trace.distributed, trace.rank) == (ours, info, 3)


def test_a_pptrace_object_written_as_text_is_read(write: Write, op: Op) -> None:
    assert read_kineto(write([op()], before={"pptrace": json.dumps({"rank": 2})})).rank == 2


@pytest.mark.parametrize(
    ("name", "before", "labels", "rank"),
    [
        ("rank5.json", {"distributedInfo": {"rank": 2}}, "rank 4", 2),
        ("rank5.json", {"distributedInfo": {"rank": -1}}, "rank 4", 4),
        ("rank5.json", {}, "CPU", 5),
        ("rank-3.Jul_15.pt.trace.json", {}, "", 3),
        ("trace_rank_12_step3.json.gz", {}, "", 12),
        ("worker0.1623143089861.pt.trace.json", {}, "", 0),
        ("host1_4711.1700000.pt.trace.json", {}, "", None),
        ("frank3.json", {}, "", None),
        ("trace.json", {"distributedInfo": "none"}, "", None),
    ],
)
def test_the_rank_comes_from_the_best_witness(
    write: Write, op: Op, name: str, before: dict[str, Any], labels: str, rank: int | None
) -> None:
    label = {"ph": "M", "name": "process_labels", "pid": 10, "tid": 0, "ts": 0, "args": {"labels": labels}}
    assert read_kineto(write([label, op()], name, before)).rank == rank


@pytest.mark.parametrize(
    ("pids", "labels", "ranks"),
    [
        (((10, 0), (11, 1)), ("RANK 5 - {}", "RANK 2 - {}"), [2, 5]),
        (
            (("[TP00-PP01] 10", "[TP00-PP01] 0"), ("[TP00-PP00] 10", "[TP00-PP00] 0")),
            ("python", "python"),
            [None, None],
        ),
        (((10, 0), (11, 1)), ("PP rank 1, TP rank 0", "PP rank 0, TP rank 0"), [None, None]),
        (((10, 0), (11, 1)), ("python", "python"), [None, None]),
        (((10, ...), (11, ...)), ("python", "python"), [None, None]),
    ],
)
def test_of_several_ranks_merged_into_one_file_each_has_its_own_events(
    write: Write, op: Op, pids: Sequence[Sequence[Any]], labels: Sequence[str], ranks: list[int | None]
) -> None:
    """The first one in the file has two kernels, the second one; both numbered from 1 on."""
    content: list[dict[str, Any]] = []
    for (host, device), label, number in zip(pids, labels, (2, 1), strict=True):
        content += [
            op("cudaLaunchKernel", 0, 1, cat="cuda_runtime", pid=host, args={"correlation": at + 1})
            for at in range(number)
        ]
        content += [op(pid=host), {"ph": "i", "name": "[memory]", "pid": host, "ts": 1, "args": {"Bytes": number}}]
        kernels = [kernel(correlation=at + 1) | {"pid": device} for at in range(number)]
        content += kernels if device is not ... else [op(f"aten::{at}", pid=host) for at in range(number)]
        for pid in (host, device):
            content.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": label.format("GPU")}})
    content = [event for event in content if event["pid"] is not ...] + [op(cat="Trace", pid="Spans")]
    info = {"rank": 0, "world_size": 2, "pg_config": []}
    before = {"distributedInfo": info, "host_name": "a", "pptrace": {"rank": 0}}
    traces = read_ranks(write(content, "rank7.json", before))
    assert [trace.rank for trace in traces] == ranks
    is_first = [2, 1] if labels[0] == "python" and isinstance(pids[0][0], int) else [1, 2]  # in order of the ids
    assert [trace.info.num_events for trace in traces] == [1 + 2 * number for number in is_first]
    assert [trace.memory["allocated_bytes"].tolist() for trace in traces] == [[number] for number in is_first]
    assert all((trace.distributed, trace.metadata) == ({"world_size": 2}, {}) for trace in traces)
    assert [len(trace.warnings) for trace in traces] == [1, 0]
    assert "several ranks in one file, divided by" in traces[0].warnings[0]


def test_ranks_in_one_file_of_which_nothing_tells_whose_kernels_are_whose_are_refused(write: Write, op: Op) -> None:
    content = [op(), op(pid=11), kernel(correlation=1), kernel(correlation=1) | {"pid": 1}]
    call = op("cudaLaunchKernel", 0, 1, cat="cuda_runtime", args={"correlation": 1})
    for calls in ([], [call, call | {"pid": 11}]):  # by neither of them, and by both
        line = r"several ranks in one file, and nothing tells .* expected the file of each rank"
        with pytest.raises(TraceError, match=line):
            read_ranks(write([*calls, *content]))
    picture = [{"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"rank {pid}"}} for pid in (0, 1)]
    with pytest.raises(TraceError, match="without operators or device work"):
        read_ranks(write([*picture, *(op(pid=pid, cat="op") for pid in (0, 1))]))
    (trace,) = read_ranks(write([*[op()] * 20, op(pid=11), kernel()]))  # one operator of another process is damage
    assert trace.info.num_events == 22


def comms(path: Path) -> list[dict[str, Any]]:
    table = read_kineto(path).events.comm_args
    assert list(table.columns) == list(COMM_ARGS)
    return [{str(key): value for key, value in row.items()} for row in table.to_dict("records")]


def test_communication_fields_of_torch_2_2_count_elements(write: Write, op: Op) -> None:
    args = {"Collective name": "allreduce", "In msg size": 10, "Out msg size": 12, "dtype": "BFloat16", "Group size": 8}
    row = comms(write([op("record_param_comms", args=args)]))[0]
    assert (row["collective"], row["in_bytes"], row["out_bytes"], row["group_size"]) == ("allreduce", 20, 24, 8)
    assert (row["group_id"], row["group_ranks"], row["src"], row["dst"], row["seq"]) == ("", "", -1, -1, -1)


def test_communication_fields_of_torch_2_13_are_all_read(write: Write) -> None:
    message = {"Collective name": "send", "In msg nelems": 1024, "Out msg nelems": 1024, "dtype": "Float", "Seq": 42}
    group = {"Process Group Name": "7", "Process Group Description": "pp", "Process Group Ranks": "[1, 5]"}
    args = message | group | {"Group size": 2, "Rank": 5, "Dst Rank": 5, "Is asynchronized op": True, "Comms Id": 123}
    content = [kernel("gemm", 1), kernel("ncclDevKernel_SendRecv(ncclDevComm*)", 2, **args), kernel("gemm", 0.5)]
    assert comms(write(content)) == [
        {
            **{"event": 2, "collective": "send", "in_bytes": 4096, "out_bytes": 4096, "in_elements": -1, "splits": ""},
            **{"group_id": "7", "group_description": "pp", "group_ranks": "[1, 5]", "group_size": 2},
            **{"src": -1, "dst": 5, "seq": 42},
        }
    ]


def test_elided_group_ranks_come_from_the_groups_configuration(write: Write, op: Op) -> None:
    args = {"Collective name": "allgather", "Process Group Name": "3", "Process Group Ranks": "[0, 1, ...]"}
    config = {"pg_config": [{"pg_name": "3", "pg_size": 4, "ranks": [0, 1, 4, 5]}]}
    row = comms(write([op(args=args | {"Group size": 4})], after={"distributedInfo": config}))[0]
    assert row["group_ranks"] == "[0, 1, 4, 5]"


def test_elided_group_ranks_come_from_start_and_stride_else_stay_unknown(write: Write, op: Op) -> None:
    args = {"Collective name": "allgather", "Process Group Ranks": "[0, 8, ...]", "Group size": 3}
    strided = args | {"Global rank start": 0, "Global rank stride": 8}
    rows = comms(write([op(ts=1, args=args), op(ts=2, args=strided)]))
    assert [row["group_ranks"] for row in rows] == ["", "[0, 8, 16]"]


def test_damaged_communication_fields_are_unknown(write: Write, op: Op) -> None:
    sizes = {"In msg nelems": "many", "Out msg nelems": 2**62, "dtype": "Float"}
    others = {"Collective name": "allreduce", "Seq": None, "Process Group Ranks": {"a": 1}, "Src Rank": 2**70}
    row = comms(write([op(args=sizes | others)]))[0]
    assert (row["in_bytes"], row["out_bytes"], row["seq"], row["group_ranks"], row["src"]) == (-1, -1, -1, "", -1)


def test_peers_of_gloo_come_from_the_concrete_inputs(write: Write, op: Op) -> None:
    send = op("c10d::send", 1, args={"Concrete Inputs": ["", "", "3", "0"]})
    recv = op("c10d::recv_", 2, args={"Concrete Inputs": ["", "", "2", "0"]})
    without = op("c10d::send", 3)
    no_integer = op("c10d::send", 4, args={"Concrete Inputs": ["", "", str(2**63)]})
    rows = comms(write([send, recv, without, no_integer]))
    peers = [(row["collective"], row["src"], row["dst"]) for row in rows]
    assert peers == [("send", -1, 3), ("recv", 2, -1), ("send", -1, -1), ("send", -1, -1)]


def test_the_rank_may_come_from_collectives_over_all_ranks_only(write: Write, op: Op) -> None:
    world = {"Collective name": "allreduce", "Process Group Ranks": "[0, 1, 2]", "Group size": 3, "Rank": 1}
    pair = {"Collective name": "allreduce", "Process Group Ranks": "[1, 2]", "Group size": 2, "Rank": 0}
    peer = world | {"Collective name": "send", "Rank": 2}
    root = world | {"Collective name": "broadcast", "Rank": 0}
    assert read_kineto(write([op(args=pair), op(args=peer), op(args=root)])).rank is None
    assert read_kineto(write([op(args=pair), op(args=peer), op(args=root), op(args=world)])).rank == 1


def test_roots_of_broadcasts_are_read_as_sources(write: Write, op: Op) -> None:
    """The operator has the root's place in its group, the record of a group of two its global rank."""
    inputs = {
        "Input type": ["TensorList", "", "Scalar", "Scalar", "Scalar", "Scalar"],
        "Input Dims": [[[64, 256]], [], [], [], [], []],
        "Concrete Inputs": ["", "", "1", "0", "False", "-1"],
    }
    pair = {"Collective name": "broadcast", "Process Group Ranks": "[4, 6]", "Group size": 2, "Rank": 1}
    content = [op("c10d::broadcast_", 0, args=inputs), op("record_param_comms", 1, args=pair)]
    content += [op("record_param_comms", 2, args=pair | {"Collective name": "allreduce"})]
    assert [row["src"] for row in comms(write(content))] == [1, 6, -1]


def moment(ts: float, kind: int, device: int, **args: Any) -> dict[str, Any]:
    fields = {"Device Type": kind, "Device Id": device} | {key.replace("_", " "): value for key, value in args.items()}
    event = {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 1, "tid": 1}
    return event | {"ts": ts, "args": fields}


def memory(table: pd.DataFrame) -> list[list[int]]:
    assert {name: str(dtype) for name, dtype in table.dtypes.items()} == dict(MEMORY)
    return [[int(value) for value in row] for row in table.to_numpy()]


def test_memory_is_that_of_the_accelerators_added_up(write: Write, op: Op) -> None:
    content = [
        moment(1, 0, -1, Bytes=4, Total_Allocated=999, Total_Reserved=0),
        moment(2, 1, 0, Bytes=4, Total_Allocated=100, Total_Reserved=200),
        moment(3, 1, 1, Bytes=4, Total_Allocated=10, Total_Reserved=20),
        moment(4, 1, 0, Bytes=-60, Total_Allocated=40, Total_Reserved=200),
        op(),
    ]
    table = read_kineto(write(content, "rank2.json", {"baseTimeNanoseconds": 10})).memory
    assert memory(table) == [[2, 2010, 100, 200], [2, 3010, 110, 220], [2, 4010, 50, 220]]


def test_memory_without_accelerators_is_the_hosts(write: Write, op: Op) -> None:
    table = read_kineto(write([moment(1, 0, -1, Bytes=4, Total_Allocated=999, Total_Reserved=0), op()])).memory
    assert memory(table) == [[-1, 1000, 999, 0]]


def test_memory_of_old_traces_counts_from_the_first_event(write: Write, op: Op) -> None:
    content = [moment(1, 1, 0, Bytes=8), moment(3, 1, 0, Bytes=-8), moment(2, 1, 0, Bytes=16), op()]
    assert memory(read_kineto(write(content)).memory) == [[-1, 1000, 8, -1], [-1, 2000, 24, -1], [-1, 3000, 16, -1]]


@pytest.mark.parametrize(
    ("content", "result"),
    [
        (b"", "empty"),
        (b"  \n ", "empty"),
        (b"hello", "begins with 'hello'"),
        (b"\x00\x01\x02", "begins with"),
        (b'{"a": 1, "b": 2}', 'a JSON object with "a", "b"'),
        (b'{"schema": "1.0.1", "pid": 1, "nodes": []}', "an execution trace of torch or Chakra"),
        (b'{"a": {"traceEvents": [1]}}', 'a JSON object with "a"'),
        (b'{"traceEvents": null}', 'a JSON object with "traceEvents"'),
        (b"{}", "an empty JSON object"),
        (b'{"schemaVersion": 1, "deviceProp', 'damaged or truncated JSON without "traceEvents"'),
        (b'{"traceEvents": []}', "an empty list of trace events"),
        (b"[]", "an empty list of trace events"),
        (b"[1, 2, 3]", "an empty list of trace events"),
        (b'[]\n{"ph": "X"}', 'an empty list of trace events, and \'{"ph": "X"}\' behind it'),
        (b'[{"file": "a.json.gz", "size": 32}]', "a list of 1 entry of which none can be read as an event"),
        (b'{"traceEvents": [{"ph": "M"}]}', "1 event and no complete one"),
        (b'{"traceEvents": [{"ph": "B", "ts": 1}, {"ph": "E", "ts": 2}]}', "1 begin/end pair and no complete event"),
        (b'{"traceEvents": [{"ph": "X", "ts"', "damaged or truncated before the first event"),
        (b'{"traceEvents": [{"ph": "X", "name": "a"}]}', "no event has a usable time"),
        (b"\x1f\x8b\x08\x00garbage", "empty"),
    ],
)
def test_a_file_without_a_trace_says_what_it_is_in_one_line(write: Write, content: bytes, result: str) -> None:
    path = write(content)
    with pytest.raises(TraceError) as caught:
        read_kineto(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: {result}")
    assert "expected" in message
    assert message.count(";") >= 2
    assert "\n" not in message


def test_files_that_cannot_be_read_are_trace_errors(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.json", Path("\0")):
        with pytest.raises(TraceError, match="cannot be read"):
            read_kineto(path)


def test_a_real_trace_of_nccl_keeps_its_communication(data: Path) -> None:
    trace = read_kineto(data / "hta/nccl_parser_config/nccl_data.json.gz")
    kernels = trace.events.category[trace.events.comm_args["event"]] == Category.KERNEL
    assert (trace.rank, trace.warnings, kernels.sum()) == (0, (), 21)
    on_device = trace.events.comm_args[kernels]
    assert set(on_device["group_ranks"]) == {"[0, 1]"}
    assert on_device["in_bytes"].sum() == sum(on_device["out_bytes"]) > 10**8
    assert trace.distributed["world_size"] == 2


def test_a_real_trace_of_2021_has_its_kernels_on_their_stream(data: Path) -> None:
    events = read_kineto(data / "kineto_tb_plugin/worker0.1623143089861.pt.trace.json.gz").events
    counts = {Category(code).name: int((events.category == code).sum()) for code in np.unique(events.category)}
    on_host = {"CPU_OP": 23646 - 4 * 6, "ANNOTATION": 4 * 6, "RUNTIME": 11923, "OTHER": 1}
    assert counts == on_host | {"KERNEL": 8772, "MEMCPY": 12, "MEMSET": 312}
    assert set(events.stream[events.category == Category.KERNEL].tolist()) == {7}
    assert (events.thread[events.category == Category.CPU_OP] >= 0).all()
