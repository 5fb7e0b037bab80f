"""Step boundaries of a script whose torch optimizers, if it has any, have not stepped: taken from its backward passes.

Gradients accumulate over the backward passes of one step; between two steps the script changes its parameters, or takes
their gradients away. So a step ends where a backward pass is followed by such a change, seen when the next forward of a
module begins, or else the next backward pass. Gradients alone that change between two backward passes of one forward are
those of several losses, which the script combines.
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
    """A few of the tensors that a script trains, and what they were like when it was last asked.

    A leaf that is no parameter may be what a stage of a pipeline received, which lives for a microbatch: leaves that are
    gone say nothing while others are there, and are replaced by those of the next backward pass when all are. What FSDP gathers
    anew for every pass, and frees, is not what is trained.
    """

    def __init__(self) -> None:
        self._watched: list[ref[torch.Tensor]] = []
        self._before: list[tuple[object, object]] = []

    def look(self, roots: Iterable[Any]) -> None:
        """Remember how they are now, after a backward pass from ``roots``."""
        self._watched = [item for item in self._watched if item() is not None]
        if not self._watched:
            kept = (leaf for leaf in map(_unwrapped, _leaves(roots)) if not _is_freed(leaf))
            self._watched = [ref(leaf) for leaf in itertools.islice(kept, _MOST_WATCHED)]
        self._before = self._state()

    def have_changed(self, *, with_gradients: bool) -> bool:
        """Return whether the script has changed one of them since, or, ``with_gradients``, taken their gradients away.

        An update through ``.data`` leaves no trace on the tensor itself, but the gradients are cleared after it. Gradients that
        only grew are no sign: a backward by hand, or a split one, adds to them outside of any backward pass.
        """
        alive = [item() is not None for item in self._watched]
        if not any(alive):
            return bool(self._watched)
        pairs = list(itertools.compress(zip(self._before, self._state(), strict=True), alive))
        if any(before != after for (before, _), (after, _) in pairs):
            return True
        changed = [
            item
            for item, ((_, before), (_, after)) in zip(itertools.compress(self._watched, alive), pairs, strict=True)
            if before != after
        ]
        return with_gradients and bool(changed) and all(_is_cleared(item()) for item in changed)

    def _state(self) -> list[tuple[object, object]]:
        return [(None, None) if (tensor := item()) is None else _state_of(tensor) for item in self._watched]


def _unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that the transforms of ``torch.func`` (``grad``, ``vmap``) have wrapped."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def _is_freed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has elements and no memory of its own for them, as FSDP's gathered parameters after a pass."""
    return not hasattr(tensor, "to_local") and tensor.numel() > 0 and tensor.untyped_storage().size() == 0


def _is_cleared(tensor: torch.Tensor | None) -> bool:
    """Return whether a tensor has no gradient, or one of zeros."""
    if tensor is None or tensor.grad is None:
        return True
    with torch.no_grad():
        grad = tensor.grad
        return not torch.count_nonzero(grad.to_local() if hasattr(grad, "to_local") else grad)


def _state_of(tensor: torch.Tensor) -> tuple[object, object]:
    grad = tensor.grad
    value = tensor._version, tensor.data_ptr()
    return value, None if grad is None else (grad._version, grad.data_ptr())


def _leaves(roots: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The leaves of a graph: the parameters of modules, or all where it has none of them."""
    others: list[torch.Tensor] = []
    has_parameters = False
    queue = deque(root.grad_fn for root in roots if isinstance(root, torch.Tensor) and root.grad_fn is not None)
    seen = set(queue)
    while queue and len(seen) < _MOST_NODES:
        node = queue.popleft()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.nn.Parameter):
            has_parameters = True
            yield leaf
        elif isinstance(leaf, torch.Tensor):
            others.append(leaf)
        following = {entry for entry, _ in node.next_functions if entry is not None} - seen
        seen |= following
        queue.extend(following)
    if not has_parameters:
        yield from others


class BackwardSteps:
    """Calls ``begins`` when training begins, and ``ends`` between two steps, until :meth:`detach`.

    A pass that is captured into a graph (``is_captured``) is none. What goes wrong in here takes it out, with one line.
    """

    def __init__(
        self, begins: Callable[[], None], ends: Callable[[], None], is_captured: Callable[[], bool] = lambda: False
    ) -> None:
        self._begins = begins
        self._ends = ends
        self._is_captured = is_captured
        self._trained = TrainedTensors()
        self._depth = 0
        self._complete = False  # a backward pass of the step that runs now has ended
        self.num_passes = 0
        """Backward passes that ended, those inside others not counted."""
        self.sees_forwards = False
        """True if :meth:`look` is called at every forward of a module, so that two backward passes without one follow one."""
        self._originals = {name: getattr(torch.autograd, name) for name in ("backward", "grad")}
        for name, original in self._originals.items():
            setattr(torch.autograd, name, self._watched(original))

    def look(self) -> None:
        """Look at the begin or end of what is no part of a backward pass: a forward, or the script."""
        if not self._is_captured():
            self._guarded(self._look)

    def detach(self) -> None:
        """Stop listening."""
        for name, original in self._originals.items():
            setattr(torch.autograd, name, original)
        self._originals = {}

    def _watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def observed(*args: Any, **kwargs: Any) -> Any:
            if not self._originals or torch.compiler.is_compiling() or self._is_captured():
                return original(*args, **kwargs)
            self._depth += 1
            try:
                if self._depth == 1:
                    self._guarded(self._begins)
                    self._guarded(lambda: self._look(with_gradients=not self.sees_forwards))
                result = original(*args, **kwargs)
            finally:
                self._depth -= 1
            if self._depth == 0:
                roots = args[0] if args else next(iter(kwargs.values()), ())
                self._guarded(lambda: self._end(roots))
            return result

        return observed

    def _look(self, *, with_gradients: bool = True) -> None:
        if self._complete and self._depth <= 1 and self._trained.have_changed(with_gradients=with_gradients):
            self._complete = False
            self._ends()

    def _end(self, roots: Any) -> None:
        self._trained.look([roots] if isinstance(roots, torch.Tensor) else roots)
        self._complete = True
        self.num_passes += 1

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as err:
            self.detach()
            line = f"pptrace: steps by backward passes: {type(err).__name__}: {err}; they are watched no longer"
            print(line, file=sys.stderr, flush=True)
