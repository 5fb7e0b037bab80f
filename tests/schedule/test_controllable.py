"""V-half and V-min against their authors' construction."""

from __future__ import annotations

import pytest

from pptrace.schedule.registry import build
from pptrace.simulator import peak_inflight, simulate, uniform

AUTHORS = [
    *(("v-half", 2, 8, 4, 49), ("v-half", 3, 9, 4, 59), ("v-half", 4, 4, 6, 34), ("v-half", 4, 16, 6, 101)),
    *(("v-half", 5, 5, 6, 44), ("v-half", 5, 20, 6, 131), ("v-half", 6, 24, 8, 155), ("v-half", 7, 14, 8, 101)),
    *(("v-half", 7, 28, 8, 185), ("v-half", 8, 32, 10, 209), ("v-half", 12, 24, 14, 173)),
    *(("v-half", 16, 32, 18, 233), ("v-min", 2, 8, 4, 51), ("v-min", 3, 9, 4, 59), ("v-min", 4, 4, 4, 35)),
    *(("v-min", 4, 16, 4, 107), ("v-min", 5, 20, 6, 135), ("v-min", 6, 24, 6, 161), ("v-min", 7, 28, 6, 191)),
    *(("v-min", 8, 32, 8, 219), ("v-min", 12, 24, 10, 185), ("v-min", 16, 32, 12, 251)),
]
"""(schedule, p, m, the most activations of one chunk on a rank, ticks of the step with F = I = W = 1): what the program of the
authors gives, sail-sg/zero-bubble-pipeline-parallelism 39f2c18, ``scheduler/zbv_greedy.py``, its orders replayed.
"""


@pytest.mark.parametrize(("name", "p", "m", "held", "ticks"), AUTHORS)
def test_memory_is_the_authors_and_the_step_no_longer(name: str, p: int, m: int, held: int, ticks: int) -> None:
    plan = build(name, p, m)
    assert max(peak_inflight(plan)) == held
    assert simulate(plan, uniform(1, 2, 1)).makespan_ns <= ticks
