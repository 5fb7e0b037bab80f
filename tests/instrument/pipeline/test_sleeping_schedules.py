"""A schedule, run for real with ops that sleep, takes the time and the memory that its plan says.

One of them; every schedule with PPTRACE_ALL set.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pptrace.schedule.registry import SCHEDULES
from pptrace.simulator import simulate, uniform
from tests.support.extent import ALL
from tests.support.pool import Pool
from tests.support.sleeping import SleepingRun, measure

SPAN_S = 0.4
"""Long enough that what the runtime itself needs between two ops, some 20 ms a step on two busy cores, weighs little."""


@pytest.mark.parametrize("name", SCHEDULES if ALL else ("dualpipe",))
def test_a_step_takes_what_its_plan_takes_with_the_measured_ops(name: str, pool: Pool, tmp_path: Path) -> None:
    run = SleepingRun(name, 4, 8, None, 0.0, steps=2, ahead=2)
    units = simulate(run.plan, uniform(forward_ns=1, backward_ns=2)).makespan_ns
    measured = measure(pool, replace(run, forward_s=SPAN_S / units), tmp_path)
    # No step is shorter than its ops allow. Ranks that wait in turn for what could overlap take twice as long and more; the
    # README has the figures of a quiet machine, below 1 %, and a busy one adds to each step, so that the shortest counts.
    assert measured.span_error >= -0.002
    assert min(measured.span_errors) < 0.5
    assert measured.in_flight_measured == measured.in_flight_planned
