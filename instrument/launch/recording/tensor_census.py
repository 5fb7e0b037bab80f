"""The tensors that are alive in this process: what each is, and of which stage and operator.

Python knows those that a program holds. Those that only autograd holds are found in its graph, from every tensor with a history
and every edge that a pipeline runtime keeps for a backward.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

_MOST_NODES = 200_000


class What(StrEnum):
    PARAMETER = "parameter"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer state"
    ACTIVATION = "activation"  # held for a backward
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """One storage. ``op`` is autograd's name of the operator that saved or made it; None where unknown."""

    what: What
    shape: tuple[int, ...]
    dtype: str
    device: str
    bytes: int
    op: str | None = None
    stage: int | None = None
    microbatch: int | None = None


@dataclass(frozen=True, slots=True)
class _Root:
    """Nodes at which a search of autograd's graph begins."""

    node: Node
    stage: int | None = None
    microbatch: int | None = None


class Census:
    """Counts each storage once, as the first of the kinds that it is."""

    def __init__(self) -> None:
        self._found: dict[int, LiveTensor] = {}

    @property
    def tensors(self) -> list[LiveTensor]:
        """Largest first."""
        return sorted(self._found.values(), key=lambda tensor: -tensor.bytes)

    def add(self, value: object, what: What, op: str | None = None, root: _Root | None = None) -> None:
        """Count a tensor; nothing where it has no storage, or one that is counted."""
        if not _is_tensor(value):
            return
        tensor: Any = value
        try:
            tensor = tensor.to_local() if hasattr(type(tensor), "to_local") else tensor
            storage = tensor.untyped_storage()
            key, num_bytes = storage._cdata, storage.nbytes()
        except (RuntimeError, NotImplementedError, AttributeError):  # sparse, meta or fake: no bytes here
            return
        if num_bytes == 0 or key in self._found or tensor.device.type == "meta":
            return
        stage, microbatch = (None, None) if root is None else (root.stage, root.microbatch)
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._found[key] = LiveTensor(
            what, tuple(tensor.shape), dtype, str(tensor.device), num_bytes, op, stage, microbatch
        )


def count_live_tensors() -> list[LiveTensor]:
    """All live tensors, one entry per storage, largest first."""
    objects = gc.get_objects()
    census = Census()
    tensors = [value for value in objects if _is_tensor(value)]
    parameters = [tensor for tensor in tensors if issubclass(type(tensor), torch.nn.Parameter)]
    states = list(_optimizer_states(objects))
    for parameter in parameters:
        census.add(parameter, What.PARAMETER)
    for tensor in tensors:
        if tensor.is_leaf and tensor.grad is not None:
            census.add(tensor.grad, What.GRADIENT)
    for state in states:
        census.add(state, What.OPTIMIZER_STATE)
    roots = [*_pipeline_roots(objects), *(_Root(node) for tensor in tensors if (node := tensor.grad_fn) is not None)]
    _add_saved(census, roots)
    for tensor in tensors:
        node = tensor.grad_fn
        census.add(tensor, What.ACTIVATION if node is not None else What.OTHER, None if node is None else node.name())
    return census.tensors


def _is_tensor(value: object) -> bool:
    return issubclass(type(value), Tensor)  # not isinstance: it may run a property of a proxy


def _loaded(module: str, name: str) -> type[Any]:
    """A class of a module that the script has imported; one without instances where it has not."""
    return getattr(sys.modules.get(module), name, _Absent)


class _Absent:
    """Stands for a class that is not there."""


def _optimizer_states(objects: list[Any]) -> Iterator[Tensor]:
    own = _loaded("instrument.optim.adamw", "AdamW")
    for value in objects:
        kind = type(value)
        if issubclass(kind, torch.optim.Optimizer):
            for state in value.state.values():
                yield from (part for part in state.values() if _is_tensor(part)) if isinstance(state, dict) else ()
        elif issubclass(kind, own):
            yield from value.moments


def _pipeline_roots(objects: list[Any]) -> Iterator[_Root]:
    """The graphs that pipeline runtimes keep for their backwards, each with its stage and microbatch."""
    own = _loaded("instrument.pipeline.microbatch_buffers", "MicrobatchBuffers")
    of_torch = _loaded("torch.distributed.pipelining.stage", "_PipelineStageBase")
    for value in objects:
        if issubclass(type(value), own):
            yield from (_Root(node, cell.stage, cell.microbatch) for cell, node in value.graphs())
        elif issubclass(type(value), of_torch):
            for microbatch, (outputs, _) in list(value.fwd_cache.items()):
                for output in outputs if isinstance(outputs, tuple | list) else (outputs,):
                    if _is_tensor(output) and output.grad_fn is not None:
                        yield _Root(output.grad_fn, value.stage_index, microbatch)


def _add_saved(census: Census, roots: list[_Root]) -> None:
    """Count what the nodes of these graphs have saved; a node belongs to the first root that leads to it."""
    seen: set[Node] = set()
    for root in roots:
        waiting = [root.node]
        while waiting and len(seen) < _MOST_NODES:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            for saved in _saved_by(node):
                census.add(saved, What.ACTIVATION, node.name(), root)
            waiting += [following for following, _ in node.next_functions if following is not None]


def _saved_by(node: Node) -> Iterator[object]:
    """Tensors that a node has saved, not unpacked: where hooks packed them (checkpoints) that would compute them again."""
    for name in dir(node):
        if not name.startswith("_raw_saved_"):
            continue
        try:
            saved = getattr(node, name)
            for part in saved if isinstance(saved, tuple | list) else (saved,):
                yield getattr(part, "data", None)
        except (RuntimeError, AttributeError):  # freed: its backward has run
            continue
