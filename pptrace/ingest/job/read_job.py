"""Read all files of a job, in several processes where that pays, with the progress of all of them, and assign every trace a
distinct rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

import pandas as pd
from msgspec import Struct
from msgspec.structs import replace

from pptrace.errors import PptraceError, TraceError
from pptrace.ingest.common.byte_source import num_text_bytes
from pptrace.ingest.common.rank_names import rank_of_file_name, rank_of_value
from pptrace.ingest.formats import read_file
from pptrace.ingest.inputs.resolve import InputFile, OpenedInputs
from pptrace.ingest.job.one_recording import last_recordings, one_recording
from pptrace.ingest.kineto.reader import ReadProgress
from pptrace.model.traces import InputFormat, Trace, TraceInfo
from pptrace.model.wording import as_ranges
from pptrace.processes import num_cpus

_MAX_PART = 0.99  # of a file read to its end: its events are still to be sorted and recognised


class JobProgress(Struct, frozen=True):
    """Progress of a job: the part that has been read. ``files_read`` and ``bytes_read`` include parts of the files that are
    being read.

    Bytes are those of the files as they lie on disk, compressed or not; a file found in the cache counts as read.
    """

    files_read: float
    num_files: int
    bytes_read: int
    num_bytes: int


OnProgress = Callable[[JobProgress], None]


class ProgressMeter:
    """Sums up what has been read of each file; calls ``on_progress`` at the start and whenever the sum grows."""

    def __init__(self, file_bytes: Sequence[int], on_progress: OnProgress) -> None:
        self._file_bytes = file_bytes
        self._on_progress = on_progress
        self._num_done = 0
        self._bytes_done = 0
        self._parts: dict[int, float] = {}
        self._last = JobProgress(0, len(file_bytes), 0, sum(file_bytes))
        on_progress(self._last)

    def set_part(self, index: int, part: float) -> None:
        """Set the fraction of a file that has been read. One that is read anew from its start does not move back."""
        self._parts[index] = max(self._parts.get(index, 0.0), min(part, 1.0) * _MAX_PART)
        self._report()

    def set_done(self, index: int) -> None:
        self._parts.pop(index, None)
        self._num_done += 1
        self._bytes_done += self._file_bytes[index]
        self._report()

    def _report(self) -> None:
        bytes_read = self._bytes_done + sum(int(self._file_bytes[index] * part) for index, part in self._parts.items())
        files_read = self._num_done + sum(self._parts.values())
        progress = JobProgress(files_read, self._last.num_files, bytes_read, self._last.num_bytes)
        if progress != self._last:
            self._last = progress
            self._on_progress(progress)


_LARGE_BYTES = 12 * 1024 * 1024  # of text; reading a smaller file takes less than starting a process
_MAX_RANKS = 1_000_000
_OF_RUN = {"world_size": "number of ranks", "mesh": "mesh", "plan": "plan"}
"""Facts that all ranks of a run have in common, and what they are."""


class RankData(Protocol):
    """The result of reading one trace, with its ops where its format lists ops: the trace, or what a transform made of it."""

    @property
    def info(self) -> TraceInfo: ...

    @property
    def ops(self) -> pd.DataFrame | None: ...

    def with_more(self, later: Self) -> Self:
        """This rank with the rows of a further table of the same rank."""

    def with_info(self, info: TraceInfo) -> Self:
        """This result with the rank and warnings of ``info``."""


Data = TypeVar("Data", bound=RankData)
Transform = Callable[[Trace], Data]
FileResult = tuple[Data, ...] | PptraceError
Read = Callable[[InputFile, int, ReadProgress | None], FileResult[Data]]
"""(file, number of cores, callback for the part that has been read) → its result. It is picklable."""
ReadFiles = Callable[[Mapping[int, InputFile], Read[Data], ProgressMeter], Mapping[int, FileResult[Data]]]
"""Reader of a job's files by their numbers: in this process and others, or on the workers of a cluster."""


class Store(Protocol[Data]):
    """A cache of the results of files. It is pickled to other processes."""

    def peek(self, file: InputFile) -> tuple[Data, ...] | None:
        """The cached results of a file, if they can be identified without reading its content."""

    def get(self, file: InputFile) -> tuple[Data, ...] | None:
        """The cached results of a file, reading its content to identify it if necessary."""

    def put(self, file: InputFile, traces: Sequence[Data]) -> None: ...


class ReadResult(Struct, Generic[Data], frozen=True):
    """The result of each trace, in order of rank, all ranks distinct; and warnings about the whole job."""

    traces: tuple[Data, ...]
    warnings: tuple[str, ...] = ()


