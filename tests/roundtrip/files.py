"""A run on paper → files of a format, as its tool would have written them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pptrace.recognise.run import RecognisedRun
from tests.ingest.nsight_files import Process, Report, write_report
from tests.roundtrip.styles import LEAD, Style
from tests.support import kineto
from tests.support.analysed import recognise
from tests.support.synthetic import START, Event, PaperRun, make_trace

PAUSE = 1000


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
    """A JSON file per rank."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(run.plan.pp):
        facts = {"rank": rank, "world_size": run.plan.pp, "backend": "nccl"}
        kineto.write_kineto(folder / f"rank{rank}.json.gz", events_of(style, run, rank, steps), distributedInfo=facts)
    return folder


def write_nsight(style: Style, run: PaperRun, steps: int, folder: Path) -> Path:
    """One export that holds all ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    processes: Sequence[Process] = [
        Process(1000 + rank, events_of(style, run, rank, steps), mpi_rank=rank) for rank in range(run.plan.pp)
    ]
    return write_report(Report(processes), folder / "all.sqlite")


WRITERS = {"kineto": write_kineto, "nsight": write_nsight}
