"""``Work`` handles of ``torch.distributed``: who wants to know that one is waited for, and that it is complete."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist

from instrument.adapters.calls import Call
from instrument.adapters.hooks import Hooks, Watch


class Awaited(Protocol):
    """Call that a ``Work`` carries. ``waiting`` may come several times, ``completed`` or ``failed`` comes once."""

    def waiting(self) -> None: ...

    def completed(self) -> None: ...

    def failed(self) -> None: ...


@dataclass(frozen=True, slots=True)
class CallWait:
    """A call as its handle knows it; ``tell`` takes what happens to it, by name of an observer's method."""

    tell: Callable[[str, Call], None]
    call: Call

    def waiting(self) -> None:
        self.tell("waiting", self.call)

    def completed(self) -> None:
        self.tell("completed", self.call)

    def failed(self) -> None:
        self.tell("failed", self.call)


class Works:
    """The handles that are watched; the script keeps them alive, not we."""

    def __init__(self, hooks: Hooks) -> None:
        self._carried: WeakKeyDictionary[Any, tuple[Awaited, ...]] = WeakKeyDictionary()
        self._lock = threading.Lock()
        hooks.wrap(dist.Work, "wait", self._watch_wait)
        hooks.wrap(dist.Work, "is_completed", self._watch_is_completed)

    def watch(self, work: Any, carried: Sequence[Awaited]) -> None:
        """Tell ``carried`` of the waits for a handle, besides those that it has."""
        with self._lock:
            self._carried[work] = (*self._carried.get(work, ()), *carried)

    def _of(self, work: Any) -> tuple[Awaited, ...]:
        """Calls of a handle that are not complete yet."""
        return self._carried.get(work, ()) if type(work) is dist.Work else ()

    def _take(self, work: Any) -> tuple[Awaited, ...]:
        """The same, and forget it: the handle is complete."""
        with self._lock:
            return self._carried.pop(work, ())

    def _watch_wait(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
        carried = self._of(args[0])
        if not carried:
            return
        for item in carried:
            item.waiting()
        try:
            yield
        except GeneratorExit:
            for item in reversed(self._take(args[0])):
                item.failed()
            raise
        for item in reversed(self._take(args[0])):
            item.completed()

    def _watch_is_completed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
        is_completed = yield
        if is_completed and self._of(args[0]):
            for item in self._take(args[0]):
                item.completed()


def is_work(result: object) -> bool:
    """Return whether a call returned a handle that can be waited for; a coalesced call's stand-in cannot."""
    return type(result) is dist.Work or (isinstance(result, dist.Work) and type(result).__name__ != "_IllegalWork")
