"""The range of a forward that a backward runs again, for whatever calls ``torch.utils.checkpoint``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext

from instrument.recorder import Recorder
from pptrace.marks import SpanKind

Contexts = Callable[[], tuple[AbstractContextManager[object], AbstractContextManager[object]]]
"""Makes the contexts of a forward and of its recompute, as ``context_fn`` of ``torch.utils.checkpoint``."""


class RecomputeRange(AbstractContextManager[None]):
    """The range of a recompute, of the step that runs when it begins. It may be entered several times, one after another."""

    def __init__(self, recorder: Recorder, inner: AbstractContextManager[object] | None = None) -> None:
        """Take what writes the range, and the script's own context inside it."""
        self._recorder = recorder
        self._inner = inner
        self._open = ExitStack()

    def __enter__(self) -> None:
        self._open.enter_context(self._recorder.span(SpanKind.RECOMPUTE, self._recorder.step))
        if self._inner is not None:
            self._open.enter_context(self._inner)

    def __exit__(self, *error: object) -> bool:
        return bool(self._open.__exit__(*error))  # type: ignore[arg-type]


def marked(recorder: Recorder, contexts: Contexts | None = None) -> Contexts:
    """Contexts as ``contexts`` makes them, with the range of the recompute around its own."""

    def both() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
        forward, again = (nullcontext(), None) if contexts is None else contexts()
        return forward, RecomputeRange(recorder, again)

    return both
