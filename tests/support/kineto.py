"""Files of PyTorch's profiler, whose events are made to order."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

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


def event_row(
    category: str, name: str, start: float, length: float, correlation: int | None = None, thread: int = 1, **args: Any
) -> dict[str, Any]:
    """An event as such a file has it, µs: a kernel on stream 7 of device 0, anything else of a thread."""
    place = {"pid": 0, "tid": 7} if category == "kernel" else {"pid": 1, "tid": thread}
    args |= {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": category, "name": name, **place, "ts": start, "dur": length, "args": args}


def write_rows(path: Path, rows: Iterable[dict[str, Any]], **members: Any) -> Path:
    """A file of such events with ``members`` before them, packed where its name says so."""
    content = json.dumps({"schemaVersion": 1, **members, "traceEvents": list(rows)}).encode()
    path.write_bytes(gzip.compress(content, 1) if path.suffix == ".gz" else content)
    return path


def write_changed(sample: Path, folder: Path, change: Callable[[int, Any], None]) -> Path:
    """A copy of a sample, of whose files ``change`` changes the content, given with its rank."""
    for path in sorted(sample.glob("rank*.json.gz")):
        content = msgspec.json.decode(gzip.decompress(path.read_bytes()))
        change(int(path.name[4:].partition(".")[0]), content)
        (folder / path.name.removesuffix(".gz")).write_bytes(msgspec.json.encode(content))
    return folder


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
