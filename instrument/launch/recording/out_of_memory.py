"""A snapshot of a rank's memory when it ran out: ``rank{R}.memory.json`` in the run directory, on GPUs a pickle next to it.

The JSON file (schema ``pptrace.memory/1``) lists the largest live tensors and sums by what they are, by stage and by operator.
The pickle is torch's own snapshot of the device's allocator, for https://pytorch.org/memory_viz.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from instrument.launch.record import write_json
from instrument.launch.recording.step_memory import StepPeak
from instrument.launch.recording.tensor_census import LiveTensor, count_live_tensors
from pptrace.schedule.actions import Action

SNAPSHOT_SCHEMA = "pptrace.memory/1"
_MOST_TENSORS = 200
_TEXT = re.compile(r"out of memory|can't allocate memory|cannot allocate memory", re.IGNORECASE)


def find_out_of_memory(error: BaseException) -> BaseException | None:
    """The error of ``error`` and its causes that says that memory ran out; None where none does."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, MemoryError | torch.OutOfMemoryError) or (
            isinstance(current, RuntimeError) and _TEXT.search(str(current))
        ):
            return current
        current = current.__cause__ or current.__context__
    return None


def write_snapshot(run_dir: Path, rank: int, error: BaseException, memory: StepPeak | None) -> tuple[Path, str]:
    """Write what is alive; (the file, one line that says so).

    Raises:
        OSError: the file could not be written.
    """
    tensors = count_live_tensors()
    op = _running_op(error)
    path = run_dir / f"rank{rank}.memory.json"
    allocator = _dump_device(run_dir / f"rank{rank}.memory.pickle")
    by_what = _sums(tensors, "what")
    content: dict[str, Any] = {
        "schema": SNAPSHOT_SCHEMA,
        "rank": rank,
        "step": None if memory is None else memory.step,
        "op": op,
        "error": str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__,
        "memory": None if memory is None else asdict(memory),
        "allocator_snapshot": None if allocator is None else allocator.name,
        "total_bytes": sum(tensor.bytes for tensor in tensors),
        "by_what": by_what,
        "by_stage": _sums(tensors, "stage"),
        "by_op": _sums(tensors, "op"),
        "num_tensors": len(tensors),
        "tensors": [asdict(tensor) for tensor in tensors[:_MOST_TENSORS]],
    }
    write_json(path, content)
    return path, _line(content, path, allocator)


def _line(content: dict[str, Any], path: Path, allocator: Path | None) -> str:
    where = "" if content["step"] is None else f" in step {content['step']}"
    where += "" if content["op"] is None else f", {content['op']}"
    parts = ", ".join(f"{entry['what']} {_gigabytes(entry['bytes'])}" for entry in content["by_what"][:4])
    held = f"{_gigabytes(content['total_bytes'])} of tensors were alive" + (f" ({parts})" if parts else "")
    more = "" if allocator is None else f"; the allocator's snapshot: {allocator}"
    return f"out of memory{where}: {held}; the largest are listed in {path}{more}"


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:,.1f} MB"


def _sums(tensors: Sequence[LiveTensor], name: str) -> list[dict[str, Any]]:
    """Bytes by the value of a field, largest first."""
    sums: Counter[Any] = Counter()
    for tensor in tensors:
        sums[getattr(tensor, name)] += tensor.bytes
    return [{name: value, "bytes": num_bytes} for value, num_bytes in sums.most_common()]


def _dump_device(path: Path) -> Path | None:
    """Torch's snapshot of the device's allocator; None without a device, or where its allocator gives none."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    with suppress(Exception):  # in the middle of an error of the device nothing may hide it
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
        return path
    return None


def _running_op(error: BaseException) -> str | None:
    """The op of the pipeline that ran, as the innermost frame of the error that knows says; None where none does."""
    return next((op for frame in _innermost_first(error.__traceback__) if (op := _op_of(frame)) is not None), None)


def _innermost_first(trace: TracebackType | None) -> Iterator[FrameType]:
    frames = []
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    return reversed(frames)


def _op_of(frame: FrameType) -> str | None:
    values = frame.f_locals
    action = values.get("action")
    if isinstance(action, Action) and action.kind.is_compute:
        return f"{action.kind} of stage {action.stage}, microbatch {action.microbatch}"
    stage = getattr(values.get("self"), "stage_index", None)  # torch.distributed.pipelining
    for kind, name in (("F", "fwd_chunk_id"), ("B", "bwd_chunk_id")):
        if isinstance(stage, int) and isinstance(values.get(name), int):
            return f"{kind} of stage {stage}, microbatch {values[name]}"
    return None
