"""Memory over time as a figure, and as counters of Perfetto."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from msgspec import structs

from pptrace.model.tables import MEMORY, make_table
from pptrace.report.charts.memory import memory_over_time
from pptrace.report.html import report_page
from pptrace.report.perfetto import perfetto_object
from pptrace.workflow.load import load
from tests.support.programs import SAMPLES


def table(rank: int, times: list[int], levels: list[int], reserved: int = 0) -> Any:
    columns = {"rank": [rank] * len(times), "t_ns": times, "allocated_bytes": levels}
    return make_table(MEMORY, columns | {"reserved_bytes": [reserved] * len(times)})


def test_each_rank_is_a_line_of_its_levels() -> None:
    assert memory_over_time(table(0, [], [])) is None
    figure = memory_over_time(table(3, [3_000_000, 1_000_000], [2_000_000, 5_000_000]))
    (line,) = figure.data
    assert (line.name, list(line.x), list(line.y)) == ("rank 3", [0.0, 2.0], [5.0, 2.0])


def test_no_peak_is_lost_of_many_events() -> None:
    levels = np.full(100_000, 1_000_000)
    levels[54_321] = 9_000_000
    figure = memory_over_time(table(0, list(range(0, 10_000_000, 100)), levels.tolist()))
    (line,) = figure.data
    assert len(line.x) <= 2001
    assert max(line.y) == 9.0
    assert line.y[-1] == 1.0
    peak = list(line.y).index(9.0)
    assert line.x[peak] <= 54_321 * 100 / 1e6 < line.x[peak + 1]


def test_memory_is_on_the_page_and_in_perfetto_where_there_is_any() -> None:
    analysis = load([SAMPLES / "1f1b_p2"])
    start = int(analysis.data.ops["start_ns"].min())
    memory = table(1, [start + 2_000, start + 5_000], [7, 8], reserved=-1)
    with_memory = replace(analysis, data=structs.replace(analysis.data, memory=memory))
    assert "memory/stage/0/" in report_page(with_memory), "a tile of the timeline"
    counters = [event for event in perfetto_object(with_memory)["traceEvents"] if event["ph"] == "C"]
    assert [(counter["pid"], counter["args"]) for counter in counters] == [(1, {"allocated": 7}), (1, {"allocated": 8})]
    assert counters[1]["ts"] - counters[0]["ts"] == 3.0
