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
_WAITS = re.compile(r"EVENT|NOTIFY|WRITE_VALUE|PLACE_HOLDER|PROFILING|LABEL|STREAM_|MODEL_|NOP", re.IGNORECASE)
_COPIES = re.compile(r"MEMCPY|PCIE_DMA|SDMA", re.IGNORECASE)
_FILLS = re.compile(r"MEMSET", re.IGNORECASE)
_OPERATOR = re.compile(
    r"::|Backward\d+$|^(?:acln?n?|npu|hccl|contiguous_|format_contiguous|empty_tensor|(?:record|wait|destroy)_event|detach_?$)",
    re.IGNORECASE,
)
"""Operators of torch, torch_npu and autograd; the profiler gives them the category of the program's own ranges."""
_GROUP = re.compile(r"Group (?P<name>\S+) (?:Aicpu )?Communication")
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
    lane = np.full(len(collected.processes), "", dtype=object)
    for process, name in collected.process_names.items():
        lane[process] = name
    of_process = {name: np.array([each in names for each in lane], dtype=np.bool_) for name, names in _NAMES.items()}
    category = np.full(len(rows), LEFT_OUT, dtype=np.int8)
    on = {name: mask[rows.process] for name, mask in of_process.items()}
    is_enqueue, is_dequeue = (
        on[_PYTHON] & _are(collected.categories, rows.category, kind) for kind in ("enqueue", "dequeue")
    )
    category[on[_PYTHON]] = _host_categories(collected, rows, is_dequeue)[on[_PYTHON]]
    category[is_enqueue], category[is_dequeue] = Category.RUNTIME, Category.OTHER
    category[on[_CALLS]], category[on[_RANGES]] = Category.RUNTIME, Category.ANNOTATION
    is_collective = on[_COLLECTIVES[0]] & _on_group_lanes(collected, rows)
    category[is_collective] = Category.KERNEL
    connections = rows.number[is_collective]
    is_part = np.isin(rows.number, connections[(connections > 0) & (connections < _NONE)])
    is_task = on[_TASKS] & ~is_part
    category[is_task] = _task_categories(collected, rows)[is_task]
    return Lanes(category, on[_CALLS], is_enqueue, is_dequeue, is_collective)


_NAMES = {name: (name,) for name in (_PYTHON, _CALLS, _RANGES, _TASKS)} | {_COLLECTIVES[0]: _COLLECTIVES}


def _are(texts: dict[str | None, int], codes: npt.NDArray[np.int32], text: str) -> Mask:
    is_it: Mask = codes == texts.get(text, -1)
    return is_it


def _host_categories(collected: Collected, rows: Rows, is_dequeue: Mask) -> Int8:
    """Categories in Python's lane: what the queue hands to the device is an operator, whatever its name."""
    names = list(collected.names)
    queued = {names[code].removeprefix("Dequeue@") for code in np.unique(rows.name[is_dequeue]).tolist() if names[code]}
    operators = np.array([name in queued or bool(_OPERATOR.search(name or "")) for name in names], dtype=np.bool_)
    kinds = {"cpu_op": Category.CPU_OP, "python_function": Category.PYTHON, "GC": Category.ANNOTATION}
    by_category = [kinds.get(str(name), Category.OTHER) for name in collected.categories]
    category = np.array(by_category, dtype=np.int8)[rows.category]
    category[(category == Category.CPU_OP) & ~operators[rows.name]] = Category.ANNOTATION
    return category


def _task_categories(collected: Collected, rows: Rows) -> Int8:
    """Categories on a device's streams, by type and, where that says nothing, name of the task."""
    types, names = list(collected.task_types), list(collected.names)
    pairs, inverse = np.unique(np.stack((rows.task_type, rows.name)), axis=1, return_inverse=True)
    kinds = [_kind_of_task(types[kind] or "", names[name] or "") for kind, name in pairs.T.tolist()]
    return np.array(kinds, dtype=np.int8)[inverse.reshape(-1)]


def _kind_of_task(task_type: str, name: str) -> Category:
    text = task_type or name
    if _WAITS.search(text.replace(" ", "_")):
        return Category.DEVICE_SYNC
    if _COPIES.search(text):
        return Category.MEMCPY
    return Category.MEMSET if _FILLS.search(text) else Category.KERNEL


def _on_group_lanes(collected: Collected, rows: Rows) -> Mask:
    """Mark the rows on lanes of groups, rather than of planes, which hold the parts of the same collectives."""
    lanes = np.unique(np.stack((rows.process.astype(np.int64), rows.thread)), axis=1).T.tolist()
    mask = np.zeros(len(rows), dtype=np.bool_)
    for process, thread in lanes:
        if collected.thread_names.get((process, thread), "").endswith("Communication"):
            mask |= (rows.process == process) & (rows.thread == thread)
    return mask


def group_names(collected: Collected, rows: Rows, chosen: npt.NDArray[np.intp]) -> list[str]:
    """The group of each of some collectives, as its lane names it: "" where that is a number, which each rank counts itself."""
    names = []
    for process, thread in zip(rows.process[chosen].tolist(), rows.thread[chosen].tolist(), strict=True):
        match = _GROUP.fullmatch(collected.thread_names.get((process, thread), ""))
        names.append(match["name"] if match and not match["name"].isdecimal() else "")
    return names
