"""Charts of the dashboard's pages: their marks are the figures of the report."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from pptrace.analysis.compare.result import ChangeVerdict, Comparison, OfBoth, PartChange, SpanChange
from pptrace.analysis.links.types import Link
from pptrace.analysis.memory.types import InFlight, MemoryReport, PredictedMemory, RankMemory
from pptrace.analysis.op_costs import OpCost, OpGroup, OpSample
from pptrace.analysis.report import Report
from pptrace.analysis.result import Finding, Severity
from pptrace.analysis.whatif.result import Scenario, Standing, WhatIf
from pptrace.analysis.whole_run import Cause, StepChange, StepOutlier, StepSeries
from pptrace.report.charts.base import columns_axis, plain
from pptrace.report.charts.changes import causes_of_both, changes_chart, changes_of_parts
from pptrace.report.charts.communication import (
    MOST_ROWS,
    axes_of_links,
    comms_chart,
    is_by_stage,
    link_matrix,
    link_rates,
)
from pptrace.report.charts.memory import MOST_RANKS, in_flight_chart, memory_chart, unseen_parts
from pptrace.report.charts.stages import group_lines, stage_points, stages_chart
from pptrace.report.charts.steps import blame_chart, causes_chart, steps_chart
from pptrace.workflow.load import load
from tests.support.programs import SAMPLES

MS = 1_000_000


@pytest.fixture(scope="module")
def report() -> Report:
    return load([SAMPLES / "1f1b_p4"], as_recorded=True).report


def trace(figure: Any, name: str) -> Any:
    return next(part for part in figure.data if part.name == name)


def steps_of(report: Report, spans: dict[int, int | None], series: StepSeries | None) -> Report:
    base = report.steps[0]
    steps = tuple(
        replace(base, step=number, span_ns=None if ms is None else ms * MS, period_ns=None, outside=None)
        for number, ms in spans.items()
    )
    return replace(report, steps=steps, step_series=series)


def test_each_step_is_a_point_and_outliers_levels_and_evaluations_are_marked(report: Report) -> None:
    outlier = StepOutlier(2, 30 * MS, 1, 10 * MS, None, ())
    change = StepChange(3, 1, 10 * MS, 4, 20 * MS, None)
    series = StepSeries(4, 10 * MS, 10 * MS, 20 * MS, 30 * MS, 30 * MS, (outlier,), (change,), evaluations=(5,))
    figure = steps_chart(steps_of(report, {1: 10, 2: 30, 3: 20, 4: 20, 5: 3, 6: None}, series), chosen=4)
    points = trace(figure, "step")
    assert (list(points.x), list(points.y)) == ([1, 2, 3, 4], [10.0, 30.0, 20.0, 20.0])
    assert list(trace(figure, "evaluation").x) == [5]
    assert (list(trace(figure, "outlier").x), list(trace(figure, "chosen").x)) == ([2], [4])
    levels = trace(figure, "typical step of each level")
    assert list(levels.y) == [10.0, 10.0, None, 20.0, 20.0, None]
    assert list(levels.x) == [0.5, 2.5, None, 2.5, 5.5, None]
    assert list(trace(figure, "distribution").y) == [10.0, 30.0, 20.0, 20.0]


def test_without_any_known_length_there_is_no_chart_of_steps(report: Report) -> None:
    assert steps_chart(steps_of(report, {1: None, 2: None}, None)) is None
    assert steps_chart(steps_of(report, {1: None, 2: 4}, None)) is not None


def test_one_step_has_no_distribution_and_its_length_is_seen_from_zero(report: Report) -> None:
    figure = steps_chart(steps_of(report, {7: 30}, None))
    assert [part.type for part in figure.data] == ["scatter", "scatter"]
    assert figure.layout.yaxis.rangemode == "tozero"


@pytest.mark.parametrize(
    ("number", "span"), [(1, (-2.5, 2.5)), (2, (-2.0, 3.0)), (4, (-1.0, 4.0)), (5, None), (48, None)]
)
def test_few_columns_are_no_wider_than_those_of_five(number: int, span: tuple[float, float] | None) -> None:
    axis = columns_axis(number)
    assert axis.get("range") == (None if span is None else list(span))
    assert sum(axis.get("range", (number, 0))) == (number - 1 if span else number), "in the middle"


def test_causes_are_bars_of_their_places_and_those_that_gain_are_green(report: Report) -> None:
    causes = (Cause("jitter", {"rank": 2}, -3 * MS), Cause("imbalance", {"stage": 1}, 5 * MS), Cause("host", {}, 0))
    figure = causes_chart(replace(report.steps[0], causes=causes, period_ns=None))
    bars, labels = figure.data
    assert [text.strip() for text in labels.text] == ["5.00 ms · 6.0%", "−3.00 ms · −3.6%"]
    assert list(labels.textposition) == ["middle right", "middle left"]
    assert (list(bars.x), list(figure.layout.yaxis.ticktext)) == ([5.0, -3.0], ["imbalance, stage 1", "jitter, rank 2"])
    assert list(bars.marker.color) == ["#E69F00", "#3A9B5C"]
    assert causes_chart(replace(report.steps[0], causes=None)) is None


def test_the_bubble_is_shared_out_by_kind_and_by_stage(report: Report) -> None:
    step = report.steps[0]
    figure = blame_chart(step)
    rows: dict[float, float] = {}
    for bar in figure.data:
        rows[bar.y[0]] = rows.get(bar.y[0], 0.0) + bar.x[0]
    assert rows == {0: pytest.approx(1.0, abs=0.01), 1: pytest.approx(1.0, abs=0.01)}
    assert blame_chart(replace(step, blame=None)) is None
    seen = set()
    for kinds in ({"idle": 3, "F": 1}, {"host": 3, "idle": 2, "F": 1}, {"host": 3, "wait": 2, "idle": 1}):
        again = blame_chart(replace(step, blame=replace(step.blame, by_kind=kinds)))
        seen.add(trace(again, "idle").marker.color)
        colours = [bar.marker.color for bar in again.data if bar.y[0] == 0]
        assert all(one != other for one, other in pairwise(colours)), "neighbours differ"
    assert len(seen) == 1, "wherever it stands"


def test_communication_is_the_mean_over_ranks_and_unknown_parts_are_told_together(report: Report) -> None:
    step = report.steps[0]
    sends = [comm for rank in step.ranks for comm in rank.comms if (comm.axis, comm.kind) == ("pp", "send")]
    figure = comms_chart(step)
    row = list(figure.layout.yaxis.ticktext).index("pp  send")
    for name, field in (("Waiting for the other side", "wait_ns"), ("Exposed transfer", "exposed_ns")):
        mean = sum(getattr(comm, field) for comm in sends) // len(sends) / 1e6
        assert trace(figure, name).x[row] == pytest.approx(mean)
    blind = tuple(
        replace(rank, comms=tuple(replace(comm, wait_ns=None, hidden_ns=None, exposed_ns=None) for comm in rank.comms))
        for rank in step.ranks
    )
    both = trace(comms_chart(replace(step, ranks=blind)), "Waiting or transfer, not known which")
    assert both.x[row] == pytest.approx(sum(comm.total_ns or 0 for comm in sends) // len(sends) / 1e6)
    assert comms_chart(replace(step, ranks=tuple(replace(rank, comms=()) for rank in step.ranks))) is None


def test_a_kind_of_a_trace_is_text_in_a_chart(report: Report) -> None:
    step = report.steps[0]
    hostile = replace(step.ranks[0], comms=(replace(step.ranks[0].comms[0], kind="<b>x</b><script>"),))
    figure = comms_chart(replace(step, ranks=(hostile,)))
    assert list(figure.layout.yaxis.ticktext) == ["pp  &lt;b&gt;x&lt;/b&gt;&lt;script&gt;"]
    assert plain("a & b") == "a &amp; b"


def link(source: int, target: int, ns: int, num_bytes: int | None = 1_000, peak: float | None = None) -> Link:
    rate = None if num_bytes is None else num_bytes / ns
    return Link("pp", source, target, True, 4, num_bytes, ns, 2 * ns, 0, 0, None, rate, None, None, peak)


def test_the_axis_of_a_slow_link_comes_first_then_what_costs_the_steps_most_then_bytes(report: Report) -> None:
    links = [
        replace(report.links[0], axis=axis, bytes=size)
        for axis, size in (("pp", 9), ("cp", 8), ("ep", 7), ("tp", None))
    ]
    costs = (
        Cause("communication", {"axis": "ep"}, 30),
        Cause("communication", {"axis": "cp"}, 40),
        Cause("jitter", {}, 90),
    )
    step = replace(report.steps[0], causes=costs)
    of_bytes = replace(report, links=tuple(links), steps=(replace(step, causes=None),), findings=())
    assert axes_of_links(of_bytes) == ["pp", "cp", "ep", "tp"]
    of_costs = replace(of_bytes, steps=(step,))
    assert axes_of_links(of_costs) == ["cp", "ep", "pp", "tp"]
    slow = Finding(Severity.WARNING, "Slow link", "", evidence={"cause": "communication", "where": {"link": "0-1"}})
    assert axes_of_links(replace(of_costs, findings=(slow,))) == ["pp", "cp", "ep", "tp"]


def test_a_matrix_has_a_cell_for_each_link(report: Report) -> None:
    own = replace(report, links=(link(0, 1, 3 * MS), link(1, 2, 5 * MS), link(2, 1, 7 * MS, None)))
    (cells,) = link_matrix(own, "pp", "transfer").data
    assert list(cells.y) == ["rank 0", "rank 1", "rank 2"]
    assert [list(row) for row in cells.z] == [[None, 3.0, None], [None, None, 5.0], [None, 7.0, None]]
    (sizes,) = link_matrix(own, "pp", "bytes").data
    assert [list(row) for row in sizes.text] == [["", "1.0 KB", ""], ["", "", "1.0 KB"], ["", "", ""]]
    assert link_matrix(own, "tp", "bytes") is None
    assert link_matrix(replace(own, links=(link(0, 1, MS, None),)), "pp", "bytes") is None


def test_a_matrix_of_many_ranks_is_by_stage_with_the_largest_link_named(report: Report) -> None:
    base, replicas = report.steps[0], MOST_ROWS
    ranks = tuple(replace(base.ranks[0], rank=rank, stage=rank % 2) for rank in range(2 * replicas))
    links = tuple(link(2 * index, 2 * index + 1, (index + 1) * MS) for index in range(replicas))
    many = replace(report, steps=(replace(base, ranks=ranks),), links=links)
    assert is_by_stage(many, "pp")
    (cells,) = link_matrix(many, "pp", "transfer").data
    assert list(cells.y) == ["stage 0", "stage 1"]
    assert cells.z[0][1] == sum(range(1, replicas + 1))
    assert f"most: {2 * replicas - 2} → {2 * replicas - 1}, {replicas}.00 ms" in cells.customdata[0][1]
    unknown = replace(many, steps=())
    assert not is_by_stage(unknown, "pp")
    rows = link_matrix(unknown, "pp", "transfer").data[0].y
    assert len(rows) == MOST_ROWS
    assert f"rank {2 * replicas - 1}" in rows, "those with most"
    assert "rank 0" not in rows
    assert link_matrix(unknown, "pp", "transfer").layout.height <= 640, "as high as the box of a picture"


def test_the_slowest_links_come_first_with_their_peaks(report: Report) -> None:
    own = replace(report, links=(link(0, 1, 1_000, 9_000), link(1, 2, 1_000, 2_000, peak=25.0)))
    figure = link_rates(own, "pp")
    assert list(figure.layout.yaxis.ticktext) == ["1 → 2", "0 → 1"]
    assert list(trace(figure, "bytes over transfer time").x) == [2e9, 9e9]
    assert list(trace(figure, "peak of the link").x) == [25e9, None]
    assert link_rates(replace(report, links=(link(0, 1, 1_000, None),)), "pp") is None


def memory(number: int, stage: int, peak: int | None, predicted: PredictedMemory | None = None) -> RankMemory:
    return RankMemory(number, stage, (stage,), 2, peak, None, None, None, InFlight(4, 3), predicted)


def test_predicted_parts_are_stacked_beside_the_measured_peak() -> None:
    parts = PredictedMemory(1 * MS, 2 * MS, 3 * MS, None, None, ())
    figure = memory_chart(MemoryReport((memory(0, 0, 9 * MS, parts), memory(1, 1, None)), ()))
    assert {part.name: list(part.y) for part in figure.data} == {
        "weights, predicted": [1.0, None],
        "gradients, predicted": [2.0, None],
        "optimizer state, predicted": [3.0, None],
        "measured peak": [9.0, None],
    }
    assert memory_chart(MemoryReport((memory(0, 0, None),), ())) is None
    assert memory_chart(MemoryReport((memory(0, 0, 9 * MS),), ())).layout.showlegend, "a mark alone has its name too"


def test_parts_too_small_to_be_seen_are_named_and_pointing_at_their_rank_tells_all() -> None:
    parts = PredictedMemory(3_000, 3_000_000, 12_000, None, None, ())
    report = MemoryReport((memory(0, 0, 76_000_000, parts), memory(1, 1, None)), ())
    figure = memory_chart(report)
    assert figure.layout.hovermode == "x unified"
    assert {part.name: part.customdata[0] for part in figure.data} == {
        "weights, predicted": "3.0 KB",
        "gradients, predicted": "3.0 MB",
        "optimizer state, predicted": "12.0 KB",
        "measured peak": "76.0 MB",
    }
    assert unseen_parts(report) == ["weights", "optimizer state"]
    assert unseen_parts(MemoryReport((memory(0, 0, None, parts),), ())) == ["weights", "optimizer state"]
    assert unseen_parts(MemoryReport((memory(0, 0, 5),), ())) == []


def test_what_memory_the_step_began_with_is_seen_on_every_part() -> None:
    parts = PredictedMemory(1 * MS, 2 * MS, 3 * MS, 4 * MS, 10 * MS, ())
    figure = memory_chart(MemoryReport((replace(memory(0, 0, 9 * MS, parts), start_bytes=6 * MS),), ()))
    mark = trace(figure, "measured at the start of the step").marker
    grounds = [luminance(part.marker.color) for part in figure.data if part.type == "bar"]
    assert len(grounds) == 4
    assert all((luminance(mark.color) + 0.05) / (ground + 0.05) > 2 for ground in grounds)
    assert mark.color != trace(figure, "measured peak").marker.color


def luminance(colour: str) -> float:
    """The relative luminance of "#rrggbb", as WCAG defines it."""
    srgb = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    return float(linear @ (0.2126, 0.7152, 0.0722))


def test_of_many_ranks_the_fullest_of_each_stage_is_drawn() -> None:
    ranks = tuple(memory(rank, rank % 2, rank) for rank in range(MOST_RANKS + 2))
    report = MemoryReport(ranks, ())
    assert list(memory_chart(report).data[0].x) == [
        f"rank {MOST_RANKS}<br>stage 0",
        f"rank {MOST_RANKS + 1}<br>stage 1",
    ]
    figure = in_flight_chart(report)
    assert (list(trace(figure, "measured").y), list(trace(figure, "planned").y)) == ([3, 3], [4, 4])
    assert figure.layout.yaxis.range[1] > 4.2, "marks of the most are whole"
    stages = MemoryReport(tuple(memory(rank, rank, rank) for rank in range(MOST_RANKS + 2)), ())
    axis = in_flight_chart(stages).layout.xaxis
    assert list(axis.ticktext) == [str(rank) for rank in range(0, MOST_RANKS + 2, 3)], "numbers, which do not overlap"
    assert (axis.tickvals[1], axis.title.text) == ("rank 3, stage 3", "rank")
    nothing = replace(ranks[0], in_flight=InFlight(None, None))
    assert in_flight_chart(MemoryReport((nothing,), ())) is None


def test_stages_have_a_bar_for_each_kind_with_its_spread() -> None:
    costs = [
        OpCost(1, "B", 8, 5, 4 * MS, 5 * MS, 7 * MS, 9 * MS, 1, 1, 5),
        OpCost(0, "F", 8, 2, MS, 2 * MS, 2 * MS, 2 * MS, 1, 0, 2),
    ]
    figure = stages_chart(costs)
    assert [part.name for part in figure.data] == ["Forward", "Backward"]
    backward = trace(figure, "Backward")
    assert (list(backward.x), list(backward.y)) == (["stage 1"], [5.0])
    assert (list(backward.error_y.array), list(backward.error_y.arrayminus)) == ([2.0], [1.0])
    assert stages_chart([]) is None


def test_costs_of_two_groups_are_points_with_a_median_for_each_group() -> None:
    low, high = (np.array(costs) * MS for costs in ([2, 2, 3], [8, 9]))
    groups = (OpGroup(3, 2 * MS), OpGroup(2, 8 * MS))
    samples = [OpSample(0, "F", np.concatenate((low, high)), groups), OpSample(1, "F", low, ())]
    figure = stage_points(samples)
    points, medians = figure.data
    assert (points.name, points.mode, list(points.y)) == ("Forward", "markers", [2, 2, 3, 8, 9, 2, 2, 3])
    assert [round(x) for x in points.x] == [0] * 5 + [1] * 3
    assert len(set(points.x)) == 8, "points of equal height lie beside each other"
    assert [y for y in medians.y if y is not None] == [2, 2, 8, 8, 2, 2]
    assert group_lines(samples) == ["stage 0, Forward: 3 ops of 2.00 ms and 2 ops of 8.00 ms"]
    assert stage_points(samples[1:]) is None


def scenario(name: str, gain: int, held: int, size: int | None = None, **more: Any) -> Scenario:
    spans = (100 - gain, 95 - gain, 110 - gain)
    fields: dict[str, Any] = {"ideal": (), "note": "", "split": None, "on_pareto_front": False, "num_chunks": 2} | more
    return Scenario(
        name=name, schedule=name, num_microbatches=4, span_ns=spans[0] * MS, low_ns=spans[1] * MS, high_ns=spans[2] * MS,
        gain_ns=gain * MS, bubble_ratio=0.1, peak_inflight=held, peak_memory_bytes=size, verified_span_ns=None, **fields,
    )  # fmt: skip


def test_changes_are_points_of_gain_and_memory_and_ideals_are_none_of_them() -> None:
    best, worse = scenario("best", 20, 8, on_pareto_front=True), scenario("worse", 5, 8)
    ideal, today = (
        scenario("ideal jitter", 30, 4, ideal=("jitter",), standing=Standing.IDEAL),
        scenario("as it was", 0, 4, num_chunks=1),
    )
    result = WhatIf(100 * MS, 100 * MS, 0.0, (ideal, best, worse), today, 5)
    figure = changes_chart(result)
    front = trace(figure, "front: nothing takes less time and no more memory")
    assert (list(front.x), list(front.y), list(front.text)) == ([4.0], [20.0], ["best"])
    assert (list(front.error_y.array), list(front.error_y.arrayminus)) == ([5.0], [10.0])
    assert list(trace(figure, "the run as it was").x) == [4.0]
    assert sum(len(part.x) for part in figure.data if part.showlegend is not False) == 3
    in_bytes = replace(
        result, scenarios=(replace(best, peak_memory_bytes=2 * 10**9),), today=replace(today, peak_memory_bytes=10**9)
    )
    assert list(trace(changes_chart(in_bytes), "the run as it was").x) == [1.0]
    small = replace(
        in_bytes,
        scenarios=(replace(best, peak_memory_bytes=356 * 10**6),),
        today=replace(today, peak_memory_bytes=350 * 10**6),
    )
    in_mb = changes_chart(small)
    assert list(trace(in_mb, "the run as it was").x) == [350.0], "in the unit of the table below it"
    assert in_mb.layout.xaxis.title.text == "MB, peak of the fullest rank"
    assert changes_chart(replace(result, scenarios=(ideal,))) is None


def test_the_axis_of_gains_begins_where_the_interval_of_the_run_as_it_was_does() -> None:
    """As it was, the step is 100 ms, 95 to 110: what loses 11 ms or more is not drawn, and how many do is said."""
    changes = (scenario("best", 20, 8), scenario("worse", -10, 8), scenario("wild", -400, 2, on_pareto_front=True))
    lacking = scenario("lacking", 60, 8, standing=Standing.LACKING)
    result = WhatIf(100 * MS, 100 * MS, 0.0, (*changes, lacking), scenario("as it was", 0, 4, num_chunks=1), 5)
    figure = changes_chart(result)
    names = {point[0] for part in figure.data for point in part.customdata or ()}
    assert names == {"best", "worse", "as it was"}
    low, high = figure.layout.yaxis.range
    assert -14 < low <= -10
    assert 25 <= high < 30
    assert "not shown: 1 change with a larger loss, among them wild with less memory<" in figure.layout.xaxis.title.text


def test_names_of_changes_at_one_point_stand_apart_and_the_last_ones_are_left_out() -> None:
    same = [scenario(f"receives posted {number} ops ahead", 5, 8, on_pareto_front=True) for number in range(9)]
    result = WhatIf(100 * MS, 100 * MS, 0.0, tuple(same), scenario("as it was", 0, 4, num_chunks=1), 5)
    front = trace(changes_chart(result), "front: nothing takes less time and no more memory")
    named = [place for text, place in zip(front.text, front.textposition, strict=True) if text]
    assert len(set(named)) == len(named) >= 2
    assert len(named) < len(same), "a point has few sides"


def test_names_of_changes_stand_clear_of_the_line_of_the_front() -> None:
    """Of changes at one point, from which the line goes to the right."""
    at = [*((f"receives posted {number} ops ahead", 5, 4) for number in range(3)), ("last", 6, 9)]
    front = [scenario(name, gain, memory, on_pareto_front=True) for name, gain, memory in at]
    unsure = [replace(one, low_ns=one.span_ns - 9 * MS, high_ns=one.span_ns + 9 * MS) for one in front]
    result = WhatIf(100 * MS, 100 * MS, 0.0, tuple(unsure), scenario("as it was", 0, 4, num_chunks=1), 5)
    found = trace(changes_chart(result), "front: nothing takes less time and no more memory")
    assert all(found.text[:2])
    assert "middle right" not in found.textposition[:3]


def test_names_of_changes_stand_clear_of_whiskers() -> None:
    """Of three changes, apart from each other, with room on all sides."""
    changes = [
        replace(scenario(name, gain, gain), on_pareto_front=True) for name, gain in (("a", 2), ("b", 5), ("c", 8))
    ]
    unsure = [replace(one, low_ns=one.span_ns - MS, high_ns=one.span_ns + MS) for one in changes]
    result = WhatIf(100 * MS, 100 * MS, 0.0, tuple(unsure), scenario("as it was", 0, 4, num_chunks=1), 5)
    front = trace(changes_chart(result), "front: nothing takes less time and no more memory")
    assert len(front.text) == 3
    assert not [place for place in front.textposition if place.endswith("center")]


def comparison(*parts: PartChange) -> Comparison:
    return Comparison(ChangeVerdict.SLOWER, "", SpanChange(1, 2, 1.0, 0.5, 1.5), OfBoth(9, 9), parts, (), ())


def test_two_runs_have_their_causes_side_by_side_and_only_certain_changes_in_colour() -> None:
    both = comparison(
        PartChange("cause", {"cause": "jitter"}, 1 * MS, 4 * MS, 3 * MS, True),
        PartChange("compute", {"kind": "B", "stage": 2}, 5 * MS, 4 * MS, -MS, True),
        PartChange("bubble", {"phase": "steady"}, 5 * MS, 7 * MS, 2 * MS, False),
    )
    figure = causes_of_both(both)
    assert (list(trace(figure, "A").x), list(trace(figure, "B").x)) == ([1.0], [4.0])
    bars = changes_of_parts(both)
    assert list(bars.layout.yaxis.ticktext) == ["compute B, stage 2", "bubble steady"]
    assert list(bars.data[0].x) == [-1.0, 2.0]
    low, high = bars.layout.xaxis.range
    assert -1.0 - low == pytest.approx(high - 2.0)
    assert high - 2.0 > 0.3 * (high - low), "room for the texts of both ends, not to cover the names"
    assert list(bars.data[0].marker.color) == ["#3A9B5C", "#7A838F"]
    assert (causes_of_both(comparison()), changes_of_parts(comparison())) == (None, None)