def read_each(
    inputs: OpenedInputs,
    transform: Transform[Data],
    jobs: int | None = None,
    on_progress: OnProgress | None = None,
    store: Store[Data] | None = None,
    read_files: ReadFiles[Data] | None = None,
) -> ReadResult[Data]:
    """Read every file: large ones in ``jobs`` processes (default: one per CPU; several for one file where there are fewer large
    files), small ones in this process; or all of them by ``read_files``.

    ``transform`` is applied to each trace in the process that read it; it must be picklable (a module-level function). ``store``
    is looked up before a file is read, and gets the results of files read.

    A file can hold several traces. A trace's rank is the one in the trace, else the one in run.json, else the smallest free
    number. Of traces of a rank that were recorded one after the other one is taken (:mod:`pptrace.ingest.job.one_recording`); of
    others that claim the same rank the second gets a free number; op tables with other steps of a rank are joined.
    ``warnings`` begins with those of ``inputs`` and has a line for every failure and for every trace whose rank had to be
    assigned.

    Raises:
        TraceError: the first file's error, when no file can be read; or the files are of different runs.
    """
    meter = ProgressMeter([file.num_bytes for file in inputs.files], on_progress or (lambda _progress: None))
    results: dict[int, FileResult[Data]] = {}
    for number, file in enumerate(inputs.files):
        if store is not None and (cached := store.peek(file)) is not None:
            results[number] = cached
            meter.set_done(number)
    read: Read[Data] = partial(_read_one, transform, store)

    def read_some(numbers: Iterable[int]) -> None:
        others = {number: inputs.files[number] for number in numbers if number not in results}
        results.update((read_files or partial(_read_here, jobs))(others, read, meter))

    exported_ns, unread = last_recordings(inputs.files)
    numbers: Sequence[int] = sorted(exported_ns)
    read_some(numbers)
    if not numbers or not all(_begins_after(results[number], exported_ns[number]) for number in numbers):
        unread, numbers = (), range(len(inputs.files))
        read_some(numbers)
    for number in set(range(len(inputs.files))).difference(results):
        meter.set_done(number)
    traces: list[tuple[InputFile, Data]] = []
    failures: list[PptraceError] = []
    for number in numbers:
        result = results[number]
        if isinstance(result, PptraceError):
            failures.append(result)
        else:
            traces += [(inputs.files[number], trace) for trace in result]
    if len(failures) == len(numbers):
        raise failures[0] if failures else TraceError("no trace files are given; expected one per rank")
    _require_one_run([(trace.info, trace.info.metadata) for _, trace in traces])
    claimed = [_claimed_rank(file, trace.info)[0] for file, trace in traces]
    used, left_out = one_recording([trace.info for _, trace in traces], claimed)
    traces = [traces[number] for number in used]
    _require_one_run([(trace.info, trace.info.distributed) for _, trace in traces])
    ranked, rank_warnings = _with_ranks(traces)
    failure_warnings = (f"{failure} (left out; read the other {len(ranked)})" for failure in failures)
    return ReadResult(ranked, (*inputs.warnings, *failure_warnings, *unread, *left_out, *rank_warnings))


def _begins_after(result: FileResult[Data], time_ns: int) -> bool:
    """Return whether a file holds one recording, which begins after a time, ns since 1970."""
    begins = [] if isinstance(result, PptraceError) else [trace.info.begins_ns for trace in result]
    return len(begins) == 1 and begins[0] is not None and begins[0][0] > time_ns


def _read_one(
    transform: Transform[Data],
    store: Store[Data] | None,
    file: InputFile,
    cores: int,
    on_progress: ReadProgress | None,
) -> FileResult[Data]:
    """Read one file; an error is returned, since an exception would lose its type on the way from another process."""
    if store is not None and (cached := store.get(file)) is not None:
        return cached
    try:
        traces = tuple(map(transform, read_file(file.path, file.format, cores, on_progress)))
    except PptraceError as err:
        return err
    if store is not None:
        store.put(file, traces)
    return traces


