"""Files of PyTorch's profiler, whose events are made to order."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pptrace.model.traces import Category
from tests.support.synthetic import Event

_CATEGORIES = {
    Category.CPU_OP: "cpu_op",
    Category.ANNOTATION: "user_annotation",
    Category.RUNTIME: "cuda_runtime",
    Category.KERNEL: "kernel",
}


def write_kineto(path: Path, events: Sequence[Event], **members: Any) -> None:
    """A packed JSON file with ``members`` before its events; times in µs with three decimals, which no float64 can hold."""
    head = json.dumps({"schemaVersion": 1, **members})[:-1]
    rows = ",\n".join(map(_row, sorted(events, key=lambda event: event.start)))
    path.write_bytes(gzip.compress(f'{head}, "traceEvents": [\n{rows}\n]}}'.encode(), 1))


def _row(event: Event) -> str:
    args: dict[str, int] = {}
    if event.correlation >= 0:
        args["correlation"] = event.correlation
    if event.category == Category.KERNEL:
        args |= {"device": event.device, "stream": event.stream}
    pid, tid = (event.device, event.stream) if event.category == Category.KERNEL else (4242, event.thread)
    fields = {"ph": "X", "cat": _CATEGORIES[event.category], "name": event.name, "pid": pid, "tid": tid, "args": args}
    return f'{json.dumps(fields)[:-1]}, "ts": {_us(event.start)}, "dur": {_us(event.end - event.start)}}}'


def _us(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}"
