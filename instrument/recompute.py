"""The range of a forward that a backward runs again, for whatever calls ``torch.utils.checkpoint``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from types import TracebackType

from instrument.recorder import Recorder
from instrument.session import Session
from pptrace.marks import SpanKind

Context = AbstractContextManager[object]


class RecomputeRange(AbstractContextManager[None]):
    """The range of a recompute, of the step that runs when it begins. It may be entered several times, one after another."""

    def __init__(self, recorder: Recorder, inner: Context | None = None, session: Session | None = None) -> None:
        """Take what writes the range, the script's own context inside it, and what counts steps if the recorder does not."""
        self._recorder = recorder
        self._session = session
        self._inner = nullcontext() if inner is None else inner
        self._open = ExitStack()

    def __enter__(self) -> None:
        step = self._recorder.step if self._session is None else self._session.num_steps
        self._open.enter_context(self._recorder.span(SpanKind.RECOMPUTE, step))
        self._open.enter_context(self._inner)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return bool(self._open.__exit__(kind, error, trace))


@dataclass(frozen=True, slots=True)
class MarkedContexts:
    """Contexts of a forward and of its recompute, as ``context_fn`` of ``torch.utils.checkpoint`` makes them: the script's own,
    if it has some, with the range of the recompute around.
    """

    recorder: Recorder
    contexts: Callable[[], tuple[Context, Context]] | None = None
    session: Session | None = None

    def __call__(self) -> tuple[Context, Context]:
        forward, again = (nullcontext(), None) if self.contexts is None else self.contexts()
        return forward, RecomputeRange(self.recorder, again, self.session)
