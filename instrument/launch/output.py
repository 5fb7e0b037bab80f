"""Output of the ranks on one terminal: each line whole, with its rank before it where there are several."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TextIO

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

_KINETO_NOISE = b"USDT:"  # Kineto reports each start and stop of the profiler on stderr


class Terminal:
    """Writes whole lines, and one line of status below them where stderr is a terminal. Usable from any thread."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        self._lock = threading.Lock()
        self._status = ""
        self.live = self._err.isatty()

    def out(self, text: str) -> None:
        self._write(self._out, text)

    def err(self, text: str) -> None:
        self._write(self._err, text)

    def status(self, text: str) -> None:
        """Replace the line of status; ``""`` removes it."""
        if not self.live or text == self._status:
            return
        with self._lock:
            self._status = text
            self._err.write(f"\r\x1b[2K{text}")
            self._err.flush()

    def _write(self, stream: TextIO, text: str) -> None:
        with self._lock:
            if self._status:
                self._err.write("\r\x1b[2K")
                self._err.flush()
            try:
                stream.write(f"{text}\n")
                stream.flush()
            except BrokenPipeError:
                pass  # nobody reads it; the ranks go on
            except OSError as err:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # for what it still holds, and what comes
                what = f"stdout: cannot be written ({err.strerror})"
                self._err.write(f"pptrace: {what}; what the ranks print is lost; the run goes on\n")
            if self._status:
                self._err.write(self._status)
                self._err.flush()


class RankPipes(LogsSpecs):
    """Gives each rank's stdout and stderr a pipe, which a thread reads. Ask for ``ranks`` only after the start."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__()
        self.ranks: dict[int, int] = {}
        """Local rank → global rank."""
        self.world_size = 0
        self._terminal = terminal
        self._threads: list[threading.Thread] = []
        self._write_fds: list[int] = []

    @property
    def root_log_dir(self) -> str:
        return ""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Destinations of each rank's output for torch's launcher."""
        self.world_size = int(envs[0]["WORLD_SIZE"])
        self.ranks = {local_rank: int(env["RANK"]) for local_rank, env in envs.items()}
        for env in envs.values():
            env["TORCHELASTIC_ERROR_FILE"] = ""
        stdouts = {local_rank: self._open(rank, is_error=False) for local_rank, rank in self.ranks.items()}
        stderrs = {local_rank: self._open(rank, is_error=True) for local_rank, rank in self.ranks.items()}
        return LogsDest(stdouts, stderrs, {}, {}, dict.fromkeys(envs, ""))

    def close(self, patience_s: float = 1.0) -> None:
        """Print what is left. A process that a rank left behind may hold a pipe open: it is not waited for."""
        for fd in self._write_fds:
            os.close(fd)
        self._write_fds.clear()
        deadline = time.monotonic() + patience_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _open(self, rank: int, *, is_error: bool) -> str:
        read_fd, write_fd = os.pipe()
        self._write_fds.append(write_fd)
        prefix = f"[rank {rank:>{len(str(self.world_size - 1))}}] " if self.world_size > 1 else ""
        thread = threading.Thread(target=self._pass_on, args=(read_fd, prefix, is_error), daemon=True)
        thread.start()
        self._threads.append(thread)
        return f"/dev/fd/{write_fd}"

    def _pass_on(self, fd: int, prefix: str, is_error: bool) -> None:
        write = self._terminal.err if is_error else self._terminal.out
        pending = b""
        while block := os.read(fd, 1 << 16):
            *lines, pending = (pending + block).split(b"\n")
            for line in lines:
                if not line.startswith(_KINETO_NOISE):
                    write(prefix + _visible(line))
        if pending:
            write(prefix + _visible(pending))
        os.close(fd)


def _visible(line: bytes) -> str:
    """Reduce a line to what a terminal would show of it in the end: progress bars write theirs again and again after a return."""
    parts = [part for part in line.split(b"\r") if part]
    return parts[-1].decode(errors="replace") if parts else ""
