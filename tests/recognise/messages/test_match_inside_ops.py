"""Collectives without a group inside ops are matched where replicas have the same ones, and left alone where anything differs."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from msgspec.structs import replace

from pptrace.clock.result import Clock, ClockMethod
from pptrace.model.mesh import MeshInfo
from pptrace.model.tables import COMMS, OPS
from pptrace.recognise.messages.match_without_groups import match_inside_ops
from tests.support.tables import table_of

MS = 1_000_000
CLOCK = Clock(ClockMethod.SAME_HOST, dict.fromkeys(range(4), 0), 50_000)
MESH = MeshInfo(num_ranks=4, pp=2, vpp=1, tp=1, cp=1, dp=2, ep=1, pipelines=((0, 2), (1, 3)))
"""Ranks 0 and 1 have stage 0, ranks 2 and 3 stage 1."""


def tables(late_ms: int = 3) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(comms, ops) of two steps of an F with two exchanges, to which the second pipeline's ranks come late."""
    ops, comms = [], []
    for rank in range(4):
        for step in range(2):
            begin = (100 * step + 20 * (rank // 2)) * MS
            common = {"rank": rank, "step": step, "stage": rank // 2, "chunk": 0, "clock": "host"}
            times = {"start_ns": begin, "end_ns": begin + 16 * MS}
            ops.append({**common, "kind": "F", "microbatch": 0, "source": "inferred", **times})
            for nth in range(2):
                start = begin + (8 * nth + 1 + late_ms * (rank % 2)) * MS
                end = begin + (8 * nth + 6) * MS
                times = dict.fromkeys(("start_ns", "posted_ns", "asked_ns", "transfer_start_ns"), start)
                times |= dict.fromkeys(("end_ns", "transfer_end_ns"), end)
                comms.append({**common, "kind": "all_to_all", "axis": "unknown", **times})
    return table_of(COMMS, comms, -1), table_of(OPS, ops, -1)


def test_replicas_have_the_same_collectives_in_their_ops() -> None:
    comms, ops = tables()
    matched = match_inside_ops(comms, ops, MESH, CLOCK)
    assert (matched["match"] >= 0).all()
    for _, rows in matched.groupby("match"):
        assert sorted(rows["rank"]) in ([0, 1], [2, 3])
        assert rows["step"].nunique() == 1
        assert rows["end_ns"].nunique() == 1
    assert matched["match"].nunique() == 8
    assert matched.drop(columns="match").equals(comms.drop(columns="match"))


def test_none_is_matched_that_is_over_before_another_has_begun() -> None:
    comms, ops = tables(late_ms=6)
    assert match_inside_ops(comms, ops, MESH, CLOCK).equals(comms)


@pytest.mark.parametrize("dropped", [0, 5, 15])
def test_one_that_a_replica_lacks_leaves_its_stage_alone(dropped: int) -> None:
    comms, ops = tables()
    left = comms.drop(index=dropped).reset_index(drop=True)
    stage = int(comms["stage"].iloc[dropped])
    matched = match_inside_ops(left, ops, MESH, CLOCK)
    assert ((matched["match"] >= 0) == (left["stage"] != stage)).all()


def test_without_a_clock_or_replicas_nothing_is_matched() -> None:
    comms, ops = tables()
    alone = replace(MESH, dp=1, pipelines=((0, 1, 2, 3),))
    apart = replace(CLOCK, unrelated=frozenset({1, 3}))
    for mesh, clock in ((alone, CLOCK), (MESH, apart)):
        assert match_inside_ops(comms, ops, mesh, clock)["match"].eq(-1).all()


def test_those_of_a_known_group_and_between_ops_stay_as_they_are() -> None:
    comms, ops = tables()
    comms = comms.assign(axis=np.where(comms["step"] == 0, "ep", comms["axis"])).astype(comms.dtypes)
    between = ops.assign(end_ns=ops["start_ns"] + 8 * MS)
    matched = match_inside_ops(comms, between, MESH, CLOCK)
    is_first = comms["start_ns"] < comms["step"] * 100 * MS + comms["stage"] * 20 * MS + 8 * MS
    assert ((matched["match"] >= 0) == ((comms["step"] == 1) & is_first)).all()
