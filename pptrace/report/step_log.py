"""Figures of each step of a run that goes on, where others look at training: W&B, TensorBoard, a file of JSON lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from pptrace.errors import PptraceError, UsageError
from pptrace.workflow.live.follow import LiveStepFigures

_PARTS = ("compute_ns", "bubble_ns", "exposed_comm_ns")


def step_values(step: LiveStepFigures) -> dict[str, float]:
    """Values of a step by name, without those that are not known: ms, and shares of the span of all ranks.

    ``pptrace/compute_share``, ``bubble_share`` and ``exposed_comm_share`` sum to 1 where all are known.
    """
    values: dict[str, float] = {"pptrace/step_ms": step.step_ns / 1e6}
    if not step.observed:
        return values
    values["pptrace/slow_ranks"] = len(step.slow_ranks)
    if step.span_ns:
        values["pptrace/span_ms"] = step.span_ns / 1e6
        for name in _PARTS:
            times = [getattr(rank, name) for rank in step.ranks]
            if None not in times:
                values[f"pptrace/{name.removesuffix('_ns')}_share"] = sum(times) / (step.span_ns * len(step.ranks))
    if step.slowest_rank is not None:
        values["pptrace/slowest_rank"] = step.slowest_rank
    return values


@contextmanager
def open_step_logs(texts: Sequence[str], run_dir: Path) -> Iterator[Callable[[LiveStepFigures], None]]:
    """Context of a function that writes a step to each of ``texts``: ``wandb:PROJECT``, ``tensorboard:DIR``, ``jsonl:FILE``.

    Raises:
        UsageError: one is none of these.
        PptraceError: its package is not installed, or it cannot be written.
    """
    with ExitStack() as stack:
        logs = []
        for text in texts:
            kind, _, target = text.partition(":")
            if kind not in _LOGS or not target:
                raise UsageError(f"--log {text!r}: expected wandb:PROJECT, tensorboard:DIR or jsonl:FILE")
            try:
                logs.append(stack.enter_context(_LOGS[kind](target, run_dir.resolve().name)))
            except ImportError as err:
                raise PptraceError(f"--log {text}: {err}; pip install {kind}, or give jsonl:FILE") from None
            except OSError as err:
                raise PptraceError(f"--log {text}: cannot be written: {err.strerror or err}") from None

        def write(step: LiveStepFigures) -> None:
            values = step_values(step)
            for log in logs:
                log(step.step, step.start_ns / 1e9, values)

        yield write


_Log = Callable[[int, float, Mapping[str, float]], object]
"""Writes the number of a step, when it began (s, wall-clock time), and its values."""


@contextmanager
def _wandb(project: str, name: str) -> Iterator[_Log]:
    with import_module("wandb").init(project=project, name=name) as run:
        yield lambda step, _, values: run.log(dict(values), step=step)


@contextmanager
def _tensorboard(folder: str, _: str) -> Iterator[_Log]:
    """Context of what writes a run's figures; steps from the first one on replace those that are in the folder already."""
    writer_of_folder = import_module("torch.utils.tensorboard").SummaryWriter
    with ExitStack() as stack:
        writers: list[Any] = []

        def write(step: int, time_s: float, values: Mapping[str, float]) -> None:
            if not writers:
                writers.append(stack.enter_context(writer_of_folder(folder, purge_step=step)))
            for name, value in values.items():
                writers[0].add_scalar(name, value, step, time_s)
            writers[0].flush()

        yield write


@contextmanager
def _jsonl(file: str, _: str) -> Iterator[_Log]:
    """Context of what appends the steps that the file does not have: a step that began at the same time is the same one."""
    with Path(file).open("a+", encoding="utf-8", errors="replace", buffering=1) as lines:
        lines.seek(0)
        known, line = set(), ""
        for line in lines:
            with suppress(ValueError, KeyError, TypeError):
                of_step = json.loads(line)
                known.add((of_step["step"], of_step["time_s"]))
        if line and not line.endswith("\n"):  # of a writer that was killed
            lines.write("\n")

        def write(step: int, time_s: float, values: Mapping[str, float]) -> None:
            if (step, time_s) not in known:
                lines.write(f"{json.dumps({'step': step, 'time_s': time_s, **values})}\n")

        yield write


_LOGS: Mapping[str, Callable[[str, str], AbstractContextManager[_Log]]] = {
    "wandb": _wandb,
    "tensorboard": _tensorboard,
    "jsonl": _jsonl,
}
