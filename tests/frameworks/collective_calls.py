"""Every collective that gloo has, called at once and with a handle, profiled: what the ranks of the pool run."""

from __future__ import annotations

import datetime
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.profiler import ProfilerActivity, profile

SIZE = 256
Call = Callable[[], Any]


def call_all_profiled(record_shapes: bool, folder: str) -> dict[str, int]:
    """Call every collective in the world and in a group of it, write ``rank<r>.json``; how many calls of each kind were made."""
    rank = dist.get_rank()
    half = dist.new_group([0, 1])
    counts: Counter[str] = Counter()
    warnings.simplefilter("ignore", FutureWarning)  # torch renames some; people call the old ones
    with profile(activities=[ProfilerActivity.CPU], record_shapes=record_shapes) as profiler:
        for group in (dist.group.WORLD, half if rank < 2 else None):
            for is_async in (False, True) if group is not None else ():
                counts.update(_call_each(group, is_async))
        counts.update(_pending_at_once())
        counts.update(_others())
    profiler.export_chrome_trace(str(Path(folder) / f"rank{rank}.json"))
    return dict(counts)


def _call_each(group: dist.ProcessGroup, is_async: bool) -> Iterator[str]:
    for kind, call in _calls(group, is_async):
        time.sleep(0.0005 * (1 + dist.get_rank()))
        work = call()
        if is_async:
            torch.ones(64, 64) @ torch.ones(64, 64)
            work.wait()
        yield kind


def _calls(group: dist.ProcessGroup, is_async: bool) -> list[tuple[str, Call]]:
    size = dist.get_world_size(group)
    last = size - 1

    def parts() -> list[torch.Tensor]:
        return [torch.ones(SIZE) for _ in range(size)]

    one, all_of = torch.ones(SIZE), torch.ones(SIZE * size)
    is_root = dist.get_rank(group) == last
    how: dict[str, Any] = {"group": group, "async_op": is_async}
    return [
        ("all_reduce", lambda: dist.all_reduce(one, **how)),
        ("all_gather", lambda: dist.all_gather(parts(), one, **how)),
        ("all_gather", lambda: dist.all_gather_into_tensor(all_of, one, **how)),
        ("reduce_scatter", lambda: dist.reduce_scatter(one, parts(), **how)),
        ("all_reduce", lambda: dist.all_reduce(one, **how)),
        ("reduce_scatter", lambda: dist.reduce_scatter_tensor(one, all_of, **how)),
        ("all_to_all", lambda: dist.all_to_all_single(torch.empty_like(all_of), all_of, **how)),
        ("broadcast", lambda: dist.broadcast(one, group_src=last, **how)),
        ("reduce", lambda: dist.reduce(one, group_dst=last, **how)),
        ("gather", lambda: dist.gather(one, parts() if is_root else None, group_dst=last, **how)),
        ("scatter", lambda: dist.scatter(one, parts() if is_root else None, group_src=last, **how)),
        ("barrier", lambda: dist.barrier(**how)),
    ]


def _pending_at_once() -> Iterator[str]:
    works = []
    for _ in range(4):
        works.append(dist.all_reduce(torch.ones(SIZE), async_op=True))
        yield "all_reduce"
    works.append(dist.barrier(async_op=True))
    yield "barrier"
    for work in works:
        work.wait()


def _others() -> Iterator[str]:
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=60))
    yield "barrier"
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, {"rank": dist.get_rank()})
    yield from ("all_gather", "all_gather")  # sizes, then objects
    functional.wait_tensor(functional.all_reduce(torch.ones(SIZE), "sum", dist.group.WORLD))
    yield "all_reduce"
    yield from _messages()


def _messages() -> Iterator[str]:
    rank, size = dist.get_rank(), dist.get_world_size()
    ways = ((dist.isend, (rank + 1) % size), (dist.irecv, (rank - 1) % size))
    for work in dist.batch_isend_irecv([dist.P2POp(way, torch.ones(SIZE), peer) for way, peer in ways]):
        work.wait()
    yield from ("send", "recv")


def train_with_barriers(folder: str) -> None:
    """All-reduce, a posted barrier and messages both ways in every step, in the world alone; write ``rank<r>.json``."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for step in range(12):
            time.sleep(0.003 * ((rank + step) % size))  # another one is late in every step
            posted = dist.barrier(async_op=True)
            time.sleep(0.002)
            posted.wait()
            for _ in _messages():
                dist.all_reduce(torch.ones(SIZE))
    profiler.export_chrome_trace(str(Path(folder) / f"rank{rank}.json"))
