"""The ranges of a rank kept by itself, without torch's profiler: names, threads and times, for a fraction of its cost."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

from instrument.recorder import TorchRanges

_TORCH = TorchRanges()


class MarkLog:
    """Ranges while ``is_on``; else they go to torch's profiler. Open ones are (name, start); a closed one is a row. Usable from
    any thread.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()
        self._rows: list[tuple[str, int, int, int]] = []

    def open(self, name: str) -> Any:
        """A range begins in this thread."""
        return (name, time.perf_counter_ns()) if self.is_on else _TORCH.open(name)

    def close(self, opened: Any) -> None:
        """A range of this thread ends."""
        now = time.perf_counter_ns()
        if not isinstance(opened, tuple):
            _TORCH.close(opened)
            return
        self._rows.append((*opened, now, threading.get_native_id()))

    def clear(self) -> None:
        """Forget all ranges."""
        self._rows.clear()

    def events(self) -> Iterator[str]:
        """Yield each range as an event of a Kineto trace, as text: times are µs since the epoch, digit by digit."""
        pid = os.getpid()
        for name, start, end, thread in self._rows:
            at, length = start + self._epoch_ns, end - start
            yield (
                f'{{"ph":"X","cat":"user_annotation","name":{json.dumps(name)},"pid":{pid},"tid":{thread},'
                f'"ts":{at // 1000}.{at % 1000:03d},"dur":{length // 1000}.{length % 1000:03d}}}'
            )
