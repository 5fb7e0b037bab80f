"""Files read on the workers of a dask.distributed cluster that :mod:`pptrace.workflow.dask_cluster` has opened."""

from __future__ import annotations

import os
import platform
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import CancelledError
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from pptrace.errors import PptraceError
from pptrace.ingest.inputs.resolve import InputFile
from pptrace.ingest.job.read_job import Data, FileResult, ProgressMeter, Read

if TYPE_CHECKING:
    from distributed import Client, Future

_NO_WORKERS_S = 20.0  # a killed worker is started again in a few seconds, where something does that
_POLL_S = 0.1
_READING = "pptrace-reading"
"""Topic of events (token, path, 1 or −1): a worker has begun to read a file, and has read it to its end."""


class DaskEngine(Struct, frozen=True):
    """A cluster that this program is connected to. ``name`` is for messages, ``token`` tells its events from other programs'."""

    client: Client
    name: str
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    def read_files(
        self, files: Mapping[int, InputFile], read: Read[Data], meter: ProgressMeter
    ) -> dict[int, FileResult[Data]]:
        """Read each file on a worker, the largest first: see :data:`pptrace.ingest.job.read_job.ReadFiles`.

        What is read comes here as it is ready, and its worker lets go of it.

        Raises:
            PptraceError: a worker does not see a file, workers die of it, or there are none any more.
        """
        folder, futures = str(Path.cwd()), {}
        for index in sorted(files, key=lambda index: -files[index].num_bytes):
            arguments = (read, files[index], folder, self.token)
            futures[index] = self.client.submit(_read_visible, *arguments, pure=False)
        results: dict[int, FileResult[Data]] = {}
        seen_s = time.monotonic()  # when there were workers
        while futures:
            # Where a worker dies, what only it has is lost until others have read it again.
            done = [index for index, future in futures.items() if future.status not in ("pending", "lost")]
            for index in done:
                result = self._result_of(futures.pop(index), files[index].path)
                if isinstance(result, InvisibleFileError):
                    raise result
                results[index] = result
                meter.set_done(index)
            if done or self._has_workers():
                seen_s = time.monotonic()
            elif time.monotonic() - seen_s >= _NO_WORKERS_S:
                raise PptraceError(f"{self.name}: has no workers any more; start workers, or use --engine local")
            if not done:
                time.sleep(_POLL_S)
        return results

    def _result_of(self, future: Future[Any], path: Path) -> Any:
        """The result of a call that is over.

        Raises:
            PptraceError: workers died of the file, or there is no connection any more.
        """
        from distributed.comm import CommClosedError
        from distributed.scheduler import KilledWorker

        try:
            return future.result()
        except KilledWorker as error:
            raise PptraceError(
                f"{self._read_by_the_dead() or path}: workers died while they worked on it, the last at "
                f"{error.last_worker.address}; expected workers with memory for it: see their logs, or use --engine local"
            ) from None
        except (CancelledError, CommClosedError):
            raise PptraceError(f"{self.name}: the connection is lost; is the scheduler still running?") from None

    def _has_workers(self) -> bool:
        try:
            return self.client.status == "running" and bool(self.client.nthreads())
        except (OSError, TimeoutError):  # the scheduler is gone
            return False

    def _read_by_the_dead(self) -> str:
        """The file that was begun most often without being read to its end: dask counts calls that only waited on that worker."""
        begun: Counter[str] = Counter()
        for _, (token, path, change) in self.client.get_events(_READING):
            begun[path] += change if token == self.token else 0
        return max(begun, key=begun.__getitem__) if max(begun.values(), default=0) > 1 else ""


class InvisibleFileError(PptraceError):
    """A file that this program sees and a worker does not."""


def _read_visible(read: Read[Data], file: InputFile, folder: str, token: str) -> FileResult[Data]:
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
    result = read(file, 1, None)
    worker.log_event(_READING, (token, str(file.path), -1))
    return result


def _invisible(file: InputFile, why: str) -> InvisibleFileError:
    from distributed import get_worker

    return InvisibleFileError(
        f"{file.path}: worker {get_worker().address} on {platform.node()} does not see this file ({why}); expected a file "
        "system that all machines share, with the same paths; or use --engine local"
    )