def _read_here(
    jobs: int | None, files: Mapping[int, InputFile], read: Read[Data], meter: ProgressMeter
) -> dict[int, FileResult[Data]]:
    """Read files on this machine, large ones in ``jobs`` processes: :data:`ReadFiles`."""
    results: dict[int, FileResult[Data]] = {}
    large = {index: file for index, file in files.items() if num_text_bytes(file.path) >= _LARGE_BYTES}
    jobs = jobs if jobs is not None else num_cpus()
    num_processes = max(1, min(len(large), jobs))
    cores = max(1, jobs // num_processes)
    if num_processes > 1:
        from pptrace.ingest.job.read_in_processes import read_in_processes  # small files need no pool of processes

        for index, result in read_in_processes(large, read, cores, num_processes, meter):
            results[index] = result
            meter.set_done(index)
    for index, file in files.items():
        if index not in results:
            results[index] = read(file, cores, partial(meter.set_part, index))
            meter.set_done(index)
    return results


def _with_ranks(pairs: Sequence[tuple[InputFile, Data]]) -> tuple[tuple[Data, ...], tuple[str, ...]]:
    """Assign distinct ranks: first to the traces that claim one, in order, then to the others.

    Returns the traces in order of rank, and a warning for each rank that is not as claimed.
    """
    ranked: dict[int, Data] = {}
    lines: dict[int, str] = {}
    unranked: list[tuple[Data, str]] = []
    for file, trace in pairs:
        rank, doubt = _claimed_rank(file, trace.info)
        own = trace.with_info(replace(trace.info, rank=rank))
        if rank is None:
            unranked.append((own, doubt or "no rank is named in it"))
        elif rank not in ranked:
            if not doubt and file.rank not in (None, rank):
                doubt = f"says rank {rank}, but run.json says {file.rank}"
            if doubt:
                lines[rank] = f"{trace.info.path}: {doubt}"
            ranked[rank] = own
        elif (joined := _joined(ranked[rank], own)) is not None:
            ranked[rank] = joined
        else:
            unranked.append((trace, f"says rank {rank}, as {ranked[rank].info.path} does"))
    sizes = [trace.info.metadata.get("world_size") for _, trace in pairs]  # where pptrace's recorder wrote it
    world = max((size for size in sizes if isinstance(size, int) and 0 < size <= _MAX_RANKS), default=0)
    used_ranks = set(ranked) | set(range(world))
    for trace, reason in unranked:
        free = range(len(pairs) + len(used_ranks) + 1)
        # A second trace of a rank must not stand in for a rank of the job that has no trace.
        has_claim = trace.info.rank is not None
        rank = next(number for number in free if number not in (used_ranks if has_claim else ranked))
        used_ranks.add(rank)
        ranked[rank] = trace.with_info(replace(trace.info, rank=rank))
        lines[rank] = f"{trace.info.path}: {reason}"
    read_as: dict[str, list[int]] = {}
    for rank in sorted(lines):
        read_as.setdefault(lines[rank], []).append(rank)
    return tuple(ranked[rank] for rank in sorted(ranked)), tuple(
        f"{line}; read as rank{'s' * (len(ranks) > 1)} {as_ranges(ranks)}" for line, ranks in read_as.items()
    )


def _claimed_rank(file: InputFile, info: TraceInfo) -> tuple[int | None, str]:
    """The rank in a trace, else in run.json or the file's name; with a warning where the one in the trace is impossible."""
    declared_rank = file.rank if info.rank is None else info.rank
    if declared_rank is None:
        return None, ""
    size = info.distributed.get("world_size") if declared_rank == rank_of_value(info.distributed.get("rank")) else None
    limit = size if isinstance(size, int) and 0 < size <= _MAX_RANKS else _MAX_RANKS
    if declared_rank < limit:
        return declared_rank, ""
    alternatives = (file.rank, rank_of_file_name(Path(info.path).name))
    where = f"of a job of {size} ranks" if limit == size else f"where ranks below {limit:,} are expected"
    doubt = f"says rank {declared_rank} {where}, which cannot be"
    return next((rank for rank in alternatives if rank is not None and rank < limit), None), doubt


def _require_one_run(facts: Sequence[tuple[TraceInfo, Mapping[str, Any]]]) -> None:
    """Refuse traces of different runs. A rank that failed early may lack these facts, so only those that have them count."""
    for name, noun in _OF_RUN.items():
        by_value: dict[str, TraceInfo] = {}
        for info, known in facts:
            if known.get(name):
                by_value.setdefault(repr(known[name]), info)
        if len(by_value) > 1:
            first, second = list(by_value.values())[:2]
            raise TraceError(
                f"{second.path}: is of another run than {first.path} (another {noun}); expected the traces of one run; "
                "analyse them one run at a time, or compare two with `pptrace compare`"
            )


def _joined(first: Data, second: Data) -> Data | None:
    """Join two op tables of one rank that hold different steps; None where either is no op table.

    Raises:
        TraceError: the tables are of different runs or on different clocks: they hold the same step, or steps that overlap.
    """
    ops, other_ops = _step_spans(first), _step_spans(second)
    if ops is None or other_ops is None:
        return None
    rank, prefix = first.info.rank, f"{second.info.path}: is of another run than {first.info.path}"
    if common_steps := sorted(set(ops.index) & set(other_ops.index)):
        raise TraceError(
            f"{prefix} (both hold step {common_steps[0]} of rank {rank}); "
            "expected the tables of one run; analyse them one run at a time, or compare two with `pptrace compare`"
        )
    spans = pd.concat([ops.assign(table=0), other_ops.assign(table=1)]).sort_values(["start_ns", "end_ns", "table"])
    overlaps = spans["start_ns"].to_numpy()[1:] < spans["end_ns"].to_numpy()[:-1]
    if (overlaps & (spans["table"].to_numpy()[1:] != spans["table"].to_numpy()[:-1])).any():
        raise TraceError(
            f"{prefix}, or on another clock (their steps on rank {rank} run at the same time); expected tables on one clock; "
            "give their times from the same zero"
        )
    return first.with_more(second)


def _step_spans(table: RankData) -> pd.DataFrame | None:
    """Start and end of each step, index step, ns; None where the rank does not come from an op table."""
    if table.info.format is not InputFormat.OPLOG or table.ops is None or table.ops.empty:
        return None
    return table.ops[table.ops["step"] >= 0].groupby("step").agg({"start_ns": "min", "end_ns": "max"})
