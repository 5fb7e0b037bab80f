"""Communication summaries and findings on tables worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from pptrace.analysis.findings.find import find
from pptrace.analysis.findings.reasons import with_reasons
from pptrace.analysis.result import CommSummary, CommTotal, RankStep, ScheduleSummary, Severity
from pptrace.analysis.steps.communication import summarise_steps, total_comms
from pptrace.analysis.steps.steps import marked_steps
from pptrace.analysis.stragglers.detectors import Study
from pptrace.analysis.whole_run import Cause, StepChange, StepSeries
from pptrace.intervals import EMPTY, Int64, union
from pptrace.model.tables import COMMS, OPS
from pptrace.slices import Slice, slice_of
from tests.support.parts import SCHEDULE, findings_with, parts_ns, rank_step, reason_with, step_with, steps_with
from tests.support.tables import named, table_of


def comms_of(*rows: dict[str, object]) -> Slice:
    usual: dict[str, object] = {"axis": "dp", "kind": "all_reduce", "group_size": 4, "bytes": 1000}
    return slice_of(table_of(COMMS, [usual | row for row in rows]))


def summarise_comms(comms: Slice, compute: Int64) -> tuple[CommSummary, ...]:
    """The summaries of a single step."""
    return summarise_steps(comms, np.zeros(len(comms), dtype=np.int64), 1, compute)[0]


def times(start: int, moving: int, moved: int, end: int) -> dict[str, object]:
    return {"start_ns": start, "transfer_start_ns": moving, "transfer_end_ns": moved, "end_ns": end}


def test_hidden_and_exposed_communication_by_hand() -> None:
    """Moving 20-50 and 40-60, so 20-60 as a whole; compute 30-45 hides 15 of the 40."""
    (result,) = summarise_comms(comms_of(times(10, 20, 50, 50), times(40, 40, 60, 65)), union([30], [45]))
    assert (result.axis, result.kind, result.count, result.bytes) == ("dp", "all_reduce", 2, 2000)
    assert (result.total_ns, result.wait_ns) == (65, 15)
    assert (result.hidden_ns, result.exposed_ns) == (15, 25)
    assert result.overlap_ratio == 15 / 40
    assert result.algbw_gbps == 2000 / 50
    assert result.busbw_gbps == pytest.approx(2000 / 50 * 1.5)


@pytest.mark.parametrize(
    ("kind", "factor"),
    [
        *(("all_reduce", 1.5), ("all_gather", 0.75), ("reduce_scatter", 0.75), ("all_to_all", 0.75)),
        *(("broadcast", 1), ("send", 1)),
    ],
)
def test_bus_bandwidth_has_the_factors_of_nccl_tests(kind: str, factor: float) -> None:
    (result,) = summarise_comms(comms_of(times(0, 0, 100, 100) | {"kind": kind}), EMPTY)
    assert result.algbw_gbps == 10
    assert result.busbw_gbps == pytest.approx(10 * factor)


def test_uneven_parts_of_an_all_to_all_have_no_bus_bandwidth() -> None:
    """Its factor takes every member for one that keeps a part of n: one that keeps all sends nothing."""
    even, uneven = ({"kind": "all_to_all", "group_size": 2, "splits": splits} for splits in ("3,3>3,3", "6,0>6,0"))
    (result,) = summarise_comms(comms_of(times(0, 0, 100, 100) | even), EMPTY)
    assert (result.algbw_gbps, result.busbw_gbps) == (10, 5)
    (result,) = summarise_comms(comms_of(times(0, 0, 50, 50) | even, times(50, 50, 100, 100) | uneven), EMPTY)
    assert (result.algbw_gbps, result.busbw_gbps) == (20, None)
    total = total_of(times(0, 0, 0, 20) | even, times(20, 20, 20, 40) | uneven)
    assert (total.algbw_gbps, total.busbw_gbps) == (50, None)


def test_what_is_not_matched_has_no_wait_and_no_bandwidth() -> None:
    (result,) = summarise_comms(comms_of(times(0, 0, 100, 100), times(200, 200, 300, 300) | {"match": -1}), EMPTY)
    assert (result.wait_ns, result.algbw_gbps, result.busbw_gbps) == (None, None, None)
    assert (result.total_ns, result.exposed_ns, result.hidden_ns, result.overlap_ratio) == (200, None, None, None)


def test_there_is_a_summary_per_axis_and_kind() -> None:
    rows = [
        times(0, 0, 1, 1) | {"axis": axis, "kind": kind} for axis in ("pp", "dp") for kind in ("send", "recv", "send")
    ]
    totals = summarise_comms(comms_of(*rows), EMPTY)
    assert [(c.axis, c.kind, c.count) for c in totals] == [
        *(("dp", "recv", 1), ("dp", "send", 2), ("pp", "recv", 1), ("pp", "send", 2)),
    ]
    assert summarise_comms(comms_of(), EMPTY) == ()


def test_each_step_has_its_own_summaries_and_what_was_predicted_but_not_made_counts_zero() -> None:
    """Of three steps the second is empty; the rows are not in order of kind within a step."""
    rows = [
        times(0, 5, 10, 10) | {"kind": "send", "axis": "pp", "bytes": 7},
        times(20, 20, 30, 32) | {"kind": "all_reduce"},
        times(40, 40, 70, 70) | {"kind": "send", "axis": "pp", "bytes": 9},
        times(200, 200, 230, 230) | {"kind": "all_gather", "bytes": -1},
    ]
    planned = [
        {("pp", "send"): 21, ("tp", "all_reduce"): 50},
        {("pp", "send"): 22},
        {("dp", "all_gather"): 23},
    ]
    first, second, third = summarise_steps(
        comms_of(*rows), np.array([0, 0, 0, 2]), 3, union([25, 50, 190], [28, 60, 210]), planned
    )
    assert [(c.axis, c.kind, c.count, c.bytes, c.predicted_bytes) for c in first] == [
        ("dp", "all_reduce", 1, 1000, 0),
        ("pp", "send", 2, 16, 21),
        ("tp", "all_reduce", 0, 0, 50),
    ]
    reduce, send, absent = first
    assert (reduce.total_ns, reduce.wait_ns, reduce.hidden_ns, reduce.exposed_ns) == (12, 2, 3, 7)
    assert (send.total_ns, send.wait_ns, send.hidden_ns, send.exposed_ns) == (40, 5, 10, 25)
    assert (absent.total_ns, absent.wait_ns, absent.hidden_ns, absent.exposed_ns) == (0, 0, 0, 0)
    assert (absent.overlap_ratio, absent.algbw_gbps, absent.busbw_gbps) == (None, None, None)
    assert second == (CommSummary("pp", "send", 0, 0, 0, 0, 0, 0, None, None, None, 22),)
    (gather,) = third
    assert (gather.count, gather.bytes, gather.predicted_bytes, gather.algbw_gbps) == (1, None, 23, None)
    assert (gather.hidden_ns, gather.exposed_ns, gather.overlap_ratio) == (10, 20, 1 / 3)
    assert [len(of_step) for of_step in summarise_steps(comms_of(*rows), np.array([0, 0, 0, 2]), 3, EMPTY)] == [2, 0, 1]


def test_what_moved_in_no_time_has_no_bandwidth_and_one_rank_waits_for_nobody() -> None:
    (instant,) = summarise_comms(comms_of(times(3, 8, 8, 8)), EMPTY)
    assert (instant.wait_ns, instant.exposed_ns, instant.overlap_ratio, instant.algbw_gbps) == (5, 0, None, None)
    (alone,) = summarise_comms(comms_of(times(3, 3, 8, 8) | {"match": -1, "group_size": 1}), EMPTY)
    assert (alone.wait_ns, alone.exposed_ns, alone.algbw_gbps, alone.busbw_gbps) == (0, 5, 200, None)
    (empty,) = summarise_comms(comms_of(times(0, 0, 4, 4) | {"bytes": 0}), EMPTY)
    assert (empty.bytes, empty.algbw_gbps) == (0, 0)


def total_of(*rows: dict[str, object], compute: list[list[int]] | None = None) -> CommTotal:
    device = {"clock": "device"}
    intervals = None if compute is None else np.array(compute)
    (total,) = total_comms(comms_of(*(device | row for row in rows)), intervals)
    return total


def test_a_total_over_the_trace_counts_time_twice_where_two_calls_run_and_busy_time_once() -> None:
    """From 0 to 20 and from 10 to 30: 40 ns in all, busy for 30, of which 25 to 40 hide 5."""
    total = total_of(times(0, 0, 0, 20), times(10, 10, 10, 30) | {"bytes": 200}, compute=[[25, 40]])
    assert (total.axis, total.kind, total.group_size, total.count) == ("dp", "all_reduce", 4, 2)
    assert (total.bytes, total.total_ns, total.busy_ns, total.overlap_ratio) == (1200, 40, 30, 5 / 30)
    assert (total.algbw_gbps, total.busbw_gbps) == (30, 45)
    assert total_comms(comms_of(), None) == ()


@pytest.mark.parametrize(
    ("row", "changes"),
    [
        ({}, {}),
        ({"clock": "none"}, {"busy_ns": None, "overlap_ratio": None}),
        ({"clock": "host"}, {"overlap_ratio": None, "algbw_gbps": None, "busbw_gbps": None}),
        ({"bytes": -1}, {"bytes": None, "algbw_gbps": None, "busbw_gbps": None}),
        ({"bytes": 0}, {"bytes": 1000, "algbw_gbps": 25, "busbw_gbps": 37.5}),
        ({"group_size": 2}, {"group_size": None, "busbw_gbps": None}),
    ],
    ids=lambda part: str(part),
)
def test_a_total_lacks_what_one_of_its_calls_does_not_say(row: dict[str, object], changes: dict[str, object]) -> None:
    plain = {"busy_ns": 30, "overlap_ratio": 1 / 6, "bytes": 2000, "algbw_gbps": 50, "busbw_gbps": 75, "group_size": 4}
    total = total_of(times(0, 0, 0, 20), times(10, 10, 10, 30) | row, compute=[[25, 40]])
    assert {name: getattr(total, name) for name in plain} == plain | changes


def test_a_total_of_messages_or_of_unknown_groups_or_of_no_time() -> None:
    message = total_of(times(0, 0, 0, 20) | {"kind": "send", "group_size": -1})
    assert (message.group_size, message.algbw_gbps, message.busbw_gbps, message.overlap_ratio) == (None, 50, 50, None)
    unknown = total_of(times(0, 0, 0, 20) | {"group_size": -1})
    assert (unknown.group_size, unknown.algbw_gbps, unknown.busbw_gbps) == (None, 50, None)
    alone = total_of(times(0, 0, 0, 20) | {"group_size": 1})
    assert (alone.group_size, alone.algbw_gbps, alone.busbw_gbps) == (1, 50, None)
    instant = total_of(times(9, 9, 9, 9), compute=[[0, 20]])
    assert (instant.total_ns, instant.busy_ns, instant.overlap_ratio, instant.algbw_gbps) == (0, 0, None, None)


def test_a_marked_step_is_the_hull_of_its_ranges_with_the_time_of_the_others() -> None:
    """Rank 1 has step 4 in two ranges; rank 0 has ranges of step 4 without the step's own, and step 9."""
    rows = [
        *((1, 4, "STEP", 100, 160), (1, 4, "STEP", 90, 150), (1, 4, "OPTIMIZER", 95, 105)),
        *((1, 4, "OPTIMIZER", 120, 123), (1, 4, "F", 0, 500), (0, 4, "GRAD_SYNC", 5, 9), (0, 9, "STEP", 7, 8)),
    ]
    early, late = marked_steps(table_of(OPS, named("rank step kind start_ns end_ns", rows)))
    assert (early.rank, early.step, early.start_ns, early.end_ns, early.spans) == (0, 9, 7, 8, {})
    assert (late.rank, late.step, late.start_ns, late.end_ns, late.spans) == (1, 4, 90, 160, {"OPTIMIZER": 13})


