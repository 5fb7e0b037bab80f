"""Functions that the ranks of the pool run for the tests of marked collectives and of tensor and sequence parallelism."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from instrument.collectives import AxisGroup, Reduction
from instrument.recorder import Recorder
from instrument.route import Route
from pptrace.errors import PptraceError
from pptrace.marks import Axis, Mark, UnknownMark, parse_mark
from tests.support.profiled import Event, events_of

T = TypeVar("T")


class Listening(Recorder):
    """A recorder whose ranges are heard by a tool that writes down their names: a profiler costs too much per case."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 7
        self.names: list[str] = []
        self._domain = self

    def get_event_attributes(self, message: str) -> str:
        return message

    def push_range(self, name: str) -> None:
        self.names.append(name)

    def pop_range(self) -> None:
        """Only beginnings are kept."""


def heard(recorder: Listening, function: Callable[[], T]) -> tuple[T, list[Mark]]:
    """The function's answer, and the marks that the recorder made meanwhile, in the order of their beginning."""
    recorder.names.clear()
    answer = function()
    marks = [mark for name in recorder.names if isinstance(mark := parse_mark(name), Mark)]
    assert len(marks) == len(recorder.names)
    return answer, marks


def axis_of_all_ranks(route: Route = Route.DIRECT, recorder: Recorder | None = None) -> AxisGroup:
    """An axis tp of the whole world, in step 7."""
    group = dist.new_group(range(dist.get_world_size()), backend="gloo", group_desc="mesh_tp")
    recorder = recorder or Recorder()
    recorder.step = 7
    return AxisGroup(group, Axis.TP, recorder, route)


def observed(function: Callable[[], Any]) -> tuple[Any, list[Mark], list[Event]]:
    """The function's answer, its marks in the order of their beginning, and the backend's own events."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        answer = function()
    events = sorted(events_of(profiler), key=lambda event: event.start)
    marks = [mark for event in events if (mark := parse_mark(event.name)) is not None]
    known = [mark for mark in marks if not isinstance(mark, UnknownMark)]
    assert len(known) == len(marks)
    return answer, known, [event for event in events if parse_mark(event.name) is not None or "gloo:" in event.name]


def own_value(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Small whole numbers, another for every place of every rank: their sums are exact in every dtype."""
    count = torch.arange(torch.Size(shape).numel()).view(shape)
    return ((count * 3 + rank * 5) % 7).to(dtype)


Answers = tuple[dict[str, Tensor], list[Mark], list[Event]]


def every_operation(route: Route, dtypes: Sequence[torch.dtype], later: bool) -> list[Answers]:
    """Of each dtype each operation once, blocking or started."""
    group = axis_of_all_ranks(route)
    return [_every_operation(group, dtype, later) for dtype in dtypes]


def _every_operation(group: AxisGroup, dtype: torch.dtype, later: bool) -> Answers:
    size, rank = group.size, group.rank
    value = own_value(rank, (2, 2 * size, 3), dtype)

    def blocking() -> dict[str, Tensor]:
        return {
            "sum": group.all_reduce(value.clone()),
            "max": group.all_reduce(value.clone(), Reduction.MAX),
            "gather": group.all_gather(value),
            "gather 1": group.all_gather(value, dim=1),
            "scatter 1": group.reduce_scatter(value, dim=1),
            "scatter -2": group.reduce_scatter(value, dim=-2),
            "to all": group.all_to_all(value.transpose(0, 1)),
            "broadcast": group.broadcast(value.clone(), size - 1),
        }

    def started() -> dict[str, Tensor]:
        pending = {
            "rotation": group.start_rotation(value),
            "rotation 2": group.start_rotation(value.transpose(0, 1), 2),
            "sum": group.start_all_reduce(value.clone()),
            "max": group.start_all_reduce(value.clone(), Reduction.MAX),
            "gather": group.start_all_gather(value),
            "gather 1": group.start_all_gather(value, dim=1),
            "scatter 1": group.start_reduce_scatter(value, dim=1),
            "scatter -2": group.start_reduce_scatter(value, dim=-2),
        }
        return {name: item.wait() for name, item in pending.items()}

    return observed(started if later else blocking)


def alone() -> tuple[list[bool], int]:
    """An axis of one rank: whether each answer is the input, and how many marks there were."""
    group = AxisGroup(
        [dist.new_group([rank], backend="gloo") for rank in range(dist.get_world_size())][dist.get_rank()],
        Axis.TP,
        Recorder(),
    )
    value = torch.ones(2, 3)

    def run() -> list[bool]:
        answers = [
            group.all_reduce(value),
            group.all_gather(value, 1),
            group.reduce_scatter(value, 1),
            group.all_to_all(value),
            group.broadcast(value, 0),
            group.start_all_reduce(value).wait(),
            group.start_rotation(value).wait(),
        ]
        return [answer is value for answer in answers]

    answer, marks, _ = observed(run)
    return answer, len(marks)


def wait_twice() -> None:
    """The second time is refused."""
    pending = axis_of_all_ranks().start_all_reduce(torch.ones(2))
    pending.wait()
    with pytest.raises(PptraceError, match="waited for twice"):
        pending.wait()


def scatter_undivided() -> None:
    """Two ranks refuse a tensor of three."""
    refusal = r"^dimension 1 of a tensor of shape \(2, 3\) does not divide into 2 parts, one for each rank of tp$"
    with pytest.raises(PptraceError, match=refusal):
        axis_of_all_ranks().reduce_scatter(torch.ones(2, 3), dim=1)
