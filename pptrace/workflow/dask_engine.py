"""Calls on the workers of a dask.distributed cluster that :mod:`pptrace.workflow.dask_cluster` has opened."""

from __future__ import annotations

import os
import platform
import queue
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pptrace.errors import PptraceError
from pptrace.ingest.inputs.resolve import InputFile
from pptrace.ingest.job.read_job import FileResult, RankData
from pptrace.ingest.job.read_progress import ProgressMeter
from pptrace.recognise.recognised_rank import RecognisedRank
from pptrace.workflow.remote_rank import RemoteRank, lean_ranks, whole_rank

if TYPE_CHECKING:
    from distributed import Client, Future

_NO_WORKERS_S = 20.0  # a killed worker is started again in a few seconds, where something does that
_POLL_S = 0.5
_READING = "pptrace-reading"
"""Topic of events (token, path, 1 or −1): a worker has begun to read a file, and has read it to its end."""

Data = TypeVar("Data", bound=RankData)


@dataclass(frozen=True, slots=True)
class DaskEngine:
    """A cluster that this program is connected to. ``name`` is what messages call it, ``token`` tells its events from those of
    other programs.
    """

    client: Client
    name: str
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    def read_files(
        self, files: Sequence[InputFile], read: Callable[[InputFile], FileResult[Data]], meter: ProgressMeter
    ) -> list[FileResult[Data]]:
        """Read each file on a worker: see :data:`pptrace.ingest.job.read_job.ReadFiles`.

        Raises:
            PptraceError: a worker does not see a file, or workers die of it.
        """
        results: list[FileResult[Data]] = self._done_with(self._reads(files, read), files, meter)
        return results

    def read_lean(
        self, files: Sequence[InputFile], read: Callable[[InputFile], FileResult[RecognisedRank]], meter: ProgressMeter
    ) -> list[FileResult[RemoteRank]]:
        """The same, but what a file holds stays on the worker: what is returned says where."""
        wholes = self._reads(files, read)
        leans = {index: self.submit(lean_ranks, whole) for index, whole in wholes.items()}
        results: list[FileResult[RemoteRank]] = []
        for index, result in enumerate(self._done_with(leans, files, meter)):
            if isinstance(result, PptraceError):
                results.append(result)
            else:
                results.append(tuple(replace(rank, parts=((wholes[index], at),)) for at, rank in enumerate(result)))
        return results

    def _reads(self, files: Sequence[InputFile], read: Callable[[InputFile], Any]) -> dict[int, Future[Any]]:
        """A call for each file, the largest first."""
        order = sorted(range(len(files)), key=lambda index: -files[index].num_bytes)
        folder = str(Path.cwd())
        return {index: self.submit(_read_visible, read, files[index], folder, self.token) for index in order}

    def _done_with(
        self, futures: Mapping[int, Future[Any]], files: Sequence[InputFile], meter: ProgressMeter
    ) -> list[Any]:
        """The results for all files, in their order."""
        names = [str(file.path) for file in files]
        for index in self.done(futures, dict(enumerate(names))):
            meter.set_done(index)
        results = self._gathered([futures[index] for index in range(len(files))], names)
        for result in results:
            if isinstance(result, InvisibleFileError):
                raise result
        return results

    def whole_ranks(self, ranks: Sequence[RemoteRank]) -> tuple[RecognisedRank, ...]:
        """Fetch the whole of each rank."""
        futures = list({id(future): future for rank in ranks for future, _ in rank.parts}.values())
        files = dict(zip(map(id, futures), self.results(futures, ["the ranks"] * len(futures)), strict=True))
        return tuple(
            whole_rank([(files[id(future)], index) for future, index in rank.parts]).with_info(rank.info)
            for rank in ranks
        )

    @property
    def num_workers(self) -> int:
        return max(len(self.client.nthreads()), 1)

    def holders(self, futures: Sequence[Future[Any]]) -> list[str]:
        """The address of a worker that has the result of each future; "" where none has it any more."""
        holders = self.client.who_has(futures)
        return [min(holders.get(future.key, ()), default="") for future in futures]

    def results(self, futures: Sequence[Future[Any]], names: Sequence[str]) -> list[Any]:
        """The results of all futures, each of which ``names`` calls something for a line about workers that die of it."""
        for _ in self.done(dict(enumerate(futures)), dict(enumerate(names))):
            pass
        return self._gathered(futures, names)

    def _gathered(self, futures: Sequence[Future[Any]], names: Sequence[str]) -> list[Any]:
        """The results of futures that are done; made again where a worker has died with them meanwhile."""
        try:
            return list(self.client.gather(list(futures)))
        except Exception:  # what a task raised comes out of gather, whatever it is
            for future, name in zip(futures, names, strict=True):
                self._raise_if_failed(future, name)
            raise

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call a function on a worker; of arguments that are futures it gets the results."""
        return self.client.submit(function, *arguments, pure=False)

    def done(self, futures: Mapping[int, Future[Any]], names: Mapping[int, str]) -> Iterator[int]:
        """The keys of futures as these are done.

        Raises:
            PptraceError: workers died of what ``names`` calls it, or there are none any more.
        """
        finished: queue.Queue[Future[Any]] = queue.Queue()
        key_of = {future.key: key for key, future in futures.items()}
        for future in futures.values():
            future.add_done_callback(finished.put)
        without_workers_s = 0.0
        for _ in range(len(futures)):
            while True:
                try:
                    future = finished.get(timeout=_POLL_S)
                    break
                except queue.Empty:
                    without_workers_s = 0.0 if self._has_workers() else without_workers_s + _POLL_S
                    if without_workers_s >= _NO_WORKERS_S:
                        raise PptraceError(
                            f"{self.name}: has no workers any more; start workers, or use --engine local"
                        ) from None
            self._raise_if_failed(future, names[key_of[future.key]])
            yield key_of[future.key]

    def _has_workers(self) -> bool:
        try:
            return self.client.status == "running" and bool(self.client.nthreads())
        except (OSError, TimeoutError):  # the scheduler is gone
            return False

    def _raise_if_failed(self, future: Future[Any], name: str) -> None:
        from distributed.scheduler import KilledWorker

        if future.status in ("finished", "pending"):
            return
        if future.status in ("cancelled", "lost"):
            raise PptraceError(f"{self.name}: the connection is lost; is the scheduler still running?")
        error = future.exception()
        if isinstance(error, KilledWorker):
            raise PptraceError(
                f"{self._read_by_the_dead() or name}: workers died while they worked on it, the last at "
                f"{error.last_worker.address}; expected workers with memory for it: see their logs, or use --engine local"
            ) from None
        if isinstance(error, BaseException):
            raise error

    def _read_by_the_dead(self) -> str:
        """The file that was begun most often without being read to its end: dask counts calls that only waited on that worker."""
        begun: Counter[str] = Counter()
        for _, (token, path, change) in self.client.get_events(_READING):
            begun[path] += change if token == self.token else 0
        return max(begun, key=begun.__getitem__) if max(begun.values(), default=0) > 1 else ""


class InvisibleFileError(PptraceError):
    """A file that this program sees and a worker does not."""


def _read_visible(
    read: Callable[[InputFile], FileResult[Data]], file: InputFile, folder: str, token: str
) -> FileResult[Data]:
    """Read a file on a worker, if it is the one that was seen when the job's files were listed.

    ``folder`` is where a relative path begins: the report names files as the user does, so the worker goes there.
    """
    from distributed import get_worker

    try:
        if not file.path.is_absolute():
            os.chdir(folder)
        num_bytes = file.path.stat().st_size
    except OSError as err:
        return _invisible(file, err.strerror or str(err))
    if num_bytes != file.num_bytes:
        return _invisible(file, f"{num_bytes} bytes there, {file.num_bytes} here")
    worker = get_worker()
    worker.log_event(_READING, (token, str(file.path), 1))
    result = read(file)
    worker.log_event(_READING, (token, str(file.path), -1))
    return result


def _invisible(file: InputFile, why: str) -> InvisibleFileError:
    from distributed import get_worker

    return InvisibleFileError(
        f"{file.path}: worker {get_worker().address} on {platform.node()} does not see this file ({why}); expected a file "
        "system that all machines share, with the same paths; or use --engine local"
    )
