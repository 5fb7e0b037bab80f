"""Communication summaries and findings on tables worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from pptrace.analysis.communication import summarise_steps
from pptrace.analysis.findings import find
from pptrace.analysis.result import Bubble, CommSummary, ScheduleSummary, Severity, StepReport, Waterfall
from pptrace.intervals import EMPTY, Int64, union
from pptrace.model.tables import COMMS, make_table
from pptrace.slices import Slice, slice_of


def comms_of(*rows: dict[str, object]) -> Slice:
    blank: dict[str, object] = {name: 0 if dtype == "int64" else "" for name, dtype in COMMS.items()}
    filled = [blank | {"axis": "dp", "kind": "all_reduce", "group_size": 4, "bytes": 1000} | row for row in rows]
    return slice_of(make_table(COMMS, {name: [row[name] for row in filled] for name in COMMS}))


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
        ("all_reduce", 1.5),
        ("all_gather", 0.75),
        ("reduce_scatter", 0.75),
        ("all_to_all", 0.75),
        ("broadcast", 1),
        ("send", 1),
    ],
)
def test_bus_bandwidth_has_the_factors_of_nccl_tests(kind: str, factor: float) -> None:
    (result,) = summarise_comms(comms_of(times(0, 0, 100, 100) | {"kind": kind}), EMPTY)
    assert result.algbw_gbps == 10
    assert result.busbw_gbps == pytest.approx(10 * factor)


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
        ("dp", "recv", 1),
        ("dp", "send", 2),
        ("pp", "recv", 1),
        ("pp", "send", 2),
    ]
    assert summarise_comms(comms_of(), EMPTY) == ()


SCHEDULE = ScheduleSummary("1f1b", 8, 4, 1, "metadata", ())


def step_with(fall: Waterfall | None, span: int = 1000) -> StepReport:
    return StepReport(0, 0, span, span, Bubble(0.1, 0.1, 0.1, 0.1, fall), ())


def test_findings_name_causes_worth_saying_with_the_largest_gain_first() -> None:
    falls = [Waterfall(600, 100, 19, 80, 200, None, 1), Waterfall(600, 120, 19, 60, 180, None, 21)]
    findings = find([step_with(fall) for fall in falls], SCHEDULE)
    assert [(finding.evidence["waterfall"], finding.gain_ns) for finding in findings] == [
        ("structural", 110),
        ("communication", 190),
        ("jitter", 70),
    ]
    assert findings[0].severity is Severity.INFO
    assert findings[1].title == "Communication: 19.0% of the step goes to communication that no compute hides"


def test_steps_without_a_waterfall_give_no_causes() -> None:
    assert find([step_with(None)], SCHEDULE) == ()
    assert find([], SCHEDULE) == ()


def test_a_run_that_left_its_plan_is_the_first_finding() -> None:
    left = ScheduleSummary("1f1b", 8, 4, 1, "metadata", ("rank 0: op 5 is 0B0", "rank 1: op 4 is 1B0"))
    findings = find([step_with(Waterfall(600, 400, 0, 0, 0, None, 0))], left)
    assert [finding.title.split(":")[0] for finding in findings] == ["The run does not follow the plan", "Structural"]
    assert findings[0].severity is Severity.CRITICAL
    assert findings[0].detail == "2 of its orders differ from 1f1b; the first: rank 0: op 5 is 0B0"
