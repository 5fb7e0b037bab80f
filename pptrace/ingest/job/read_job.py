"""Read all files of a job, in processes where that pays, and give each trace a rank of its own."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Generic, Protocol, Self, TypeVar

from pptrace.errors import PptraceError, TraceError
from pptrace.ingest.common.byte_source import num_text_bytes
from pptrace.ingest.common.rank_names import rank_of_file_name, rank_of_value
from pptrace.ingest.formats import ReadOptions, read_file
from pptrace.ingest.inputs.resolve import InputFile, OpenedInputs
from pptrace.ingest.job.join_tables import HasOps, joined
from pptrace.model.tables import Trace, TraceInfo

Progress = Callable[[float, int], None]
"""Told how many files have been read, with the part read of the one at hand, and how many there are."""

_LARGE_BYTES = 12 * 1024 * 1024  # of text; below, starting a process costs more than reading
_MOST_RANKS = 1_000_000
_PART_AT_LAST = 0.99  # of a file, when it has been read to its end: its events are still to be sorted and recognised


@dataclass(frozen=True, slots=True)
class ReadFailure:
    """A file that gave nothing. ``message`` is the error's line."""

    path: str
    rank: int | None
    message: str


class OfRank(HasOps, Protocol):
    """What is kept of one trace: the trace itself, or what somebody made of it."""

    def with_info(self, info: TraceInfo) -> Self:
        """The same with another rank or more warnings."""


Kept = TypeVar("Kept", bound=OfRank)
Keep = Callable[[Trace], Kept]
Outcome = tuple[Kept, ...] | PptraceError


class Store(Protocol[Kept]):
    """Remembers what was kept of files. Other processes get a copy of it."""

    def known(self, file: InputFile) -> tuple[Kept, ...] | None:
        """What is remembered of a file, where that can be told at once."""

    def get(self, file: InputFile) -> tuple[Kept, ...] | None:
        """What is remembered of a file, even if finding out takes reading it."""

    def put(self, file: InputFile, found: Sequence[Kept]) -> None: ...


@dataclass(frozen=True, slots=True)
class ReadResult(Generic[Kept]):
    """What was kept of each trace, in order of rank, each with a rank of its own; files that failed; and lines about the
    job as a whole.
    """

    traces: tuple[Kept, ...]
    failures: tuple[ReadFailure, ...] = ()
    warnings: tuple[str, ...] = ()


def read_traces(inputs: OpenedInputs, jobs: int | None = None, progress: Progress | None = None) -> ReadResult[Trace]:
    """:func:`read_each` that keeps the traces as they are."""
    return read_each(inputs, _whole, jobs, progress)


def read_each(
    inputs: OpenedInputs,
    keep: Keep[Kept],
    jobs: int | None = None,
    progress: Progress | None = None,
    store: Store[Kept] | None = None,
) -> ReadResult[Kept]:
    """Read every file; large ones in ``jobs`` processes (default: one per CPU), several of them for one file where there are
    fewer files, small ones here.

    ``keep`` makes of each trace, where it is read, what is kept of it: a module's function, so that other processes find it.
    ``store`` is asked before a file is read, and told what was kept.
    A file can hold several traces. A trace's rank is
    its own word, else what the run says, else the smallest free number; two that claim the same rank become two ranks, but
    tables of ops that tell its other steps, which are joined.
    ``warnings`` begins with those of ``inputs`` and has a line for every failure and for every trace whose rank is not its own
    word: that says nothing against the trace.

    Raises:
        TraceError: the first file's error, when no file can be read; or the files are of different runs.
    """
    outcomes = _read_all(inputs.files, keep, jobs, progress or (lambda _done, _all: None), store)
    errors = [outcome for outcome in outcomes if isinstance(outcome, PptraceError)]
    if not outcomes or len(errors) == len(outcomes):
        raise errors[0] if errors else TraceError("no trace files are given; expected one per rank")
    pairs = list(zip(inputs.files, outcomes, strict=True))
    failures = tuple(
        ReadFailure(str(file.path), file.rank, str(err)) for file, err in pairs if isinstance(err, PptraceError)
    )
    found = [(file, trace) for file, read in pairs if not isinstance(read, PptraceError) for trace in read]
    _require_one_run([trace.info for _, trace in found])
    traces, taken = _with_ranks(found)
    lost = tuple(f"{failure.message} (left out; read the other {len(traces)})" for failure in failures)
    return ReadResult(traces, failures, (*inputs.warnings, *lost, *taken))


def _whole(trace: Trace) -> Trace:
    return trace


def _read_one(keep: Keep[Kept], store: Store[Kept] | None, effort: ReadOptions, file: InputFile) -> Outcome[Kept]:
    """Errors are returned, so that they come back from a process whole."""
    if store is not None and (known := store.get(file)) is not None:
        return known
    try:
        found = tuple(map(keep, read_file(file.path, file.format, effort)))
    except PptraceError as err:
        return err
    if store is not None:
        store.put(file, found)
    return found


