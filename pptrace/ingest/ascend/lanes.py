"""Events of a ``trace_view.json``: their categories by lane and, on a device, by task; the calls that launched device work; and
the arguments of collectives.

Python            operators and ranges of the program, Python calls, Enqueue and Dequeue of the task queue
CANN              calls of AscendCL, runtime and HCCL
MsprofTx          ranges of mstx
Ascend Hardware   a lane for each stream: tasks
HCCL | Communication   a lane for each group: collectives; planes: their parts
Overlap Analysis, HBM, …   sums over other lanes, and counters: no events of their own

    Enqueue (thread of the operator) ─ correlation_id ─ Dequeue (thread of the queue) ⊃ call ─ HostToDevice ─ task

Without a task queue the call is on the operator's thread. At profiler level 0 calls are not recorded: the beginning of the
arrow says where and when each was.

    hcom_allReduce__586_0_1 { data_type: FP32, count: 4097000 }       on the lane "Group <name> Communication"

The name ends with the last digits of a hash of the group's name, which is the same on all ranks, and numbers. ``count`` is the
number of elements that a rank hands in; of a reduce-scatter those that it gets (``HcclReduceScatter``, ``recvCount``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from pptrace.ingest.ascend.trace_rows import Collected
from pptrace.ingest.common.rank_names import DTYPE_BYTES, CommRecord, comm_args_table
from pptrace.ingest.common.sort_events import SortedEvents
from pptrace.model.tables import Int8, Int64
from pptrace.model.traces import Category
from pptrace.slices import Slice, first_like

Mask = npt.NDArray[np.bool_]

LEFT_OUT = -1
"""Code of rows that are no events: analyses, counters, and the parts of a collective."""

_PYTHON, _CALLS, _RANGES, _TASKS = "Python", "CANN", "MsprofTx", "Ascend Hardware"
_COLLECTIVES = ("HCCL", "Communication")
_WAITS = re.compile(
    r"EVENT|NOTIFY|WRITE[_ ]VALUE|PLACE[_ ]HOLDER|PROFILING|LABEL|STREAM[_ ]|MODEL[_ ]|NOP", re.IGNORECASE
)
_COPIES = re.compile(r"MEMCPY|PCIE_DMA|SDMA", re.IGNORECASE)
_FILLS = re.compile(r"MEMSET", re.IGNORECASE)
_OPERATOR = re.compile(
    r"::|Backward\d+$|^(?:acln?n?|npu|hccl|contiguous_|format_contiguous|empty_tensor|(?:record|wait|destroy)_event|detach_?$)",
    re.IGNORECASE,
)
"""Operators of torch, torch_npu and autograd; the profiler gives them the category of the program's own ranges."""
_NONE = 2**32 - 1


def lanes_of(collected: Collected, rows: Slice) -> Slice:
    """The ``category`` of each row, :data:`LEFT_OUT` where it is no event, and which of them are calls and collectives.

    A task of a collective's connection is a part of the collective.
    """
    lane_of_process = [collected.process_names.get(process, "") for process in range(len(collected.processes))]
    category = np.full(len(rows), LEFT_OUT, dtype=np.int8)

    def on(*lanes: str) -> Mask:
        on_lane: Mask = np.array([lane in lanes for lane in lane_of_process], dtype=np.bool_)[rows["process"]]
        return on_lane

    is_python, is_call = on(_PYTHON), on(_CALLS)
    is_enqueue, is_dequeue = (
        is_python & (rows["category"] == collected.categories.get(kind, -1)) for kind in ("enqueue", "dequeue")
    )
    category[is_python] = _host_categories(collected, rows, is_dequeue)[is_python]
    category[is_enqueue], category[is_dequeue] = Category.RUNTIME, Category.OTHER
    category[is_call], category[on(_RANGES)] = Category.RUNTIME, Category.ANNOTATION
    is_collective = np.zeros(len(rows), dtype=np.bool_)
    for (process, thread), name in collected.thread_names.items():  # planes hold the parts of the same collectives
        if name.endswith("Communication"):
            is_collective |= (rows["process"] == process) & (rows["thread"] == thread)
    is_collective &= on(*_COLLECTIVES)
    category[is_collective] = Category.KERNEL
    connections = rows["number"][is_collective]
    is_part = np.isin(rows["number"], connections[(connections > 0) & (connections < _NONE)])
    is_task = on(_TASKS) & ~is_part
    category[is_task] = _task_categories(collected, rows)[is_task]
    marks = {"is_call": is_call, "is_enqueue": is_enqueue, "is_dequeue": is_dequeue, "is_collective": is_collective}
    return Slice({"category": category, **marks})


