"""Ranges of garbage collections: one for each of an older generation, with the step that runs."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch._dynamo
from torch.profiler import ProfilerActivity, profile

from instrument.recorder import Recorder
from instrument.session import CollectionRanges, Session
from tests.instrument.test_recorder import names


@pytest.fixture(autouse=True)
def _no_collections_of_others() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def test_collections_of_older_generations_get_ranges_while_they_are_watched() -> None:
    steps = iter(range(10, 20))
    collections = CollectionRanges(Recorder(), lambda: next(steps))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        gc.disable()  # the profiler turns collections on again
        gc.collect()
        collections.watch()
        gc.collect(0)
        gc.collect(1)
        gc.collect()
        collections.remove()
        gc.collect()
    assert names(profiler) == ["pp1:GC step=10", "pp1:GC step=11"]
    assert not [call for call in gc.callbacks if getattr(call, "__self__", None) is collections]


def test_a_collection_that_began_before_it_was_watched_has_no_range() -> None:
    collections = CollectionRanges(Recorder(), lambda: 0)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        collections._note("stop", {"generation": 2})
    assert names(profiler) == []


def test_the_steps_of_a_session_watch_collections_and_leave_nothing_behind() -> None:
    before = list(gc.callbacks)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        gc.disable()
        for step in Session(Recorder()).steps(3):
            if step == 1:
                gc.collect()
    assert [name for name in names(profiler) if " GC" in name or ":GC" in name] == ["pp1:GC step=1"]
    assert gc.callbacks == before


def test_a_collection_in_compiled_code_has_a_range_and_adds_nothing_to_compile() -> None:
    def collecting(x: torch.Tensor) -> torch.Tensor:
        doubled = x * 2
        gc.collect()
        return doubled + 1

    def num_frames() -> int:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about the collection in the graph
            torch.compile(collecting, backend="eager")(torch.ones(2))
        return int(torch._dynamo.utils.counters["frames"]["total"])

    usual = num_frames()
    collections = CollectionRanges(Recorder(), lambda: 4)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        gc.disable()
        collections.watch()
        watched = num_frames()
        collections.remove()
    assert watched == usual
    assert "pp1:GC step=4" in names(profiler)
