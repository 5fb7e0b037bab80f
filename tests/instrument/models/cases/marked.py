"""Functions that the ranks of the pool run: training steps under torch's profiler, with the group of every call in the trace."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.autograd.profiler import profile, record_function

from instrument.optim.clipping import OptimizerSync
from instrument.recorder import Recorder
from pptrace.marks import AwaitMark, Mark, P2PMark, UnknownMark, WaitMark, parse_mark
from tests.instrument.models.cases.call_watch import GROUP_CALLS, CommunicationMark
from tests.instrument.models.cases.mixes import Mix, mesh_of, run_steps, runtime_of
from tests.support.profiled import rows_of

GROUP = "group of "
ITEM_BYTES = {"double": 8, "float": 4, "c10::BFloat16": 2, "long int": 8}


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a trace; times in µs. ``inputs`` are (numel, bytes of an item or None where the trace tells no dtype)
    of its tensors, ``numbers`` its inputs that are no tensors, as text, ``lists`` those that are lists of numbers."""

    name: str
    thread: int
    start: float
    end: float
    inputs: tuple[tuple[int, int | None], ...] = ()
    numbers: tuple[str, ...] = ()
    lists: tuple[tuple[int, ...], ...] = ()

    def holds(self, other: Event) -> bool:
        return self.thread == other.thread and self.start <= other.start and other.end <= self.end


@dataclass(frozen=True, slots=True)
class Marked:
    """A range of communication, its mark, and how long what was posted in it may go on."""

    event: Event
    mark: CommunicationMark
    awaited_end: float


def steps_of(mix: Mix) -> int:
    """One, or two where the update of a step is settled in the next."""
    return 2 if mix.clip is not None and mix.sync is OptimizerSync.POST_VALIDATION else 1


def train_profiled(mix: Mix) -> list[Event]:
    """Train, and give back the marks, the calls to process groups and what the backend did."""
    mesh = mesh_of(mix)
    runtime = runtime_of(mix, mesh, Recorder())
    # torch.profiler.profile is this class and an import that takes seconds.
    with _groups_of_facts(), profile(use_cpu=True, use_kineto=True, record_shapes=True) as profiler:
        run_steps(mix, mesh, runtime, steps_of(mix))
    seen = ("c10d::", "gloo:", "pp1:", GROUP)
    return [_event(row) for row in rows_of(profiler) if row["name"].startswith(seen)]


@contextmanager
def _groups_of_facts() -> Iterator[None]:
    """A range around every call to a process group that says which: gloo's own events do not."""
    with ExitStack() as patches:
        for name in GROUP_CALLS:
            patches.enter_context(mock.patch.object(dist.ProcessGroup, name, _facts(getattr(dist.ProcessGroup, name))))
        yield


def _facts(call: Callable[..., Any]) -> Callable[..., Any]:
    def facts(group: dist.ProcessGroup, *arguments: Any, **options: Any) -> Any:
        ranks = ",".join(map(str, dist.get_process_group_ranks(group)))
        with record_function(f"{GROUP}{group.group_desc} {ranks}"):
            return call(group, *arguments, **options)

    return facts


def _event(raw: dict[str, Any]) -> Event:
    arguments = raw.get("args", {})
    inputs = []
    for kind, dims in zip(arguments.get("Input type", ()), arguments.get("Input Dims", ()), strict=True):
        if kind == "TensorList":
            inputs += [(prod(each), None) for each in dims]
        elif kind in ITEM_BYTES:
            inputs.append((prod(dims), ITEM_BYTES[kind]))
    concrete = arguments.get("Concrete Inputs", ())
    numbers = tuple(text for text in concrete if text.isdigit())
    lists = tuple(tuple(json.loads(text)) for text in concrete if text.startswith("["))
    return Event(raw["name"], raw["tid"], raw["ts"], raw["ts"] + raw["dur"], tuple(inputs), numbers, lists)


def marked(events: list[Event]) -> list[Marked]:
    """The ranges of communication; what was posted with a handle, or ahead, may go on until somebody has waited for it."""
    marks = [(event, parse_mark(event.name)) for event in events if event.name.startswith("pp1:")]
    awaited: dict[object, float] = {}
    for event, mark in marks:
        for key in _awaited_by(mark):
            awaited[key] = event.end
    result = []
    for event, mark in marks:
        if isinstance(mark, CommunicationMark):
            ends = [awaited[key] for key in _posted_by(mark) if key in awaited]
            result.append(Marked(event, mark, max([event.end, *ends])))
    return result


def _posted_by(mark: CommunicationMark) -> list[object]:
    """Identifiers by which the ranges that wait for a call know it."""
    if isinstance(mark, P2PMark):
        return [(transfer, mark.step) for transfer in mark.transfers]
    return [] if mark.handle is None else [mark.handle]


def _awaited_by(mark: Mark | UnknownMark | None) -> list[object]:
    if isinstance(mark, WaitMark):
        return [(mark.transfer, mark.step)]
    return [mark.handle] if isinstance(mark, AwaitMark) else []
