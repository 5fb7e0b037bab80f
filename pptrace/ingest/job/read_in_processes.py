"""Read several files of a job in processes of their own, which share how far they are."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping, MutableSequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from pptrace.ingest.inputs.resolve import InputFile
from pptrace.processes import can_fork

if TYPE_CHECKING:
    from pptrace.ingest.job.read_job import Data, FileResult, ProgressMeter, Read

_POLL_S = 0.1  # between looks at how far the reading processes are

_parts_read: MutableSequence[float] = []
"""Fraction read of each file of the job in a reading process, in memory that all of them share."""


def read_in_processes(
    files: Mapping[int, InputFile], read: Read[Data], cores: int, num_processes: int, meter: ProgressMeter
) -> Iterator[tuple[int, FileResult[Data]]]:
    """(number, result) of the files, the largest first, as they finish; where a process dies, some stay missing.

    Each is read on several ``cores``. Processes are forked where that can be done: nothing has to be imported again.
    """
    context = multiprocessing.get_context("fork" if can_fork() else "spawn")
    parts = context.RawArray("d", max(files) + 1)
    pool = ProcessPoolExecutor(num_processes, mp_context=context, initializer=_share_parts, initargs=(parts,))
    with pool, suppress(BrokenProcessPool):
        order = sorted(files, key=lambda index: -files[index].num_bytes)
        futures = {pool.submit(_read_in_process, read, cores, index, files[index]): index for index in order}
        while futures:
            for future in wait(futures, timeout=_POLL_S, return_when=FIRST_COMPLETED).done:
                yield futures.pop(future), future.result()
            for index in futures.values():
                meter.set_part(index, parts[index])


def _share_parts(parts: MutableSequence[float]) -> None:
    global _parts_read
    _parts_read = parts


def _read_in_process(read: Read[Data], cores: int, index: int, file: InputFile) -> FileResult[Data]:
    return read(file, cores, partial(_parts_read.__setitem__, index))
