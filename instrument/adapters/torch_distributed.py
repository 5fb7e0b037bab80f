"""Hooks of ``torch.distributed``'s functions: every collective and message that Python code calls, and its ``Work`` handle.

Operators that communicate (functional collectives) are watched by :mod:`instrument.adapters.torch_functional_collectives`. Calls
that C++ makes by itself (DDP's reducer) do not pass here; the profiler's own events tell them, and that there were some,
``unhooked_calls.py``.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from instrument.adapters.calls import SETUP, Call, CallGroup, CallObserver
from instrument.adapters.group_messages import GroupMessageHook
from instrument.adapters.hooks import Hook, Hooks
from instrument.adapters.tensor_bytes import num_bytes
from instrument.adapters.unhooked_calls import UnhookedCalls
from instrument.adapters.works import Awaited, Works, is_work
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
        self._observers = [*logs, *observers]
        self._unhooked = UnhookedCalls(logs)
        self._setups = itertools.count()
        self._batches = itertools.count()
        self._local = _Local()
        self._groups: WeakKeyDictionary[Any, tuple[CallGroup, _Sequences]] = WeakKeyDictionary()
        self.axes: dict[str, str] = {}
        """Axis that an adapter knows, by name of the group."""
        self.descriptions: dict[str, str] = {}
        """Description of a group that an adapter gives instead of the group's, by name of the group."""
        self.reducers: set[str] = set()
        """Names of the groups in which C++ reduces gradients."""
        self.groups: dict[str, CallGroup] = {}
        """Groups that were used by name, also those that are gone."""
        for name, function in _FUNCTIONS.items():
            if hasattr(c10d, name) or hasattr(dist, name):
                self._wrap(name, _CallHook(self, function))
        self._wrap("batch_isend_irecv", _BatchHook(self))
        self._wrap_coalescing_manager()
        if logs:
            self._wrap("init_process_group", _SetupHook(self, logs))
            for kind in P2P:
                hooks.wrap(dist.ProcessGroup, kind, GroupMessageHook(self, works, logs, kind))
            self._unhooked.start()

    def _wrap(self, name: str, hook: Hook) -> None:
        owner = c10d if hasattr(c10d, name) else dist
        original = getattr(owner, name)
        wrapper = self._hooks.wrap(owner, name, hook)
        self._hooks.replace_everywhere(name, original, wrapper, "torch")

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
            calls, works = self.begin_batch(), []
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
                self.end_batch(calls, works)

        self._hooks.replace_everywhere("_coalescing_manager", original, watched, "torch")

    def _return_late(self) -> None:
        """A manager that gathers calls posts them when it ends, so the last of them returns only then."""
        late, self._local.late = self._local.late, None
        if late is not None:
            self._tell("returned", late)

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

    def begin_batch(self) -> list[Call]:
        """Gather the calls of this thread, until they are settled together."""
        if self._local.batch is None:
            self._local.batch = []
            self._local.batch_number = next(self._batches)
        return self._local.batch

    def end_batch(self, calls: list[Call], works: Sequence[Any]) -> None:
        """A batch has been posted, with these handles."""
        self._local.batch = None
        self._settle_batch(calls, works)

    def _settle_batch(self, calls: list[Call], works: Sequence[Any]) -> None:
        handles = [work for work in works if is_work(work)]
        if len(handles) == len(calls):
            for call, work in zip(calls, handles, strict=True):
                self._works.watch(work, (_CallWait(self, call),))
        elif handles:
            self._works.watch(handles[-1], tuple(_CallWait(self, call) for call in calls))
        else:
            for call in calls:
                self._tell("completed", call)

    def begin(self, function: _Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """The call that a function is about to make; None inside another call, and for a rank that is no member."""
        return self.enter(lambda: self._call(function, args, kwargs))

    def enter(self, make: Callable[[], Call | None]) -> Call | None:
        """The same for whatever ``make`` makes of it; :meth:`leave` or :meth:`abort` follows."""
        local = self._local
        if local.depth:
            local.depth += 1
            return None
        call = make() if dist.is_initialized() else None
        local.depth = 1
        if call is not None:
            self._return_late()
            self._tell("posted", call)
        return call

    def look(self) -> None:
        """Report what C++ has posted: the script is over."""
        self._unhooked.look()

    def fail(self) -> None:
        """The script ends with an error, perhaps that of a call which no hook sees."""
        self._unhooked.fail()

    def begin_setup(self, world_size: int) -> Call:
        """The ranks are about to make the default process group."""
        group = CallGroup("", tuple(range(world_size)), "", "all ranks")
        return Call(self._unhooked.next_number(), SETUP, group, -1, 0, next(self._setups))

    def begin_group_message(self, kind: str, group: Any, peer: int, size: int, tag: int) -> Call | None:
        """The message that a method of a group is about to post; None inside a function that is watched."""
        if self._local.depth or self._local.batch is not None or not dist.is_initialized():
            return None
        ranks = self._group(group)[0].ranks
        return self.new_call(kind, group, ranks[peer], size, is_async=True, tag=tag)

    def end_group_message(self) -> None:
        """The method has returned, or raised."""
        self._settle_count()

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

    def end(self, call: Call | None, result: Any) -> None:
        """The function has returned."""
        if not self.leave(call):
            return
        assert call is not None
        if call.kind == "recv" and call.peer < 0 and isinstance(result, int):
            call.peer = result
        if call.is_async and is_work(result):
            self._works.watch(result, (self.awaited(call),))
        else:
            self.complete(call)

    def leave(self, call: Call | None) -> bool:
        """End a call that has returned; True if its end is still to be seen to: nobody else, such as a batch, does that."""
        self._local.depth -= 1
        if call is None:
            return False
        self._settle_count()
        if self._local.batch is not None:
            self._local.batch.append(call)
            if self._local.posts_at_exit:
                self._local.late = call
                return False
        self._tell("returned", call)
        return self._local.batch is None

    def awaited(self, call: Call) -> Awaited:
        """A call as its handle knows it."""
        return _CallWait(self, call)

    def abort(self, call: Call | None) -> None:
        """The function raised."""
        self._local.depth -= 1
        if call is not None:
            self._settle_count()
            self._tell("failed", call)

    def _settle_count(self) -> None:
        counted, self._local.counted = self._local.counted, None
        self._end_count(counted)

    def name_axis(self, group: Any, axis: str) -> None:
        """Say which axis of the mesh a process group is; a mesh's own name for it, where there is one, says more."""
        self.axes.setdefault(self._group(group)[0].name, axis)

    def describe(self, group: Any, description: str) -> None:
        """Say what a process group is, in the words that its maker would use."""
        self.descriptions[self._group(group)[0].name] = description

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

    def _tell(self, event: str, call: Call) -> None:
        for observer in tuple(self._observers):
            try:
                getattr(observer, event)(call)
            except Exception as err:
                self._observers.remove(observer)
                self._hooks.say(f"{type(observer).__name__} raised {type(err).__name__}: {err}; it is taken out")

    def wait(self, call: Call) -> None:
        self._tell("waiting", call)

    def complete(self, call: Call) -> None:
        self._tell("completed", call)

    def fail_call(self, call: Call) -> None:
        self._tell("failed", call)


@dataclass(frozen=True, slots=True)
class _CallWait:
    """A call as its handle knows it."""

    calls: DistributedCalls
    call: Call

    def waiting(self) -> None:
        self.calls.wait(self.call)

    def completed(self) -> None:
        self.calls.complete(self.call)

    def failed(self) -> None:
        self.calls.fail_call(self.call)


class _CallHook(Hook):
    def __init__(self, calls: DistributedCalls, function: _Function) -> None:
        self._calls = calls
        self._function = function

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        return self._calls.begin(self._function, args, kwargs)

    def after(self, token: Call | None, result: Any) -> None:
        self._calls.end(token, result)

    def failed(self, token: Call | None) -> None:
        self._calls.abort(token)


class _SetupHook(Hook):
    """The default process group is made by all ranks together: the first call in which one may be missed."""

    def __init__(self, calls: DistributedCalls, logs: Sequence[CallObserver]) -> None:
        self._calls = calls
        self._logs = logs

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        size, of = os.environ.get("WORLD_SIZE", ""), _argument(args, kwargs, 3, "world_size")
        if not size.isdigit() or of not in (None, -1, int(size)):
            return None  # of other ranks than those of the run
        call = self._calls.begin_setup(int(size))
        for log in self._logs:
            log.posted(call)
        return call

    def after(self, token: Call | None, result: Any) -> None:
        if token is not None:
            for log in self._logs:
                log.completed(token)

    def failed(self, token: Call | None) -> None:
        if token is not None:
            for log in self._logs:
                log.failed(token)


class _BatchHook(Hook):
    """``batch_isend_irecv`` calls ``isend`` and ``irecv``; their handles come at its end."""

    def __init__(self, calls: DistributedCalls) -> None:
        self._calls = calls

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Call]:
        return self._calls.begin_batch()

    def after(self, token: list[Call], result: Any) -> None:
        self._calls.end_batch(token, result if isinstance(result, list) else [result])

    def failed(self, token: list[Call]) -> None:
        self._calls.end_batch(token, ())


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
