"""Events of one rank in columns."""

from __future__ import annotations

import pytest

from pptrace.model.traces import Category
from tests.support.synthetic import Event, make_trace


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
