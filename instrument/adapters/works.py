"""``Work`` handles of ``torch.distributed``: who wants to know that one is waited for, and that it is complete."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist

from instrument.adapters.hooks import Hook, Hooks


class Awaited(Protocol):
    """Call that a ``Work`` carries. ``waiting`` may come several times, ``completed`` or ``failed`` comes once."""

    def waiting(self) -> None: ...

    def completed(self) -> None: ...

    def failed(self) -> None: ...


class Works:
    """The handles that are watched; the script keeps them alive, not we."""

    def __init__(self, hooks: Hooks) -> None:
        self._carried: WeakKeyDictionary[Any, tuple[Awaited, ...]] = WeakKeyDictionary()
        self._lock = threading.Lock()
        hooks.wrap(dist.Work, "wait", _Wait(self))
        hooks.wrap(dist.Work, "is_completed", _IsCompleted(self))

    def watch(self, work: Any, carried: Sequence[Awaited]) -> None:
        """Tell ``carried`` of the waits for a handle, besides those that it has."""
        with self._lock:
            self._carried[work] = (*self._carried.get(work, ()), *carried)

    def of(self, work: Any) -> tuple[Awaited, ...]:
        """Calls of a handle that are not complete yet."""
        return self._carried.get(work, ()) if type(work) is dist.Work else ()

    def take(self, work: Any) -> tuple[Awaited, ...]:
        """The same, and forget it: the handle is complete."""
        with self._lock:
            return self._carried.pop(work, ())


def is_work(result: object) -> bool:
    """Return whether a call returned a handle that can be waited for; a coalesced call's stand-in cannot."""
    return type(result) is dist.Work or (isinstance(result, dist.Work) and type(result).__name__ != "_IllegalWork")


class _Wait(Hook):
    def __init__(self, works: Works) -> None:
        self._works = works

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        carried = self._works.of(args[0])
        for item in carried:
            item.waiting()
        return args[0] if carried else None

    def after(self, token: Any, result: Any) -> None:
        if token is not None:
            for item in reversed(self._works.take(token)):
                item.completed()

    def failed(self, token: Any) -> None:
        if token is not None:
            for item in reversed(self._works.take(token)):
                item.failed()


class _IsCompleted(Hook):
    def __init__(self, works: Works) -> None:
        self._works = works

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[0]

    def after(self, token: Any, result: Any) -> None:
        if result and self._works.of(token):
            for item in self._works.take(token):
                item.completed()
