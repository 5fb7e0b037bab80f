"""A session that writes down what hooks tell it, in place of one that profiles; and process groups of one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from pptrace.marks import ExchangeMark, Mark, OpMark, P2PMark, SpanKind, SpanMark, WaitMark
from pptrace.schedule.plan import Plan


@dataclass(slots=True)
class HeardRecorder:
    """Listens, and keeps each mark in the order in which its range began; ``open`` are the ranges that run."""

    marks: list[Mark] = field(default_factory=list)
    open: list[Mark] = field(default_factory=list)
    listening: bool = True
    communicating: bool = False
    step: int = 0
    _ranges: list[Any] = field(default_factory=list)
    """Kept: one that is left open would end with its last reference."""

    def mark(self, mark: Mark) -> Any:
        self._ranges.append(_heard(self, mark))
        return self._ranges[-1]

    def span(self, kind: SpanKind, step: int) -> Any:
        return self.mark(SpanMark(kind, step))


@contextmanager
def _heard(recorder: HeardRecorder, mark: Mark) -> Iterator[None]:
    recorder.marks.append(mark)
    recorder.open.append(mark)
    try:
        yield
    finally:
        recorder.open.remove(mark)


@dataclass(slots=True)
class HeardSession:
    """A session whose step is the number of optimizer steps so far."""

    recorder: Any = field(default_factory=HeardRecorder)
    num_steps: int = 0
    num_passes: int = 0
    described: list[tuple[str, Plan | None, list[int], dict[str, int | str]]] = field(default_factory=list)

    def begin_pass(self) -> None:
        self.num_passes += 1

    def begin_optimizer(self, optimizer: object) -> None:
        self.recorder.marks.append(SpanMark(SpanKind.OPTIMIZER, self.num_steps))

    def end_optimizer(self, optimizer: object, *, stepped: bool) -> None:
        self.num_steps += stepped

    def describe_watched(
        self, framework: str, plan: Plan | None, pp_ranks: Sequence[int], mesh: Mapping[str, int | str] | None = None
    ) -> None:
        self.described.append((framework, plan, list(pp_ranks), dict(mesh or {})))

    @property
    def words(self) -> list[str]:
        """Words of the ranges that were heard, one for each: ``2F3``, ``2SEND_F3>1`` joined by commas, ``wait …``, ``EVAL``
        and so on.
        """
        return [_word(mark) for mark in self.recorder.marks]

    def words_of(self, *kinds: type) -> list[str]:
        return [_word(mark) for mark in self.recorder.marks if isinstance(mark, kinds)]


def _word(mark: Mark) -> str:
    match mark:
        case OpMark(action, _, _):
            return str(action)
        case P2PMark(transfers, _, _):
            return ",".join(f"{t.action}{'>' if t.action.kind.is_send else '<'}{t.peer}@{t.bytes}" for t in transfers)
        case WaitMark(transfer, _):
            return f"wait {transfer.action}"
        case ExchangeMark(links, _, _, _):
            return ",".join(f"shape{'>' if link.sends else '<'}{link.peer}@{link.bytes}" for link in links)
        case SpanMark(kind, _):
            return str(kind)
        case _:
            return type(mark).__name__


@contextmanager
def alone_as(rank: int, world: int) -> Iterator[None]:
    """Process groups of ``world`` ranks, of which this process is one; nobody else is there, and messages are lost."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
