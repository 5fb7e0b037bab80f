"""Captures and replays of CUDA graphs: what a script does while a graph is captured runs only when the graph is replayed.

A graph in which an optimizer stepped makes that step in each of its replays, in which no Python runs that could tell. Graphs of
layers or of a forward and a backward hold no such step: the optimizer that follows them tells the steps, as ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch


class GraphReplays:
    """Watches all CUDA graphs of the process until :meth:`detach`.

    Args:
        before, after: called around each replay of a graph in which an optimizer stepped, with the graph.
    """

    def __init__(self, before: Callable[[object], None], after: Callable[[object], None]) -> None:
        self._before = before
        self._after = after
        self._captured: list[object] = []
        self._updating: WeakSet[object] = WeakSet()
        self.has_new = False
        """True from the end of a capture in which an optimizer stepped, until who is called before a replay sets it back."""
        self.num_replays = 0
        """Replays of graphs in which no optimizer stepped."""
        self._class: Any = getattr(torch.cuda, "CUDAGraph", None)
        self._originals: dict[str, Any] = {}
        watches = {"capture_begin": self._watch_begin, "capture_end": self._watch_end, "replay": self._watch_replay}
        if all(callable(getattr(self._class, name, None)) for name in watches):
            for name, watch in watches.items():
                self._originals[name] = getattr(self._class, name)
                setattr(self._class, name, watch(self._originals[name]))

    def detach(self) -> None:
        """Stop watching."""
        for name, original in self._originals.items():
            setattr(self._class, name, original)
        self._originals = {}
        self._captured = []

    @property
    def capturing(self) -> bool:
        """Return whether what runs now is captured: it takes no time of a step, and nothing may wait for the device in it."""
        return bool(self._captured)

    def note_update(self) -> None:
        """Note that an optimizer steps in the graph that is captured now."""
        if self._captured:
            self._updating.add(self._captured[-1])

    def _watch_begin(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def capture_begin(graph: object, *args: Any, **kwargs: Any) -> Any:
            result = original(graph, *args, **kwargs)
            if self._originals:
                self._updating.discard(graph)
                self._captured.append(graph)
            return result

        return capture_begin

    def _watch_end(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def capture_end(graph: object, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(graph, *args, **kwargs)
            finally:
                self._captured = [other for other in self._captured if other is not graph]
                self.has_new |= graph in self._updating

        return capture_end

    def _watch_replay(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replay(graph: object, *args: Any, **kwargs: Any) -> Any:
            if not self._originals or graph not in self._updating:
                self.num_replays += 1
                return original(graph, *args, **kwargs)
            self._before(graph)
            result = original(graph, *args, **kwargs)
            self._after(graph)
            return result

        return replay
