"""Ranks that begin late: when one is named, and when nothing is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from pptrace.analysis.report import Report
from pptrace.analysis.result import Finding
from pptrace.analysis.stragglers.detectors import study_steps
from pptrace.analysis.stragglers.hosts import LATE_LAUNCHES, LATE_OP, LATE_START, PAUSES
from pptrace.analysis.stragglers.outside import AMONG, BEFORE
from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.registry import build
from pptrace.slices import Slice
from pptrace.workflow.load import load
from tests.analysis.stragglers.test_late_calls import LATE_RANK, mean_span, report_of
from tests.support.analysed import analyse
from tests.support.extent import by_turns
from tests.support.measured import measured_costs
from tests.support.programs import pptrace_here
from tests.support.synthetic import record

LATE_NS = 4_000


def of_reason(report: Report, reason: str) -> list[Finding]:
    return [finding for finding in report.findings if finding.evidence.get("reason") == reason]


@pytest.mark.parametrize(
    ("other", "sends"),
    by_turns(
        ((0, True), (LATE_NS // 2, True), (LATE_NS * 9 // 10, False), (LATE_NS, False)),
        ("together", "one by one", "buffered"),
    ),
)
def test_a_rank_is_named_that_is_clearly_later_than_the_others(sends: str, other: tuple[int, bool]) -> None:
    other_ns, is_named = other
    late = lambda _step, rank, _action: LATE_NS if rank == LATE_RANK else other_ns  # noqa: E731
    report = report_of("interleaved-1f1b", 2, sends=sends, late=late)
    found = of_reason(report, LATE_LAUNCHES)
    assert [finding.evidence["where"] for finding in found] == [{"rank": LATE_RANK}] * is_named
    assert ["rank 1" in finding.title for finding in found] == [True] * is_named
    left = sum("ops that begin late though their inputs" in other.title for other in report.findings)
    assert left == (other_ns > 0)  # what both are late by


@pytest.mark.parametrize(("num_steps", "usual"), [(1, 1), (2, 1), (1, 0), (3, 0)])
def test_a_single_stop_in_a_few_steps_is_not_a_rank_whose_ops_are_always_late(num_steps: int, usual: int) -> None:
    def once(rank: int, action: Action) -> int:
        return 60_000 if rank == LATE_RANK and action.kind is Kind.RECV_F and action.microbatch == 4 else usual

    cost = {Kind.F: 10_000, Kind.B: 20_000}
    recording = record(build("1f1b", 4, 8), lambda op: cost[op.kind], 50, steps=num_steps, before_calls=once)
    report = analyse(recording.traces()).report
    assert not of_reason(report, LATE_LAUNCHES)
    causes = [cause for cause in report.steps[0].causes or () if cause.cause == "host"]
    assert max(causes, key=lambda cause: cause.ns).where == {"rank": LATE_RANK}
    (host,) = (finding for finding in report.findings if finding.evidence["cause"] == "host")
    assert host.evidence["where"] == {"rank": LATE_RANK}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h2"])
def test_without_messages_the_first_ops_of_all_ranks_but_one_are_no_late_starts(schedule: str, tmp_path: Path) -> None:
    """They wait for messages, which are taken out of the simulation's file."""
    file = tmp_path / "simulated.json"
    pptrace_here("simulate", schedule, "--pp", "4", "--microbatches", "8", "--p2p", "0.3", "--json", file, "--ops")
    simulated = json.loads(file.read_text(encoding="utf-8"))
    for rank in simulated["ranks"]:
        assert rank.pop("messages")
    file.write_text(json.dumps(simulated), encoding="utf-8")
    report = load([file], cache=False).report
    assert not of_reason(report, LATE_START)
    assert not [cause for cause in report.steps[0].causes or () if cause.cause == "host"]
    lacking = [kinds.reason for kinds in report.missing_evidence if kinds.findings == ("host",)]
    assert len(lacking) == 1
    assert lacking[0].startswith("48 of 48 messages between stages have no known transfer")


def test_lateness_of_a_rank_is_compared_with_the_median_of_the_others() -> None:
    late = lambda _step, rank, _action: (0, LATE_NS, 0, LATE_NS)[rank]  # noqa: E731
    (finding,) = of_reason(report_of("1f1b", 4, sends="buffered", late=late), LATE_LAUNCHES)
    assert finding.evidence["where"]["rank"] in (1, 3)


