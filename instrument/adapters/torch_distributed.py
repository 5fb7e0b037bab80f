"""Hooks of ``torch.distributed``'s functions: every collective and message that Python code calls, and its ``Work`` handle.

Operators that communicate (functional collectives) are watched by :mod:`instrument.adapters.torch_functional_collectives`. Calls
that C++ makes by itself (DDP's reducer) do not pass here; the profiler's own events tell them, and that there were some,
``unhooked_calls.py``.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from instrument.adapters.calls import SETUP, Call, CallGroup, CallObserver
from instrument.adapters.hooks import Hook, Hooks, Watch
from instrument.adapters.tensor_bytes import num_bytes
from instrument.adapters.unhooked_calls import UnhookedCalls
from instrument.adapters.works import CallWait, Works, is_work
from pptrace.marks import P2P


@dataclass(frozen=True, slots=True)
class _Function:
    """Positions of the arguments of a function: (position, name), position −1 for keyword only.

    ``tensors`` are the arguments whose bytes count, the larger sum of which is the message; ``root`` is (position, name, name of
    the rank within the group).
    """

    kind: str
    tensors: tuple[tuple[int, str], ...]
    group: int
    is_async: int | None = None  # None: never; -2: always
    root: tuple[int, str, str] | None = None


_ALWAYS = -2
_FUNCTIONS = {
    "all_reduce": _Function("all_reduce", ((0, "tensor"),), 2, 3),
    "all_reduce_coalesced": _Function("all_reduce", ((0, "tensors"),), 2, 3),
    "broadcast": _Function("broadcast", ((0, "tensor"),), 2, 3, (1, "src", "group_src")),
    "_broadcast_coalesced": _Function("broadcast", ((1, "tensors"),), 0),
    "reduce": _Function("reduce", ((0, "tensor"),), 3, 4, (1, "dst", "group_dst")),
    "all_gather": _Function("all_gather", ((0, "tensor_list"), (1, "tensor")), 2, 3),
    "all_gather_coalesced": _Function("all_gather", ((0, "output_tensor_lists"), (1, "input_tensor_list")), 2, 3),
    "all_gather_into_tensor": _Function("all_gather", ((0, "output_tensor"), (1, "input_tensor")), 2, 3),
    "all_gather_single": _Function("all_gather", ((0, "output_tensor"), (1, "input_tensor")), 2, 3),
    "_all_gather_base": _Function("all_gather", ((0, "output_tensor"), (1, "input_tensor")), 2, 3),
    "gather": _Function("gather", ((0, "tensor"), (1, "gather_list")), 3, 4, (2, "dst", "group_dst")),
    "scatter": _Function("scatter", ((0, "tensor"), (1, "scatter_list")), 3, 4, (2, "src", "group_src")),
    "reduce_scatter": _Function("reduce_scatter", ((0, "output"), (1, "input_list")), 3, 4),
    "reduce_scatter_tensor": _Function("reduce_scatter", ((0, "output"), (1, "input")), 3, 4),
    "reduce_scatter_single": _Function("reduce_scatter", ((0, "output"), (1, "input")), 3, 4),
    "_reduce_scatter_base": _Function("reduce_scatter", ((0, "output"), (1, "input")), 3, 4),
    "all_to_all_single": _Function("all_to_all", ((0, "output"), (1, "input")), 4, 5),
    "all_to_all": _Function("all_to_all", ((0, "output_tensor_list"), (1, "input_tensor_list")), 2, 3),
    "barrier": _Function("barrier", (), 0, 1),
    "monitored_barrier": _Function("barrier", (), 0),
    "send": _Function("send", ((0, "tensor"),), 2, root=(1, "dst", "group_dst")),
    "recv": _Function("recv", ((0, "tensor"),), 2, root=(1, "src", "group_src")),
    "isend": _Function("send", ((0, "tensor"),), 2, _ALWAYS, (1, "dst", "group_dst")),
    "irecv": _Function("recv", ((0, "tensor"),), 2, _ALWAYS, (1, "src", "group_src")),
}
"""Functions of ``torch/distributed/distributed_c10d.py`` in torch 2.6 to 2.13; a version may lack some."""


@dataclass(slots=True)
class _Local(threading.local):
    """Calls that this thread is inside of."""

    depth: int = 0
    batch: list[Call] | None = None
    batch_number: int = -1
    posts_at_exit: bool = False
    """True if the batch is a coalescing manager's."""
    waits_at_exit: bool = False
    """True if it also waits for them: they are complete when it ends."""
    late: Call | None = None
    """Its last call."""
    counted: tuple[Any, int | None] | None = None
    """Process group of the call that runs, and its count when the call began."""