def _read_all(
    files: Sequence[InputFile], keep: Keep[Kept], jobs: int | None, progress: Progress, store: Store[Kept] | None
) -> list[Outcome[Kept]]:
    outcomes: dict[int, Outcome[Kept]] = {}
    for place, file in enumerate(files):
        if store is not None and (known := store.known(file)) is not None:
            outcomes[place] = known
            progress(len(outcomes), len(files))
    large = [
        place for place, file in enumerate(files) if place not in outcomes and num_text_bytes(file.path) >= _LARGE_BYTES
    ]
    jobs = jobs if jobs is not None else _num_cpus()
    num_processes = max(1, min(len(large), jobs))
    cores = max(1, jobs // num_processes)
    if num_processes > 1:
        read = partial(_read_one, keep, store, ReadOptions(cores))
        large.sort(key=lambda place: -files[place].num_bytes)
        _read_in_processes(files, large, read, num_processes, outcomes, progress)
    for place, file in enumerate(files):
        if place not in outcomes:
            told = partial(_add_part, progress, len(outcomes), len(files))
            outcomes[place] = _read_one(keep, store, ReadOptions(cores, told), file)
            progress(len(outcomes), len(files))
    return [outcomes[place] for place in range(len(files))]


def _add_part(progress: Progress, done: int, total: int, part: float) -> None:
    progress(done + part * _PART_AT_LAST, total)


def _read_in_processes(
    files: Sequence[InputFile],
    places: Sequence[int],
    read: Callable[[InputFile], Outcome[Kept]],
    num_processes: int,
    outcomes: dict[int, Outcome[Kept]],
    progress: Progress,
) -> None:
    """Fill ``outcomes`` for ``places``; what a process that dies leaves undone is left to the caller.

    Processes are forked where no other thread of Python could hold a lock: they have everything imported at once. The
    libraries that numpy calls lay their own threads down before a fork.
    """
    forks = sys.platform == "linux" and threading.active_count() == 1
    context = multiprocessing.get_context("fork" if forks else "spawn")
    with ProcessPoolExecutor(num_processes, mp_context=context) as pool, suppress(BrokenProcessPool):
        futures = {pool.submit(read, files[place]): place for place in places}
        for future in as_completed(futures):
            outcomes[futures[future]] = future.result()
            progress(len(outcomes), len(files))


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _with_ranks(pairs: Sequence[tuple[InputFile, Kept]]) -> tuple[tuple[Kept, ...], tuple[str, ...]]:
    """Every trace with a rank of its own, in order of rank, and lines that say why. First those that claim one, in order, then
    the others."""
    ranked: dict[int, Kept] = {}
    lines: dict[int, str] = {}
    later: list[tuple[Kept, str]] = []
    for file, trace in pairs:
        claimed, doubt = _claimed(file, trace.info)
        if claimed is None:
            unknown = trace.with_info(replace(trace.info, rank=None))
            later.append((unknown, doubt or "nothing in it says which rank it is"))
        elif claimed in ranked and (whole := joined(ranked[claimed], _with_rank(trace, claimed))) is not None:
            ranked[claimed] = whole
        elif claimed in ranked:
            later.append((trace, f"says rank {claimed}, as {ranked[claimed].info.path} does"))
        else:
            if file.rank not in (None, claimed):
                said = f"says rank {claimed} where the run says {file.rank}; taken as rank {claimed}"
                lines[claimed] = f"{trace.info.path}: {said}"
            if doubt:
                lines[claimed] = f"{trace.info.path}: {doubt}; taken as rank {claimed}"
            ranked[claimed] = _with_rank(trace, claimed)
    taken = set(ranked) | {rank for _, trace in pairs for rank in range(_world_size(trace.info))}
    for trace, why in later:
        free = range(len(pairs) + len(taken) + 1)
        # A rank that another trace's job has, but no trace, is missing; a second trace of a rank does not stand in for it.
        claims = trace.info.rank is not None
        rank = next(number for number in free if number not in (taken if claims else ranked))
        taken.add(rank)
        ranked[rank] = _with_rank(trace, rank)
        lines[rank] = f"{trace.info.path}: {why}; taken as rank {rank}"
    return tuple(ranked[rank] for rank in sorted(ranked)), tuple(lines[rank] for rank in sorted(lines))


def _claimed(file: InputFile, info: TraceInfo) -> tuple[int | None, str]:
    """The rank that a trace says it is, else its run or its file's name; with words about one that it says and cannot be."""
    said = file.rank if info.rank is None else info.rank
    if said is None:
        return None, ""
    size = info.distributed.get("world_size") if said == rank_of_value(info.distributed.get("rank")) else None
    most = size if isinstance(size, int) and 0 < size <= _MOST_RANKS else _MOST_RANKS
    if said < most:
        return said, ""
    others = (file.rank, rank_of_file_name(Path(info.path).name))
    where = f"of a job of {size} ranks" if most == size else f"where ranks below {most:,} are expected"
    doubt = f"says rank {said} {where}, which is not believed"
    return next((rank for rank in others if rank is not None and rank < most), None), doubt


def _world_size(info: TraceInfo) -> int:
    """How many ranks the trace's job had, where pptrace's own recorder wrote it down; else 0."""
    size = info.metadata.get("world_size")
    return size if isinstance(size, int) and 0 < size <= _MOST_RANKS else 0


def _require_one_run(infos: Sequence[TraceInfo]) -> None:
    """Traces of different runs make no pipeline together. A rank that failed early may not have said what it runs."""
    for name, what in (("world_size", "number of ranks"), ("mesh", "mesh"), ("plan", "plan")):
        said: dict[str, TraceInfo] = {}
        for info in infos:
            if info.metadata.get(name):
                said.setdefault(repr(info.metadata[name]), info)
        if len(said) > 1:
            first, second = list(said.values())[:2]
            raise TraceError(
                f"{second.path}: is of another run than {first.path} (another {what}); expected the traces of one run; "
                "analyse them one run at a time"
            )


def _with_rank(trace: Kept, rank: int) -> Kept:
    return trace.with_info(replace(trace.info, rank=rank))
