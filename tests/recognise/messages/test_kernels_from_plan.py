"""Kernels that may send or receive, between the ops of a known plan."""

from __future__ import annotations

import random

import pandas as pd
import pytest

from pptrace.model.mesh import MeshInfo
from pptrace.model.schedule_info import PlanSource, ScheduleInfo
from pptrace.model.tables import COMMS, OPS, Schema, empty_table, make_table
from pptrace.recognise.messages.comms_from_calls import CALL_COMMS
from pptrace.recognise.messages.kernels_from_plan import kernels_from_plan
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import build
from tests.support.synthetic import PaperRun, groups_of, run_on_paper

MS = 1_000_000


def paper(schedule: str, shape: tuple[int, int, int]) -> PaperRun:
    draw = random.Random(7)
    return run_on_paper(build(schedule, *shape), lambda _: draw.randrange(3 * MS, 9 * MS), latency=MS // 5)


def follows(plan: Plan) -> ScheduleInfo:
    return ScheduleInfo(plan, plan.name, PlanSource.RECOGNISED)


def mesh_of(pp: int) -> MeshInfo:
    return MeshInfo(pp, pp=pp, vpp=1, tp=1, cp=1, dp=1, ep=1, pipelines=(tuple(range(pp)),))


def table(schema: Schema, rows: list[dict[str, object]]) -> pd.DataFrame:
    unknown = {name: "" if dtype == "str" else -1 for name, dtype in schema.items()}
    frame = pd.DataFrame([{**unknown, **row} for row in rows])
    return make_table(schema, {name: frame[name] for name in schema})


def traced(run: PaperRun, offsets: tuple[int, ...] = ()) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The kernels of all ranks, one for each group of messages, and the ops, each rank on a clock of its own."""
    kernels: list[dict[str, object]] = []
    ops: list[dict[str, object]] = []
    for rank in range(run.plan.pp):
        off = offsets[rank] if offsets else 0
        for group in groups_of(run.ranks[rank]):
            span = {"start_ns": group[0].start + off, "end_ns": max(done.end for done in group) + off}
            if group[0].action.kind.is_p2p:
                kernels.append({"rank": rank, "kind": "send_recv", "axis": "unknown", "clock": "device", **span})
            else:
                action = group[0].action
                named = {"kind": str(action.kind), "stage": action.stage, "microbatch": action.microbatch}
                ops.append({"rank": rank, "step": 0, **named, **span})
    return table(CALL_COMMS, kernels), table(OPS, ops)


def names(comms: pd.DataFrame) -> set[tuple[int, str]]:
    kind = comms["kind"].str.upper() + "_" + comms["direction"].astype(str)
    text = comms["stage"].astype(str) + kind + comms["microbatch"].astype(str)
    return set(zip(comms["rank"], text, strict=True))


def truth(run: PaperRun) -> set[tuple[int, str]]:
    return {(rank, str(done.action)) for rank in range(run.plan.pp) for done in run.transfers(rank)}


@pytest.mark.parametrize("offsets", [(), (5 * MS, -70 * MS, 0)])
@pytest.mark.parametrize(("schedule", "shape"), [("1f1b", (3, 6, 1)), ("gpipe", (3, 4, 1))])
def test_they_are_the_messages_of_the_ops_beside_them(
    schedule: str, shape: tuple[int, int, int], offsets: tuple[int, ...]
) -> None:
    run = paper(schedule, shape)
    calls, ops = traced(run, offsets)
    result, line = kernels_from_plan(calls, empty_table(COMMS), ops, follows(run.plan), mesh_of(shape[0]))
    assert names(result) == truth(run)
    assert line.startswith(f"{len(calls)} send/receive kernels")
    assert set(result["axis"]) == {"pp"}


def test_not_where_one_lacks_or_is_too_many_or_cannot_have_met_its_other_side() -> None:
    run = paper("1f1b", (3, 6, 1))
    calls, ops = traced(run)
    first = calls.index[calls["rank"] == 1][0]  # no other kernel ends before the first forward
    extra = calls.loc[[first]].assign(end_ns=calls.loc[first, "start_ns"] + 1)
    moved = ops.assign(start_ns=ops["start_ns"] + 400 * MS, end_ns=ops["end_ns"] + 400 * MS)
    for changed, of in (
        (calls.drop(index=first), ops),
        (pd.concat([calls, extra], ignore_index=True), ops),
        (calls, moved),
        (calls, ops.drop(index=ops.index[4])),
    ):
        result, line = kernels_from_plan(changed, empty_table(COMMS), of, follows(run.plan), mesh_of(3))
        assert line == ""
        pd.testing.assert_frame_equal(result, changed)


def test_not_where_a_message_of_the_pipeline_is_told() -> None:
    run = paper("1f1b", (3, 6, 1))
    calls, ops = traced(run)
    labelled = table(COMMS, [{"rank": 2, "kind": "recv", "axis": "pp"}])
    assert kernels_from_plan(calls, labelled, ops, follows(run.plan), mesh_of(3))[1] == ""


def test_of_two_kernels_between_two_ops_the_one_that_ends_with_its_other_side_is_the_message() -> None:
    """Rank 1 receives the second activation before it sends the first gradient, as DeepSpeed does; times are ms."""
    plan = build("1f1b", 2, 2)
    times = {
        0: {"0F0": (0, 5), "0F1": (6, 11), "0B0": (19, 29), "0B1": (40, 50)},
        1: {"1F0": (6, 10), "1B0": (10, 16), "1F1": (19, 24), "1B1": (24, 39)},
    }
    wanted = {
        0: {"0SEND_F0": (5, 6), "0SEND_F1": (11, 17), "0RECV_B0": (17, 19), "0RECV_B1": (29, 40)},
        1: {"1RECV_F0": (0, 6), "1RECV_F1": (16, 17), "1SEND_B0": (17, 19), "1SEND_B1": (39, 40)},
    }
    ops = [
        {
            "rank": rank,
            "step": 0,
            "kind": name[1],
            "stage": rank,
            "microbatch": int(name[2]),
            **span_of(times[rank][name]),
        }
        for rank in times
        for name in times[rank]
    ]
    calls = [
        {"rank": rank, "kind": "send_recv", "axis": "unknown", "clock": "device", **span_of(span)}
        for rank, own in wanted.items()
        for span in own.values()
    ]
    result, _ = kernels_from_plan(
        table(CALL_COMMS, calls), empty_table(COMMS), table(OPS, ops), follows(plan), mesh_of(2)
    )
    labelled = {
        (row.rank, f"{row.stage}{row.kind.upper()}_{row.direction}{row.microbatch}", row.start_ns // MS)
        for row in result.itertuples()
    }
    assert labelled == {(rank, name, span[0]) for rank, own in wanted.items() for name, span in own.items()}


def span_of(ms: tuple[int, int]) -> dict[str, int]:
    return {"start_ns": ms[0] * MS, "end_ns": ms[1] * MS}
