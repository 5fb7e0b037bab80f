"""Live gloo processes that run many cases: importing torch takes seconds, making a process group milliseconds.

A case is a function that every rank of a fresh process group calls. A case that takes too long is killed, and the error
shows where each rank stood. Each process is a fork of one that has imported torch: see :mod:`tests.support.forked`.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from multiprocessing import current_process
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.process import AuthenticationString
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.support.forked import ROOT, start_python

P = ParamSpec("P")
T = TypeVar("T")
PR_SET_PDEATHSIG = 1
GRACE_S = 2.0  # for the other ranks of a case in which one has failed


class RankFailureError(AssertionError):
    """A rank raised, died, or did not finish in time."""


class Pool:
    """At most ``size`` processes, each started by the first case that needs it and again after a failure.

    A case is run by ``world`` of them, all where neither the pool nor the case says how many.
    """

    def __init__(self, size: int, world: int | None = None) -> None:
        self.size = size
        self.world = size if world is None else world
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        self._store: dist.TCPStore | None = None
        self._num_cases = 0
        self._stacks = tempfile.TemporaryDirectory()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._stacks.cleanup()

    def run(
        self, function: Callable[..., Any], *arguments: Any, world: int | None = None, timeout_s: float = 180
    ) -> list[Any]:
        """Call ``function(*arguments)`` on every rank of a new process group of ``world`` ranks.

        Returns:
            What each rank returned.

        Raises:
            RankFailureError: with the traceback of the rank that raised, or the stacks of all when time ran out.
        """
        if function.__module__ == "__main__":
            raise ValueError(f"{function.__name__} is a function of the script itself, which ranks cannot import")
        world = self.world if world is None else world
        assert world <= self.size
        self._start(world)
        self._num_cases += 1
        for rank in range(world):
            self._pipes[rank].send((f"case{self._num_cases}", world, function, arguments))
        return self._collect(world, time.monotonic() + timeout_s)

    def stop(self) -> None:
        """End every process."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes, self._store = [], [], None

    def _start(self, world: int) -> None:
        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(len(self._processes), world):
            ours, theirs = Pipe()
            program = "import sys; from tests.support.pool import serve; serve(*sys.argv[1:])"
            arguments = (str(rank), str(self._store.port), str(self._stack_file(rank)))
            ours.send_bytes(current_process().authkey)
            with theirs:
                process = start_python(
                    [sys.executable, "-c", program, *arguments],
                    stdin=theirs.fileno(),
                    cwd=ROOT,
                    env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                )
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self, world: int, deadline: float) -> list[Any]:
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while missing := [rank for rank in range(world) if rank not in answers and rank not in failures]:
            if failures:  # the rank that failed first is often not the one that is heard first
                deadline = min(deadline, time.monotonic() + GRACE_S)
            ready = wait([self._pipes[rank] for rank in missing], timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in (rank for rank in missing if self._pipes[rank] in ready):
                ok, answer = self._receive(rank)
                (answers if ok else failures)[rank] = answer
        if len(answers) == world:
            return [answers[rank] for rank in range(world)]
        lines = [f"rank {rank} of {world}:\n{failures[rank]}" for rank in sorted(failures)]
        if not lines:
            lines = [f"only ranks {sorted(answers)} of {world} finished in time", self._all_stacks()]
        self.stop()
        raise RankFailureError("\n".join(lines))

    def _receive(self, rank: int) -> tuple[bool, Any]:
        try:
            return self._pipes[rank].recv()
        except EOFError:
            return False, "the process died"

    def _stack_file(self, rank: int) -> Path:
        return Path(self._stacks.name) / f"rank{rank}.txt"

    def _all_stacks(self) -> str:
        for process in self._processes:
            process.send_signal(signal.SIGUSR1)  # does nothing to one that has ended
        time.sleep(0.5)
        return "\n".join(f"rank {rank}:\n{self._stacks_of(rank)}" for rank in range(len(self._processes)))

    def _stacks_of(self, rank: int) -> str:
        try:
            return self._stack_file(rank).read_text()
        except OSError:
            return "it had not begun: torch was still being imported\n"


def serve(rank_text: str, port: str, stack_file: str) -> None:
    """A worker: one case after another, until the parent closes the pipe, which is stdin, or dies."""
    rank, pipe = int(rank_text), Connection(os.dup(0))
    current_process().authkey = AuthenticationString(pipe.recv_bytes())  # with which processes get each other's tensors
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    _share_device()
    warnings.simplefilter("error")
    # Said once where a thread of autograd multiplies matrices before anything else; it changes nothing.
    warnings.filterwarnings("ignore", message="Attempting to run cuBLAS, but there was no current CUDA context")
    warnings.filterwarnings("ignore", message=".*Profiler clears events")  # of torch up to 2.11, at every first cycle
    store = dist.TCPStore("127.0.0.1", int(port), is_master=False)
    closing: queue.SimpleQueue[list[dist.ProcessGroup]] = queue.SimpleQueue()
    threading.Thread(target=_close_groups, args=(closing,), daemon=True).start()
    groups: list[dist.ProcessGroup] = []
    gc.freeze()  # what is imported stays; looking through it after each case would take longer than most cases do
    gc.set_threshold(20_000, 20, 50)  # and less often within one
    with Path(stack_file).open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        while True:
            try:
                name, world, function, arguments = pipe.recv()
            except EOFError:
                return
            closing.put(groups)  # of the case before, now that all ranks have ended it: none of them connects any more
            groups = []
            pipe.send(_attempt(name, rank, world, store, groups, function, arguments))


def _share_device() -> None:
    """Let all gloo groups of this process have one device, whose thread looks a hundred times a second for something to do.

    Each group makes one of its own otherwise, and keeps it where something keeps the group: those of many cases take the cores.
    """
    import torch.distributed.distributed_c10d as c10d

    device = c10d.ProcessGroupGloo.create_device(interface="lo")

    class OnSharedDevice(c10d.ProcessGroupGloo):
        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, **_: Any) -> None:
            options = c10d.ProcessGroupGloo._Options()
            options._devices = [device]
            options._timeout = timeout
            super().__init__(store, rank, size, options)

    c10d.ProcessGroupGloo = OnSharedDevice


