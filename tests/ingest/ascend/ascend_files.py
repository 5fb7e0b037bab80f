"""Synthetic traces in the form of the Ascend profiler's, built event by event, in the layout of ``trace_view.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HOST, CANN, NPU, HCCL, OVERLAP = 4000, 4096010, 4096033, 4096065, 4096097
MAIN, QUEUE = 4000, 4001
NONE = 4294967295


def us(ns: int) -> str:
    """A time as the profiler writes it: text of microseconds."""
    return f"{ns // 1000}.{ns % 1000:03d}"


def metadata(pid: int, process: str, threads: dict[int, str]) -> list[dict[str, Any]]:
    rows = [{"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": process}}]
    return rows + [
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
        for tid, name in threads.items()
    ]


def host(name: str, start: int, dur: int, cat: str = "cpu_op", tid: int = MAIN, **args: Any) -> dict[str, Any]:
    args = args or {"Sequence number": -1, "Fwd thread id": 0}
    return {
        "ph": "X", "name": name, "pid": HOST, "tid": tid, "ts": us(start), "dur": dur / 1000, "cat": cat, "args": args,
    }  # fmt: skip


def task(name: str, start: int, dur: int, stream: int, kind: str, connection: int = NONE) -> dict[str, Any]:
    args = {"Task Type": kind, "Physic Stream Id": stream, "connection_id": connection}
    return {"name": name, "pid": NPU, "tid": stream, "ts": us(start), "dur": dur / 1000, "args": args, "ph": "X"}


def collective(name: str, start: int, dur: int, connection: int, count: int, dtype: str = "FP32") -> dict[str, Any]:
    args = {"connection_id": connection, "data_type": dtype, "count": count}
    return {"name": name, "pid": HCCL, "tid": 0, "ts": us(start), "dur": dur / 1000, "args": args, "ph": "X"}


def arrow(id_: str, call: tuple[int, int], work: dict[str, Any]) -> list[dict[str, Any]]:
    """The flow from a call (thread, time) to device work."""
    common = {"cat": "HostToDevice", "name": f"HostToDevice{id_}", "id": id_}
    end = {"ph": "f", "pid": work["pid"], "tid": work["tid"], "ts": work["ts"], "bp": "e"}
    return [{"ph": "s", "pid": CANN, "tid": call[0], "ts": us(call[1]), **common}, {**end, **common}]


def queued(number: int, name: str, enqueued: int, dequeued: int) -> list[dict[str, Any]]:
    """Enqueue on the main thread and Dequeue on that of the queue, 100 and 2,000 ns long."""
    return [
        host("Enqueue", enqueued, 100, "enqueue", correlation_id=number),
        host(f"Dequeue@{name}", dequeued, 2_000, "dequeue", QUEUE, correlation_id=number),
    ]


T0 = 1_736_408_883_000_000_000
"""Start, ns since 1970."""


def step(rank: int = 0, group: str = "0", *, with_calls: bool = False) -> list[dict[str, Any]]:
    """A step of 100 µs: a product of 20 µs, a copy of 5 µs and an all-reduce of 30 µs, 10 µs of them beside a second product."""
    t0 = T0 + rank
    product = task("aclnnMm_MatMulV2", t0 + 10_000, 20_000, 2, "AI_CORE", 11)
    copy = task("MEMCPY_ASYNC", t0 + 31_000, 5_000, 2, "PCIE_DMA_SQE", 12)
    second = task("aclnnMm_MatMulV2", t0 + 60_000, 20_000, 2, "AI_CORE", 14)
    reduce = collective("hcom_allReduce__586_0_1", t0 + 40_000, 30_000, 13, 1000)
    events = [
        host("ProfilerStep#7", t0, 100_000),
        host("forward_step", t0 + 1_000, 50_000),
        host("aten::mm", t0 + 2_000, 3_000),
        host("aclnnMm", t0 + 2_500, 400),
        host("c10d::allreduce_", t0 + 7_000, 2_000),
        *queued(1, "aclnnMm", t0 + 2_600, t0 + 5_000),
        *queued(2, "HcclAllreduce", t0 + 7_600, t0 + 9_000),
        *metadata(HOST, "Python", {MAIN: "Thread 4000", QUEUE: "Thread 4001"}),
        *metadata(NPU + rank, "Ascend Hardware", {2: "Stream 2", 4: "Stream 4"}),
        *metadata(HCCL + rank, "HCCL", {0: f"Group {group} Communication", 1: "Plane 0"}),
        *metadata(OVERLAP + rank, "Overlap Analysis", {0: "Computing"}),
        product, copy, second, reduce,
        task("EVENT_WAIT", t0 + 36_000, 4_000, 2, "EVENT_WAIT_SQE", 15),
        task("Notify Wait", t0 + 40_000, 29_000, 4, "Notify Wait", 13),
        task("SDMA", t0 + 69_000, 900, 4, "SDMA", 13),
        {"name": "Memcpy", "pid": HCCL, "tid": 1, "ts": us(t0 + 41_000), "dur": 1, "args": {"task type": "Memcpy"}, "ph": "X"},
        {"name": "Computing", "pid": OVERLAP, "tid": 0, "ts": us(t0 + 10_000), "dur": 20, "ph": "X"},
        {"name": "HBM 0/Read", "ts": us(t0), "pid": 99, "tid": 0, "args": {"Read(MB/s)": 0.0}, "ph": "C"},
        *arrow("40004068119343529983", (QUEUE, t0 + 5_500), product),
        *arrow("77", (QUEUE, t0 + 9_300), reduce),
        *arrow("78", (MAIN, t0 + 30_500), copy),
    ]  # fmt: skip
    if with_calls:
        call = host("AscendCL@aclrtMemcpyAsync", t0 + 30_500, 400, level="acl", connection_id=12, **{"Thread Id": MAIN})
        del call["cat"]
        events += [*metadata(CANN, "CANN", {MAIN: "Thread 4000"}), call | {"pid": CANN}]
    for event in events:
        if event["pid"] in (NPU, HCCL, OVERLAP):
            event["pid"] += rank
    return events


MESSAGE_NS = 50_000
ORDERS = ("F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3")
"""1F1B of two stages and four microbatches; a forward takes 1 ms and a backward 2 ms."""


def pipeline_steps(rank: int, num_steps: int = 3) -> list[dict[str, Any]]:
    """Steps of :data:`ORDERS` with the labels of torch.distributed.pipelining, launched long before they run."""
    ends = _ends_of_ops()
    events = metadata(HOST, "Python", {MAIN: "Thread 4000", QUEUE: "Thread 4001"})
    events += metadata(NPU + rank, "Ascend Hardware", {2: "Stream 2"})
    for number in range(num_steps):
        begin = T0 + number * 30_000_000
        events.append(host(f"ProfilerStep#{number}", begin - 500_000, 29_000_000))
        for index, op in enumerate(ORDERS[rank].split()):
            called, connection = begin - 400_000 + index * 40_000, 1 + 100 * number + index
            events.append(host(f"PP:{rank}{op}", called, 30_000))
            events += queued(connection, "aclnnMm", called + 10_000, called + 20_000)
            length = _length_of(op)
            work = task("aclnnMm_MatMulV2", begin + ends[rank, op] - length, length, 2, "AI_CORE", connection)
            work["pid"] += rank
            events += [work, *arrow(str(connection), (QUEUE, called + 20_500), work)]
    return events


def _length_of(op: str) -> int:
    return 1_000_000 if op[0] == "F" else 2_000_000


def _ends_of_ops() -> dict[tuple[int, str], int]:
    """The end of each op of a rank, ns from the start of its step: an op waits for the one before it and for its input."""
    ends: dict[tuple[int, str], int] = {}
    todo = [(rank, op) for rank, order in enumerate(ORDERS) for op in order.split()]
    free = [0, 0]
    while todo:
        for rank, op in todo:
            needed = (1 - rank, op) if (op[0] == "F") == (rank == 1) else None
            is_next = next(other for other in todo if other[0] == rank) == (rank, op)
            if is_next and (needed is None or needed in ends):
                ready = 0 if needed is None else ends[needed] + MESSAGE_NS
                free[rank] = ends[rank, op] = max(free[rank], ready) + _length_of(op)
                todo.remove((rank, op))
                break
    return ends


def write_rank(directory: Path, rank: int, events: list[dict[str, Any]], *, described: bool = True) -> Path:
    """Write a rank's folder as the profiler does; its trace's path."""
    folder = directory / f"node-7_{4000 + rank}_2025010911270{rank}123_ascend_pt"
    output = folder / "ASCEND_PROFILER_OUTPUT"
    output.mkdir(parents=True)
    info = {"config": {"common_config": {"record_shapes": True, "with_stack": False}}, "rank_id": rank}
    (folder / f"profiler_info_{rank}.json").write_text(json.dumps(info))
    (output / "communication.json").write_text("{}")
    if described:
        groups = {"group_name_3": {"group_name": "dp", "group_rank": rank, "global_ranks": [0, 1]}}
        args = {"rank": rank, "world_size": 2}
        described_job = {"distributed_args": args, "parallel_group_info": groups, "ENV_VARIABLES": {"SECRET": "x"}}
        (folder / "profiler_metadata.json").write_text(json.dumps(described_job))
    path = output / "trace_view.json"
    path.write_text(json.dumps(events))
    return path
