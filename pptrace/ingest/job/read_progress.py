"""Progress of reading a job's files: files and bytes, of all processes that read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

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
