"""Step boundaries of a script that does not know pptrace: taken from its optimizers.

A step ends when the optimizer has stepped. Where an iteration steps several optimizers, it ends with the last of them:
the one seen last before the first steps again, unless that one steps after some iterations alone. A step of an optimizer
inside that of another (wrappers) is part of it. Until an optimizer of torch's has stepped, and for ever where none does, the
backward passes tell the steps: not every optimizer that a script makes is stepped, or stepped where Python sees it. A step
that is captured into a CUDA graph is made by each replay of it.

Several passes of a watched pipeline before one update (gradient accumulation) are one step, where each of its ranks had made an
optimizer of torch's when its first pass began; else each pass is one, as on a rank that has none and cannot tell.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch.amp.grad_scaler import GradScaler
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from instrument.adapters.calls import Call
from instrument.launch.recording.backward_steps import BackwardSteps
from instrument.launch.recording.graph_replays import GraphReplays
from instrument.recorder import Range
from instrument.session import Session
from pptrace.marks import P2P, SpanKind

_REGULAR = 2
"""Iterations in a row with which an optimizer has to end until the next one waits for it, if it did not end all so far."""
_MOST_PASSES, _MOST_BEFORE_FIRST = 256, 16
"""Passes of a pipeline before one update, and before the first one: where more have none, this is a benchmark of passes."""


class IterationRule:
    """Decides, from the order in which optimizers step, after which of them an iteration ends.

    It is the last one of the iteration before; but the first, where that one stepped after some iterations alone, as the outer
    optimizer of local training does: waiting for it would take in the passes of the next iteration.
    """

    def __init__(self) -> None:
        self._first: int | None = None
        self._last: int | None = None  # of the iteration before: the one to wait for
        self._latest: int | None = None
        self._ended = False
        self._latest_before: int | None = None  # that of the iteration before
        self._num_same = 0  # iterations in a row with that one
        self._num_iterations = 0

    @property
    def has_begun(self) -> bool:
        """Return whether an optimizer has stepped."""
        return self._latest is not None

    @property
    def is_open(self) -> bool:
        """Return whether optimizers have stepped in an iteration whose end was not announced."""
        return self._latest is not None and not self._ended

    def before(self, optimizer: int) -> bool:
        """Return whether the iteration ends only now, since the optimizer it was to end with did not step in it."""
        if optimizer != self._first:
            return False
        late = not self._ended
        self._num_iterations += 1
        self._num_same = self._num_same + 1 if self._latest == self._latest_before else 1
        self._latest_before = self._latest
        is_regular = self._num_same >= min(_REGULAR, self._num_iterations)
        self._last = self._latest if is_regular else self._first
        self._ended = False
        return late

    def after(self, optimizer: int) -> bool:
        """Return whether the iteration ends with this optimizer's step."""
        if self._first is None:
            self._first = self._last = optimizer
        self._latest = optimizer
        if optimizer == self._last and not self._ended:
            self._ended = True
            return True
        return False


class MessageWatch:
    """An observer of calls: a step of a pipeline may begin with a message, before any forward."""

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look

    def posted(self, call: Call) -> None:
        if call.kind in P2P:
            self._look()

    def returned(self, call: Call) -> None:
        pass

    waiting = completed = failed = returned


