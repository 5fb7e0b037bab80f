"""Ranks that a script starts by itself through multiprocessing, as ``torch.multiprocessing.spawn`` does: each is recorded.

The parent hands multiprocessing a target that installs a session of its own and then calls the script's. What the ranks say of
themselves goes into a folder of their own, so that the parent's record stays.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_start_method
from multiprocessing.process import BaseProcess
from typing import Any

from instrument.launch.facts import UNKNOWN_SIZE
from instrument.launch.record import spawned_dir
from instrument.launch.worker import Rank, WorkerConfig


@dataclass(frozen=True, slots=True)
class SpawnedRank:
    """A process's target, recorded as a rank.

    ``index`` counts the processes, and is the rank until torch.distributed knows it.
    """

    target: Callable[..., object]
    config: WorkerConfig
    index: int

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Call the target; what it raises is raised."""
        if "torch" not in sys.modules:  # it trains nothing
            self.target(*args, **kwargs)
            return
        rank = Rank(self.config, self.index, self.index, UNKNOWN_SIZE)
        rank.call(partial(self.target, *args, **kwargs))
        if rank.error is not None:
            raise rank.error


def record_as_rank(config: WorkerConfig, process: BaseProcess, index: int) -> bool:
    """Record a process that is about to be started; whether that is possible: a forked one shares its parent's session."""
    target = getattr(process, "_target", None)
    method = getattr(process, "_start_method", None) or get_start_method()
    if target is None or method == "fork" or config.options.profiler == "nsys":
        return False
    folder = spawned_dir(config.control_dir)
    folder.mkdir(exist_ok=True)
    vars(process)["_target"] = SpawnedRank(target, replace(config, control_dir=folder, record_dir=folder), index)
    return True
