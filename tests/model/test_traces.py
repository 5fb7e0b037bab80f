"""Events of one rank: rows by the names and categories that they have, and the span of those of the host."""

from __future__ import annotations

import re

import numpy as np
import pytest

from pptrace.model import traces
from pptrace.model.traces import Category
from tests.support.synthetic import Event, make_trace

KINDS = (Category.CPU_OP, Category.RUNTIME, Category.ANNOTATION)


@pytest.mark.parametrize("most", [0, 10_000])
@pytest.mark.parametrize("categories", [(), *((kind,) for kind in KINDS), KINDS[:2]])
def test_rows_by_name_are_the_same_with_few_names_and_with_many(
    monkeypatch: pytest.MonkeyPatch, most: int, categories: tuple[Category, ...]
) -> None:
    monkeypatch.setattr(traces, "_MANY_NAMES", most)
    random = np.random.default_rng(3)
    drawn = zip(random.choice(3, 200).tolist(), random.choice(40, 200).tolist(), strict=True)
    events = make_trace(
        [Event(KINDS[kind], f"op {number}", at, at + 1) for at, (kind, number) in enumerate(drawn)]
    ).events
    pattern = re.compile(r"[37]$")
    expected = [
        row
        for row, (category, name) in enumerate(zip(events.category.tolist(), events.name_id.tolist(), strict=True))
        if pattern.search(events.names[name]) and (not categories or Category(category) in categories)
    ]
    assert expected
    assert events.rows_named(pattern, *categories).tolist() == expected


@pytest.mark.parametrize(
    ("host", "span"),
    [([], None), ([(5, 9)], (5, 9)), ([(5, 40), (6, 9)], (5, 40)), ([(-30, -20), (-25, -5)], (-30, -5))],
)
def test_the_span_of_the_host_has_no_work_of_devices_in_it(
    host: list[tuple[int, int]], span: tuple[int, int] | None
) -> None:
    of_host = [Event(Category.CPU_OP, f"op{index}", *times, thread=1) for index, times in enumerate(host)]
    of_device = [Event(Category.KERNEL, "kernel", -50, 90, stream=7)]
    assert make_trace([*of_host, *of_device]).events.host_span_ns == span
    assert make_trace(of_host).events.host_span_ns == span
