"""Step boundaries of a script without any optimizer of torch's: taken from its backward passes.

Gradients accumulate over the backward passes of one step; between two steps the script changes its parameters, or takes
their gradients away. So a step ends where a backward pass is followed by such a change, seen when the next forward of a
module begins, or else the next backward pass.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import ref

import torch

_MOST_WATCHED = 4
_MOST_NODES = 20_000


class TrainedTensors:
    """A few of the tensors that a script trains, and what they were like when it was last asked."""

    def __init__(self) -> None:
        self._watched: list[ref[torch.Tensor]] = []
        self._before: list[object] = []

    def look(self, roots: Iterable[Any]) -> None:
        """Remember how they are now, after a backward pass from ``roots``."""
        if not self._watched:
            self._watched = [ref(leaf) for leaf in itertools.islice(_leaves(roots), _MOST_WATCHED)]
        self._before = self._state()

    def have_changed(self) -> bool:
        """Whether the script has changed one of them, or its gradient, since."""
        return self._state() != self._before

    def _state(self) -> list[object]:
        return [None if (tensor := item()) is None else _state_of(tensor) for item in self._watched]


def _state_of(tensor: torch.Tensor) -> tuple[int, ...]:
    grad = tensor.grad
    return (tensor._version,) if grad is None else (tensor._version, grad._version, grad.data_ptr())


def _leaves(roots: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The leaves of a graph, those that are parameters of a module first."""
    others: list[torch.Tensor] = []
    queue = deque(root.grad_fn for root in roots if isinstance(root, torch.Tensor) and root.grad_fn is not None)
    seen = set(queue)
    while queue and len(seen) < _MOST_NODES:
        node = queue.popleft()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.nn.Parameter):
            yield leaf
        elif isinstance(leaf, torch.Tensor):
            others.append(leaf)
        following = {entry for entry, _ in node.next_functions if entry is not None} - seen
        seen |= following
        queue.extend(following)
    yield from others


class BackwardSteps:
    """Calls ``begins`` when training begins, and ``ends`` between two steps, until :meth:`detach`.

    What goes wrong in here takes it out, with one line.
    """

    def __init__(self, begins: Callable[[], None], ends: Callable[[], None]) -> None:
        self._begins = begins
        self._ends = ends
        self._trained = TrainedTensors()
        self.ends_steps = True
        """Whether these passes tell the ends of steps, or only when training begins."""
        self._depth = 0
        self._complete = False  # a backward pass of the step that runs now has ended
        self._originals = {name: getattr(torch.autograd, name) for name in ("backward", "grad")}
        for name, original in self._originals.items():
            setattr(torch.autograd, name, self._watched(original))

    def look(self) -> None:
        """Something begins or ends that is no part of a backward pass: a forward, or the script."""
        self._guarded(self._look)

    def end_nothing(self) -> None:
        """Something else ends the steps."""
        self.ends_steps = False

    def detach(self) -> None:
        """Stop listening."""
        for name, original in self._originals.items():
            setattr(torch.autograd, name, original)
        self._originals = {}

    def _watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def observed(*args: Any, **kwargs: Any) -> Any:
            if not self._originals or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            self._depth += 1
            try:
                if self._depth == 1:
                    self._guarded(self._begins)
                    self._guarded(self._look)
                result = original(*args, **kwargs)
            finally:
                self._depth -= 1
            if self._depth == 0:
                roots = args[0] if args else next(iter(kwargs.values()), ())
                self._guarded(lambda: self._end(roots))
            return result

        return observed

    def _look(self) -> None:
        if self.ends_steps and self._complete and self._depth <= 1 and self._trained.have_changed():
            self._complete = False
            self._ends()

    def _end(self, roots: Any) -> None:
        self._trained.look([roots] if isinstance(roots, torch.Tensor) else roots)
        self._complete = True

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as err:
            self.detach()
            line = f"pptrace: steps by backward passes: {type(err).__name__}: {err}; they are watched no longer"
            print(line, file=sys.stderr, flush=True)