def test_findings_name_causes_worth_saying_warnings_first_and_of_these_the_largest_gain() -> None:
    falls = [parts_ns(600, 100, 19, 80, 200, None, 1), parts_ns(600, 120, 19, 60, 180, None, 21)]
    findings = find([step_with(fall) for fall in falls], SCHEDULE)
    assert [(finding.evidence["cause"], finding.gain_ns) for finding in findings] == [
        ("communication", 190),
        ("jitter", 70),
        ("structural", 110),
    ]
    assert findings[2].severity is Severity.INFO
    assert (
        findings[0].title
        == "Communication: 20.0% of the step (19.0% of all steps) goes to communication that no compute hides"
    )


def test_steps_without_a_waterfall_give_no_causes() -> None:
    assert find([step_with(None)], SCHEDULE) == ()
    assert find([], SCHEDULE) == ()


def test_a_run_that_left_its_plan_is_the_first_finding() -> None:
    left = ScheduleSummary("1f1b", 8, 4, 1, "metadata", ("rank 0: op 5 is 0B0", "rank 1: op 4 is 1B0"))
    findings = find([step_with(parts_ns(600, 400, 0, 0, 0, None, 0))], left)
    assert [finding.title.split(":")[0] for finding in findings] == ["The run does not follow the plan", "Structural"]
    assert findings[0].severity is Severity.CRITICAL
    assert findings[0].detail == "2 of its orders differ from 1f1b; the first: rank 0: op 5 is 0B0"


