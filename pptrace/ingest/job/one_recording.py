"""Choose one recording of ranks that were recorded several times, one after the other.

torch.profiler writes a file of each rank for each turn of its schedule (``repeat``), torchtitan a folder for each iteration that
it profiles, and an earlier run may have written into the folder. Such files are of one rank each, and no ranks of their own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from pptrace.ingest.common.byte_source import first_bytes
from pptrace.ingest.inputs.resolve import InputFile
from pptrace.model.tables import Int64
from pptrace.model.traces import InputFormat, TraceInfo
from pptrace.model.wording import as_ranges, counted, listed

_FORMATS = (InputFormat.KINETO, InputFormat.ASCEND)
_WORKER = re.compile(r"(.+)\.(\d{10,20})(?:\.pt)?\.trace\.json(?:\.gz)?")
"""A name of torch's ``tensorboard_trace_handler``: the worker's, by default host and process, and the time of the export."""
_RANK = re.compile(rb'"distributedInfo":\s*\{[^{}\[\]]*"rank":\s*(\d{1,9})\b')
_FEW = 3


def last_recordings(files: Sequence[InputFile]) -> tuple[dict[int, int], tuple[str, ...]]:
    """Find each worker's last recording, as :func:`one_recording` chooses it, by names and heads alone.

    Returns:
        by the number of its file the time of the export before it, ns since 1970: it begins later, if the names are right; and a
        line that names the other files. Nothing unless all files are of torch's handler, workers have equally many of them, and
        their heads say that each worker is a rank of its own.
    """
    of_worker: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for number, file in enumerate(files):
        name = _WORKER.fullmatch(file.path.name) if file.format is InputFormat.KINETO else None
        rank = _RANK.search(first_bytes(file.path)) if name else None
        if name is None or rank is None:
            return {}, ()
        exported_ns = int(name[2].ljust(19, "0"))  # older versions of torch write milliseconds
        of_worker.setdefault((int(rank[1]), str(file.path.with_name(name[1]))), []).append((exported_ns, number))
    is_rank = all(len(set(names)) == len(of_worker) for names in zip(*of_worker, strict=True))
    counts = {len(recordings) for recordings in of_worker.values()}
    if len(counts) != 1 or counts == {1} or not is_rank:
        return {}, ()
    last = {recordings[-1][1]: recordings[-2][0] for recordings in map(sorted, of_worker.values())}
    others = {number: rank for (rank, _), own in of_worker.items() for _, number in own if number not in last}
    return last, _lines([(str(files[number].path), others[number]) for number in sorted(others)])


def one_recording(infos: Sequence[TraceInfo], ranks: Sequence[int | None]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """(numbers of the traces to analyse, in order; a line that names the others, where there are any).

    Recordings of one rank follow one another: of traces of a rank that were recorded at the same time one says a wrong rank.
    Where all ranks have equally many, the last of each is analysed; else what was recorded together with the last one that most
    ranks have.

    Args:
        infos: of all traces of a job.
        ranks: which they say they are of, None where they do not; the files' names then tell whether two are of one process.
    """
    of_rank = _recordings(infos, ranks)
    if all(len(numbers) == 1 for numbers in of_rank):
        return tuple(range(len(infos))), ()
    chosen = {numbers[-1] for numbers in of_rank}
    if len({len(numbers) for numbers in of_rank}) > 1:
        chosen = _recorded_together(infos, of_rank)
    left_out = sorted(number for numbers in of_rank for number in numbers if number not in chosen)
    others = {number for numbers in of_rank for number in numbers}
    used = tuple(number for number in range(len(infos)) if number in chosen or number not in others)
    return used, _lines([(infos[number].path, ranks[number]) for number in left_out])


def _recordings(infos: Sequence[TraceInfo], ranks: Sequence[int | None]) -> list[list[int]]:
    """Numbers of the traces of each rank that has any with events, in order of time; none of ranks whose traces overlap."""
    of_rank: dict[object, list[int]] = {}
    for number, (info, rank) in enumerate(zip(infos, ranks, strict=True)):
        if info.format in _FORMATS and info.begins_ns is not None:
            worker = _WORKER.fullmatch(Path(info.path).name)
            process = rank if rank is not None else worker[1] if worker else (number,)
            of_rank.setdefault(process, []).append(number)
    found = []
    for numbers in of_rank.values():
        spans = sorted((*(infos[number].begins_ns or (0, 0)), number) for number in numbers)
        if all(last < first for (_, last, _), (first, _, _) in pairwise(spans)):
            found.append([number for _, _, number in spans])
    return found


def _recorded_together(infos: Sequence[TraceInfo], of_rank: Sequence[Sequence[int]]) -> set[int]:
    """The last recording that most ranks have, by the traces that overlap; a rank without a trace of it has none.

    The only trace of a rank that overlaps no other is not known to be of another recording.
    """
    numbers = [number for of_one in of_rank for number in of_one]
    rank = np.repeat(np.arange(len(of_rank)), list(map(len, of_rank)))
    first, last = np.array([infos[number].begins_ns for number in numbers], dtype=np.int64).T
    num_ranks = np.array([len(np.unique(rank[_overlap(first, last, at) > 0])) for at in range(len(numbers))])
    most = np.flatnonzero(num_ranks == num_ranks.max())
    overlap = _overlap(first, last, int(most[np.argmax(first[most])]))
    chosen = set()
    for at in range(len(of_rank)):
        rows = np.flatnonzero(rank == at)
        best = int(rows[np.argmax(overlap[rows])])
        if overlap[best] > 0 or (len(rows) == 1 and num_ranks[best] == 1):
            chosen.add(numbers[best])
    return chosen


def _overlap(first: Int64, last: Int64, at: int) -> Int64:
    """Time for which each recording overlaps one of them, ns; 0 and less where it does not."""
    overlap: Int64 = np.minimum(last, last[at]) - np.maximum(first, first[at]) + 1
    return overlap


def _lines(left_out: Sequence[tuple[str, int | None]]) -> tuple[str, ...]:
    """The line that names these files, each with its rank."""
    if not left_out:
        return ()
    named = {rank for _, rank in left_out if rank is not None}
    of_ranks = f"rank{'s' * (len(named) > 1)} {as_ranges(named)}" if named else "one process"
    files = listed([path for path, _ in left_out], _FEW)
    return (
        f"{counted(len(left_out), 'file')} of other recordings of {of_ranks}, made at other times, left out: {files}; the last "
        "recording that most ranks have is analysed; give the files of another one alone to see that",
    )
