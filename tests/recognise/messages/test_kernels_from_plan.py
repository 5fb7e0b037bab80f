"""Kernels that may send or receive, between the ops of a known plan."""

from __future__ import annotations

import random

import pandas as pd
import pytest

from pptrace.model.mesh import MeshInfo
from pptrace.model.schedule_info import PlanSource, ScheduleInfo
from pptrace.model.tables import COMMS, OPS, empty_table
from pptrace.recognise.messages.comms_from_calls import CALL_COMMS
from pptrace.recognise.messages.kernels_from_plan import kernels_from_plan
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import build
from tests.support.found_ops import message_names
from tests.support.synthetic import PaperRun, groups_of, run_on_paper
from tests.support.tables import named, table_of

MS = 1_000_000


def paper(schedule: str, shape: tuple[int, int, int]) -> PaperRun:
    draw = random.Random(7)
    return run_on_paper(build(schedule, *shape), lambda _: draw.randrange(3 * MS, 9 * MS), latency=MS // 5)


def follows(plan: Plan) -> ScheduleInfo:
    return ScheduleInfo(plan, plan.name, PlanSource.RECOGNISED)


def mesh_of(pp: int) -> MeshInfo:
    return MeshInfo(pp, pp=pp, vpp=1, tp=1, cp=1, dp=1, ep=1, pipelines=(tuple(range(pp)),))


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
    return table_of(CALL_COMMS, kernels, -1), table_of(OPS, ops, -1)


@pytest.mark.parametrize("offsets", [(), (5 * MS, -70 * MS, 0)])
@pytest.mark.parametrize(("schedule", "shape"), [("1f1b", (3, 6, 1)), ("gpipe", (3, 4, 1))])
def test_they_are_the_messages_of_the_ops_beside_them(
    schedule: str, shape: tuple[int, int, int], offsets: tuple[int, ...]
) -> None:
    run = paper(schedule, shape)
    calls, ops = traced(run, offsets)
    result, line = kernels_from_plan(calls, empty_table(COMMS), ops, follows(run.plan), mesh_of(shape[0]))
    truth = {(rank, str(done.action)) for rank in range(run.plan.pp) for done in run.transfers(rank)}
    assert set(zip(result["rank"], message_names(result), strict=True)) == truth
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
    labelled = table_of(COMMS, [{"rank": 2, "kind": "recv", "axis": "pp"}], -1)
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
        (rank, 0, name[1], rank, int(name[2]), start * MS, end * MS)
        for rank in times
        for name, (start, end) in times[rank].items()
    ]
    calls = [
        (rank, "send_recv", "unknown", "device", start * MS, end * MS)
        for rank, own in wanted.items()
        for start, end in own.values()
    ]
    result, _ = kernels_from_plan(
        table_of(CALL_COMMS, named("rank kind axis clock start_ns end_ns", calls), -1),
        empty_table(COMMS),
        table_of(OPS, named("rank step kind stage microbatch start_ns end_ns", ops), -1),
        follows(plan),
        mesh_of(2),
    )
    labelled = set(zip(result["rank"], message_names(result), result["start_ns"] // MS, strict=True))
    assert labelled == {(rank, name, span[0]) for rank, own in wanted.items() for name, span in own.items()}