def test_causes_are_mentioned_from_two_percent_of_the_step_on_with_their_share() -> None:
    """Of 2 × 1,000 ns: exactly 2 % of imbalance, 1.9 % of jitter."""
    falls = [parts_ns(600, 300, 25, 38, 0, None, 0), parts_ns(600, 300, 15, 0, 0, None, 0)]
    imbalance, structural = find([step_with(fall) for fall in falls], SCHEDULE)
    assert imbalance.evidence == {"cause": "imbalance", "where": {}, "share": 0.025}
    assert imbalance.gain_ns == 20
    assert imbalance.title == "Imbalance: 2.5% of the step goes to stages of unequal cost"
    assert structural.evidence == {"cause": "structural", "where": {}, "share": 0.3}
    assert structural.title == "Structural: 30.0% of the step is the fill and drain of 1f1b itself"


def test_fill_and_drain_of_several_calls_advises_one_call() -> None:
    several = ScheduleSummary("custom", 8, 4, 1, "recognised", (), runs=("1f1b", "1f1b"))
    (structural,) = find([step_with(parts_ns(600, 300, 0, 0, 0, None, 0))], several)
    assert structural.title == (
        "Structural: 30.0% of the step is the fill and drain of the schedule in each of the 2 calls of a step"
    )
    assert structural.detail.startswith("one call with all 8 microbatches fills and drains once; that, or a schedule")


