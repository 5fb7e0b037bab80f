"""Bubbles by cause: an exact partition of the time without op, each part with what was seen of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dashboards.tiles.bubbles import CAUSES, SendTimes, bubbles_by_cause, gaps_in_ops
from pptrace.analysis.aligned import RankRows, RowsByRank
from pptrace.intervals import EMPTY, length
from pptrace.model.device_idle import IdleTime
from pptrace.model.tables import COMMS, OPS
from pptrace.timeline.lanes import Lane
from pptrace.workflow.load import load

MATCH = 7


def rows_of_rank() -> tuple[RankRows, pd.DataFrame]:
    """Rank 1 computes in 10–20, 40–50 and 60–70 of a step in 0–100, and receives in 32–40 what rank 0 sends at 30."""
    default = {name: "" if dtype == "str" else -1 for name, dtype in COMMS.items()}
    ends = [
        {"rank": 0, "kind": "send", "axis": "pp", "start_ns": 30, "end_ns": 40, "match": MATCH, "step": 0},
        {"rank": 1, "kind": "recv", "axis": "pp", "start_ns": 32, "end_ns": 40, "match": MATCH, "step": 0},
    ]
    comms = pd.DataFrame([default | end for end in ends])
    op = {name: "" if dtype == "str" else 0 for name, dtype in OPS.items()} | {"rank": 1, "kind": "F"}
    ops = pd.DataFrame([op | {"start_ns": start, "end_ns": start + 10} for start in (10, 40, 60)])
    return RowsByRank(ops, comms).of_rank(1), comms


def lane(compute: list[list[int]], starved: list[list[int]]) -> Lane:
    idle = IdleTime(launch_starved=np.array(starved, dtype=np.int64).reshape(-1, 2))
    return Lane(np.array(compute, dtype=np.int64), EMPTY, EMPTY, EMPTY, EMPTY, on_device=True, idle=idle)


def test_each_part_of_a_bubble_has_its_cause() -> None:
    rows, comms = rows_of_rank()
    window = (np.array([0]), np.array([100]), np.array([0]))
    parts = bubbles_by_cause(rows, lane([[10, 20], [40, 50], [60, 70]], [[55, 60]]), *window, SendTimes.of(comms))
    assert {cause: part.tolist() for cause, part in parts.items()} == {
        "host": [[55, 60]],
        "fill": [[0, 10]],
        "drain": [[70, 100]],
        "late message": [[20, 30], [32, 40]],  # not sent before 30; from 32 on the rank had asked for it
        "late collective": [],
        "other": [[30, 32], [50, 55]],
    }
    assert tuple(parts) == tuple(CAUSES)


def test_gaps_in_ops_are_those_without_kernels() -> None:
    rows, _ = rows_of_rank()
    gaps = gaps_in_ops(rows, lane([[10, 14], [16, 20], [40, 50], [60, 70]], [[14, 15]]))
    assert {name: part.tolist() for name, part in gaps.items()} == {
        "not launched": [[14, 15]],
        "no compute": [[15, 16]],
    }
    assert all(part.tolist() == [] for part in gaps_in_ops(rows, None).values())


def test_the_causes_of_a_run_without_kernels_sum_to_its_bubbles(run_p4: Path) -> None:
    analysis = load([run_p4])
    sent = SendTimes.of(analysis.data.comms)
    for step in analysis.report.steps:
        windows = [window for window in analysis.windows if window.step == step.step]
        edges = (np.array([windows[0].start_ns]), np.array([windows[0].end_ns]), np.array([step.step]))
        for row in step.ranks:
            rows, of_rank = analysis.data.rows.of_rank(row.rank), analysis.data.lanes[row.rank]
            parts = bubbles_by_cause(rows, of_rank, *edges, sent)
            assert sum(map(length, parts.values())) == pytest.approx(row.bubble_ns, abs=1)