def _host_categories(collected: Collected, rows: Slice, is_dequeue: Mask) -> Int8:
    """Categories in Python's lane: what the queue hands to the device is an operator, whatever its name."""
    names = collected.names.texts
    queued = {
        names[code].removeprefix("Dequeue@") for code in np.unique(rows["name"][is_dequeue]).tolist() if names[code]
    }
    operators = np.array([name in queued or bool(_OPERATOR.search(name)) for name in names], dtype=np.bool_)
    kinds = {"cpu_op": Category.CPU_OP, "python_function": Category.PYTHON, "GC": Category.ANNOTATION}
    by_category = [kinds.get(name, Category.OTHER) for name in collected.categories.texts]
    category: Int8 = np.array(by_category, dtype=np.int8)[rows["category"]]
    category[(category == Category.CPU_OP) & ~operators[rows["name"]]] = Category.ANNOTATION
    return category


def _task_categories(collected: Collected, rows: Slice) -> Int8:
    """Categories on a device's streams, by type and, where that says nothing, name of the task."""
    types, names = collected.task_types.texts, collected.names.texts
    pairs, inverse = np.unique(np.stack((rows["task_type"], rows["name"])), axis=1, return_inverse=True)
    patterns = ((_WAITS, Category.DEVICE_SYNC), (_COPIES, Category.MEMCPY), (_FILLS, Category.MEMSET))
    kinds = []
    for task_type, name in pairs.T.tolist():
        text = types[task_type] or names[name]
        kinds.append(next((kind for pattern, kind in patterns if pattern.search(text)), Category.KERNEL))
    return np.array(kinds, dtype=np.int8)[inverse.reshape(-1)]


def launches_of(
    rows: Slice, lanes: Slice, is_device: np.ndarray[tuple[int], np.dtype[np.bool_]], starts: Slice, ends: Slice
) -> tuple[Int64, tuple[Int64, Int64, Int64]]:
    """Join device work to its launches along the arrows that end where it begins.

    Returns:
        A number of each row that joins device work to the row that launched it, -1 for other rows; and (thread, start in ns,
        number) of launches that are no row.
    """
    number = np.full(len(rows), -1, dtype=np.int64)
    work = np.flatnonzero(is_device)
    places = (rows["process"][work], rows["thread"][work], rows["start_ns"][work])
    flow = first_like(places, (ends["process"], ends["thread"], ends["t_ns"]))
    work, flow = work[flow >= 0], flow[flow >= 0]
    begin = first_like([ends["id"][flow]], [starts["id"]])
    work, begin = work[begin >= 0], begin[begin >= 0]
    thread, t_ns = starts["thread"][begin], starts["t_ns"][begin]
    launcher = _enqueued(rows, lanes, thread, t_ns)
    direct = np.flatnonzero(launcher < 0)
    calls = np.flatnonzero(lanes["is_call"])
    index = first_like((thread[direct], t_ns[direct]), (rows["thread"][calls], rows["start_ns"][calls]))
    launcher[direct[index >= 0]] = calls[index[index >= 0]]
    is_row = launcher >= 0
    _, group = np.unique(launcher[is_row], return_inverse=True)
    number[work[is_row]] = group + 1
    number[launcher[is_row]] = group + 1
    alone = np.flatnonzero(~is_row)
    first_free = int(number.max(initial=0)) + 1
    own = first_free + np.arange(len(alone))
    number[work[alone]] = own
    return number, (thread[alone], t_ns[alone], own)


