"""Long sequences, a slow link, pauses and a slow worker: each is named for what it is, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from pptrace.analysis.findings.verdict import verdict_lines
from pptrace.analysis.report import Report
from pptrace.analysis.result import Finding
from pptrace.analysis.stragglers.communication import slow_link
from pptrace.analysis.stragglers.hosts import host_pauses
from pptrace.analysis.stragglers.reason import Reason
from pptrace.analysis.stragglers.sequences import long_sequences
from pptrace.model.tables import Int64
from pptrace.schedule.actions import Kind
from pptrace.schedule.plan_table import PlanTable
from pptrace.schedule.registry import build
from pptrace.schedule.replay_table import replay_table
from pptrace.workflow.load import load
from tests.support.measured import measured_costs
from tests.support.replayed import message_rows, op_rows

PP, DP, MICROBATCHES, STEPS = 4, 3, 8, 6
OP_NS, MESSAGE_NS = 1_000_000, 20_000


def usual(table: PlanTable) -> Int64:
    """Costs of all ops, shape (steps, pipelines, rows), which vary by a thousandth."""
    base = np.where(table.kind == Kind.F.code, OP_NS, 2 * OP_NS)
    return base + np.random.default_rng(0).integers(0, OP_NS // 1000, (STEPS, DP, len(table)))


def report_of(
    folder: Path, table: PlanTable, durations: Int64, transfers: Int64 | int = MESSAGE_NS, delays: Int64 | None = None
) -> Report:
    """The report of a run whose ops begin as soon as they can, but for ``delays``, read from tables of ops and messages."""
    late = np.zeros_like(durations) if delays is None else delays
    transfers = np.broadcast_to(transfers, (STEPS, DP, table.num_messages))
    replay = replay_table(table, durations + late, transfers)
    start, end = replay.start + late, replay.end
    senders = table.dep[table.dep_is_message]
    step_ns = int(end.max()) + OP_NS
    ops, comms = [], []
    for step, replica in np.ndindex(STEPS, DP):
        begin, at = step * step_ns, (step, replica)
        ops.append(op_rows(table, start[at] + begin, end[at] + begin, (DP, replica), step=step))
        sent = end[at][senders] + begin
        moved = (sent, sent + transfers[at])
        comms.append(message_rows(table, moved, moved, (DP, replica), step=step))
    folder.mkdir(exist_ok=True)
    pd.concat(ops).to_csv(folder / "ops.csv", index=False)
    pd.concat(comms).to_csv(folder / "comms.csv", index=False)
    return load([folder]).report


def findings_of(report: Report) -> list[Finding]:
    """The findings but for the structural one, which every run has."""
    return [
        finding
        for finding in report.findings
        if finding.evidence["cause"] != "structural" and "is_outside" not in finding.evidence
    ]


def real_gain(report: Report, healthy: Report) -> float:
    """By how much the mean step of a run is longer than that of another one, ns."""
    spans = [np.mean([step.span_ns or 0 for step in each.steps]) for each in (report, healthy)]
    return float(spans[0] - spans[1])


def assert_only(report: Report, healthy: Report, cause: str, where: dict[str, object]) -> Finding:
    (finding,) = findings_of(report)
    assert finding.evidence["cause"] == cause
    assert finding.evidence["where"] == where
    assert finding.gain_ns == pytest.approx(real_gain(report, healthy), rel=0.1)
    assert finding.gain_low_ns <= (finding.gain_ns or 0) <= finding.gain_high_ns
    return finding


def test_a_slow_worker_is_named_and_no_other_reason(tmp_path: Path, table: PlanTable, healthy: Report) -> None:
    durations = usual(table)
    durations[:, 1, table.rank == 2] = durations[:, 1, table.rank == 2] * 3 // 2
    report = report_of(tmp_path / "run", table, durations)
    finding = assert_only(report, healthy, "straggler", {"rank": 2 * DP + 1})
    assert "reason" not in finding.evidence
    stragglers = report.stragglers
    assert max(stragglers.workers, key=lambda worker: worker.slowdown).rank == 2 * DP + 1
    assert stragglers.m_w == pytest.approx(1, abs=0.2)


def test_a_slow_link_is_named_with_its_ranks(tmp_path: Path, table: PlanTable, healthy: Report) -> None:
    transfers = np.full((STEPS, DP, table.num_messages), MESSAGE_NS)
    ends = table.rank[table.dep[table.dep_is_message]] + table.rank[table.dep_reader[table.dep_is_message]]
    transfers[:, 2, ends == 1 + 2] = 30 * MESSAGE_NS
    report = report_of(tmp_path / "run", table, usual(table), transfers)
    finding = assert_only(report, healthy, "communication", {"link": f"{DP + 2}-{2 * DP + 2}"})
    assert finding.evidence["reason"] == "slow link"
    assert finding.evidence["typical_ns"] == pytest.approx(30 * MESSAGE_NS, rel=0.01)
    assert finding.evidence["usual_ns"] == pytest.approx(MESSAGE_NS, rel=0.01)


@pytest.mark.parametrize(("is_inside", "has_network"), [(True, False), (False, True), (None, True)])
def test_what_to_do_about_a_slow_link_of_one_host_is_about_that_host_and_no_network(
    tmp_path: Path, table: PlanTable, is_inside: bool | None, has_network: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr("pptrace.workflow.analyse.is_same_host", lambda ranks, _: asked.append(ranks) or is_inside)
    transfers = np.full((STEPS, DP, table.num_messages), MESSAGE_NS)
    ends = table.rank[table.dep[table.dep_is_message]] + table.rank[table.dep_reader[table.dep_is_message]]
    transfers[:, 2, ends == 1 + 2] = 30 * MESSAGE_NS
    report = report_of(tmp_path / "run", table, usual(table), transfers)
    (finding,) = (found for found in report.findings if found.evidence.get("reason") == "slow link")
    assert (DP + 2, 2 * DP + 2) in asked
    assert finding.evidence["same_host"] is is_inside
    assert (" of one host" in finding.title) == bool(is_inside)
    first = verdict_lines(report).first
    for advice in (finding.detail, first):
        assert ("network" in advice) == has_network, advice
        assert ("host" in advice) == (is_inside is not False), advice
    assert first.startswith("Look at ")


@pytest.mark.parametrize("few", [False, True])
def test_microbatches_that_cost_more_on_all_stages_are_long_sequences(
    tmp_path: Path, table: PlanTable, few: bool
) -> None:
    """Totals of steps differ, which is nothing to win back: only how a step deals its work out is. What a few long ones are more
    than most is no loss either.
    """
    random = np.random.default_rng(1)
    of_step = random.uniform(0.6, 1.4, (STEPS, 1, 1))
    work = random.uniform(0.5, 1.5, (STEPS, DP, MICROBATCHES))
    work = np.where(work > 1.25, 3.0, 1.0) if few else work
    work *= of_step / work.mean(axis=(1, 2), keepdims=True)
    durations = np.rint(usual(table) * work[:, :, table.microbatch]).astype(np.int64)
    hiccups = np.zeros_like(durations)
    hiccups[0, 0, np.flatnonzero(table.kind == Kind.F.code)[:2]] = 12 * OP_NS
    report = report_of(tmp_path / "run", table, durations + hiccups)
    healthy = report_of(tmp_path / "healthy", table, np.rint(usual(table) * of_step).astype(np.int64) + hiccups)
    finding = assert_only(report, healthy, "jitter", {})
    assert finding.evidence["reason"] == "long sequences"
    assert finding.evidence["correlation"] > 0.95
    assert "microbatches of unequal work" in report.verdict


def test_now_and_then_a_rank_that_stands_still_has_pauses(tmp_path: Path, table: PlanTable, healthy: Report) -> None:
    delays = np.zeros((STEPS, DP, len(table)), dtype=np.int64)
    random = np.random.default_rng(2)
    for step in range(STEPS):
        row = random.choice(np.flatnonzero((table.position > 2) & (table.position < 12)))
        delays[step, random.integers(DP), row] = 4 * OP_NS
    report = report_of(tmp_path / "run", table, usual(table), delays=delays)
    finding = assert_only(report, healthy, "host", {})
    assert finding.evidence["reason"] == "pauses"
    assert finding.evidence["num_pauses"] == STEPS
    assert finding.evidence["typical_ns"] == pytest.approx(4 * OP_NS, rel=0.05)


def of(
    table: PlanTable, durations: Int64, transfers: Int64 | int = MESSAGE_NS, delays: Int64 | int = 0
) -> list[Reason | None]:
    """(long sequences, slow link, pauses) of a run."""
    plans = [measured_costs(table, durations, transfers, delays)]
    return [find(plans) for find in (long_sequences, slow_link, host_pauses)]


def test_nothing_is_a_reason_in_a_healthy_run(table: PlanTable) -> None:
    assert of(table, usual(table)) == [None, None, None]


def test_plans_of_which_one_shows_nothing_show_no_long_sequences(table: PlanTable) -> None:
    work = np.random.default_rng(1).uniform(0.5, 1.5, (STEPS, DP, MICROBATCHES))
    plans = [
        measured_costs(of_plan, np.rint(usual(of_plan) * work[:, :, of_plan.microbatch]).astype(np.int64))
        for of_plan in (table, build("gpipe", 1, MICROBATCHES).table)
    ]
    assert long_sequences(plans[:1]) is not None
    assert long_sequences(plans) is None


def test_a_link_is_compared_with_those_of_replicas_at_the_same_place(table: PlanTable) -> None:
    ends = table.rank[table.dep[table.dep_is_message]] + table.rank[table.dep_reader[table.dep_is_message]]
    transfers = np.where(
        ends == 3, 10 * MESSAGE_NS, MESSAGE_NS
    )  # on every replica: another kind of link, none that is slow
    assert of(table, usual(table), np.tile(transfers, (STEPS, DP, 1)))[1] is None
    (_, link, _) = of(table, usual(table)[:, :1], np.tile(transfers, (STEPS, 1, 1)))
    assert link.where == {"link": "1-2"}


def test_a_link_of_which_only_more_messages_were_waited_for_is_not_slow(table: PlanTable) -> None:
    """Half of all messages come before they are asked for; of one link a few less."""
    ends = table.rank[table.dep[table.dep_is_message]] + table.rank[table.dep_reader[table.dep_is_message]]
    share = np.full((DP, table.num_messages), 0.4)
    share[0, ends == 1 + 2] = 0.6
    late = np.random.default_rng(4).random((STEPS, DP, table.num_messages)) < share
    for usual_ns in (MESSAGE_NS, 0):  # none: they had come before they were asked for, and tell nothing
        transfers = np.where(late, 5 * MESSAGE_NS, usual_ns)
        assert of(table, usual(table), transfers)[1] is None
        transfers[:, 0, ends == 1 + 2] *= 10
        link = of(table, usual(table), transfers)[1]
        assert link.where == {"link": f"{DP}-{2 * DP}"}
        share[0] = 0.2
        late = np.random.default_rng(4).random((STEPS, DP, table.num_messages)) < share
