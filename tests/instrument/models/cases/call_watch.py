"""Calls to process groups beside the marks that are open when they are made: cheap enough for every run of the grid."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any
from unittest import mock

import torch.distributed as dist

from instrument.recorder import Recorder
from pptrace.marks import AwaitMark, Axis, CollectiveMark, ExchangeMark, Link, P2PMark, parse_mark
from pptrace.sizes.transformer import Calls, Volume, total

CommunicationMark = P2PMark | CollectiveMark | ExchangeMark
DESCRIPTIONS = {
    Axis.PP: {"mesh_pp", "mesh_pp_reverse", "mesh_pp_control"},
    Axis.TP: {"mesh_tp", "mesh_tp_control"},
    Axis.CP: {"mesh_cp", "mesh_cp_control", "mesh_cp_ring", "mesh_cp_ulysses"},
    Axis.DP: {"mesh_dp", "mesh_dp_control"},
    Axis.DP_CP: {"mesh_dp-cp", "mesh_dp-cp_control"},
    Axis.EP: {"mesh_ep"},
    Axis.EDP: {"mesh_edp"},
    Axis.ETP: {"mesh_etp"},
    Axis.EMBEDDING: {"mesh_embd"},
    Axis.MIRROR: {"mesh_mirror"},
}
"""Names of the groups of an axis."""

_WORDS = ("all", "reduce", "gather", "scatter", "broadcast", "barrier", "send", "recv")
GROUP_CALLS = tuple(
    name for name in dir(dist.ProcessGroup) if any(word in name for word in _WORDS) and not name.startswith("__")
)


def links_of(mark: CommunicationMark) -> tuple[Link, ...]:
    """The messages of a point-to-point call, sends first as the runtime posts exchanges; () of a collective."""
    if isinstance(mark, P2PMark):
        return tuple(Link(item.action.kind.is_send, item.peer, item.bytes) for item in mark.transfers)
    return mark.links if isinstance(mark, ExchangeMark) else ()


def volume_of(mark: CommunicationMark) -> Volume:
    if isinstance(mark, CollectiveMark):
        return {(str(mark.axis), str(mark.kind)): Calls(1, mark.bytes)}
    return total({(str(mark.axis), "send" if link.sends else "recv"): Calls(1, link.bytes)} for link in links_of(mark))


_read = lru_cache(maxsize=None)(parse_mark)


class CallWatch:
    """A listener in place of NVTX's domain, and what it saw.

    ``problems`` are calls that do not lie in exactly one mark of their axis and size.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.marks: list[CommunicationMark] = []
        self.awaited: list[tuple[int, Axis, int | None]] = []  # how many marks came before, and what was waited for
        self._open: list[CommunicationMark | None] = []  # one thread: backward runs in the caller's on CPUs

    def recorder(self) -> Recorder:
        recorder = Recorder()
        recorder._domain = self
        return recorder

    def get_event_attributes(self, message: str) -> str:
        return message

    def push_range(self, name: str) -> None:
        mark = _read(name)
        self._open.append(mark if isinstance(mark, CommunicationMark) else None)
        if isinstance(mark, CommunicationMark):
            self.marks.append(mark)
        if isinstance(mark, AwaitMark):
            self.awaited.append((len(self.marks), mark.axis, mark.handle))

    def pop_range(self) -> None:
        self._open.pop()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Every call to a process group is looked at."""
        with ExitStack() as patches:
            for name in GROUP_CALLS:
                call = self._watched(name, getattr(dist.ProcessGroup, name))
                patches.enter_context(mock.patch.object(dist.ProcessGroup, name, call))
            yield

    def concurrent(self, axis: Axis) -> int:
        """Count the calls along an axis that were started while another one of it was not awaited yet."""
        started = {
            mark.handle: index
            for index, mark in enumerate(self.marks)
            if isinstance(mark, CollectiveMark) and mark.axis is axis and mark.handle is not None
        }
        ended = {handle: index for index, of_axis, handle in self.awaited if of_axis is axis}
        return sum(
            any(other < index < ended[handle] for handle, other in started.items()) for index in started.values()
        )

    def volume(self, step: int) -> Volume:
        """Count and bytes of a step by (axis, kind)."""
        return total(volume_of(mark) for mark in self.marks if mark.step == step)

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(group: dist.ProcessGroup, *arguments: Any, **options: Any) -> Any:
            around = [mark for mark in self._open if mark is not None]
            if len(around) != 1 or not _fits(around[0], group):
                self.problems.append(f"{name} of {group.size()} ranks of {group.group_desc}: open marks {around}")
            return call(group, *arguments, **options)

        return watched


def _fits(mark: CommunicationMark, group: dist.ProcessGroup) -> bool:
    size = mark.size if isinstance(mark, CollectiveMark) else group.size()
    return group.group_desc in DESCRIPTIONS[mark.axis] and size == group.size()