@dataclass(slots=True)
class _Sequences:
    """Numbers of the calls of each kind that a group has had."""

    collectives: int = 0
    messages: dict[tuple[str, int], int] = field(default_factory=dict)

    def next(self, kind: str, peer: int) -> int:
        if kind not in P2P:
            self.collectives += 1
            return self.collectives - 1
        count = self.messages.get((kind, peer), 0)
        self.messages[kind, peer] = count + 1
        return count


class DistributedCalls:
    """Watches the calls of this process, and tells observers of them.

    ``logs`` also get what is no communication of the script: that process groups are made, and what C++ posts by itself.
    """

    def __init__(
        self, hooks: Hooks, works: Works, observers: Sequence[CallObserver], logs: Sequence[CallObserver] = ()
    ) -> None:
        self._hooks = hooks
        self._works = works
        self._logs = logs
        self._observers = [*logs, *observers]
        self._unhooked = UnhookedCalls(logs)
        self._setups = itertools.count()
        self._batches = itertools.count()
        self._local = _Local()
        self._groups: WeakKeyDictionary[Any, tuple[CallGroup, _Sequences]] = WeakKeyDictionary()
        self.axes: dict[str, str] = {}
        """Axis that an adapter knows, by name of the group."""
        self.dimensions: dict[str, list[str]] = {}
        """Names that meshes have for a group, which may be one of several, by name of the group."""
        self.reducers: set[str] = set()
        """Names of the groups in which C++ reduces gradients."""
        self.groups: dict[str, CallGroup] = {}
        """Groups that were used by name, also those that are gone."""
        for name, function in _FUNCTIONS.items():
            if hasattr(c10d, name) or hasattr(dist, name):
                self._wrap(name, partial(self._watch_function, function))
        self._wrap("batch_isend_irecv", self._watch_batch)
        self._wrap_coalescing_manager()
        if logs:
            self._wrap("init_process_group", self._watch_setup)
            for kind in P2P:
                hooks.wrap(dist.ProcessGroup, kind, partial(self._watch_group_message, kind))
            self._unhooked.start()

    def _wrap(self, name: str, hook: Hook) -> None:
        owner = c10d if hasattr(c10d, name) else dist
        original = getattr(owner, name)
        wrapper = self._hooks.wrap(owner, name, hook)
        self._hooks.replace_everywhere(name, original, wrapper)

    def _wrap_coalescing_manager(self) -> None:
        original = getattr(c10d, "_coalescing_manager", None)
        if original is None:
            return

        @contextmanager
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._local.batch is not None or not self._hooks.active:  # the batch around it settles its calls
                with original(*args, **kwargs) as manager:
                    yield manager
                return
            calls, works = self._begin_batch(), []
            counted = self._begin_count(_argument(args, kwargs, 0, "group"))
            self._local.posts_at_exit = True
            self._local.waits_at_exit = not _argument(args, kwargs, 2, "async_ops")
            try:
                with original(*args, **kwargs) as manager:
                    yield manager
                works = list(manager.works)
            finally:
                self._local.posts_at_exit = self._local.waits_at_exit = False
                self._end_count(counted)
                self._return_late()
                self._end_batch(calls, works)

        self._hooks.replace_everywhere("_coalescing_manager", original, watched)

    def _return_late(self) -> None:
        """A manager that gathers calls posts them when it ends, so the last of them returns only then."""
        late, self._local.late = self._local.late, None
        if late is not None:
            self.tell("returned", late)

    def _begin_count(self, group: Any) -> tuple[Any, int | None] | None:
        """Begin to count what the group posts under a hook; None where this rank is no member of it."""
        group = _member_group(group) if dist.is_initialized() else None
        if group is None:
            return None
        self._group(group)
        return group, self._unhooked.begin(group)

    def _end_count(self, counted: tuple[Any, int | None] | None) -> None:
        if counted is not None:
            self._unhooked.end(*counted)

    def _begin_batch(self) -> list[Call]:
        """Gather the calls of this thread, until they are settled together."""
        if self._local.batch is None:
            self._local.batch = []
            self._local.batch_number = next(self._batches)
        return self._local.batch

    def _end_batch(self, calls: list[Call], works: Sequence[Any]) -> None:
        """A batch has been posted, with these handles."""
        self._local.batch = None
        handles = [work for work in works if is_work(work)]
        if len(handles) == len(calls):
            for call, work in zip(calls, handles, strict=True):
                self._works.watch(work, (CallWait(self.tell, call),))
        elif handles:
            self._works.watch(handles[-1], tuple(CallWait(self.tell, call) for call in calls))
        else:
            for call in calls:
                self.tell("completed", call)

    def _watch_batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
        """``batch_isend_irecv`` calls ``isend`` and ``irecv``; their handles come at its end."""
        calls, works = self._begin_batch(), []
        try:
            result = yield
            works = result if isinstance(result, list) else [result]
        finally:
            self._end_batch(calls, works)

    def watch(self, make: Callable[[], Call | None]) -> Generator[None, Any, tuple[Call | None, Any]]:
        """Watch the call that ``make`` makes, None of a rank that is no member; a call inside another one is part of that.

        Returns:
            The call, or None where nobody or its batch sees to its end, and what it returned.
        """
        local = self._local
        call = None if local.depth or not dist.is_initialized() else make()
        local.depth += 1
        if call is not None:
            self._return_late()
            self.tell("posted", call)
        event = "failed"
        try:
            result = yield
            event = "returned"
        finally:
            local.depth -= 1
            if call is not None:
                self._settle_count()
                if event == "returned" and local.batch is not None:
                    local.batch.append(call)
                if event == "returned" and local.posts_at_exit:
                    local.late = call
                else:
                    self.tell(event, call)
        return (call if local.batch is None else None), result

    def _watch_function(self, function: _Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
        call, result = yield from self.watch(lambda: self._call(function, args, kwargs))
        if call is None:
            return
        if call.kind == "recv" and call.peer < 0 and isinstance(result, int):
            call.peer = result
        if call.is_async and is_work(result):
            self._works.watch(result, (CallWait(self.tell, call),))
        else:
            self.tell("completed", call)

    def look(self) -> None:
        """Report what C++ has posted: the script is over."""
        self._unhooked.look()

    def fail(self) -> None:
        """The script ends with an error, perhaps that of a call which no hook sees."""
        self._unhooked.fail()

    def _watch_setup(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
        """The default process group is made by all ranks together: the first call in which one may be missed."""
        size, of = os.environ.get("WORLD_SIZE", ""), _argument(args, kwargs, 3, "world_size")
        if not size.isdigit() or of not in (None, -1, int(size)):
            return  # of other ranks than those of the run
        group = CallGroup("", tuple(range(int(size))), "", "all ranks")
        call = Call(self._unhooked.next_number(), SETUP, group, -1, 0, next(self._setups))
        self._log("posted", call)
        event = "failed"
        try:
            yield
            event = "completed"
        finally:
            self._log(event, call)

    def _watch_group_message(self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
        """``ProcessGroup.send`` and ``recv``, by which pptrace's runtime posts its messages, and marks them itself.

        The logs alone get to know of them. Without that a hang would have them as collectives that C++ posted.
        """
        is_inside = self._local.depth or self._local.batch is not None
        if is_inside or kwargs or len(args) != 4 or not dist.is_initialized():
            return
        group, tensors, peer, tag = args
        peer = self._group(group)[0].ranks[peer]
        call = self.new_call(kind, group, peer, num_bytes(tensors), is_async=True, tag=tag)
        self._log("posted", call)
        event, work = "failed", None
        try:
            work = yield
            event = "returned"
        finally:
            self._settle_count()
            self._log(event, call)
        if is_work(work):
            self._works.watch(work, (CallWait(self._log, call),))

    def _log(self, event: str, call: Call) -> None:
        for log in self._logs:
            getattr(log, event)(call)

    def _call(self, function: _Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        group = _member_group(_argument(args, kwargs, function.group, "group"))
        if group is None:
            return None
        peer = self._peer(function, args, kwargs, self._group(group)[0])
        is_async = function.is_async == _ALWAYS or bool(
            function.is_async is not None and _argument(args, kwargs, function.is_async, "async_op")
        )
        size = max((num_bytes(_argument(args, kwargs, *tensor)) for tensor in function.tensors), default=0)
        return self.new_call(function.kind, group, peer, size, is_async=is_async, tag=_tag(function, args, kwargs))

    def new_call(self, kind: str, group: Any, peer: int, size: int, *, is_async: bool, tag: int = 0) -> Call:
        """A call of a process group that is about to be made; ``peer`` and ``size`` as in :class:`Call`."""
        known, sequences = self._group(group)
        self._local.counted = self._begin_count(group)
        batch = self._local.batch
        return Call(
            self._unhooked.next_number(),
            kind,
            known,
            peer,
            size,
            sequences.next(kind, peer),
            -1 if batch is None else self._local.batch_number,
            is_async or (batch is not None and not self._local.waits_at_exit),
            tag,
        )

    def _settle_count(self) -> None:
        counted, self._local.counted = self._local.counted, None
        self._end_count(counted)

    def name_axis(self, group: Any, axis: str) -> None:
        """Say which axis of the mesh a process group is; a mesh's own name for it, where there is one, says more."""
        self.axes.setdefault(self._group(group)[0].name, axis)

    def name_dimension(self, group: Any, dimension: str) -> None:
        """Say which dimension of a mesh a process group is; another mesh may have the same one by another name."""
        names = self.dimensions.setdefault(self._group(group)[0].name, [])
        if dimension not in names:
            names.append(dimension)

    def note_reducer(self, group: Any) -> None:
        """Say that C++ reduces gradients in a process group: calls that do not pass here."""
        self.reducers.add(self._group(group)[0].name)

    def _group(self, group: Any) -> tuple[CallGroup, _Sequences]:
        known = self._groups.get(group)
        if known is None:
            name = str(group.group_name)
            description = str(getattr(group, "group_desc", ""))
            ranks = tuple(dist.get_process_group_ranks(group))
            own = CallGroup(name, ranks, str(dist.get_backend(group)), description, self.axes.get(name, ""))
            known = self._groups[group] = (own, _Sequences())
            self.groups[name] = own
            self._unhooked.add(group, own)
        return known

    def _peer(self, function: _Function, args: tuple[Any, ...], kwargs: dict[str, Any], group: CallGroup) -> int:
        if function.root is None:
            return -1
        position, name, local_name = function.root
        local = kwargs.get(local_name)
        if isinstance(local, int) and local < len(group.ranks):
            return group.ranks[local]
        peer = _argument(args, kwargs, position, name)
        if peer is None:
            return -1 if function.kind == "recv" else 0
        return int(peer)

    def tell(self, event: str, call: Call) -> None:
        """Tell the observers of an event, by name of their method; one that raises is taken out."""
        for observer in tuple(self._observers):
            try:
                getattr(observer, event)(call)
            except Exception as err:
                self._observers.remove(observer)
                self._hooks.say(f"{type(observer).__name__} raised {type(err).__name__}: {err}; it is taken out")


def _member_group(group: Any) -> Any | None:
    """The process group that an argument names; None where this rank is no member of it."""
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    return c10d._get_default_group() if group is None else group


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str) -> Any:
    return args[position] if 0 <= position < len(args) else kwargs.get(name)


def _tag(function: _Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    tag = _argument(args, kwargs, 3, "tag") if function.kind in P2P else 0
    return tag if isinstance(tag, int) else 0
