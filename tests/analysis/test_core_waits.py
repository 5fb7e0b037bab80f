"""Waits for a processor core: by the facts of each rank, and in the findings that they may explain."""

from __future__ import annotations

from typing import Any

import pytest

from pptrace.analysis.core_waits import core_waits_of, with_core_wait
from pptrace.analysis.result import Finding, Severity
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
        ("straggler", {"where": {"rank": 2}}, CoreWait(2, 0.05)),
        ("unexplained", {"where": {"rank": 0}}, None),
        ("host", {"where": {"rank": 9}}, None),
        ("host", {"reason": "late launches"}, CoreWait(1, 0.31)),
        ("host", {"reason": "late start", "where": {"rank": 2}}, CoreWait(2, 0.05)),
        ("host", {"reason": "pauses"}, CoreWait(1, 0.31)),
        ("jitter", {"reason": "long ops"}, CoreWait(1, 0.31)),
        ("host", {"reason": "garbage collection"}, None),
        ("jitter", {"reason": "long sequences"}, None),
        ("imbalance", {"where": {"stage": 1}}, None),
        ("communication", {}, None),
        ("structural", {}, None),
    ],
)
def test_a_finding_says_what_its_rank_waited_for_a_core(
    cause: str, evidence: dict[str, Any], named: CoreWait | None
) -> None:
    before = finding(cause, **evidence)
    after = with_core_wait(before, WAITS)
    if named is None:
        assert after == before
        return
    assert after.detail == (
        f"rank {named.rank} was short of processor cores: on average {named.share:.2f} of its threads were ready to run and had "
        "none; look for other work on its machine, and for more threads than cores (OMP_NUM_THREADS); look there"
    )
    assert after.evidence == before.evidence | {"core_wait": {"rank": named.rank, "share": named.share}}
    assert (after.title, after.gain_ns, after.severity) == (before.title, before.gain_ns, before.severity)


def test_a_finding_stays_as_it_is_where_nothing_is_known_or_it_has_no_cause() -> None:
    before = finding("host")
    assert with_core_wait(before, ()) == before
    off_plan = Finding(Severity.CRITICAL, "The run does not follow the plan", "3 of its orders differ")
    assert with_core_wait(off_plan, WAITS) == off_plan
