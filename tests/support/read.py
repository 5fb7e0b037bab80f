"""Readers as tests need them: a file of one rank, a job whose traces stay as they are."""

from __future__ import annotations

from pathlib import Path

from pptrace.ingest import OnProgress, ReadResult, read_each
from pptrace.ingest.inputs.resolve import OpenedInputs
from pptrace.ingest.kineto.reader import ReadProgress, read_ranks
from pptrace.model.traces import Trace


def read_kineto(path: Path, cores: int = 1, on_progress: ReadProgress | None = None) -> Trace:
    """The trace of the first rank in a file."""
    return read_ranks(path, cores, on_progress)[0]


def read_traces(
    inputs: OpenedInputs, jobs: int | None = None, on_progress: OnProgress | None = None
) -> ReadResult[Trace]:
    """The traces of all files."""
    return read_each(inputs, _unchanged, jobs, on_progress)


def _unchanged(trace: Trace) -> Trace:
    return trace