@pytest.mark.parametrize(
    ("runs", "title"),
    [
        ((), "custom"),
        (("1f1b",), "1f1b"),
        (("1f1b",) * 3, "1f1b, 3 times a step"),
        (("gpipe", "1f1b"), "gpipe, then 1f1b"),
        (("gpipe", "1f1b", "1f1b"), "gpipe, then 1f1b 2 times"),
    ],
)
def test_the_title_of_a_schedule_names_its_runs(runs: tuple[str, ...], title: str) -> None:
    assert ScheduleSummary("custom", 8, 4, 1, "recognised", (), runs=runs).title == title


@pytest.mark.parametrize("name", ["jitter", "communication", "unexplained"])
def test_what_every_run_has_some_of_is_mentioned_from_five_percent_of_the_step_on(name: str) -> None:
    def named_with(ns: int) -> list[str]:
        fall = parts_ns(600, 300, 0, 0, 0, None, 0)
        findings = find([step_with(replace(fall, **{name: ns})) for _ in range(2)], SCHEDULE)
        return [finding.evidence["cause"] for finding in findings]

    assert named_with(49) == ["structural"]
    assert named_with(50) == [name, "structural"]


def test_steps_without_a_waterfall_count_neither_in_shares_nor_in_gains() -> None:
    falls = [parts_ns(600, 300, 0, 0, 100, None, 0), None]
    communication, structural = find([step_with(fall) for fall in falls], SCHEDULE)
    assert (structural.gain_ns, structural.evidence["share"]) == (300, 0.3)
    assert (communication.gain_ns, communication.evidence["share"]) == (100, 0.1)


def test_exposed_communication_is_divided_among_its_axes() -> None:
    """Two ranks: 30 + 30 of tp, 20 of pp, none of dp, unknown of ep."""

    def rank_with(*exposed: tuple[str, int | None]) -> RankStep:
        comms = (CommSummary(axis, "send", 1, 0, 9, 0, 0, ns, None, None, None) for axis, ns in exposed)
        return rank_step(comms=tuple(comms))

    ranks = rank_with(("pp", 20), ("tp", 30), ("dp", 0)), rank_with(("tp", 30), ("ep", None))
    fall = parts_ns(600, 240, 0, 60, 100, None, 0)
    step = replace(step_with(fall), ranks=ranks)
    communication, jitter, _ = find([step], SCHEDULE)
    assert communication.evidence["exposed_by_axis"] == {"tp": 0.75, "pp": 0.25}
    assert communication.detail.startswith("of what is exposed: tp 75%, pp 25%; overlap it")
    assert "exposed_by_axis" not in jitter.evidence
    none_exposed = replace(step_with(fall), ranks=(rank_with(("pp", 0)),))
    assert "exposed_by_axis" not in find([none_exposed], SCHEDULE)[0].evidence
    causes = (Cause("communication", {"axis": "tp"}, 20), Cause("communication", {"axis": "pp"}, 80))
    costs = replace(step, causes=causes)
    (communication,) = find([costs], SCHEDULE)
    assert communication.detail.startswith("by axis: pp 80%, tp 20%; overlap it"), "what it costs the step"
    assert communication.evidence["exposed_by_axis"] == {"tp": 0.75, "pp": 0.25}