@pytest.mark.parametrize(("late_ns", "share", "is_finding"), [(600, 0.04, False), (1_200, 0.07, True)])
def test_what_all_ranks_are_late_by_is_a_finding_from_a_twentieth_of_the_step_on(
    late_ns: int, share: float, is_finding: bool
) -> None:
    report = report_of("interleaved-1f1b", 2, sends="together", late=lambda *_: late_ns)
    host = sum(cause.ns for step in report.steps for cause in step.causes or () if cause.cause == "host")
    assert host / len(report.steps) / mean_span(report) == pytest.approx(share, abs=0.005)
    found = [finding for finding in report.findings if finding.evidence["cause"] == "host"]
    assert [one.evidence["where"] for one in found] == [{}] * is_finding
    assert not of_reason(report, LATE_LAUNCHES)  # the cause says it


@pytest.mark.parametrize("kind", ["DATA", "GRAD_SYNC"])
@pytest.mark.parametrize(("late_ns", "num_late"), [(9000, 1), (9000, 5), (900, 1)])
def test_single_ops_that_come_late_in_each_step_are_named_with_what_their_host_did_before(
    late_ns: int, num_late: int, kind: str
) -> None:
    """Rank 0 loads data, or reduces gradients, before F of microbatch 4, or all from it to B of 0. Of 16 ops five are no single
    ones.
    """
    table = build("gpipe", 2, 8).table
    is_late = (table.rank == 0) & (table.position >= 4) & (table.position < 4 + num_late)
    delays = np.tile(np.where(is_late, late_ns, 0), (4, 1, 1))
    costs = measured_costs(table, np.full((4, 1, len(table)), 1000), 0, delays)
    window = np.arange(4)
    spans = {"window": window, "pp_rank": 0 * window, "side": AMONG + 0 * window, "name": np.array([kind] * 4)}
    outside = Slice(
        {**spans, "match": window, "start": 0 * window, "end": 6000 + 0 * window, "work": 6000 + 0 * window}
    )
    reasons = study_steps([replace(costs, outside=outside)]).reasons
    found = [reason for reason in reasons if reason.name == LATE_OP]
    assert bool(found) == (num_late == 1 and late_ns > 1000)
    if found:
        (reason,) = reasons
        assert (reason.where, reason.evidence["idle_spans"]) == ({"rank": 0}, {kind: pytest.approx(2 / 3)})
        assert reason.title.endswith("because rank 0 comes late to the same ops of each step (F of microbatch 4)")
        assert reason.gains.tolist() == [late_ns] * 4


def test_an_op_that_comes_late_in_few_steps_is_none_that_comes_late_in_each() -> None:
    table = build("gpipe", 2, 8).table
    delays = np.zeros((8, 1, len(table)), dtype=np.int64)
    delays[:4, 0, 4] = 9000
    reasons = study_steps([measured_costs(table, np.full((8, 1, len(table)), 1000), 0, delays)]).reasons
    assert [reason.name for reason in reasons] == [PAUSES]


def test_a_late_start_says_which_ranges_its_host_ran_before() -> None:
    table = build("1f1b", 2, 4).table
    delays = np.where((table.rank == 1) & (table.position == 0), 9000, 0)
    costs = measured_costs(table, np.full((3, 1, len(table)), 1000), 0, np.tile(delays, (3, 1, 1)))
    of_ranks = [(window, place, kind) for window in range(3) for place, kind in ((0, "LOGGING"), (1, "DATA"))]
    window, place, name = (np.array(column) for column in zip(*of_ranks, strict=True))
    spans = {"window": window, "pp_rank": place, "side": BEFORE + 0 * window, "name": name, "match": -1 - 0 * window}
    outside = Slice({**spans, "start": 0 * window, "end": 6000 + 0 * window, "work": 6000 + 0 * window})
    (reason,) = study_steps([replace(costs, outside=outside)]).reasons
    assert (reason.name, reason.evidence["idle_spans"]) == (LATE_START, {"DATA": pytest.approx(2 / 3)})
