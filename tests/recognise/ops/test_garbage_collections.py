"""Garbage collections as rows of the ops table: pptrace's marks, torch's own record of them, and ranges of scripts."""

from __future__ import annotations

import pytest

from pptrace.model.traces import Category
from pptrace.recognise.rank import recognise_rank
from tests.support.synthetic import AUTOGRAD_THREAD, MAIN_THREAD, START, Event, make_trace

OP = "pp1:0F0 chunk=0 phase=warmup step=4"


def annotation(name: str, start: int, end: int, category: Category = Category.ANNOTATION) -> Event:
    return Event(category, name, START + start, START + end, thread=MAIN_THREAD)


def collections(*events: Event) -> list[tuple[int, int, int]]:
    """(step, start, end) of each collection, in the order of the rows."""
    steps = [annotation("pp1:STEP step=4", 0, 1000), annotation("pp1:STEP step=5", 1000, 2000)]
    ops = [annotation(OP, 100, 500), annotation("pp1:0F0 chunk=0 phase=warmup step=5", 1100, 1500)]
    table = recognise_rank(make_trace([*steps, *ops, *events])).ops
    rows = table[table["kind"] == "GC"]
    assert (rows["clock"] == "host").all()
    assert set(table.loc[table["kind"] == "F", "step"]) == {4, 5}
    return list(
        zip(rows["step"].tolist(), (rows["start_ns"] - START).tolist(), (rows["end_ns"] - START).tolist(), strict=True)
    )


@pytest.mark.parametrize("name", ["gc", "GC", "gc.collect", "python_gc", "garbage collection"])
def test_ranges_of_scripts_around_collections_are_known_by_their_names(name: str) -> None:
    assert collections(annotation(name, 1200, 1300)) == [(5, 1200, 1300)]


@pytest.mark.parametrize("name", ["gcn", "collect", "gc.collect_grads", "egc"])
def test_other_ranges_are_no_collections(name: str) -> None:
    assert collections(annotation(name, 1200, 1300)) == []


def test_what_torch_records_of_collections_belongs_to_the_step_that_began_last() -> None:
    before, inside, between = ((-50, -40), (200, 300), (1000, 1010))
    events = [annotation("Python GC", *times, Category.PYTHON) for times in (before, inside, between)]
    assert collections(*events) == [(4, *before), (4, *inside), (5, *between)]


def test_marks_of_collections_stand_alone() -> None:
    mark = annotation("pp1:GC step=4", 200, 300)
    assert collections(mark, annotation("Python GC", 201, 299, Category.PYTHON)) == [(4, 200, 300)]


def test_a_collection_takes_its_own_time_whatever_other_threads_launch_meanwhile() -> None:
    launch = Event(
        Category.RUNTIME, "cudaLaunchKernel", START + 220, START + 222, thread=AUTOGRAD_THREAD, correlation=8
    )
    kernel = Event(Category.KERNEL, "gemm", START + 250, START + 900, 0, 7, correlation=8)
    assert collections(annotation("pp1:GC step=4", 200, 300), launch, kernel) == [(4, 200, 300)]
