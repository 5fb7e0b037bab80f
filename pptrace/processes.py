"""Tasks shared with forked processes, which see all that this one has: nothing is copied to them, and results alone come back."""

from __future__ import annotations

import concurrent.futures
import gc
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Generic, Self, TypeVar

Result = TypeVar("Result")


def num_cpus() -> int:
    """Number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def can_fork() -> bool:
    """Return whether this process may be forked: no other Python thread could hold a lock.

    The libraries behind numpy stop their threads before a fork.
    """
    return sys.platform == "linux" and threading.active_count() == 1


class SharedTasks(Generic[Result]):
    """Tasks that other processes begin with at once, and that this one helps with when it asks for their results: a context.

    Args:
        tasks: what to do, in any order and any process; what they return has to be picklable.
        jobs: the processes that work, this one among them; with one, or where none can be forked, this one does everything.
    """

    def __init__(self, tasks: Sequence[Callable[[], Result]], jobs: int = 1) -> None:
        self._tasks = tasks
        self._pool: concurrent.futures.ProcessPoolExecutor | None = None
        self._begun: list[concurrent.futures.Future[Result]] = []
        if min(jobs, len(tasks)) > 1 and can_fork():
            import multiprocessing  # as the pool, it is imported when it is asked for

            workers, context = min(jobs, len(tasks)) - 1, multiprocessing.get_context("fork")
            self._pool = concurrent.futures.ProcessPoolExecutor(workers, context, _take_tasks, (tasks,))
            with suppress(concurrent.futures.BrokenExecutor):  # a process was ended at once: the rest is done here
                for index in range(len(tasks)):
                    self._begun.append(self._pool.submit(_do_task, index))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def results(self) -> list[Result]:
        """The results of all tasks, in their order; the last tasks that no process has begun with are done here."""
        own = {}
        for index in reversed(range(len(self._tasks))):
            if index >= len(self._begun) or self._begun[index].cancel():
                own[index] = self._tasks[index]()
        return [own[index] if index in own else self._result(index) for index in range(len(self._tasks))]

    def _result(self, index: int) -> Result:
        try:
            return self._begun[index].result()
        except concurrent.futures.BrokenExecutor:  # a process was ended, as where memory is short
            return self._tasks[index]()


_tasks: Sequence[Callable[[], Any]] = ()
"""The tasks of a forked process."""


def _take_tasks(tasks: Sequence[Callable[[], object]]) -> None:
    global _tasks
    _tasks = tasks
    gc.disable()  # it would look at, and so copy, every object of the process that was forked


def _do_task(index: int) -> Any:
    return _tasks[index]()
