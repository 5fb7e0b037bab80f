"""Collectives that C++ posts by itself: those of DDP's reducer, and of code that was compiled to C++.

No hook of Python sees them, but each process group counts what is posted in it. What it has counted more than the calls that
hooks saw, C++ has posted. The last of them is reported to the observers as a call of kind :data:`UNHOOKED`, in a group of its own
numbering, so that who waits for whom can be known: a rank that is not there has posted fewer than the others.
"""

from __future__ import annotations

import atexit
import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from instrument.adapters.calls import UNHOOKED, Call, CallGroup, CallObserver

_EVERY_S = 0.25


@dataclass(slots=True)
class _Count:
    """A group's calls. ``seen`` is how many of those that it counted were made through hooks."""

    group: CallGroup
    hooked: int = 0
    unhooked: int = 0
    num_running: int = 0
    """Calls through hooks that have begun and not returned: what the group counts meanwhile may be theirs."""
    latest: Call | None = None


class UnhookedCalls:
    """Counts, in every group that is known here, the collectives that no hook sees, and tells ``observers`` of them."""

    def __init__(self, observers: Sequence[CallObserver]) -> None:
        self._observers = observers
        self._numbers = itertools.count()
        self._latest = -1
        self._counts: WeakKeyDictionary[Any, _Count] = WeakKeyDictionary()
        self._lock = threading.Lock()
        self._used = False
        """True if there was any."""
        self._stopped = threading.Event()

    def start(self) -> None:
        """Look every now and then: a rank that waits inside C++ makes no other call."""
        thread = threading.Thread(target=self._watch, name="pptrace-unhooked-calls", daemon=True)
        thread.start()
        atexit.register(self._stop, thread)  # a thread that is inside C++ when Python ends takes the process down

    def next_number(self) -> int:
        """The number of a new call of this process."""
        self._latest = next(self._numbers)
        return self._latest

    def add(self, group: Any, known: CallGroup) -> None:
        """A process group has become known."""
        with self._lock:
            named = CallGroup(f"{known.name} {UNHOOKED}", known.ranks, known.backend, known.description, known.axis)
            self._counts[group] = _Count(named)

    def begin(self, group: Any) -> int | None:
        """A call through a hook begins; what :meth:`end` needs to know."""
        if self._used:
            self.look()
        with self._lock:
            count = self._counts[group]
            self._look_at(group, count)
            count.num_running += 1
            posted = _num_posted(group)
            return None if posted is None else posted - count.hooked

    def end(self, group: Any, unhooked: int | None) -> None:
        """End the call that has returned: all that the group has counted since belongs to it."""
        with self._lock:
            count = self._counts[group]
            count.num_running -= 1
            posted = _num_posted(group) if unhooked is not None else None
            if posted is not None and unhooked is not None:
                count.hooked = max(count.hooked, posted - unhooked)

    def look(self) -> None:
        """Tell of the calls that were not seen, of each group the last."""
        with self._lock:
            for group, count in list(self._counts.items()):
                self._look_at(group, count)

    def fail(self) -> None:
        """The script ends with an error: where the last call was one that no hook sees, it may be what has failed."""
        self.look()
        with self._lock:
            for call in [count.latest for count in self._counts.values()]:
                if call is not None and call.number == self._latest:
                    for observer in self._observers:
                        observer.failed(call)

    def _look_at(self, group: Any, count: _Count) -> None:
        posted = None if count.num_running else _num_posted(group)
        if posted is not None and posted - count.hooked > count.unhooked:
            count.unhooked = posted - count.hooked
            self._tell(count)

    def _tell(self, count: _Count) -> None:
        """Report several in a row as one call with a growing number, so that the order of calls does not depend on when we
        look.
        """
        self._used = True
        continues = count.latest is not None and count.latest.number == self._latest
        number = self._latest if continues else self.next_number()
        count.latest = Call(number, UNHOOKED, count.group, -1, -1, count.unhooked - 1, is_async=True)
        for observer in self._observers:
            observer.posted(count.latest)

    def _watch(self) -> None:
        while not self._stopped.wait(_EVERY_S):
            self.look()

    def _stop(self, thread: threading.Thread) -> None:
        self._stopped.set()
        thread.join(_EVERY_S)


def _num_posted(group: Any) -> int | None:
    """Number of calls that a group has counted on this rank; None where its backend does not count."""
    try:
        return int(group._get_sequence_number_for_group())
    except (RuntimeError, AttributeError, NotImplementedError):
        return None
