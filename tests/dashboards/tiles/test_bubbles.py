"""Time without compute in an op: an exact partition, each part with what was seen of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from msgspec.structs import replace

from pptrace.analysis.aligned import RankRows, RowsByRank
from pptrace.intervals import clip, length
from pptrace.model.device import IdleTime
from pptrace.model.tables import COMMS, OPS
from pptrace.report.tiles.bubbles import BETWEEN_OPS_ALONE, STATES, SendTimes, gaps_in_ops, idle_by_state
from pptrace.timeline.lanes import Lane
from pptrace.workflow.load import load

MATCH = 7
LANE_PARTS = ("transfer", "exposed", "unknown", "not_overlapped")


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


def lane(compute: list[list[int]], starved: list[list[int]], **others: list[list[int]]) -> Lane:
    idle = IdleTime(launch_starved=np.array(starved, dtype=np.int64).reshape(-1, 2))
    known = {name: np.array(others.get(name, []), dtype=np.int64).reshape(-1, 2) for name in LANE_PARTS}
    return Lane(np.array(compute, dtype=np.int64), **known, on_device=True, idle=idle)


def test_each_part_of_the_time_without_op_has_its_state() -> None:
    rows, comms = rows_of_rank()
    window = (np.array([0]), np.array([100]), np.array([0]))
    of_rank = lane([[10, 20], [40, 50], [60, 70], [92, 96]], [[55, 60]], exposed=[[36, 40]], unknown=[[50, 52]])
    parts = idle_by_state(rows, of_rank, *window, SendTimes.of(comms))
    assert {state: part.tolist() for state, part in parts.items()} == {
        "exposed transfer": [[36, 40]],
        "waiting or transfer": [[50, 52]],
        "other work": [[92, 96]],
        "not launched": [[55, 60]],
        "fill": [[0, 10]],
        "drain": [[70, 92], [96, 100]],
        "late message": [[20, 30], [32, 36]],  # not sent before 30; from 32 on the rank had asked for it
        "late collective": [],
        "unexplained": [[30, 32], [52, 55]],
    }
    assert tuple(parts) == tuple(STATES)


def test_time_outside_of_steps_has_states_too_and_before_the_first_event_none() -> None:
    rows, comms = rows_of_rank()
    window = (np.array([35]), np.array([55]), np.array([0]))
    parts = idle_by_state(rows, lane([[10, 20], [40, 50], [60, 70]], [[25, 28]]), *window, SendTimes.of(comms))
    assert parts["not launched"].tolist() == [[25, 28]]
    assert parts["unexplained"].tolist() == [[30, 32], [50, 60]]
    assert min(int(part.min()) for part in parts.values() if len(part)) == 20


def test_ranges_between_steps_of_a_host_are_other_work_where_nothing_else_is_known() -> None:
    op = {name: "" if dtype == "str" else 0 for name, dtype in OPS.items()} | {"rank": 1}
    kinds = (("F", 10, 20), ("OPTIMIZER", 30, 50), ("STEP", 0, 60), ("F", 60, 70))
    ops = pd.DataFrame([op | {"kind": kind, "start_ns": start, "end_ns": end} for kind, start, end in kinds])
    default = {name: "" if dtype == "str" else -1 for name, dtype in COMMS.items()}
    comms = pd.DataFrame([default | {"rank": 1, "kind": "all_reduce", "axis": "dp", "start_ns": 40, "end_ns": 45}])
    rows = RowsByRank(ops, comms).of_rank(1)
    on_host = replace(lane([[10, 20], [60, 70]], []), on_device=False, idle=None)
    none = np.empty(0, dtype=np.int64)
    parts = idle_by_state(rows, on_host, none, none, none, SendTimes.of(comms))
    known = {state: part.tolist() for state, part in parts.items() if len(part)}
    assert known == {
        "other work": [[30, 40], [45, 50]],
        "late collective": [[40, 45]],
        "unexplained": [[20, 30], [50, 60]],
    }


def test_time_in_ops_without_compute_has_its_state() -> None:
    rows, _ = rows_of_rank()
    compute = [[10, 14], [16, 20], [40, 42], [60, 70]]
    gaps = gaps_in_ops(rows, lane(compute, [[14, 15]], exposed=[[42, 45]], not_overlapped=[[42, 48]]))
    assert {name: part.tolist() for name, part in gaps.items()} == {
        "exposed transfer": [[42, 45]],
        "waiting or transfer": [],
        "not launched": [[14, 15]],
        "late collective": [[45, 48]],
        "unexplained": [[15, 16], [48, 50]],
    }
    nothing = gaps_in_ops(rows, None)
    assert set(nothing) == set(gaps) == set(STATES) - BETWEEN_OPS_ALONE
    assert all(part.tolist() == [] for part in nothing.values())


def test_the_states_of_a_run_without_kernels_sum_to_its_bubbles_and_exposed_transfers(run_p4: Path) -> None:
    analysis = load([run_p4])
    sent = SendTimes.of(analysis.data.comms)
    for step in analysis.report.steps:
        windows = [window for window in analysis.windows if window.step == step.step]
        edges = (np.array([windows[0].start_ns]), np.array([windows[0].end_ns]), np.array([step.step]))
        for row in step.ranks:
            rows, of_rank = analysis.data.rows.of_rank(row.rank), analysis.data.lanes[row.rank]
            parts = idle_by_state(rows, of_rank, *edges, sent)
            inside = {name: clip(part, windows[0].start_ns, windows[0].end_ns) for name, part in parts.items()}
            bubble = sum(
                length(part) for name, part in inside.items() if name not in ("exposed transfer", "other work")
            )
            assert bubble == pytest.approx(row.bubble_ns, abs=1)
            gaps = clip(gaps_in_ops(rows, of_rank)["exposed transfer"], windows[0].start_ns, windows[0].end_ns)
            exposed = length(inside["exposed transfer"]) + length(gaps)
            assert exposed == pytest.approx(row.exposed_comm_ns, abs=1)