def _enqueued(rows: Slice, lanes: Slice, thread: Int64, t_ns: Int64) -> Int64:
    """The Enqueue of the Dequeue around each time on its thread, -1 where there is none."""
    dequeued = np.flatnonzero(lanes["is_dequeue"])
    enqueued = np.flatnonzero(lanes["is_enqueue"])
    found = np.full(len(thread), -1, dtype=np.int64)
    for queue in np.unique(rows["thread"][dequeued]).tolist():
        of_queue = dequeued[rows["thread"][dequeued] == queue]
        of_queue = of_queue[np.argsort(rows["start_ns"][of_queue], kind="stable")]
        at = np.flatnonzero(thread == queue)
        before = np.searchsorted(rows["start_ns"][of_queue], t_ns[at], side="right") - 1
        around = of_queue[np.maximum(before, 0)]
        is_inside = (before >= 0) & (t_ns[at] <= rows["start_ns"][around] + rows["dur_ns"][around])
        index = first_like([rows["number"][around[is_inside]]], [rows["number"][enqueued]])
        found[at[is_inside]] = np.append(enqueued, -1)[index]
    return found


_NAME = re.compile(r"hcom_(?P<kind>[A-Za-z0-9]+)_*(?:__(?P<group>\w+?)_\d+_\d+)?(?:@(?P<hash>\w+))?")
_DTYPES = re.compile(r"(BFP|FP|U?INT)(\d{1,3})", re.ASCII)
_OF_ONE_SIZE = frozenset({"allreduce", "broadcast", "reduce", "send", "receive"})
_LANE = re.compile(r"Group (?P<name>\S+) (?:Aicpu )?Communication")


def collectives_table(
    collected: Collected,
    rows: Slice,
    chosen: npt.NDArray[np.intp],
    events: SortedEvents,
    groups: Sequence[Mapping[str, Any]],
) -> pd.DataFrame:
    """Make one row for each collective that is left.

    Args:
        rows: the rows that are collectives.
        chosen: their places among the events before sorting.
        groups: the process groups of the job.
    """
    by_name = {str(group["pg_name"]): group for group in groups}
    names, dtypes = collected.names.texts, collected.dtypes.texts
    columns = (rows["name"], rows["process"], rows["thread"], rows["dtype"], rows["count"])
    records: list[CommRecord] = []
    for event, name, process, thread, dtype, count in zip(
        events.sorted_rows(chosen.tolist()).tolist(), *(column.tolist() for column in columns), strict=True
    ):
        if event < 0:  # it was left out
            continue
        match = _NAME.fullmatch(names[name])
        kind = match["kind"] if match else ""
        lane = _LANE.fullmatch(collected.thread_names.get((process, thread), ""))
        group_id = (match and (match["hash"] or match["group"])) or ""
        if lane and not lane["name"].isdecimal():  # a number is what each rank counts itself
            group_id = lane["name"]
        group = by_name.get(group_id, {})
        ranks = group.get("ranks", [])
        item = _DTYPES.fullmatch(dtypes[dtype])
        item_bytes = int(item[2]) // 8 if item else DTYPE_BYTES.get(dtypes[dtype].lower(), -1)
        sent, received = _bytes(kind, count, item_bytes, len(ranks))
        description, text = str(group.get("pg_desc", "")), json.dumps(ranks) if ranks else ""
        size = len(ranks) or -1
        records.append((event, kind, sent, received, group_id, description, text, size, -1, -1, -1, -1, ""))
    return comm_args_table(records)


def _bytes(kind: str, count: int, item: int, size: int) -> tuple[int, int]:
    """(bytes handed in, bytes got), -1 where they are not known."""
    if count < 0 or item < 1:
        return -1, -1
    num_bytes, kind = count * item, kind.lower()
    of_all = num_bytes * size if size > 0 else -1
    if num_bytes >= 2**63 or of_all >= 2**63:
        return -1, -1
    if kind in _OF_ONE_SIZE:
        return num_bytes, num_bytes
    if kind == "allgather":
        return num_bytes, of_all
    return (of_all, num_bytes) if kind == "reducescatter" else (-1, -1)
