"""Hooks of torch.distributed: each call seen once, with its facts, and nothing changed or broken."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from instrument.adapters.torch_distributed import _FUNCTIONS
from tests.adapters.distributed_cases import break_a_hook, compile_with_hooks, post_by_the_group, watch_everything
from tests.support.pool import Pool

BOTH = (0, 1)
COLLECTIVES = {
    "all_reduce": ("all_reduce", -1, 32),
    "broadcast": ("broadcast", 1, 32),
    "reduce": ("reduce", 1, 32),
    "all_gather": ("all_gather", -1, 32),
    "all_gather_single": ("all_gather", -1, 32),
    "reduce_scatter_single": ("reduce_scatter", -1, 32),
    "all_to_all_single": ("all_to_all", -1, 32),
    "barrier": ("barrier", -1, 0),
}
"""By function the kind, the root and the bytes: of eight floats, or of two parts of four."""


@pytest.fixture(scope="module")
def seen(pool: Pool) -> list[dict[str, list[Any]]]:
    """By rank what was heard of every call."""
    return pool.run(watch_everything, world=2)


def test_every_function_is_seen_once_sync_and_async(seen: list[dict[str, list[Any]]]) -> None:
    for rank, result in enumerate(seen):
        assert result["lines"] == []
        numbers = {"default": -1, "own": -1}
        for name, call in result.items():
            if name.removesuffix(" async") not in {**COLLECTIVES, "gather": None, "scatter": None}:
                continue
            own = name.removesuffix(" async") in ("reduce", "all_gather")  # in a group of their own
            numbers["own" if own else "default"] += 1
            events = [entry if entry == "wait" else entry[0] for entry in call]
            if name.endswith("async"):
                assert events == ["posted", "returned", "wait", "waiting", "completed"]
            else:
                assert events == ["posted", "returned", "completed"]
            (facts,) = {entry[1:] for entry in call if entry != "wait"}
            assert facts[3:] == (numbers["own" if own else "default"], BOTH)
            if (wanted := COLLECTIVES.get(name.removesuffix(" async"))) is not None:
                assert facts[:3] == wanted
            else:
                assert facts[:2] == (name.removesuffix(" async"), 0)
                assert facts[2] == (32 if rank == 0 else 16)  # the root holds both parts
        kind = "send" if rank == 0 else "recv"
        assert [entry[:4] for entry in result["message"]] == [
            (event, kind, 1 - rank, 8) for event in ("posted", "returned", "completed")
        ]


def test_a_batch_is_one_call_for_each_message(seen: list[dict[str, list[Any]]]) -> None:
    for rank, result in enumerate(seen):
        other = 1 - rank
        assert [entry[:4] for entry in result["batch"]] == [
            (event, kind, other, 12) for kind in ("send", "recv") for event in ("posted", "returned")
        ]
        assert sorted(entry[:4] for entry in result["batch waited"]) == sorted(
            (event, kind, other, 12) for kind in ("send", "recv") for event in ("waiting", "completed")
        )
        assert result["objects"] == ["all_gather", "all_gather"]  # sizes, then contents
        assert [entry[0] for entry in result["error"]] == ["posted", "failed"]
        assert result["removed"] == []


def test_messages_by_the_methods_of_a_group_are_known_to_the_logs_alone(pool: Pool) -> None:
    """Whoever waits in one waits for its other end, and none of them is a collective that C++ posted."""
    for rank, (log, observed, lines) in enumerate(pool.run(post_by_the_group, world=2)):
        kind = "send" if rank == 0 else "recv"
        assert [entry[:5] for entry in log[:-3]] == [
            (event, kind, 1 - rank, 8, number)
            for number in (0, 1)
            for event in ("posted", "returned", "waiting", "completed")
        ]
        assert [entry[:2] for entry in log[-3:]] == [(entry[0], "all_reduce") for entry in observed]
        assert lines == []


def test_what_a_hook_raises_takes_it_out_and_changes_nothing(pool: Pool) -> None:
    for results, lines in pool.run(break_a_hook, world=2):
        assert results == [3.0, 3.0, 3.0, 3.0]
        assert len(lines) == 3
        assert any("hook of all_reduce raised RuntimeError: broken before" in line for line in lines)
        assert any("hook of broadcast raised RuntimeError: broken after" in line for line in lines)
        assert any("Observer raised RuntimeError: broken observer" in line for line in lines)


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_each_argument_stands_where_torch_has_it(name: str) -> None:
    original = getattr(c10d, name, None) or getattr(dist, name, None)
    if original is None:
        pytest.skip("this torch lacks it")
    try:
        parameters = list(inspect.signature(original).parameters)
    except ValueError:  # of C++
        parameters = re.findall(r"(\w+): ", str(original.__doc__).partition("->")[0])
    function = _FUNCTIONS[name]
    for position, argument in [*function.tensors, *([function.root[:2]] if function.root else [])]:
        assert parameters[position] == argument
    assert parameters[function.group] in ("group", "process_group")
    posts = name in ("isend", "irecv")
    assert (function.is_async == -2) is posts
    assert posts or "async_op" not in parameters or function.is_async == parameters.index("async_op")


def test_a_compiled_collective_stays_one_graph(pool: Pool) -> None:
    for values, graphs, heard in pool.run(compile_with_hooks, world=2):
        assert values == [2 * (2 * (0 + 1) + 1), 2 * (2 * (1 + 2) + 1)]
        assert graphs == 1
        assert heard == 0  # the compiler's own collective, which the trace shows
