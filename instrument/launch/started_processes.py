"""Counts the processes that a script starts through multiprocessing: ranks of its own, perhaps. Notices torchrun, too."""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

_TORCHRUN = re.compile(r"(?<![\w.-])(torchrun|torch\.distributed\.(run|launch))(?![\w./-])")
_RECORDER = "instrument.launch"


class StartedProcesses:
    """Counts from :meth:`watch` on. Daemons are not counted: pools and data loaders have them, ranks are none.

    ``has_torchrun``: the script started torch's launcher as a program, and not to record its ranks.

    ``record`` is called with each before it starts, and the number of those that it has recorded; whether it records this one.
    """

    def __init__(self) -> None:
        self.count = self.num_recorded = 0
        self.has_torchrun = False
        self.record: Callable[[BaseProcess, int], bool] | None = None
        self._recorded: list[BaseProcess] = []

    def stop(self) -> None:
        """Send SIGTERM to the processes that are recorded, and wait until they have saved their traces."""
        running = [process for process in self._recorded if process.is_alive()]
        for process in running:
            process.terminate()
        for process in running:
            process.join()

    def watch(self) -> None:
        start = BaseProcess.start

        @functools.wraps(start)
        def counted(process: Any) -> None:
            if self.record is not None and not process.daemon and self.record(process, self.num_recorded):
                self._recorded.append(process)
                self.num_recorded += 1
            start(process)
            self.count += not process.daemon

        BaseProcess.start = counted  # type: ignore[method-assign,assignment]
        open_program = subprocess.Popen.__init__

        @functools.wraps(open_program)
        def noticed(program: Any, args: Any, *more: Any, **options: Any) -> None:
            command = repr(args)
            self.has_torchrun |= _TORCHRUN.search(command) is not None and _RECORDER not in command
            open_program(program, args, *more, **options)

        subprocess.Popen.__init__ = noticed  # type: ignore[method-assign,assignment]
