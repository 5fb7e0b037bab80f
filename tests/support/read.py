"""Readers as tests need them: a file of one rank, a job whose traces stay as they are."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import astuple, replace

from pptrace.ingest import OnProgress, ReadResult, read_each
from pptrace.ingest.inputs.resolve import OpenedInputs
from pptrace.ingest.kineto.reader import ReadProgress, read_ranks
from pptrace.model.join_tables import concat_tables
from pptrace.model.traces import Trace, TraceInfo


class ReadTrace(Trace, frozen=True):
    """A trace that may get another rank, and the rows of a further table, as what is recognised in it may."""

    def with_info(self, info: TraceInfo) -> ReadTrace:
        memory = self.memory.assign(rank=-1 if info.rank is None else info.rank)
        return replace(self, rank=info.rank, memory=memory, warnings=info.warnings)

    def with_more(self, later: ReadTrace) -> ReadTrace:
        tables = {
            name: concat_tables([getattr(self, name), getattr(later, name)]) for name in ("ops", "comms", "memory")
        }
        warnings = (*self.warnings, *later.warnings)
        return replace(self, metadata={**later.metadata, **self.metadata}, warnings=warnings, **tables)


def read_kineto(path: Path, cores: int = 1, on_progress: ReadProgress | None = None) -> Trace:
    """The trace of the first rank in a file."""
    return read_ranks(path, cores, on_progress)[0]


def read_traces(
    inputs: OpenedInputs, jobs: int | None = None, on_progress: OnProgress | None = None
) -> ReadResult[ReadTrace]:
    """The traces of all files."""
    return read_each(inputs, _as_read, jobs, on_progress)


def _as_read(trace: Trace) -> ReadTrace:
    return ReadTrace(*astuple(trace))
