"""A slow rank is distinguished from a heavy stage by what its replicas take."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from pptrace.analysis.report import Report
from pptrace.model.tables import Int64
from pptrace.schedule.actions import Kind
from pptrace.schedule.plan_table import PlanTable
from pptrace.schedule.registry import build
from pptrace.schedule.replay_table import replay_table
from pptrace.workflow.load import load

PP, DP, STEPS, GAP_NS = 4, 3, 3, 1_000
NAMES = [str(kind) for kind in Kind]


def report_of(tmp_path: Path, table: PlanTable, durations: Int64) -> Report:
    """The report of a run of ``DP`` pipelines whose ops take ``durations`` (pipelines, rows); replayed, as a table of ops."""
    replay = replay_table(table, durations)
    rows = []
    for step in range(STEPS):
        begin = step * (int(replay.end.max()) + GAP_NS)
        for replica in range(DP):
            columns = {
                "rank": table.rank * DP + replica,
                "dp_rank": replica,
                "pp_rank": table.rank,
                "step": step,
                "kind": [NAMES[code] for code in table.kind],
                "stage": table.stage,
                "microbatch": table.microbatch,
                "start_ns": replay.start[replica] + begin,
                "end_ns": replay.end[replica] + begin,
            }
            rows.append(pd.DataFrame(columns))
    pd.concat(rows).to_csv(tmp_path / "ops.csv", index=False)
    return load([tmp_path / "ops.csv"]).report


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_a_rank_slower_than_its_replicas_is_named_and_its_stage_is_not(tmp_path: Path, name: str) -> None:
    table = build(name, PP, 8).table
    usual = np.where(table.kind == Kind.F.code, 10_000, 20_000)
    durations = np.stack([usual] * DP)
    healthy = report_of(tmp_path, table, durations)
    assert [finding.evidence["cause"] for finding in healthy.findings] == ["structural"]
    durations[1] = np.where(table.rank == 2, 16 * usual // 10, usual)
    report = report_of(tmp_path, table, durations)
    straggler, structural = report.findings
    slow_rank = 2 * DP + 1
    assert straggler.evidence["cause"] == "straggler"
    assert straggler.evidence["where"] == {"rank": slow_rank}
    assert structural.gain_ns == healthy.findings[0].gain_ns
    slower = (report.steps[0].span_ns or 0) - (healthy.steps[0].span_ns or 0)
    assert straggler.gain_ns == slower > 0
    blame = report.steps[0].blame
    assert blame is not None
    assert max(blame.by_rank, key=blame.by_rank.__getitem__) == slow_rank


def test_a_stage_that_is_heavy_on_every_replica_is_no_straggler(tmp_path: Path) -> None:
    table = build("1f1b", PP, 8).table
    durations = np.where(table.stage == 3, 20_000, 10_000)
    imbalance, _ = report_of(tmp_path, table, np.stack([durations] * DP)).findings
    assert imbalance.evidence["cause"] == "imbalance"
    assert imbalance.evidence["where"] == {"stage": 3}
