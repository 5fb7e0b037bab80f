from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from pptrace.intervals import EMPTY
from pptrace.report.blocks import MOST_BARS, with_blocks
from pptrace.report.figures import timeline
from pptrace.schedule.registry import build
from pptrace.simulator import simulate, uniform
from pptrace.timeline.lanes import Lane


@pytest.fixture(scope="module")
def long_step() -> pd.DataFrame:
    """18,432 ops on 16 ranks."""
    return simulate(build("interleaved-1f1b", 16, 144, 4), uniform(2_000_000, 4_000_000)).ops()


def test_few_ops_are_all_drawn(long_step: pd.DataFrame) -> None:
    few = long_step.iloc[:MOST_BARS]
    ops, blocks = with_blocks(few, 0, int(few["end_ns"].max()))
    assert ops is few
    assert len(blocks) == 0


def test_blocks_hold_every_op_once_and_cover_no_bubble(long_step: pd.DataFrame) -> None:
    ops, blocks = with_blocks(long_step, 0, int(long_step["end_ns"].max()))
    assert len(blocks) < MOST_BARS < len(long_step)
    assert len(ops) + int((blocks["num_forward"] + blocks["num_backward"]).sum()) == len(long_step)
    assert int(blocks["num_forward"].sum()) == 16 * 144 * 4
    drawn = int((blocks["end_ns"] - blocks["start_ns"]).sum())
    busy = int((long_step["end_ns"] - long_step["start_ns"]).sum())
    assert busy <= drawn <= busy * 1.01
    assert blocks["backward_share"].between(0, 1).all()


def test_ops_that_are_wide_enough_stay_as_they_are(long_step: pd.DataFrame) -> None:
    ops, blocks = with_blocks(long_step, 0, int(long_step["end_ns"].max()) // 10)
    assert len(blocks) == 0
    assert ops.index.equals(long_step.index)


def test_a_long_step_is_drawn_with_few_bars_and_says_that_blocks_are_many_ops(long_step: pd.DataFrame) -> None:
    figure = timeline(long_step, merge_thin=True)
    assert sum(len(trace.y) for trace in figure.data) < MOST_BARS
    assert "Many ops (zoom in)" in {trace.name for trace in figure.data}


def test_gaps_below_a_pixel_are_left_out_of_what_is_merged(long_step: pd.DataFrame) -> None:
    extent = int(long_step["end_ns"].max()) // 10
    exposed = np.array([[0, 100], [1_000, 1_000 + extent // 1_000]], dtype=np.int64)
    lanes = {0: Lane(EMPTY, exposed, exposed, EMPTY, exposed)}
    for merge_thin, num in ((False, 2), (True, 1)):
        figure = timeline(long_step, lanes=lanes, extent_ns=extent, merge_thin=merge_thin)
        (trace,) = (trace for trace in figure.data if trace.name == "Exposed transfer")
        assert len(trace.y) == num
