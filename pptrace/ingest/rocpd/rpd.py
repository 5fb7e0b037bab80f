"""Read databases of rocmProfileData (RPD), whose tables are called as rocpd's, with other columns.

rocpd_op       id, start, end, gpuId, queueId, description_id, opType_id      kernels (Task: replayed by a graph), copies
rocpd_api      id, start, end, pid, tid, apiName_id, args_id                  calls of HIP, UserMarker: ranges, by their args
rocpd_api_ops  api_id, op_id                                                  what launched what
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from pptrace.errors import TraceError
from pptrace.ingest.common.codes import Codes, RangeCodes
from pptrace.ingest.common.sort_events import EventColumns
from pptrace.ingest.common.sqlite import NONE, Database
from pptrace.ingest.rocpd.reader import Process, copy_name, keyed, traces_of
from pptrace.model.tables import Int64
from pptrace.model.traces import Category, Trace
from pptrace.slices import first_like

_COPY = re.compile(r"Copy(Host|Device)To(Host|Device)")
_STRING = ("rocpd_string", "string")
_OPS, _CALLS, _LAUNCHES = "rocpd_op", "rocpd_api", "rocpd_api_ops"
_COLUMNS = {
    _CALLS: ("start", "end", "pid", "tid", "apiName_id", "args_id"),
    _OPS: ("start", "end", "gpuId", "queueId", "description_id", "opType_id"),
    _LAUNCHES: ("op_id", "api_id"),
}
_EXPECTED = "expected what rocmProfileData's tracer writes; copy it anew or record again"


def read_rpd(path: Path) -> tuple[Trace, ...]:
    """Read a trace for each process with work.

    Raises:
        TraceError: the file cannot be read, lacks what such a database has, or holds no events.
    """
    with Database(path, _EXPECTED) as db:
        if lacking := next((table for table, columns in _COLUMNS.items() if not db.has(table, *columns)), ""):
            raise TraceError(f"{path}: a database of rocmProfileData without a whole table {lacking}; {_EXPECTED}")
        names = Codes()
        ids, calls = _calls(db, names)
        tables = calls, _work(db, names, ids, calls.process)
        damage = tuple(db.damage)
    processes = []
    for number in np.unique(calls.process):
        rows = [table.select(np.flatnonzero(table.process == number)) for table in tables]
        processes.append(Process([columns for columns in rows if len(columns)], names.texts, None, {}))
    return traces_of(path, processes, [], "rocmProfileData", _EXPECTED, damage)


def _calls(db: Database, names: Codes) -> tuple[Int64, EventColumns]:
    """The ids of the calls and ranges of the host, and these."""
    ids, start, end, pid, tid, name, args = keyed(db, _CALLS, _COLUMNS[_CALLS])
    category = np.full(len(ids), Category.RUNTIME, dtype=np.int8)
    code = db.text_codes(*_STRING, name, names)
    ranges = RangeCodes(names)
    marked = np.flatnonzero(code == names.get("UserMarker", -1))
    texts = db.texts(*_STRING, np.unique(args[marked]).tolist())
    code[marked] = [ranges[texts.get(key, "").encode("utf-8", "replace")] for key in args[marked].tolist()]
    category[marked] = Category.ANNOTATION
    category[np.isin(code, list(ranges.torch_ops))] = Category.CPU_OP
    launch = np.where(category == Category.RUNTIME, ids, -1)
    return ids, EventColumns.of(category, code, start, end, -1, tid, launch, pid)


def _work(db: Database, names: Codes, calls: Int64, pids: Int64) -> EventColumns:
    """Kernels, copies and fills, of the process of the call that launched them, else of the first one."""
    ids, start, end, gpu, queue, name, kind = keyed(db, _OPS, _COLUMNS[_OPS])
    launched, by = db.integers(_LAUNCHES, _COLUMNS[_LAUNCHES])
    launch = np.append(by, -1)[first_like([ids], [launched])]
    pid = np.append(pids, pids[:1] if len(pids) else -1)[first_like([launch], [calls])]
    category = np.full(len(ids), Category.KERNEL, dtype=np.int8)
    code = db.text_codes(*_STRING, name, names)
    for key, text in db.texts(*_STRING, np.unique(kind).tolist()).items():
        rows = kind == key
        if match := _COPY.fullmatch(text):
            category[rows], code[rows] = Category.MEMCPY, names[copy_name(f"{match[1]}_TO_{match[2]}".upper())]
        elif text.startswith("Fill"):
            category[rows] = Category.MEMSET
        elif "Barrier" in text or "Marker" in text:
            category[rows] = Category.DEVICE_SYNC
    device = np.where(gpu == NONE, -1, gpu).astype(np.int32)
    return EventColumns.of(category, code, start, end, device, queue, launch, pid)
