"""The profiler's interface for training scripts.

    run = session.current()
    run.describe({"pp": 4}, plan, pp_ranks=[0, 1, 2, 3])
    for step in run.steps(20):
        ...                       # open ranges with run.recorder

The same script runs with and without ``pptrace run``: without it, :func:`current` gives a session that observes
nothing.

Garbage collections of Python, which stop every thread that runs Python, have ranges: their pauses have a cause of their own.
Collections of the young generation are left out: there is one for every few hundred objects, and each takes some microseconds.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FunctionType
from typing import Any

from instrument.recorder import Range, Recorder
from pptrace.marks import SpanKind
from pptrace.schedule.plan import Plan

_OLDER = 1
"""Generation from which on collections get a range."""


def _hide_from_compiler(function: FunctionType) -> None:
    """Let torch.compile leave alone the function and what it calls: a collection may come while compiled code runs.

    A torch without the means (before 2.7) looks at the callback's code once, and goes on.
    """
    try:
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    except (ImportError, AttributeError, TypeError):
        return


class CollectionRanges:
    """Opens a ``GC`` range for each collection of an older generation; ``step`` gives the number of the running step."""

    def __init__(self, recorder: Recorder, step: Callable[[], int]) -> None:
        self._recorder = recorder
        self._step = step
        self._range: Range | None = None

    def watch(self) -> None:
        """Begin to open ranges."""
        _hide_from_compiler(type(self)._note)  # type: ignore[arg-type]
        gc.callbacks.append(self._note)

    def remove(self) -> None:
        """End what :meth:`watch` began; may be called without it."""
        with suppress(ValueError):
            gc.callbacks.remove(self._note)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Open ranges during the body, unless they are opened already."""
        if self._note in gc.callbacks:
            yield
            return
        self.watch()
        try:
            yield
        finally:
            self.remove()

    def _note(self, phase: str, info: Mapping[str, Any]) -> None:
        """Called by Python at both ends of a collection, of which one runs at a time in a process."""
        if info["generation"] < _OLDER:
            return
        if phase == "start":
            self._range = self._recorder.span(SpanKind.GC, self._step())
            self._range.__enter__()
        elif self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None


Predict = Callable[[Mapping[str, Any] | None, range], Mapping[str, object]]
"""Makes of a rank's counts of routes (:mod:`instrument.expert_counts`; None without any) what is predicted of its steps."""


class Session:
    """A session that observes nothing; ``pptrace run`` installs one that profiles (instrument/launch/recording/traced.py).

    Steps are numbered from 0 over the whole process, over all loops of the script.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._step_range: Range | None = None
        self._num_steps = 0
        self._collections = CollectionRanges(recorder, lambda: self._num_steps)

    @property
    def recorder(self) -> Recorder:
        """Writes the ranges of this process."""
        return self._recorder

    @property
    def num_steps(self) -> int:
        """Steps that have ended so far."""
        return self._num_steps

    def describe(
        self,
        mesh: Mapping[str, int | str],
        plan: Plan,
        pp_ranks: Sequence[int],
        model: Mapping[str, object] | None = None,
        predict: Predict | None = None,
    ) -> None:
        """Record mesh, plan and model of this rank in its trace and in ``run.json``.

        ``mesh`` is axis → size, ``pp_ranks`` the global ranks of this rank's pipeline by pipeline rank, ``model``
        any JSON values; ``predict`` is called when the trace is written, for what the rank should have sent and held in the
        recorded steps (:mod:`pptrace.sizes.predicted`). May be called again: the last description counts.
        """

    def describe_watched(
        self, framework: str, plan: Plan | None, pp_ranks: Sequence[int], mesh: Mapping[str, int | str] | None = None
    ) -> None:
        """Record the framework whose calls pptrace wraps, with its plan and mesh where known."""

    def begin_optimizer(self, optimizer: object) -> None:
        """Begin the step of a watched wrapper of optimizers: optimizer steps inside are part of it."""

    def end_optimizer(self, optimizer: object, *, stepped: bool) -> None:
        """End the step of a watched wrapper; not ``stepped``: it raised."""

    def begin_pass(self) -> int:
        """Begin a pass of a watched pipeline with backwards; return how many its step has had, each of which is a step of its own
        unless optimizers tell the steps.
        """
        return 0

    def steps(self, n: int) -> Iterator[int]:
        """Yield 0 … n − 1, each inside its STEP range; the profiler starts and stops at the chosen steps."""
        self.expect_steps(n)
        with self._collections.watched():
            for index in range(n):
                self.begin_step()
                try:
                    yield index
                finally:  # also where the loop is left by `break`
                    self.end_step()

    def expect_steps(self, n: int) -> None:
        """Announce ``n`` steps; called once per loop, before its first step."""

    def begin_step(self) -> None:
        """Begin the next step."""
        self._step_range = self._recorder.span(SpanKind.STEP, self._num_steps)
        self._step_range.__enter__()

    def end_step(self) -> None:
        """End the step that began last."""
        self._close_step_range()
        self._num_steps += 1

    def restart_step(self) -> None:
        """Begin the step that began last anew: what it held so far was no part of a step."""
        self._close_step_range()
        self.begin_step()

    def _close_step_range(self) -> None:
        if self._step_range is not None:
            self._step_range.__exit__(None, None, None)
            self._step_range = None


_current: Session | None = None


def current() -> Session:
    """The session of this process; one that observes nothing where the process was not started by ``pptrace run``."""
    global _current
    if _current is None:
        _current = Session(Recorder())
    return _current


def install(session: Session) -> None:
    """Make ``session`` the one that :func:`current` gives. For the launcher's worker, before the script starts."""
    global _current
    _current = session
