"""Root causes: once, above the findings that follow from them; and findings below the doubt of the clocks."""

from __future__ import annotations

from typing import Any

from pptrace.analysis.findings.root_causes import CLOCKS, CORES, SHARED_DEVICE, above_doubt, in_groups, with_root_causes
from pptrace.analysis.result import Finding, Severity
from pptrace.analysis.shared_devices import SharedDevice
from pptrace.analysis.whole_run import CoreWait, Doubt, InDoubt

STEP_NS = 1000


def finding(cause: str, gain_ns: int = 100, **evidence: Any) -> Finding:
    return Finding(Severity.WARNING, cause.title(), "look", gain_ns, {"cause": cause, "where": {}} | evidence)


HOST, JITTER, SCHEDULE, EXPOSED = (finding(cause) for cause in ("host", "jitter", "structural", "communication"))


def test_ranks_that_share_a_device_are_named_once_and_all_but_the_schedule_follows() -> None:
    devices = (SharedDevice((0, 2)), SharedDevice((1, 3), by_chance=12))
    roots, found = with_root_causes([HOST, SCHEDULE, EXPOSED], devices, (CoreWait(0, 0.9),), STEP_NS)
    assert [(root.name, root.ranks) for root in roots] == [(SHARED_DEVICE, (0, 2, 1, 3))]
    assert roots[0].title == (
        "ranks 0, 2 and ranks 1, 3 share a GPU, where their work takes turns (no kernel of one overlaps a kernel of another, "
        "where by chance 12 pairs would)"
    )
    assert [one.evidence.get("follows_from") for one in found] == [SHARED_DEVICE, None, SHARED_DEVICE]
    assert with_root_causes([SCHEDULE], devices, (), STEP_NS) == ((), (SCHEDULE,))
    assert with_root_causes([HOST], (), (), STEP_NS) == ((), (HOST,))


def test_what_is_not_explained_has_the_turns_of_ranks_that_share_a_device_in_it() -> None:
    rest = finding("unexplained")
    for share, detail in ((0.4, "waits for a turn on the shared GPU are in it; look"), (0.04, "look")):
        _, found = with_root_causes([rest, HOST], [SharedDevice((0, 1), busy_share=share)], (), STEP_NS)
        assert [one.detail for one in found] == [detail, "look"]
    assert with_root_causes([rest], (), (), STEP_NS) == ((), (rest,))


def test_a_shared_device_that_is_hardly_busy_explains_little() -> None:
    def detail(*shares: float | None) -> str:
        devices = [SharedDevice((2 * number, 2 * number + 1), busy_share=share) for number, share in enumerate(shares)]
        return with_root_causes([HOST], devices, (), STEP_NS)[0][0].detail

    assert detail(0.04, 0.07).startswith(
        "all of them together keep it busy for 7% of the time, so that turns explain little"
    )
    assert (
        detail(0.04, 0.4)
        == detail(0.04, None)
        == detail(None)
        == ("kernels begin late and run long while those of another rank run")
    )


def test_ranks_short_of_cores_are_named_once_with_what_follows() -> None:
    waits = (CoreWait(0, 0.02), CoreWait(1, 0.4))
    roots, found = with_root_causes([HOST, EXPOSED, JITTER], (), waits, STEP_NS)
    assert [(root.name, root.ranks) for root in roots] == [(CORES, (1,))]
    assert roots[0].title == "rank 1 was short of processor cores"
    assert [one.evidence.get("follows_from") for one in found] == [CORES, None, CORES]
    assert found[0].evidence["core_wait"] == {"rank": 1, "share": 0.4}
    groups = [(root and root.name, [one.title for one in below]) for root, below in in_groups(roots, found)]
    assert groups == [(CORES, ["Host", "Jitter"]), (None, ["Communication"])]


def test_of_several_ranks_short_of_cores_the_one_that_waited_most_is_named() -> None:
    slow = [finding("straggler", where={"rank": rank}) for rank in (1, 2)]
    roots, _ = with_root_causes(
        slow, (), (CoreWait(0, 0.0), CoreWait(1, 0.2), CoreWait(2, 0.3), CoreWait(3, 0.0)), STEP_NS
    )
    assert roots[0].title == "ranks 1, 2 were short of processor cores"
    assert roots[0].detail.startswith("on average 0.30 of the threads of rank 2 were runnable")


def test_ranks_that_waited_about_as_long_are_short_of_cores_too() -> None:
    waits = (CoreWait(0, 0.2), CoreWait(1, 0.4), CoreWait(2, 0.19))
    roots, _ = with_root_causes([finding("straggler", where={"rank": 1})], (), waits, STEP_NS)
    assert (roots[0].title, roots[0].ranks) == ("ranks 0, 1 were short of processor cores", (0, 1))


def test_what_compares_ranks_and_gains_less_than_the_clocks_may_be_off_by_is_left_out() -> None:
    link, outside = finding("communication", 50, reason="slow link"), finding("communication", 50, is_outside=True)
    every = [HOST, EXPOSED, link, outside]
    assert above_doubt(every, 0) == every
    assert above_doubt(every, 50) == [HOST, EXPOSED, outside]
    assert above_doubt(every, 100, has_devices=True) == [HOST, outside]
    assert above_doubt(every, 100) == [outside], "without devices, ops are late by what others had sent"
    assert above_doubt(every, None) == every


OFF = Doubt(InDoubt.CLOCK, "the clocks may be off by ±30 µs where the median op lasts 9 µs: waits are only that exact")


def test_clocks_that_are_off_by_much_of_a_gain_are_what_it_follows_from() -> None:
    sure, unsure = finding("communication", 301), finding("unexplained", 300)
    outside = finding("communication", 100, is_outside=True)
    roots, found = with_root_causes([sure, unsure, HOST, outside], (), (), STEP_NS, (OFF,), 30)
    assert [one.evidence.get("follows_from") for one in found] == [None, CLOCKS, None, None]
    (root,) = roots
    assert (root.name, root.ranks) == (CLOCKS, ())
    assert root.title == "the clocks may be off by ±30 µs where the median op lasts 9 µs"
    assert root.detail == "waits are only that exact"
    other = Doubt(InDoubt.CLOCK, "rank 2 has no messages")
    for doubts, uncertainty in (((), 30), ((other,), 30), ((OFF,), None), ((OFF,), 29)):
        assert with_root_causes([unsure], (), (), STEP_NS, doubts, uncertainty)[0] == (), (doubts, uncertainty)


def test_a_shared_device_comes_before_the_clocks() -> None:
    roots, _ = with_root_causes([EXPOSED], (SharedDevice((0, 1)),), (), STEP_NS, (OFF,), 90)
    assert [root.name for root in roots] == [SHARED_DEVICE]
