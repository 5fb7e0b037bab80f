"""Every function of ``torch.distributed`` called once in each way, watched by an observer."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from instrument.adapters.calls import Call
from instrument.adapters.hooks import Hooks, Watch
from instrument.adapters.torch_distributed import DistributedCalls
from instrument.adapters.works import Works
from tests.adapters.noting import Noting


@dataclass
class Diary(Noting):
    """Record of an observer: (event, kind, peer, bytes, sequence, group's ranks)."""

    entries: list[tuple[str, str, int, int, int, tuple[int, ...]]] = field(default_factory=list)

    def note(self, event: str, call: Call) -> None:
        self.entries.append((event, call.kind, call.peer, call.num_bytes, call.sequence, call.group.ranks))

    def take(self) -> list[tuple[str, str, int, int, int, tuple[int, ...]]]:
        entries, self.entries = self.entries, []
        return entries


def floats(count: int) -> torch.Tensor:
    return torch.ones(count, dtype=torch.float32)


def watch_everything() -> dict[str, list[Any]]:
    """By way of calling, what was heard of it on this rank of two."""
    rank = dist.get_rank()
    other = 1 - rank
    diary = Diary()
    lines: list[str] = []
    hooks = Hooks(lines.append)
    DistributedCalls(hooks, Works(hooks), [diary])
    group = dist.new_group([0, 1])
    result: dict[str, list[Any]] = {}
    both = [floats(4), floats(4)]
    calls: dict[str, Any] = {
        "all_reduce": lambda is_async: dist.all_reduce(floats(8), async_op=is_async),
        "broadcast": lambda is_async: dist.broadcast(floats(8), 1, async_op=is_async),
        "reduce": lambda is_async: dist.reduce(floats(8), dst=1, group=group, async_op=is_async),
        "all_gather": lambda is_async: dist.all_gather(both, floats(4), group, is_async),
        "all_gather_single": lambda is_async: dist.all_gather_single(floats(8), floats(4), async_op=is_async),
        "gather": lambda is_async: dist.gather(floats(4), both if rank == 0 else None, 0, async_op=is_async),
        "scatter": lambda is_async: dist.scatter(floats(4), both if rank == 0 else None, src=0, async_op=is_async),
        "reduce_scatter_single": lambda is_async: dist.reduce_scatter_single(floats(4), floats(8), async_op=is_async),
        "all_to_all_single": lambda is_async: dist.all_to_all_single(floats(8), floats(8), async_op=is_async),
        "barrier": lambda is_async: dist.barrier(async_op=is_async),
    }
    diary.take()
    for name, call in calls.items():
        call(False)
        result[name] = diary.take()
        work = call(True)
        posted = diary.take()
        work.wait()
        result[f"{name} async"] = [*posted, "wait", *diary.take()]
    if rank == 0:
        dist.send(floats(2), 1)
    else:
        dist.recv(floats(2), src=0)
    result["message"] = diary.take()
    ops = [dist.P2POp(dist.isend, floats(3), other), dist.P2POp(dist.irecv, floats(3), other)]
    works = dist.batch_isend_irecv(ops)
    result["batch"] = diary.take()
    for work in works:
        work.wait()
    result["batch waited"] = diary.take()
    kept: list[Any] = [None, None]
    dist.all_gather_object(kept, {"rank": rank})
    result["objects"] = [entry[1] for entry in diary.take() if entry[0] == "posted"]
    try:
        dist.all_reduce("no tensor")
    except (TypeError, ValueError):
        result["error"] = diary.take()
    hooks.remove()
    dist.all_reduce(floats(1))
    result["removed"] = diary.take()
    result["lines"] = lines
    return result


def post_by_the_group() -> tuple[list[Any], list[Any], list[str]]:
    """Messages by the methods of a group, as pptrace's runtime posts them: what a log heard, an observer, and the lines."""
    rank = dist.get_rank()
    log, observer = Diary(), Diary()
    lines: list[str] = []
    hooks = Hooks(lines.append)
    group = dist.new_group([1, 0])
    calls = DistributedCalls(hooks, Works(hooks), [observer], [log])
    for tag in (3, 4):
        post = group.send if rank == 0 else group.recv
        post([floats(2)], dist.get_group_rank(group, 1 - rank), tag).wait()
    dist.all_reduce(floats(1), group=group)
    calls.look()
    hooks.remove()
    return log.take(), observer.take(), lines


def break_a_hook() -> tuple[list[float], list[str]]:
    """Hooks that raise before, after, and an observer that does: results as without them, and what was reported."""
    lines: list[str] = []
    hooks = Hooks(lines.append)

    def before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
        raise RuntimeError("broken before")

    def after(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
        yield
        raise RuntimeError("broken after")

    class Observer(Diary):
        def posted(self, call: Call) -> None:
            raise RuntimeError("broken observer")

    DistributedCalls(hooks, Works(hooks), [Observer()])
    hooks.wrap(dist, "all_reduce", before)
    hooks.wrap(dist, "broadcast", after)
    results = []
    for _ in range(2):
        tensor = floats(1) * (dist.get_rank() + 1)
        dist.all_reduce(tensor)
        results.append(tensor.item())
        dist.broadcast(tensor, 0)
        results.append(tensor.item())
    hooks.remove()
    return results, lines


def compile_with_hooks() -> tuple[list[float], int, int]:
    """A compiled function with a collective in it: its results, its graphs, and what the observer heard meanwhile."""
    diary = Diary()
    hooks = Hooks(lambda line: sys.stderr.write(line))
    DistributedCalls(hooks, Works(hooks), [diary])
    graphs = 0

    def backend(module: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Any:
        nonlocal graphs
        graphs += 1
        return module.forward

    @torch.compile(backend=backend, fullgraph=True)
    def double_sum(tensor: torch.Tensor) -> torch.Tensor:
        out = tensor * 2
        dist.all_reduce(out)
        return out + 1

    values = [double_sum(floats(2) * (number + dist.get_rank())).sum().item() for number in range(2)]
    heard = len(diary.take())
    hooks.remove()
    torch._dynamo.reset()
    return values, graphs, heard
