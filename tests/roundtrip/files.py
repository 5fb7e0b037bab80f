"""A run on paper → files of a format, as its tool would have written them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

from pptrace.model.traces import Category
from pptrace.recognise.run import RecognisedRun
from tests.ingest.nsight_files import Process, Report, write_report
from tests.roundtrip.styles import LEAD, Style
from tests.support.analysed import recognise
from tests.support.synthetic import START, Event, PaperRun, make_trace

PAUSE = 1000
_CATEGORIES = {
    Category.CPU_OP: "cpu_op",
    Category.ANNOTATION: "user_annotation",
    Category.RUNTIME: "cuda_runtime",
    Category.KERNEL: "kernel",
}


def step_begins(run: PaperRun, number: int) -> int:
    return START + number * (run.end + PAUSE) + LEAD + 10


def events_of(style: Style, run: PaperRun, rank: int, steps: int) -> list[Event]:
    return [event for number in range(steps) for event in style.step(run, rank, number, step_begins(run, number))]


def recognise_run(
    style: Style, run: PaperRun, steps: int, ranks: Sequence[int] | None = None, num_ranks: int | None = None
) -> RecognisedRun:
    """Recognise traces of some of the ranks, or of all."""
    present = range(run.plan.pp) if ranks is None else ranks
    return recognise([make_trace(events_of(style, run, rank, steps), rank) for rank in present], num_ranks=num_ranks)


def write_kineto(style: Style, run: PaperRun, steps: int, folder: Path) -> Path:
    """A JSON file per rank; times in µs with three decimals, which no float64 can hold."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(run.plan.pp):
        head = json.dumps({"rank": rank, "world_size": run.plan.pp, "backend": "nccl"})
        events = ",\n".join(map(_row, sorted(events_of(style, run, rank, steps), key=lambda e: e.start)))
        text = f'{{"schemaVersion": 1, "distributedInfo": {head}, "traceEvents": [\n{events}\n]}}'
        (folder / f"rank{rank}.json.gz").write_bytes(gzip.compress(text.encode(), 1))
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


def write_nsight(style: Style, run: PaperRun, steps: int, folder: Path) -> Path:
    """One export that holds all ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    processes: Sequence[Process] = [
        Process(1000 + rank, events_of(style, run, rank, steps), mpi_rank=rank) for rank in range(run.plan.pp)
    ]
    return write_report(Report(processes), folder / "all.sqlite")


WRITERS = {"kineto": write_kineto, "nsight": write_nsight}
