"""Waits in collectives inside ops are the member's that comes last, to the nanosecond, and what they make late with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from pptrace.analysis.report import Report
from pptrace.analysis.result import StepReport
from pptrace.model.tables import Int64
from pptrace.schedule.actions import Kind
from pptrace.schedule.plan_table import PlanTable
from pptrace.schedule.registry import build
from pptrace.schedule.replay_table import replay_table
from pptrace.workflow.load import load
from tests.support.extent import ALL
from tests.support.replayed import message_rows, op_rows

PP, TP, STEPS, MICROBATCHES = 3, 2, 3, 6
SUM_NS, MESSAGE_NS = 100, 7


@pytest.fixture(scope="module")
def table() -> PlanTable:
    return build("1f1b", PP, MICROBATCHES).table


def usual(table: PlanTable) -> Int64:
    """Compute of each op before its sum over tp, shape (steps, tp ranks, rows), ns."""
    return np.broadcast_to(np.where(table.kind == Kind.F.code, 1000, 2000), (STEPS, TP, len(table))).astype(np.int64)


def report_of(folder: Path, table: PlanTable, computing: Int64, late: Int64 | None = None) -> Report:
    """The report of a run whose ops compute, and then sum over tp when the last member is there; they begin ``late`` after that
    would be possible, shape (steps, tp ranks, rows): the replay is of the slowest of each pair.
    """
    late = np.zeros_like(computing) if late is None else late
    replay = replay_table(table, (computing + late).max(axis=1) + SUM_NS, MESSAGE_NS)
    ops, comms = [], []
    for step, tp in np.ndindex(STEPS, TP):
        begin = step * (int(replay.end.max()) + 5000)
        start, end = replay.start[step] + late[step, tp] + begin, replay.end[step] + begin
        columns = {"tp_rank": tp, "step": step}
        ops.append(op_rows(table, start, end, (TP, tp), **columns))
        of_tp = {"kind": "all_reduce", "axis": "tp", "group_size": TP, "stage": -1, "microbatch": -1}
        sums = op_rows(table, start + computing[step, tp], end, (TP, tp), **columns, **of_tp)
        comms.append(sums.assign(match=step * len(table) + np.arange(len(table))))
        sent = end[table.dep[table.dep_is_message]]
        number = STEPS * len(table) + (step * TP + tp) * len(sent) + np.arange(len(sent))
        moved = (sent, sent + MESSAGE_NS)
        comms.append(message_rows(table, moved, moved, (TP, tp), match=number, group_size=2, **columns))
    folder.mkdir(exist_ok=True)
    for name, parts in (("ops", ops), ("comms", comms)):
        rows = pd.concat(parts)
        rows.assign(pp_rank=rows["rank"] // TP).to_csv(folder / f"{name}.csv", index=False)
    return load([folder]).report


@pytest.fixture(scope="module")
def clean(table: PlanTable, tmp_path_factory: pytest.TempPathFactory) -> StepReport:
    """The first step of a run without waits."""
    return report_of(tmp_path_factory.mktemp("clean") / "run", table, usual(table)).steps[0]


def assert_exact(step: StepReport) -> int:
    """The bubble of a step, which is charged once."""
    bubble = sum(rank.bubble_ns or 0 for rank in step.ranks)
    for sums in (step.blame.by_rank, step.blame.by_stage, step.blame.by_kind):
        assert sum(sums.values()) == step.blame.total_ns == bubble
        assert min(sums.values()) >= 0
    return bubble


SLOWER_NS = 20_000


@pytest.fixture(scope="module")
def slow(table: PlanTable, tmp_path_factory: pytest.TempPathFactory) -> StepReport:
    """The same with a long forward of microbatch 2 on the second tp rank of stage 1."""
    computing = usual(table)
    computing[:, 1, (table.stage == 1) & (table.microbatch == 2) & (table.kind == Kind.F.code)] += SLOWER_NS
    return report_of(tmp_path_factory.mktemp("slow") / "run", table, computing).steps[0]


def test_a_wait_for_one_long_op_is_charged_to_it_and_all_that_it_delays(clean: StepReport, slow: StepReport) -> None:
    added = assert_exact(slow) - assert_exact(clean)
    blame, before = slow.blame, clean.blame
    most, slow_rank = blame.ops[0], 1 * TP + 1
    assert (most.rank, most.kind, most.stage, most.microbatch) == (slow_rank, "F", 1, 2)
    assert added > 4 * SLOWER_NS  # the tp peer in the op, and the other stages of both pipelines
    assert 0.95 * added <= most.ns <= 1.05 * added + before.ops[0].ns
    assert blame.by_rank[slow_rank] > 0.9 * added
    assert blame.by_kind["wait"] == 0


def test_what_ops_wait_for_a_late_member_is_its_fault_and_no_communication(clean: StepReport, slow: StepReport) -> None:
    def share(step: StepReport, name: str) -> int:
        return sum(cause.ns for cause in step.causes or () if cause.cause == name)

    assert share(slow, "communication") == pytest.approx(share(clean, "communication"), rel=0.25)
    late = [cause.ns for cause in slow.causes or () if cause.where == {"rank": 1 * TP + 1}]
    assert sum(late) >= 0.9 * SLOWER_NS  # the time of a late member, which has a finding
    assert sum(cause.ns for cause in slow.causes or ()) == (slow.span_ns or 0) - (slow.ideal_ns or 0)


@pytest.mark.parametrize("tp", [0, 1] if ALL else [1])
def test_a_slow_member_is_named_and_neither_its_stage_nor_its_axis_is(
    tmp_path: Path, table: PlanTable, tp: int
) -> None:
    """Both ranks of the stage take as long, the one for the other; which pipeline is the longer one is left to chance."""
    healthy = usual(table) + np.random.default_rng(0).integers(0, 60, (STEPS, TP, len(table)))
    computing = healthy.copy()
    computing[:, tp, table.rank == 2] = computing[:, tp, table.rank == 2] * 3 // 2
    clean = report_of(tmp_path / "clean", table, healthy)
    report = report_of(tmp_path / "slow", table, computing)
    assert not any(finding.evidence["cause"] in ("straggler", "imbalance") for finding in clean.findings)
    found = [finding for finding in report.findings if finding.evidence["cause"] in ("straggler", "imbalance")]
    (late,) = found
    assert (late.evidence["reason"], late.evidence["where"]) == ("late member", {"rank": 2 * TP + tp})
    assert late.evidence["waiting_ranks"] == [2 * TP + 1 - tp]
    spans = [np.mean([step.span_ns or 0 for step in each.steps]) for each in (report, clean)]
    assert late.gain_ns == pytest.approx(spans[0] - spans[1], rel=0.02)