def test_what_made_steps_longer_from_one_on_is_no_second_finding() -> None:
    """Rank 3 slows down by 200 ns in the second half, and 50 ns are lost to imbalance in every step."""
    steps = [
        replace(
            step_with(None, causes=(Cause("straggler", {"rank": 3}, 200 * (number > 5)), Cause("imbalance", {}, 50))),
            step=number,
        )
        for number in range(12)
    ]
    change = StepChange(6, 2, 1000, 8, 1200, (Cause("straggler", {"rank": 3}, 200),))
    found = find(steps, SCHEDULE, series=StepSeries(12, *[1000] * 5, (), (change,)))
    assert [(finding.title.split(":")[0], finding.gain_ns) for finding in found] == [
        ("Slower since step 6", 100),
        ("Imbalance", 50),
    ]


def test_the_place_that_has_most_of_a_cause_is_named_with_what_the_step_would_get_back() -> None:
    """Rank 27 loses 90 of 120 ns in one step and 60 of 80 in the next; stage 1 has no half of the imbalance."""
    steps = [
        step_with(None, causes=(Cause("straggler", {"rank": 27}, 90), Cause("straggler", {"rank": 3}, 30))),
        step_with(
            None,
            causes=(
                *(Cause("straggler", {"rank": rank}, ns) for rank, ns in ((27, 60), (3, 20))),
                *(Cause("imbalance", {"stage": stage}, 30) for stage in (1, 2, 3)),
            ),
        ),
    ]
    straggler, imbalance = find(steps, SCHEDULE)
    assert (
        straggler.title
        == "Straggler: 12.0% of the step (10.0% of all steps) is lost to rank 27, which is slower than its replicas"
    )
    assert straggler.evidence == {"cause": "straggler", "where": {"rank": 27}, "share": 0.12}
    assert (straggler.gain_low_ns, straggler.gain_ns, straggler.gain_high_ns) == (-27, 100, 227)  # Student: 6.3138 · 20
    assert imbalance.title == "Imbalance: 4.5% of all steps goes to stages of unequal cost"
    assert imbalance.evidence["where"] == {}
    assert (imbalance.gain_low_ns, imbalance.gain_ns, imbalance.gain_high_ns) == (-240, 45, 330)


def test_what_a_reason_explains_is_a_part_of_its_own_taken_off_its_causes_one_after_the_other() -> None:
    causes = (
        Cause("jitter", {"rank": 1}, 60),
        Cause("straggler", {"rank": 3}, 200),
        Cause("imbalance", {"stage": 1}, 90),
    )
    steps = steps_with(*causes)
    straggler, reason, imbalance = findings_with(steps, reason_with(100, ("jitter", "straggler")))
    assert (straggler.gain_ns, reason.gain_ns, imbalance.gain_ns) == (160, 100, 90)
    assert straggler.evidence["where"] == {"rank": 3}
    assert reason.title == "Reason: 10.0% of the step"
    assert reason.evidence == {
        "cause": "jitter",
        "where": {},
        "share": 0.1,
        "reason": "long sequences",
        "figure": 1,
    }
    (step, *_), _ = with_reasons(steps, Study(reasons=(reason_with(100, ("jitter", "straggler")),), steps=(0, 1, 2, 3)))
    assert step.span_parts == {
        **{"compute": 600, "structural": 0, "imbalance": 90, "straggler": 160, "jitter": 0, "communication": 0},
        **{"long sequences": 100, "unexplained": 0},
    }
    assert (step.bubble.waterfall_ns.jitter, step.bubble.waterfall_ns.straggler) == (100, 160)


