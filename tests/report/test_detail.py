from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from pptrace.report.detail import MOST_BARS, View, select_detail, visible
from pptrace.report.figures import timeline
from pptrace.schedule.registry import build
from pptrace.simulator import simulate, uniform


@pytest.fixture(scope="module")
def long_step() -> pd.DataFrame:
    """18,432 ops on 16 ranks."""
    return simulate(build("interleaved-1f1b", 16, 144, 4), uniform(2_000_000, 4_000_000)).ops()


def whole(ops: pd.DataFrame) -> View:
    return View(int(ops["start_ns"].min()), int(ops["end_ns"].max()))


def test_few_ops_are_all_drawn(long_step: pd.DataFrame) -> None:
    few = long_step.iloc[:MOST_BARS]
    detail = select_detail(few, View(0, 1))
    assert detail.ops is few
    assert len(detail.blocks) == 0


def test_blocks_hold_every_op_once_and_cover_no_bubble(long_step: pd.DataFrame) -> None:
    detail = select_detail(long_step, whole(long_step))
    blocks = detail.blocks
    assert len(blocks) < MOST_BARS < len(long_step)
    assert len(detail.ops) + int((blocks["num_forward"] + blocks["num_backward"]).sum()) == len(long_step)
    assert int(blocks["num_forward"].sum()) == 16 * 144 * 4
    drawn = int((blocks["end_ns"] - blocks["start_ns"]).sum())
    busy = int((long_step["end_ns"] - long_step["start_ns"]).sum())
    assert busy <= drawn <= busy * 1.01
    assert blocks["backward_share"].between(0, 1).all()


def test_looking_closer_shows_every_op_of_the_stretch(long_step: pd.DataFrame) -> None:
    end = whole(long_step).end_ns
    view = View(end // 2, end // 2 + end // 10)
    detail = select_detail(long_step, view)
    inside = long_step[(long_step["end_ns"] > view.start_ns) & (long_step["start_ns"] < view.end_ns)]
    assert len(detail.blocks) == 0
    assert set(inside.index) <= set(detail.ops.index)
    assert len(detail.ops) < len(long_step)


def test_a_long_step_is_drawn_with_few_bars_and_says_that_blocks_are_many_ops(long_step: pd.DataFrame) -> None:
    figure = timeline(long_step, view=whole(long_step))
    assert sum(len(trace.y) for trace in figure.data) < MOST_BARS
    assert "Many ops (zoom in)" in {trace.name for trace in figure.data}


def test_gaps_below_a_pixel_and_far_away_are_left_out() -> None:
    gaps = np.array([[0, 100], [1_000, 1_000_000], [90_000_000, 99_000_000]], dtype=np.int64)
    assert visible(gaps, View(0, 12_000_000)).tolist() == [[1_000, 1_000_000]]
    assert visible(gaps, None) is gaps