def _close_groups(closing: queue.SimpleQueue[list[dist.ProcessGroup]]) -> None:
    """Close the connections of groups while the next case runs: with each, gloo waits for its thread, up to 10 ms."""
    while True:
        closing.get().clear()


def _attempt(
    name: str,
    rank: int,
    world: int,
    store: dist.TCPStore,
    groups: list[dist.ProcessGroup],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> tuple[bool, Any]:
    """Run a case; what it returned, or how it failed. ``groups`` takes its process groups, whose connections are still open."""
    try:
        dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=world)
        try:
            return True, function(*arguments)
        finally:
            groups += distributed_c10d._world.pg_map
            dist.destroy_process_group()
            gc.collect()  # a group that a cycle keeps keeps its threads, and those of many cases slow all others down
    except BaseException:
        return False, traceback.format_exc()


def on_one_rank(compute: Callable[P, T]) -> Callable[P, T]:
    """Cache a function of hashable arguments that all ranks of a case call together: one computes, and the others get what it
    returns.

    Each would compute the same otherwise, on the same cores.
    """
    known: dict[Any, T] = {}

    @wraps(compute)
    def call(*arguments: P.args, **options: P.kwargs) -> T:
        key = (arguments, tuple(options.items()))
        is_missing = torch.tensor(key not in known, dtype=torch.int32)
        dist.all_reduce(is_missing, dist.ReduceOp.MAX)
        if is_missing:
            answer: list[Any] = [None]
            if dist.get_rank() == 0:
                answer = [known[key] if key in known else compute(*arguments, **options)]
            dist.broadcast_object_list(answer)
            known[key] = answer[0]
        return known[key]

    return call
