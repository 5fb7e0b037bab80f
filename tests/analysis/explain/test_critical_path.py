"""The critical path against every path through small graphs."""

from __future__ import annotations

import random
from functools import cache

import numpy as np

from pptrace.analysis.explain.critical_path import bindings_of, critical_paths
from pptrace.schedule.plan_table import PlanTable
from pptrace.schedule.registry import SCHEDULES, build
from tests.support.extent import ALL
from tests.support.replayed_times import replayed_times

NUM_GRAPHS = 1000 if ALL else 100


def paths_to_the_end(table: PlanTable, durations: list[int], latency: int) -> dict[int, int]:
    """The length of the longest path through each op, by trying every path before it and every path after it."""
    rows = range(len(table))
    needs: dict[int, list[tuple[int, int]]] = {row: [] for row in rows}
    for reader, source, message in zip(table.dep_reader, table.dep, table.dep_message, strict=True):
        needs[int(reader)].append((int(source), latency if message >= 0 else 0))
    for row in rows:
        if table.position[row] > 0:
            needs[row].append((row - 1, 0))
    readers: dict[int, list[tuple[int, int]]] = {row: [] for row in rows}
    for row, sources in needs.items():
        for source, delay in sources:
            readers[source].append((row, delay))

    @cache
    def before(row: int) -> int:
        return max((before(source) + durations[source] + delay for source, delay in needs[row]), default=0)

    @cache
    def after(row: int) -> int:
        return max((after(reader) + durations[reader] + delay for reader, delay in readers[row]), default=0)

    return {row: before(row) + durations[row] + after(row) for row in rows}


def test_the_path_is_a_longest_one_of_all_and_its_parts_are_the_span() -> None:
    rng = random.Random(5)
    names = [name for name in SCHEDULES if name != "zb-auto"]
    for _ in range(NUM_GRAPHS):
        name, pp = rng.choice(names), rng.choice((2, 4))
        table = build(name, pp, rng.choice((2, 4)) * pp if "dualpipe" in name else pp * rng.randint(1, 2)).table
        durations, latency = [rng.randint(0, 50) for _ in range(len(table))], rng.choice((0, 7))
        times = replayed_times(table, [durations], latency)
        (path,), work = critical_paths(times, bindings_of(times), np.array([0]), np.zeros_like(times.start))
        longest = paths_to_the_end(table, durations, latency)
        assert path.span_ns == sum(path.parts.values()) == sum(path.by_stage.values()) == max(longest.values())
        assert path.parts["idle"] == 0
        assert path.parts["transfer"] % max(latency, 1) == 0
        on_path = np.flatnonzero(work[0])
        assert all(longest[row] == path.span_ns for row in on_path.tolist())
        assert all(work[0, row] == durations[row] for row in on_path.tolist())
