"""CUDA graphs on CPUs: ``torch.cuda.make_graphed_callables`` as it is, of graphs that record operators and run them again.

A replay runs the recorded operators on the tensors of the capture and writes their results to where the capture had them. So it
has the dangers of the original: it reads and overwrites static memory alone, and keeps the activations of the last forward only.
Of graphs that share a pool, a later capture may have memory that an earlier one has freed: a replay of the earlier one leaves NaN
in what the later ones have made. A graph that is destroyed while another is captured ends that capture.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@contextmanager
def capturing_on(device: torch.device) -> Iterator[None]:
    """Let stages be captured on CPUs too."""
    if device.type == "cuda":
        yield
        return
    replacements = {
        "CUDAGraph": Graph,
        "graph": _capture,
        "Stream": object,
        "stream": nullcontext,
        "synchronize": lambda: None,
    }
    with ExitStack() as stack:
        for name, replacement in replacements.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, replacement))
        stack.enter_context(mock.patch.object(torch.cuda.graphs, "graph_pool_handle", list))
        yield


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """One operator, and the memory of its results; ``made`` are those that are new memory."""

    operator: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    results: Sequence[Any]
    made: Sequence[Tensor]

    def replay(self) -> None:
        if not self.made and not self.operator._schema.is_mutable:
            return  # a view
        results = tree_leaves(self.operator(*self.args, **self.kwargs))
        for result, again in zip(self.results, results, strict=True):
            if any(result is made for made in self.made):
                result.copy_(again)


class Graph:
    """An imitation of ``torch.cuda.CUDAGraph``; ``pool`` has those that share memory with it, in the order of their captures."""

    num_replays = 0
    captured: Graph | None = None  # the one that is being captured

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.pool: list[Graph] = []
        self.is_valid = True

    def __del__(self) -> None:
        if (captured := type(self).captured) is not None:
            captured.is_valid = False

    @torch.no_grad()
    def replay(self) -> None:
        Graph.num_replays += 1
        for later in self.pool[self.pool.index(self) + 1 :]:
            later.forget()
        for call in self.calls:
            call.replay()

    def forget(self) -> None:
        for tensor in (made for call in self.calls for made in call.made if made.is_floating_point()):
            tensor.fill_(torch.nan)


@contextmanager
def _capture(graph: Graph, pool: list[Graph], **_: Any) -> Iterator[None]:
    graph.pool = pool
    pool.append(graph)
    with _Recording(graph.calls), mock.patch.object(Graph, "captured", graph):
        yield
    if not graph.is_valid:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


class _Recording(TorchDispatchMode):
    def __init__(self, calls: list[_Call]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {_memory(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        results = tree_leaves(result)
        made = [leaf for leaf in results if isinstance(leaf, Tensor) and _memory(leaf) not in known]
        self._calls.append(_Call(func, args, kwargs or {}, results, made))
        return result


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
