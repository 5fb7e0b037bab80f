"""Categories of the events of a ``trace_view.json``, by lane and, on a device, by task.

Python            operators and ranges of the program, Python calls, Enqueue and Dequeue of the task queue
CANN              calls of AscendCL, runtime and HCCL
MsprofTx          ranges of mstx
Ascend Hardware   a lane for each stream: tasks
HCCL | Communication   a lane for each group: collectives; planes: their parts
Overlap Analysis, HBM, …   sums over other lanes, and counters: no events of their own
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pptrace.ingest.ascend.trace_rows import Collected, Rows
from pptrace.model.tables import Int8
from pptrace.model.traces import Category

Mask = npt.NDArray[np.bool_]

LEFT_OUT = -1
"""Code of rows that are no events: analyses, counters, and the parts of a collective."""

_PYTHON, _CALLS, _RANGES, _TASKS, _COLLECTIVES = (
    "Python",
    "CANN",
    "MsprofTx",
    "Ascend Hardware",
    ("HCCL", "Communication"),
)
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


@dataclass(frozen=True, slots=True)
class Lanes:
    """Categories of all rows, :data:`LEFT_OUT` where a row is none, and which of them are calls, tasks and collectives."""

    category: Int8
    is_call: Mask
    is_enqueue: Mask
    is_dequeue: Mask
    is_collective: Mask


def lanes_of(collected: Collected, rows: Rows) -> Lanes:
    """Sort the rows into lanes; a task of a collective's connection is a part of the collective."""
    lane_of_process = [collected.process_names.get(process, "") for process in range(len(collected.processes))]
    category = np.full(len(rows), LEFT_OUT, dtype=np.int8)

    def on(*lanes: str) -> Mask:
        return np.array([lane in lanes for lane in lane_of_process], dtype=np.bool_)[rows.process]

    is_python, is_call = on(_PYTHON), on(_CALLS)
    is_enqueue, is_dequeue = (
        is_python & (rows.category == collected.categories.get(kind, -1)) for kind in ("enqueue", "dequeue")
    )
    category[is_python] = _host_categories(collected, rows, is_dequeue)[is_python]
    category[is_enqueue], category[is_dequeue] = Category.RUNTIME, Category.OTHER
    category[is_call], category[on(_RANGES)] = Category.RUNTIME, Category.ANNOTATION
    is_collective = np.zeros(len(rows), dtype=np.bool_)
    for (process, thread), name in collected.thread_names.items():  # planes hold the parts of the same collectives
        if name.endswith("Communication"):
            is_collective |= (rows.process == process) & (rows.thread == thread)
    is_collective &= on(*_COLLECTIVES)
    category[is_collective] = Category.KERNEL
    connections = rows.number[is_collective]
    is_part = np.isin(rows.number, connections[(connections > 0) & (connections < _NONE)])
    is_task = on(_TASKS) & ~is_part
    category[is_task] = _task_categories(collected, rows)[is_task]
    return Lanes(category, is_call, is_enqueue, is_dequeue, is_collective)


def _host_categories(collected: Collected, rows: Rows, is_dequeue: Mask) -> Int8:
    """Categories in Python's lane: what the queue hands to the device is an operator, whatever its name."""
    names = collected.names.texts
    queued = {names[code].removeprefix("Dequeue@") for code in np.unique(rows.name[is_dequeue]).tolist() if names[code]}
    operators = np.array([name in queued or bool(_OPERATOR.search(name)) for name in names], dtype=np.bool_)
    kinds = {"cpu_op": Category.CPU_OP, "python_function": Category.PYTHON, "GC": Category.ANNOTATION}
    by_category = [kinds.get(name, Category.OTHER) for name in collected.categories.texts]
    category = np.array(by_category, dtype=np.int8)[rows.category]
    category[(category == Category.CPU_OP) & ~operators[rows.name]] = Category.ANNOTATION
    return category


def _task_categories(collected: Collected, rows: Rows) -> Int8:
    """Categories on a device's streams, by type and, where that says nothing, name of the task."""
    types, names = collected.task_types.texts, collected.names.texts
    pairs, inverse = np.unique(np.stack((rows.task_type, rows.name)), axis=1, return_inverse=True)
    patterns = ((_WAITS, Category.DEVICE_SYNC), (_COPIES, Category.MEMCPY), (_FILLS, Category.MEMSET))
    kinds = []
    for task_type, name in pairs.T.tolist():
        text = types[task_type] or names[name]
        kinds.append(next((kind for pattern, kind in patterns if pattern.search(text)), Category.KERNEL))
    return np.array(kinds, dtype=np.int8)[inverse.reshape(-1)]
