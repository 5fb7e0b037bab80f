"""Microbatches in flight, measured in ops: those of a plan where ops come in its order, and nothing where they are not whole."""

from __future__ import annotations

import numpy as np
import pytest

from pptrace.analysis.memory.answer import peaks_in_flight
from pptrace.model.tables import OPS
from pptrace.schedule.registry import SCHEDULES, build
from pptrace.simulator import IDEAL, peak_inflight, simulate
from pptrace.slices import Slice, slices_by_rank
from tests.support.tables import named, table_of

CHUNKS = {"interleaved-1f1b": 2, "looped-bfs": 2, "interleaved-zb": 2}


def rows(*ops: tuple[str, int, int]) -> Slice:
    """Ops of stage 0 one after another: (kind, step, microbatch)."""
    table = table_of(OPS, named("kind step microbatch", ops)).assign(start_ns=range(len(ops)))
    return slices_by_rank(table, ("step", "start_ns"))[0]


def peaks(*ops: tuple[str, int, int], num_steps: int = 1) -> list[int | None]:
    table = rows(*ops)
    return peaks_in_flight(table, table["step"], num_steps)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_run_of_a_plan_holds_what_the_plan_holds(name: str) -> None:
    info = SCHEDULES[name]
    chunks = CHUNKS.get(name, info.chunks if isinstance(getattr(info, "chunks", None), int) else None)
    plan = build(name, 4, 8, chunks) if chunks else build(name, 4, 8)
    ops = simulate(plan, IDEAL).ops()
    ops = ops[ops["kind"].isin(("F", "B", "I", "W", "OVERLAP_F_B"))]
    by_rank = slices_by_rank(ops, ("start_ns",))
    window = {rank: np.zeros(len(table), dtype=np.int64) for rank, table in by_rank.items()}
    measured = [peaks_in_flight(table, window[rank], 1)[0] for rank, table in sorted(by_rank.items())]
    assert measured == list(peak_inflight(plan))


def test_each_step_is_counted_by_itself() -> None:
    first = [("F", 0, 0), ("B", 0, 0), ("F", 0, 1), ("B", 0, 1)]
    second = [("F", 2, 0), ("F", 2, 1), ("B", 2, 0), ("B", 2, 1)]
    assert peaks(*first, *second, num_steps=3) == [1, None, 2]


def test_a_split_backward_holds_until_its_weight_gradient() -> None:
    assert peaks(("F", 0, 0), ("I", 0, 0), ("F", 0, 1), ("I", 0, 1), ("W", 0, 0), ("W", 0, 1)) == [2]
    assert peaks(("F", 0, 0), ("B", 0, 0), ("F", 0, 1), ("B", 0, 1), ("W", 0, 0), ("W", 0, 1)) == [2]
    assert peaks(("F", 0, 0), ("B", 0, 0), ("F", 0, 1), ("I", 0, 1), ("W", 0, 1)) == [1]


def test_a_step_that_is_not_whole_has_no_count() -> None:
    assert peaks(("F", 0, 0), ("F", 0, 1)) == [None]
    assert peaks(("F", 0, 0), ("B", 0, 0), ("B", 0, 1)) == [None]
    assert peaks(("B", 0, 0), ("F", 0, 0)) == [None]
    assert peaks(("F", 0, 0), ("F", 0, 1), ("B", 0, 0), ("F", 1, 0), ("B", 1, 0), num_steps=2) == [None, 1]
    assert peaks_in_flight(rows(("F", 0, 0)).where(slice(0, 0)), np.zeros(0, dtype=np.int64), 1) == [None]
