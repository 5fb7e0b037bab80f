"""Garbage collections that were recorded are the reason of what they hold up, and of nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from msgspec.structs import replace

from pptrace.analysis.report import Report
from pptrace.analysis.result import Finding
from pptrace.analysis.stragglers.detectors import study_steps
from pptrace.model.tables import Int64
from pptrace.schedule.plan_table import PlanTable
from pptrace.slices import Slice
from pptrace.workflow.load import load
from tests.analysis.stragglers.test_reasons import DP, OP_NS, STEPS, findings_of, real_gain, report_of, usual
from tests.support.measured import measured_costs

LONG = 4 * OP_NS


def now_and_then(table: PlanTable) -> Int64:
    """A long time at one op of the second rank in each step, shape (steps, pipelines, rows), ns."""
    times = np.zeros((STEPS, DP, len(table)), dtype=np.int64)
    rows = np.flatnonzero((table.rank == 1) & (table.position > 2) & (table.position < 12))
    random = np.random.default_rng(2)
    for step in range(STEPS):
        times[step, 0, random.choice(rows)] = LONG
    return times


def with_collections(folder: Path, table: PlanTable, times: Int64, before: bool) -> Report:
    """The report of a run in which every of some times (steps, pipelines, rows) is a collection: before its op, or in it."""
    ops = pd.read_csv(folder / "ops.csv")
    held = times.reshape(-1)
    rows = ops[held > 0]
    at = rows["start_ns"] - held[held > 0] if before else rows["start_ns"] + 10
    collections = pd.DataFrame({"rank": rows["rank"], "step": rows["step"], "kind": "GC", "start_ns": at})
    collections["end_ns"] = collections["start_ns"] + held[held > 0]
    pd.concat([ops, collections]).to_csv(folder / "ops.csv", index=False)
    return load([folder]).report


def only(report: Report, healthy: Report) -> Finding:
    (finding,) = findings_of(report)
    assert finding.gain_ns == pytest.approx(real_gain(report, healthy), rel=0.05)
    return finding


@pytest.mark.parametrize("before", [True, False])
def test_a_collection_before_ops_or_in_them_is_named_with_its_rank(
    before: bool, tmp_path: Path, table: PlanTable, healthy: Report
) -> None:
    times = now_and_then(table)
    unknown = (
        report_of(tmp_path / "run", table, usual(table), delays=times)
        if before
        else report_of(tmp_path / "run", table, usual(table) + times)
    )
    assert {finding.evidence.get("reason") for finding in findings_of(unknown)} == {"pauses" if before else "long ops"}
    finding = only(with_collections(tmp_path / "run", table, times, before), healthy)
    assert finding.evidence["reason"] == "garbage collection"
    assert (finding.evidence["cause"], finding.evidence["where"]) == ("host", {"rank": DP})
    assert finding.evidence["num_ops"] == STEPS
    assert finding.evidence["typical_ns"] == pytest.approx(LONG, rel=0.02)
    assert "gc.freeze" in finding.detail


def test_a_collection_while_the_rank_waits_for_others_costs_nothing(tmp_path: Path, table: PlanTable) -> None:
    report_of(tmp_path / "run", table, usual(table))
    ops = pd.read_csv(tmp_path / "run" / "ops.csv")
    last = ops[(ops["rank"] == DP) & (ops["step"] == 0)].sort_values("start_ns")
    gap = (last["start_ns"].to_numpy()[1:] - last["end_ns"].to_numpy()[:-1]).argmax()
    begin = int(last["end_ns"].to_numpy()[gap])
    row = {"rank": DP, "step": 0, "kind": "GC", "start_ns": begin, "end_ns": begin + OP_NS // 2}
    pd.concat([ops, pd.DataFrame([row])]).to_csv(tmp_path / "run" / "ops.csv", index=False)
    assert not findings_of(load([tmp_path / "run"]).report)


def test_pauses_besides_collections_stay_pauses(table: PlanTable) -> None:
    times = now_and_then(table)
    others = np.roll(times, 1, axis=1)
    costs = measured_costs(table, usual(table), 0, times + others)
    collected = replace(costs, collected_before=times.reshape(costs.delays.shape))
    reasons = {reason.name: reason for reason in study_steps([collected]).reasons}
    assert set(reasons) == {"garbage collection", "pauses"}
    assert reasons["garbage collection"].where == {"rank": DP}
    assert reasons["pauses"].where == {"rank": DP + 1}
    assert {reason.name for reason in study_steps([costs]).reasons} == {"pauses"}


@pytest.mark.parametrize(("name", "share"), [("garbage collection", 1), ("pauses", 0)])
def test_what_another_rank_waits_for_one_that_stands_still_before_its_step_is_no_pause_of_its_own(
    name: str, share: int, table: PlanTable
) -> None:
    """In two steps rank 1 stands still before its first op, for which rank 0's send of its first forward waits."""
    (late,) = np.flatnonzero((table.rank == 1) & (table.position == 0))
    (waits,) = np.flatnonzero((table.rank == 0) & (table.position == 1))
    delays = np.zeros((STEPS, 1, len(table)), dtype=np.int64)
    delays[1:3, 0, [late, waits]] = LONG
    costs = measured_costs(table, usual(table)[:, :1], 0, delays)
    held = {"window": [1, 2], "row": [waits] * 2, "ns": [LONG] * 2, "by": [late] * 2}
    costs = replace(costs, held_by_starts=Slice({key: np.array(values) for key, values in held.items()}))
    collected = np.zeros_like(costs.delays)
    collected[:, late] = share * costs.delays[:, late]
    (reason,) = study_steps([replace(costs, collected_before=collected)]).reasons
    assert (reason.name, reason.where) == (name, {"rank": 1})
    without = replace(costs, delays=np.zeros_like(costs.delays))
    assert reason.gain == int((costs.lengths - without.lengths).mean())
    assert study_steps([costs], uncertainty_ns=LONG).reasons == (), "clocks may be off by as much"
