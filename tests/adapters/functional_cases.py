"""Functional collectives in every way that they are called, watched by an observer; what the ranks of a pool run."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import all_reduce as taken_by_name
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx

from instrument.adapters.hooks import Hooks
from instrument.adapters.torch_distributed import DistributedCalls
from instrument.adapters.torch_functional_collectives import FunctionalCalls
from instrument.adapters.works import Works
from tests.adapters.distributed_cases import Diary, floats

Heard = list[tuple[str, str, int, int, tuple[int, ...]]]


@contextmanager
def watched() -> Iterator[tuple[Diary, list[str]]]:
    diary, lines = Diary(), list[str]()
    hooks = Hooks(lines.append)
    FunctionalCalls(hooks, DistributedCalls(hooks, Works(hooks), [diary]))
    try:
        yield diary, lines
    finally:
        hooks.remove()


def _ways(pair: dist.ProcessGroup) -> dict[str, Callable[[], Any]]:
    """Calls over a pair of ranks, by a name."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    world = dist.group.WORLD
    own = dist.get_rank(pair)
    shard = DTensor.from_local(floats(6).reshape(2, 3), mesh["tp"], [Shard(0)])

    def both_waited() -> None:
        for tensor in funcol.all_reduce_coalesced([floats(4), floats(6)], "sum", pair):
            tensor.wait()

    def gathered_backward() -> None:
        given = floats(4).requires_grad_()
        funcol.all_gather_tensor_autograd(given, 0, pair).sum().backward()

    return {
        "all_reduce": lambda: funcol.all_reduce(floats(8), "sum", pair).wait(),
        "taken by name": lambda: taken_by_name(floats(8), "sum", pair) + 1,
        "operator": lambda: torch.ops._c10d_functional.wait_tensor(
            torch.ops._c10d_functional.all_reduce.default(floats(8), "sum", group_name=pair.group_name)
        ),
        "in place": lambda: torch.ops._c10d_functional.wait_tensor(
            torch.ops._c10d_functional.all_reduce_(floats(8), "sum", pair.group_name)
        ),
        "all_gather": lambda: funcol.all_gather_tensor(floats(4), 0, pair).wait(),
        "reduce_scatter": lambda: funcol.reduce_scatter_tensor(floats(8), "sum", 0, pair).wait(),
        "uneven": lambda: funcol.all_to_all_single(floats(6).reshape(3, 2), [own + 1] * 2, [1, 2], pair).wait(),
        "sharded anew": lambda: torch.ops._dtensor.shard_dim_alltoall(floats(8).reshape(2, 4), 0, 1, pair.group_name),
        "broadcast": lambda: funcol.broadcast(floats(8), 1, pair).wait(),
        "coalesced": both_waited,
        "mesh": lambda: funcol.all_reduce(floats(8), "sum", (mesh, 1)).wait(),
        "redistributed": lambda: shard.redistribute(placements=[Replicate()]).to_local() + 1,
        "fed to another": lambda: funcol.all_reduce(funcol.all_reduce(floats(8), "sum", pair), "sum", pair).wait(),
        "backward": gathered_backward,
        "of the world": lambda: funcol.all_reduce(floats(2), "sum", world).wait(),
    }


def watch_functional() -> dict[str, Any]:
    """By way of calling what was heard of it, and its result without and with hooks."""
    warnings.simplefilter("ignore")
    rank = dist.get_rank()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    ways = _ways(halves[rank // 2])
    plain = {name: way() for name, way in ways.items()}
    hashes = _hashes()
    actual: dict[str, Any] = {}
    with watched() as (diary, lines):
        actual["same hashes"] = _hashes() == hashes
        for name, way in ways.items():
            result = way()
            same = result is None or torch.equal(torch.as_tensor(result), torch.as_tensor(plain[name]))
            actual[name] = ([(entry[0], *entry[1:4], entry[5]) for entry in diary.take()], same)
        actual["silent"] = _trace_without_communication(halves[rank // 2].group_name), diary.take()
        for reduction in ("no reduction", "sum"):
            try:
                torch.ops._c10d_functional.all_reduce(floats(1), reduction, halves[rank // 2].group_name)
            except RuntimeError:
                actual["error"] = [entry[0] for entry in diary.take()]
        actual["after the error"] = [entry[0] for entry in diary.take()]
        actual["lines"] = lines
    return actual


def _hashes() -> list[int]:
    packet = torch.ops._c10d_functional.all_reduce
    return [hash(packet), hash(packet.default), hash(torch.ops._c10d_functional.wait_tensor)]


def _trace_without_communication(name: str) -> list[str]:
    """Tracings that call the operators with what stands for tensors; the operators that they wrote down."""

    def summed(tensor: torch.Tensor) -> torch.Tensor:
        out = torch.ops._c10d_functional.all_reduce(tensor, "sum", name)
        return torch.ops._c10d_functional.wait_tensor(out) + 1

    with FakeTensorMode():
        summed(floats(4))
    summed(torch.empty(4, device="meta"))
    graph = make_fx(summed, tracing_mode="fake")(floats(4)).graph
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def compile_functional(backend: str) -> tuple[list[float], int, Heard, list[str]]:
    """A compiled function with a collective, called thrice: results, graph breaks, what was heard of the last call."""
    torch._dynamo.reset()
    counted = torch._dynamo.utils.counters
    counted.clear()
    with watched() as (diary, lines):

        @torch.compile(backend=backend, fullgraph=True)
        def double_sum(tensor: torch.Tensor) -> torch.Tensor:
            return funcol.all_reduce(tensor * 2, "sum", dist.group.WORLD) + 1

        values = []
        for number in range(3):
            diary.take()
            values.append(double_sum(floats(2) * (number + dist.get_rank())).sum().item())
        heard = [(entry[0], *entry[1:4], entry[5]) for entry in diary.take()]
        breaks = sum(counted["graph_break"].values())
    torch._dynamo.reset()
    sys.stdout.flush()
    return values, breaks, heard, lines


def wait_unseen() -> tuple[int, int]:
    """Calls whose results are waited for as C++ does: how many were posted, and how many the hooks called complete."""
    wait, _ = torch._C._jit_get_operation("_c10d_functional::wait_tensor")
    with watched() as (diary, _):
        for _ in range(600):
            wait(torch.ops._c10d_functional.all_reduce(floats(1), "sum", dist.group.WORLD.group_name))
        entries = [entry[0] for entry in diary.take()]
    return entries.count("posted"), entries.count("completed")
