"""Messages that are posted by the methods of a process group, as pptrace's own runtime posts its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from instrument.adapters.calls import Call, CallObserver
from instrument.adapters.hooks import Hook
from instrument.adapters.tensor_bytes import num_bytes
from instrument.adapters.works import Works, is_work

if TYPE_CHECKING:
    from instrument.adapters.torch_distributed import DistributedCalls


@dataclass(frozen=True, slots=True)
class _LoggedWait:
    """A message as its handle and the logs know it."""

    logs: Sequence[CallObserver]
    call: Call

    def waiting(self) -> None:
        for log in self.logs:
            log.waiting(self.call)

    def completed(self) -> None:
        for log in self.logs:
            log.completed(self.call)

    def failed(self) -> None:
        for log in self.logs:
            log.failed(self.call)


class GroupMessageHook(Hook):
    """``ProcessGroup.send`` and ``recv``, by which pptrace's runtime posts its messages, and marks them itself.

    The logs alone get to know of them. Without that a hang would have them as collectives that C++ posted.
    """

    def __init__(self, calls: DistributedCalls, works: Works, logs: Sequence[CallObserver], kind: str) -> None:
        self._calls = calls
        self._works = works
        self._logs = logs
        self._kind = kind

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        if kwargs or len(args) != 4:
            return None
        group, tensors, peer, tag = args
        call = self._calls.begin_group_message(self._kind, group, peer, num_bytes(tensors), tag)
        if call is not None:
            for log in self._logs:
                log.posted(call)
        return call

    def after(self, token: Call | None, result: Any) -> None:
        if token is None:
            return
        self._calls.end_group_message()
        for log in self._logs:
            log.returned(token)
        if is_work(result):
            self._works.watch(result, (_LoggedWait(self._logs, token),))

    def failed(self, token: Call | None) -> None:
        if token is None:
            return
        self._calls.end_group_message()
        for log in self._logs:
            log.failed(token)
