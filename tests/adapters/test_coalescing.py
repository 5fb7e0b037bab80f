"""Calls that a coalescing manager gathers are posted when it ends, as Megatron-LM's gradient buckets are."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from instrument.adapters.calls import Call
from instrument.adapters.hooks import Hooks
from instrument.adapters.torch_distributed import DistributedCalls
from instrument.adapters.works import Works
from tests.adapters.heard import alone_as
from tests.adapters.noting import Noting


class Events(Noting):
    """An observer that writes down what it is told, beside what the script says of itself."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, event: str, call: Call) -> None:
        self.lines.append(f"{event} {call.num_bytes}{' async' if call.is_async else ''}")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_last_call_of_a_coalescing_manager_returns_when_the_manager_has_posted_it(asynchronous: bool) -> None:
    events, hooks = Events(), Hooks(lambda line: pytest.fail(line))
    with alone_as(0, 2):
        DistributedCalls(hooks, Works(hooks), [events])
        try:
            with dist._coalescing_manager(async_ops=asynchronous):
                dist.all_reduce(torch.zeros(1))
                dist.all_reduce(torch.zeros(2))
                events.lines.append("the body ends")
            dist.all_reduce(torch.zeros(3))
        finally:
            hooks.remove()
    word = " async" if asynchronous else ""
    first = [f"posted 4{word}", f"returned 4{word}"]
    assert events.lines[:5] == [*first, f"posted 8{word}", "the body ends", f"returned 8{word}"]
    assert events.lines[-3:] == ["posted 12", "returned 12", "completed 12"]
    assert ("completed 8" in events.lines) == (not asynchronous)
