"""Trains the example with two CUDA events around each op: a measure of device time that no profiler takes part in.

    PPTRACE_OP_TIMES=DIR pptrace run -n 4 tools/gpu/cuda_events.py [ARGS of train_gpt.py]…

Each rank writes ``DIR/rank<r>.json``: {"device": …, "ops": [[step, "0F1", ms], …]}. On CPUs the times are the host's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from instrument.examples.train_gpt import main
from instrument.recorder import Range, Recorder
from pptrace.schedule.actions import Action

_on_gpu = torch.cuda.is_available()
_measured: list[tuple[int, str, Any, Any]] = []


class _Timed:
    """An op's range between two moments of the current stream."""

    def __init__(self, around: Range, action: Action, step: int) -> None:
        self._around = around
        self._action = action
        self._step = step
        self._started: Any = None

    def __enter__(self) -> None:
        self._started = _moment()
        self._around.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._around.__exit__(kind, error, trace)
        _measured.append((self._step, str(self._action), self._started, _moment()))


def _moment() -> Any:
    if not _on_gpu:
        return time.perf_counter_ns()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _milliseconds(started: Any, ended: Any) -> float:
    return started.elapsed_time(ended) if _on_gpu else (ended - started) / 1e6


def _time_ops() -> None:
    marked = Recorder.op

    def timed(recorder: Recorder, action: Action, step: int) -> Range:
        return _Timed(marked(recorder, action, step), action, step)

    Recorder.op = timed  # type: ignore[method-assign]


if __name__ == "__main__":
    _time_ops()
    code = main()
    if _on_gpu:
        torch.cuda.synchronize()
    ops = [(step, action, _milliseconds(started, ended)) for step, action, started, ended in _measured]
    target = Path(os.environ["PPTRACE_OP_TIMES"]) / f"rank{os.environ['RANK']}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({"device": "cuda" if _on_gpu else "cpu", "ops": ops}))
    sys.exit(code)
