"""Buffered messages: a send never waits, and of a transfer that its reader asks for late only the rest keeps the reader."""

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
from tests.support.replayed import message_rows, op_rows

OP_NS, USUAL_NS, SLOW_NS, STEPS = 10_000, 200, 8_200, 4


def report_of(folder: Path, table: PlanTable, transfers: Int64) -> Report:
    """The report of a run in which receives are posted when their rank has ended what it did before."""
    rng, begin, parts = np.random.default_rng(7), 0, []
    readers = table.dep_reader[table.dep_is_message]
    senders = table.dep[table.dep_is_message]
    cost = np.where(table.kind == Kind.B.code, 2 * OP_NS, OP_NS)
    for step in range(STEPS):
        durations = np.rint(cost * rng.normal(1, 0.02, len(table))).astype(np.int64)
        replay = replay_table(table, durations, transfers)
        start, end = replay.start + begin, replay.end + begin
        asked = np.where(table.position[readers] > 0, end[readers - 1], begin)
        arrival = end[senders] + transfers
        parts.append(op_rows(table, start, end, step=step))
        received = (asked, np.maximum(asked, arrival))
        parts.append(message_rows(table, (end[senders], arrival), received, step=step))
        begin = int(end.max()) + OP_NS
    folder.mkdir()
    pd.concat(parts).astype({"peer": "Int64"}).to_csv(folder / "ops.csv", index=False)
    return load([folder]).report


@pytest.mark.parametrize(("name", "pp"), [("zbv", 4)])
def test_the_gain_of_a_slow_link_is_that_of_a_run_with_a_fast_one(tmp_path: Path, name: str, pp: int) -> None:
    table = build(name, pp, 2 * pp).table
    ends = [np.sort(table.rank[rows]) for rows in (np.stack((table.dep, table.dep_reader))[:, table.dep_is_message].T)]
    is_slow = np.array([end.tolist() == [1, 2] for end in ends])
    usual = np.full(table.num_messages, USUAL_NS)
    report = report_of(tmp_path / "slow", table, np.where(is_slow, SLOW_NS, usual))
    clean = report_of(tmp_path / "clean", table, usual)
    (finding,) = (finding for finding in report.findings if finding.evidence["cause"] != "structural")
    assert (finding.evidence["reason"], finding.evidence["where"]) == ("slow link", {"link": "1-2"})
    assert finding.evidence["typical_ns"] == SLOW_NS
    real = np.mean(
        [(of.span_ns or 0) - (other.span_ns or 0) for of, other in zip(report.steps, clean.steps, strict=True)]
    )
    assert finding.gain_ns == pytest.approx(real, rel=0.03)
    for step in report.steps:
        assert step.bubble.waterfall_ns.unexplained == 0
