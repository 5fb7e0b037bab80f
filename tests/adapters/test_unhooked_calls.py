"""Collectives that C++ posts without any function of Python: they are counted, and none that hooks see is counted with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional

from instrument.adapters.call_marks import CallMarks
from instrument.adapters.calls import SETUP, UNHOOKED, Call, CallGroup
from instrument.adapters.hooks import Hooks
from instrument.adapters.torch_distributed import DistributedCalls
from instrument.adapters.torch_functional_collectives import FunctionalCalls
from instrument.adapters.unhooked_calls import UnhookedCalls
from instrument.adapters.works import Works
from tests.adapters.heard import HeardSession

GROUP = CallGroup("0", (0, 1), "gloo", "default_pg")


@dataclass
class Diary:
    """An observer: (event, kind, sequence) of each call."""

    events: list[tuple[str, str, int]] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)

    def posted(self, call: Call) -> None:
        self.events.append(("posted", call.kind, call.sequence))
        self.numbers.append(call.number)

    def failed(self, call: Call) -> None:
        self.events.append(("failed", call.kind, call.sequence))

    def returned(self, call: Call) -> None: ...

    waiting = completed = returned

    def count(self, kind: str) -> int:
        """Number of calls of a kind so far, as the last of them says."""
        return max((sequence for event, of, sequence in self.events if (event, of) == ("posted", kind)), default=-1) + 1


class Counting:
    """A process group that has counted ``posted`` calls."""

    def __init__(self, posted: int | None = 0) -> None:
        self.posted = posted

    def _get_sequence_number_for_group(self) -> int:
        if self.posted is None:
            raise RuntimeError("this backend does not count")
        return self.posted


def watched(group: Counting) -> tuple[UnhookedCalls, Diary]:
    diary = Diary()
    unhooked = UnhookedCalls([diary])
    unhooked.add(group, GROUP)
    return unhooked, diary


def test_what_a_group_counts_beyond_the_calls_of_hooks_is_unseen() -> None:
    group = Counting()
    unhooked, diary = watched(group)
    began = unhooked.begin(group)
    group.posted = 2  # a barrier that counts twice, and is under way
    unhooked.look()
    unhooked.end(group, began)
    unhooked.look()
    assert diary.events == []
    group.posted = 5
    unhooked.look()
    assert diary.events == [("posted", UNHOOKED, 2)]


def test_the_order_of_calls_does_not_depend_on_when_the_group_is_looked_at() -> None:
    group = Counting()
    unhooked, diary = watched(group)
    for posted in (1, 2):
        group.posted = posted
        unhooked.look()
    unhooked.next_number()
    group.posted = 3
    unhooked.end(group, unhooked.begin(group))
    assert diary.events == [("posted", UNHOOKED, 0), ("posted", UNHOOKED, 1), ("posted", UNHOOKED, 2)]
    assert diary.numbers == [0, 0, 2]  # two in a row are one


def test_a_backend_that_does_not_count_is_left_alone() -> None:
    group = Counting(None)
    unhooked, diary = watched(group)
    unhooked.end(group, unhooked.begin(group))
    unhooked.look()
    assert diary.events == []


def test_the_last_call_has_failed_only_where_no_other_came_after_it() -> None:
    group = Counting(1)
    unhooked, diary = watched(group)
    unhooked.fail()
    assert diary.events[-1] == ("failed", UNHOOKED, 0)
    unhooked.next_number()
    unhooked.fail()
    assert len(diary.events) == 2


@pytest.fixture
def diary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Diary]:
    """Of the calls of a gloo group of this process alone, made under hooks."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    events, hooks = Diary(), Hooks(lambda line: pytest.fail(line))
    try:
        calls = DistributedCalls(hooks, Works(hooks), [], [events])
        FunctionalCalls(hooks, calls)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(1))
        yield events
        calls.fail()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        hooks.remove()


def test_the_making_of_the_default_group_is_a_call(diary: Diary) -> None:
    assert diary.events[0] == ("posted", SETUP, 0)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # newer names for these are not in every torch
def test_calls_through_python_are_seen_all(diary: Diary) -> None:
    one = torch.ones(1)
    dist.barrier()
    dist.monitored_barrier()
    dist.all_gather_object([None], "x")
    dist.all_gather_into_tensor(torch.empty(1), one)
    dist.reduce_scatter_tensor(torch.empty(1), one)
    dist.all_reduce(one, async_op=True).wait()
    dist.broadcast(one, 0, group=dist.new_group([0]))
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(torch.ones(2))
        dist.all_reduce(torch.ones(3))
    manager.wait()
    dist.barrier()
    assert sum(kind == "barrier" for _, kind, _ in diary.events) == 3
    assert diary.count(UNHOOKED) == 0


@pytest.mark.filterwarnings("ignore::FutureWarning")  # newer names for these are not in every torch
def test_functional_collectives_through_python_are_seen_all(diary: Diary) -> None:
    two, group = torch.ones(2), dist.group.WORLD
    given = torch.ones(2, requires_grad=True)
    functional.wait_tensor(functional.all_reduce(two, "sum", group))
    functional.wait_tensor(functional.all_gather_tensor(two, 0, group))
    functional.wait_tensor(functional.reduce_scatter_tensor(two, "sum", 0, group))
    functional.all_gather_tensor_autograd(given, 0, group).sum().backward()
    for tensor in functional.all_reduce_coalesced([two, torch.ones(3)], "sum", group):
        functional.wait_tensor(tensor)
    with pytest.raises(RuntimeError):
        functional.all_reduce(two, "no reduction", group)
    dist.barrier()
    assert diary.count(UNHOOKED) == 0
    reduced, gathered, scattered = (("posted", kind) for kind in ("all_reduce", "all_gather", "reduce_scatter"))
    expected = [reduced, gathered, scattered, gathered, scattered, reduced, reduced, ("failed", "all_reduce")]
    assert [event[:2] for event in diary.events[2:-1]] == expected


def test_ddps_reducer_and_functional_collectives_of_cpp_are_counted(diary: Diary) -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    dist.barrier()
    before = diary.count(UNHOOKED)
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
    dist.barrier()
    after_ddp = diary.count(UNHOOKED)
    assert after_ddp >= before + 3
    operators = torch.ops._c10d_functional
    past_python, _ = torch._C._jit_get_operation("_c10d_functional::all_reduce")  # what the operator itself called
    operators.wait_tensor(past_python(torch.ones(2), "sum", str(dist.group.WORLD.group_name)))
    dist.barrier()
    assert diary.count(UNHOOKED) == after_ddp + 1


@pytest.mark.filterwarnings("ignore::FutureWarning")  # a newer name is not in every torch
@pytest.mark.usefixtures("diary")
def test_calls_that_raise_are_known_by_kind_group_and_number() -> None:
    session = HeardSession()
    marks, hooks = CallMarks(session), Hooks(lambda line: pytest.fail(line))
    try:
        DistributedCalls(hooks, Works(hooks), [marks])
        dist.all_reduce(torch.ones(1))
        with pytest.raises((RuntimeError, ValueError)):
            dist.all_gather_into_tensor(torch.empty(3), torch.ones(2))
    finally:
        hooks.remove()
    assert marks.failed_calls == [("all_gather", str(dist.distributed_c10d._get_default_group().group_name), 1, -1)]
    assert session.recorder.open == []
