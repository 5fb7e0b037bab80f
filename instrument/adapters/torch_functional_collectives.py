"""Hooks of functional collectives: those of DTensor, of ``torch.distributed._functional_collectives`` and of compiled code.

Whoever issues one from Python calls an operator of ``torch.ops._c10d_functional`` (public functions, their backwards, DTensor's
redistribution, the code that Inductor writes), so the operators are what is watched. Their result is complete when somebody
calls ``wait_tensor`` with it: an operator's result is known again by its storage, as torch knows it.

What is no communication stays unseen: tracing with fake tensors or proxies, and a tensor subclass on its way to the tensors
that it wraps. What C++ calls without Python in between is in the trace alone, and counted by ``unhooked_calls.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d
from torch.jit import _builtins
from torch.multiprocessing.reductions import StorageWeakRef

from instrument.adapters.calls import Call
from instrument.adapters.hooks import Hooks, Watch
from instrument.adapters.tensor_bytes import num_bytes
from instrument.adapters.torch_distributed import DistributedCalls
from instrument.adapters.works import CallWait

MODULE = "torch.distributed._functional_collectives"
"""The module whose import completes the operators."""
_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd")
_KINDS = {
    "broadcast": "broadcast",
    "all_reduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "isend": "send",
    "irecv": "recv",
}
"""Kind of each operator, without the ``_`` or ``_out`` of its variants, of torch 2.6 to 2.13; a version may lack some."""
_FIRST_LIMIT = 256

Arguments = Mapping[str, Any]


class FunctionalCalls:
    """Watches the operators, and tells :class:`DistributedCalls` of each call."""

    def __init__(self, hooks: Hooks, calls: DistributedCalls) -> None:
        self._hooks = hooks
        self._calls = calls
        self._results = _Results()
        self._wrap(torch.ops._c10d_functional.wait_tensor, self._watch_wait)
        for namespace in _NAMESPACES:
            for base, kind in _KINDS.items():
                for name in (base, f"{base}_", f"{base}_out"):
                    packet = getattr(getattr(torch.ops, namespace), name, None)
                    if packet is not None:
                        self._wrap(packet, partial(self._watch_collective, kind, True))
        exchange = getattr(torch.ops._dtensor, "shard_dim_alltoall", None)
        if exchange is not None:
            self._wrap(exchange, partial(self._watch_collective, "all_to_all", False))

    def _wrap(self, packet: Any, watch: Callable[[Arguments], Watch]) -> None:
        """Watch an operator, whether it is called as such or by its only overload's name; ``watch`` gets named arguments."""
        names = [argument.name for argument in packet.default._schema.arguments]

        def hook(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
            return watch({**dict(zip(names, args, strict=False)), **kwargs})

        for owner in (packet, packet.default):
            original = owner._op
            watched = _Operator(original, self._hooks.watched(original, hook))
            self._hooks.replace(owner, "_op", watched)
            if name := _builtins._find_builtin(original):  # type: ignore[no-untyped-call]
                _builtins._register_builtin(watched, name)  # TorchScript knows it by id

    def _watch_wait(self, values: Arguments) -> Watch:
        (tensor,) = values.values()
        pending = self._results.of(tensor) if _are_real((tensor,)) else None
        if pending is None:
            return
        pending.wait.waiting()
        end = pending.fail
        try:
            yield
            end = pending.complete
        finally:
            self._results.remove(tensor)
            end()

    def _watch_collective(self, kind: str, is_async: bool, values: Arguments) -> Watch:
        if not _are_real(list(_tensors(values))):
            return
        call, result = yield from self._calls.watch(lambda: self._call(kind, is_async, values))
        if call is None:
            return
        tensors = result if isinstance(result, list | tuple) else (result,)
        if is_async and _are_real(tensors):
            self._results.add(tensors, CallWait(self._calls.tell, call))
        else:
            self._calls.tell("completed", call)

    def _call(self, kind: str, is_async: bool, values: Arguments) -> Call:
        group = values["group_name"]
        if isinstance(group, str):
            group = c10d._resolve_process_group(group)  # type: ignore[arg-type]
        peer = next((int(values[name]) for name in ("src", "dst") if name in values), -1)
        if kind == "broadcast":
            peer = torch.distributed.get_global_rank(group, peer)
        size = _message_bytes(kind, values)
        return self._calls.new_call(kind, group, peer, size, is_async=is_async, tag=values.get("tag", 0))


class _Operator:
    """Wrapper that an operator calls: its hash stays that of the original, since tables of torch are keyed by it."""

    __slots__ = ("__weakref__", "_observed", "original")

    def __init__(self, original: Callable[..., Any], observed: Callable[..., Any]) -> None:
        self.original = original
        self._observed = observed

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._observed(*args, **kwargs)

    def __hash__(self) -> int:
        return hash(self.original)

    def __eq__(self, other: object) -> bool:
        return self is other or self.original is other

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


@dataclass(slots=True, eq=False)
class _Pending:
    """A call whose results are waited for, any of them: they have one work."""

    wait: CallWait
    is_complete: bool = False

    def complete(self) -> None:
        if not self.is_complete:
            self.is_complete = True
            self.wait.completed()

    def fail(self) -> None:
        if not self.is_complete:
            self.is_complete = True
            self.wait.failed()


class _Results:
    """Calls by the storage of their results. What was freed unseen is complete: only C++ can have waited for it."""

    def __init__(self) -> None:
        self._pending: dict[int, tuple[StorageWeakRef, _Pending]] = {}
        self._limit = _FIRST_LIMIT

    def add(self, tensors: Sequence[torch.Tensor], wait: CallWait) -> None:
        pending = _Pending(wait)
        for tensor in tensors:
            # While it is kept, no other storage gets the address.
            reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            earlier = self._pending.pop(reference.cdata, None)
            if earlier is not None:
                earlier[1].complete()
            self._pending[reference.cdata] = (reference, pending)
        if len(self._pending) > self._limit:
            for key, (reference, gone) in list(self._pending.items()):
                if reference.expired():  # type: ignore[no-untyped-call]
                    del self._pending[key]
                    gone.complete()
            self._limit = max(_FIRST_LIMIT, 2 * len(self._pending))

    def of(self, tensor: torch.Tensor) -> _Pending | None:
        known = self._pending.get(tensor.untyped_storage()._cdata)
        return None if known is None or known[1].is_complete else known[1]

    def remove(self, tensor: torch.Tensor) -> None:
        self._pending.pop(tensor.untyped_storage()._cdata, None)


def _tensors(values: Arguments) -> Iterator[torch.Tensor]:
    for value in values.values():
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (item for item in value if isinstance(item, torch.Tensor))


_TRACING = tuple(
    key
    for name in ("FAKE", "PROXY", "FUNCTIONAL")
    if (key := getattr(torch._C._TorchDispatchModeKey, name, None)) is not None
)


def _are_real(tensors: Sequence[Any]) -> bool:
    """Return whether an operator that gets these tensors communicates: none is fake, wraps another or is of a transform."""
    return bool(tensors) and all(map(_is_real, tensors)) and not any(map(torch._C._get_dispatch_mode, _TRACING))


def _is_real(tensor: Any) -> bool:
    return (
        isinstance(tensor, torch.Tensor)
        and type(tensor).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and not torch._is_functional_tensor(tensor)
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def _message_bytes(kind: str, values: Arguments) -> int:
    """The larger of input and output."""
    given = next(values[name] for name in ("input", "inputs", "tensor") if name in values)
    size: int = num_bytes(given)
    if kind == "all_gather":
        return size * int(values["group_size"])
    if (splits := values.get("output_split_sizes")) and given.ndim:
        out: int = sum(map(int, splits)) * math.prod(given.shape[1:]) * given.element_size()
        return max(size, out)
    return size
