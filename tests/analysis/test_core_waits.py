"""Waits for a processor core: by the facts of each rank, and behind which findings they may be."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from pptrace.analysis.result import Finding, Severity
from pptrace.analysis.shared_devices import core_waits_of, line_of_waits, wait_behind
from pptrace.analysis.whole_run import CoreWait

WAITS = (CoreWait(0, 0.04), CoreWait(1, 0.31), CoreWait(2, 0.05))


def finding(cause: str, **evidence: Any) -> Finding:
    known = {"cause": cause, "where": {}, "share": 0.2}
    return Finding(Severity.WARNING, "Host: 20% of the step", "look there", 200, known | evidence)


def test_shares_are_of_the_ranks_that_tell() -> None:
    facts: dict[int, dict[str, Any]] = {
        3: {"core_wait": {"wait_ns": 300, "elapsed_ns": 200}},
        1: {"core_wait": {"wait_ns": 0, "elapsed_ns": 400}},
        0: {"core_wait": None},
        2: {},
        4: {"core_wait": {"wait_ns": 1, "elapsed_ns": 0}},
        5: {"core_wait": {"wait_ns": "?", "elapsed_ns": 9}},
        6: {"core_wait": {"wait_ns": -1, "elapsed_ns": 9}},
        7: {"core_wait": 0.5},
    }
    assert core_waits_of(facts) == (CoreWait(1, 0.0), CoreWait(3, 1.5))


@pytest.mark.parametrize(
    ("cause", "evidence", "named"),
    [
        ("host", {}, CoreWait(1, 0.31)),
        ("jitter", {"where": {"rank": 1}}, CoreWait(1, 0.31)),
        ("straggler", {"where": {"rank": 2}}, None),
        ("unexplained", {"where": {"rank": 0}}, None),
        ("host", {"where": {"rank": 9}}, None),
        ("host", {"reason": "late launches"}, CoreWait(1, 0.31)),
        ("host", {"reason": "late start", "where": {"rank": 1}}, CoreWait(1, 0.31)),
        ("host", {"reason": "pauses"}, CoreWait(1, 0.31)),
        ("jitter", {"reason": "long ops"}, CoreWait(1, 0.31)),
        ("host", {"reason": "garbage collection"}, None),
        ("jitter", {"reason": "long sequences"}, None),
        ("imbalance", {"where": {"stage": 1}}, None),
        ("communication", {}, None),
        ("structural", {}, None),
    ],
)
def test_the_rank_whose_wait_may_be_behind_a_finding_is_found(
    cause: str, evidence: dict[str, Any], named: CoreWait | None
) -> None:
    assert wait_behind(finding(cause, **evidence), WAITS, 100_000) == named


def test_a_wait_shorter_than_what_a_finding_costs_is_not_behind_it() -> None:
    """It costs 200 ns; a rank waits for 0.31 of a step."""
    assert wait_behind(finding("host"), WAITS, 646) == CoreWait(1, 0.31)
    assert wait_behind(finding("host"), WAITS, 645) is None


def test_what_all_ranks_wait_for_is_not_why_one_of_them_is_late() -> None:
    """A rank that sleeps for a tenth of a step on a machine where all wait for a fifth of it."""
    waits = (CoreWait(0, 0.2), CoreWait(1, 0.22), CoreWait(2, 0.31))
    late = [finding("host", reason="late launches", where={"rank": rank}) for rank in (1, 2)]
    assert [wait_behind(one, waits, 2000) for one in late] == [None, CoreWait(2, 0.31)]
    assert wait_behind(finding("host"), waits, 2000) == CoreWait(2, 0.31)


def test_a_wait_of_all_steps_is_not_why_single_ones_are_long() -> None:
    of_steps = replace(finding("host"), gain_low_ns=50, gain_high_ns=300)
    assert wait_behind(of_steps, WAITS, 2000) == CoreWait(1, 0.31)
    assert wait_behind(replace(of_steps, gain_low_ns=49), WAITS, 2000) is None
    assert wait_behind(replace(of_steps, gain_low_ns=49), WAITS, 2000, num_steps=4), "too few steps to tell"


def test_nothing_is_behind_a_finding_where_nothing_is_known_or_it_has_no_cause() -> None:
    assert wait_behind(finding("host"), (), 100_000) is None
    for width, found in ((4, None), (6, CoreWait(1, 0.31))):  # a sleep takes as long in every step
        steady = replace(finding("host"), gain_ns=100, gain_low_ns=100, gain_high_ns=100 + width)
        assert wait_behind(steady, WAITS, 100_000) == found
    off_plan = Finding(Severity.CRITICAL, "The run does not follow the plan", "3 of its orders differ")
    assert wait_behind(off_plan, WAITS, 100_000) is None


def test_a_report_says_so_where_ranks_wait_for_a_tenth_of_the_time() -> None:
    assert line_of_waits((CoreWait(0, 0.0), CoreWait(1, 0.3))).startswith(
        "ranks waited for a core for 15.0% of the time, the threads of each added up, because of other work"
    )
    several = line_of_waits((CoreWait(0, 1.0), CoreWait(1, 1.5)))
    assert several.startswith("on average 1.25 threads of a rank waited for a core, because of other work")
    assert line_of_waits((CoreWait(0, 0.05), CoreWait(1, 0.15))) == line_of_waits(()) == ""