class OptimizerSteps:
    """Listens to every optimizer of the process until :meth:`detach`.

    Step 0 begins with the first forward of a module (or the first backward pass, where a script has no modules or compiles
    them), so imports and the making of the model are no part of it.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._rule = IterationRule()
        self._depth = 0
        self._begun = False
        self._attached = True
        self._range: Range | None = None
        self._passes_are_steps = False
        self._made: WeakSet[Optimizer] = WeakSet()
        self._init: Any = Optimizer.__init__
        Optimizer.__init__ = self._note_made(self._init)  # type: ignore[method-assign]
        self._unwrapped: Any = Optimizer.profile_hook_step
        self._scaled: Any = GradScaler.step
        self._graphs = GraphReplays(self._before_replay, self._after)
        self._backward: BackwardSteps | None = BackwardSteps(
            self.begin, self._next_step, lambda: self._graphs.capturing
        )
        self._forward = register_module_forward_pre_hook(self._before_forward)
        self._compile = torch.compile
        torch.compile = self._watch_compile()
        # torch's global step hooks run inside torch's own "Optimizer.step" range, so a STEP range that ends in one of
        # them would cross it. This is the function that makes that range, and runs the hooks.
        Optimizer.profile_hook_step = staticmethod(self._wrap)  # type: ignore[method-assign,assignment]
        GradScaler.step = self._watch_scaler(self._scaled)  # type: ignore[method-assign]

    def detach(self) -> None:
        """Stop listening: the script marks its steps itself."""
        self._attached = False
        self._leave_forward()
        self.ignore_backward()
        self._graphs.detach()
        Optimizer.__init__ = self._init  # type: ignore[method-assign]
        Optimizer.profile_hook_step = staticmethod(self._unwrapped)  # type: ignore[method-assign]
        GradScaler.step = self._scaled  # type: ignore[method-assign]

    @property
    def has_optimizers(self) -> bool:
        """Return whether the process has an optimizer of torch's."""
        return bool(self._made)

    def ends_before_pass(self, num_passes: int, *, have_optimizers: bool) -> bool:
        """Return whether the pass of a pipeline that begins is of another step than the ``num_passes`` before it.

        ``have_optimizers``: all ranks of the pipeline do. A pass in the step of an optimizer (its closure) is part of that.
        """
        if self._depth:
            return False
        most = _MOST_PASSES if self._rule.has_begun else _MOST_BEFORE_FIRST
        self._passes_are_steps |= num_passes >= most
        return num_passes > 0 and (self._passes_are_steps or not have_optimizers)

    @property
    def num_backwards(self) -> int:
        """Backward passes that ended while none of the optimizers had stepped."""
        return 0 if self._backward is None else self._backward.num_passes

    @property
    def num_replays(self) -> int:
        """Replays of graphs in which none of the optimizers stepped."""
        return self._graphs.num_replays

    @property
    def begun(self) -> bool:
        """Return whether a module ran forward, or anything else of a step began."""
        return self._begun

    def begin_whole(self, optimizer: object) -> None:
        """A wrapper's step begins: the steps of optimizers inside, however many, are part of it."""
        if self._attached and not self._is_captured():
            self._before(optimizer)

    def end_whole(self, optimizer: object, *, stepped: bool) -> None:
        """End the optimizer's step; not ``stepped``: it raised."""
        if self._depth:
            self._close()
            if stepped and self._attached:
                self._after(optimizer)

    def look(self) -> None:
        """A message is about to be posted, or the script has ended: without an optimizer, a step may have ended before."""
        if self._backward is not None:
            self._backward.look()

    @property
    def is_step_open(self) -> bool:
        """Return whether the step that runs now has had an optimizer's step, but not the one to end it."""
        return self._rule.is_open

    def ignore_backward(self) -> None:
        """Stop telling steps from backward passes, since something else tells them."""
        if self._backward is not None:
            self._backward.detach()
            self._backward = None
            if self._begun:
                self._leave_forward()

    def _before_forward(self, *_: object) -> None:
        if torch.compiler.is_compiling() or self._graphs.capturing:
            return
        self.begin()
        if self._backward is not None:
            self._backward.sees_forwards = True
            self._backward.look()
        else:
            self._leave_forward()

    def _leave_forward(self) -> None:
        self._forward.remove()
        if self._backward is not None:
            self._backward.sees_forwards = False
        torch.compile = self._compile

    def _watch_compile(self) -> Any:
        """Hooks of all modules become a part of what is compiled, so there is none when the script compiles."""
        original = self._compile

        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self._leave_forward()
            return original(*args, **kwargs)

        return watched

    def _note_made(self, init: Callable[..., None]) -> Callable[..., None]:
        """Note each optimizer that is made."""

        @functools.wraps(init)
        def noted(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            init(optimizer, *args, **kwargs)
            self._made.add(optimizer)

        return noted

    def _watch_scaler(self, scaled: Callable[..., Any]) -> Callable[..., Any]:
        """An iteration whose gradients overflowed ends without a step of the optimizer: that of its scaler tells it."""

        @functools.wraps(scaled)
        def step(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if not (self._attached and scaler.is_enabled()) or torch.compiler.is_compiling() or self._is_captured():
                return scaled(scaler, optimizer, *args, **kwargs)
            self._before(optimizer)
            try:
                result = scaled(scaler, optimizer, *args, **kwargs)
            finally:
                self._close()
            self._after(optimizer)
            return result

        return step

    def _wrap(self, step: Callable[..., Any]) -> Callable[..., Any]:
        hooked = self._unwrapped(step)

        @functools.wraps(hooked)
        def observed(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if not self._attached or self._is_captured():
                return hooked(optimizer, *args, **kwargs)
            closure = args[0] if args else kwargs.get("closure")
            self._before(optimizer)
            if (
                callable(closure) and self._depth == 1
            ):  # it makes the forward and backward, which are no part of the update
                args, kwargs = (self._apart(closure), *args[1:]), {k: v for k, v in kwargs.items() if k != "closure"}
            try:
                result = hooked(optimizer, *args, **kwargs)
            finally:
                self._close()
            self._after(optimizer)
            return result

        return observed

    def _is_captured(self) -> bool:
        """Return whether the step of an optimizer is captured into a graph, whose replays make it."""
        self._graphs.note_update()
        return self._graphs.capturing

    def _before_replay(self, graph: object) -> None:
        """Begin a replay of a graph that holds a step; what came before the first one, the capture, is no part of it."""
        if self._depth:
            return
        self.ignore_backward()
        if self._graphs.has_new:
            self._graphs.has_new = False
            self._rule = IterationRule()
            if self._begun:
                self._session.restart_step()
        self.begin()
        if self._rule.before(id(graph)):
            self._next_step()

    def begin(self) -> None:
        """Step 0 begins, unless it has begun."""
        if not self._begun:
            self._begun = True
            self._session.begin_step()

    def _before(self, optimizer: object) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self.ignore_backward()
        self.begin()
        if self._rule.before(id(optimizer)):
            self._next_step()
        self._open_range()

    def _apart(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """A closure that runs outside the optimizer's range."""

        @functools.wraps(closure)
        def apart(*args: Any, **kwargs: Any) -> Any:
            self._close_range()
            try:
                return closure(*args, **kwargs)
            finally:
                self._open_range()

        return apart

    def _open_range(self) -> None:
        self._range = self._session.recorder.span(SpanKind.OPTIMIZER, self._session.num_steps)
        self._range.__enter__()

    def _close_range(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def _close(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._close_range()

    def _after(self, optimizer: object) -> None:
        self._passes_are_steps = False
        if self._depth == 0 and self._rule.after(id(optimizer)):
            self._next_step()

    def _next_step(self) -> None:
        self._session.end_step()
        self._session.begin_step()
