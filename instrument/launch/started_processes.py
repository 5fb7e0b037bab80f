"""Counts the processes that a script starts through multiprocessing: ranks of its own, perhaps, which nobody records."""

from __future__ import annotations

import functools
from multiprocessing.process import BaseProcess
from typing import Any


class StartedProcesses:
    """Counts from :meth:`watch` on. Daemons are not counted: pools and data loaders have them, ranks are none."""

    def __init__(self) -> None:
        self.count = 0

    def watch(self) -> None:
        start = BaseProcess.start

        @functools.wraps(start)
        def counted(process: Any) -> None:
            start(process)
            self.count += not process.daemon

        BaseProcess.start = counted  # type: ignore[method-assign,assignment]