def test_a_reason_takes_from_its_own_place_first_and_what_its_causes_lack_is_shared_by_several() -> None:
    causes = (Cause("jitter", {"rank": 1}, 60), Cause("jitter", {"rank": 2}, 30), Cause("interaction", {}, 40))
    reason = reason_with(120, ("jitter",), rank=2)
    (step, *_), _ = with_reasons(steps_with(*causes), Study(reasons=(reason,), steps=(0, 1, 2, 3)))
    assert [(cause.name, cause.where, cause.ns) for cause in step.causes or () if cause.ns] == [
        ("long sequences", {"rank": 2}, 120),
        ("interaction", {}, 10),
    ]
    reason = reason_with(50, ("jitter",), rank=2)
    (step, *_), _ = with_reasons(steps_with(*causes), Study(reasons=(reason,), steps=(0, 1, 2, 3)))
    assert [(cause.name, cause.where, cause.ns) for cause in step.causes or () if cause.ns] == [
        ("long sequences", {"rank": 2}, 50),
        ("interaction", {}, 40),
        ("jitter", {"rank": 1}, 40),
    ]


def test_of_two_reasons_for_the_same_time_the_one_with_the_larger_gain_is_named() -> None:
    steps = steps_with(Cause("jitter", {"rank": 1}, 110))
    larger, smaller = reason_with(100, ("jitter",)), reason_with(90, ("jitter",), "long ops")
    (finding,) = findings_with(steps, smaller, larger)
    assert (finding.evidence["reason"], finding.gain_ns) == ("long sequences", 100)
    both = findings_with(
        steps_with(Cause("jitter", {"rank": 1}, 145)), smaller, larger
    )  # half of it is left for the other one
    assert [entry.evidence["reason"] for entry in both] == ["long sequences", "long ops"]


def test_steps_that_were_not_replayed_have_the_part_of_the_nearest_one() -> None:
    steps = [replace(step_with(None, causes=(Cause("jitter", {}, 200),)), step=number) for number in (1, 2, 4, 9)]
    reason = reason_with([90, 60, 30], ("jitter",))
    named, _ = with_reasons(steps, Study(reasons=(reason,), steps=(8, 5, 1)))
    parts = [(step.parts or {})["long sequences"] for step in named]
    assert parts == [30, 30, 60, 90]


def test_slower_ranks_none_of_which_stands_out_are_not_named_besides_a_reason_for_it() -> None:
    causes = tuple(Cause("straggler", {"rank": rank}, 70) for rank in range(3))
    (reason,) = findings_with(steps_with(*causes), reason_with(100, ("jitter", "straggler")))
    assert reason.evidence["reason"] == "long sequences"


def test_a_reason_that_explains_little_takes_nothing_and_is_no_finding() -> None:
    (jitter,) = findings_with(steps_with(Cause("jitter", {"rank": 1}, 60)), reason_with(19, ("jitter",)))
    assert jitter.gain_ns == 60


def test_there_are_ten_findings_at_most_the_largest_gains() -> None:
    reasons = tuple(reason_with(100 + index, ("host",), f"reason {index}") for index in range(12))
    findings = findings_with(steps_with(Cause("jitter", {"rank": 1}, 25), Cause("host", {}, 1266)), *reasons)
    assert [finding.gain_ns for finding in findings] == list(range(111, 101, -1))


def test_a_gain_over_many_steps_has_the_interval_of_its_mean_and_what_may_be_noise_is_no_finding() -> None:
    steady = [step_with(None, causes=(Cause("jitter", {"rank": 1}, 100 + step % 2),)) for step in range(40)]
    (jitter,) = find(steady, SCHEDULE)
    assert jitter.gain_ns == 100
    assert (jitter.gain_low_ns, jitter.gain_high_ns) == (100, 101)
    noise = [step_with(None, causes=(Cause("jitter", {}, 1000 if step == 3 else -20),)) for step in range(40)]
    assert find(noise, SCHEDULE) == ()


def test_free_is_what_moves_uncovered_behind_the_last_op_while_the_pipeline_goes_on() -> None:
    """The last op ends at 40, the pipeline at 90: of 20-110 that leaves 40-90, of which compute (an optimizer) covers 50-60."""
    rows = (times(10, 20, 110, 110), times(20, 20, 110, 110) | {"kind": "send", "axis": "pp"})
    behind = (np.array([40]), np.array([90]))
    step = np.zeros(2, dtype=np.int64)
    reduce, send = summarise_steps(comms_of(*rows), step, 1, union([0, 50], [30, 60]), behind=behind)[0]
    assert (reduce.exposed_ns, reduce.free_ns) == (70, 40)
    assert (send.exposed_ns, send.free_ns) == (70, 0)
    (unknown,) = summarise_comms(comms_of(times(10, 20, 110, 110)), EMPTY)
    assert unknown.free_ns is None, "there is no pipeline"
