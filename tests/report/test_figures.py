from __future__ import annotations

import time
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pptrace.analysis.result import PhaseSummary, RankStep, StepReport
from pptrace.analysis.whole_run import Bubble, Cause, Waterfall
from pptrace.intervals import EMPTY
from pptrace.model.device import DeviceBreakdown
from pptrace.model.tables import COMMS, OPS, empty_table, make_table
from pptrace.report.colours import KIND_COLOURS, ink, shade
from pptrace.report.figures import row_labels, timeline
from pptrace.report.summary_figures import note, overview, waterfall
from pptrace.schedule.registry import build
from pptrace.simulator import Simulation, simulate, uniform
from pptrace.timeline.lanes import Lane
from pptrace.timeline.windows import StepWindow
from tests.support.parts import parts_ns

MS = 1_000_000


def simulated(name: str = "1f1b", pp: int = 4, m: int = 8, v: int | None = None) -> Simulation:
    return simulate(build(name, pp, m, v), uniform(2 * MS, 4 * MS))


def bars(figure: Any, name: str) -> list[tuple[float, float, float]]:
    """(row, start, end) of every bar of a name."""
    return [
        (y, base, base + x)
        for trace in figure.data
        if trace.name == name
        for y, base, x in zip(trace.y, trace.base, trace.x, strict=True)
    ]


def one_comm(**changes: Any) -> pd.DataFrame:
    row = {
        "rank": 1, "step": 0, "kind": "recv", "axis": "pp", "peer": 0, "group_size": 2, "bytes": 4096, "direction": "F",
        "stage": 1, "microbatch": 0, "start_ns": 0, "posted_ns": 0, "asked_ns": 0, "end_ns": 4 * MS, "transfer_start_ns": 2 * MS,
        "transfer_end_ns": 3 * MS, "stream": -1,
        "match": 0, "clock": "host",
    } | changes  # fmt: skip
    return make_table(COMMS, {name: [value] for name, value in row.items()})


def rank_step(rank: int, compute: int, comm: int, bubble: int) -> RankStep:
    nothing = DeviceBreakdown(None, None, None, None, None, None, None, None)
    phases = {"steady": PhaseSummary(0, compute + comm + bubble, 1, 1, bubble)}
    return RankStep(rank, rank, compute + comm + bubble, compute, comm, bubble, phases, (), {}, nothing, None, ())


def step_report(parts: Waterfall | None) -> StepReport:
    ranks = (rank_step(0, 60 * MS, 10 * MS, 30 * MS), rank_step(1, 70 * MS, 0, 30 * MS))
    known = {} if parts is None else {name: ns for name, ns in asdict(parts).items() if ns is not None}
    causes = tuple(Cause(name, {}, ns) for name, ns in known.items() if name != "compute") if known else None
    return StepReport(
        *(2, 0, 100 * MS, 100 * MS, Bubble(0.46, 0.3, 0.25, 0.2, parts), ranks),
        ideal_ns=known.get("compute"),
        causes=causes,
    )


def test_every_op_is_drawn_once_where_it_happened() -> None:
    ops = simulated().ops()
    figure = timeline(ops)
    for kind, name in (("F", "Forward"), ("B", "Backward")):
        own = ops[ops["kind"] == kind]
        expected = sorted(zip(own["rank"], own["start_ns"] / MS, own["end_ns"] / MS, strict=True))
        assert np.allclose(sorted(bars(figure, name)), expected)


def test_bubbles_are_exactly_what_ops_leave_of_each_row() -> None:
    simulation = simulated()
    figure = timeline(simulation.ops())
    for rank in simulation.ranks:
        lengths = [end - start for row, start, end in bars(figure, "Bubble") if round(row) == rank.rank]
        assert sum(lengths) == pytest.approx(rank.bubble_ns / MS)


def test_transfers_that_nothing_hides_are_drawn_and_both_they_and_bubbles_are_in_the_legend() -> None:
    """Inside an op, between ops, and cut at the step's end."""
    run = simulated()
    exposed = np.array([[1, 2], [3, 5], [run.makespan_ns // MS - 1, run.makespan_ns // MS + 9]]) * MS
    lanes = {1: Lane(EMPTY, exposed, exposed, EMPTY, exposed)}
    figure = timeline(run.ops(), lanes=lanes)
    end = run.makespan_ns / MS
    assert bars(figure, "Exposed transfer") == [(1.0, 1, 2), (1.0, 3, 5), (1.0, end - 1, end)]
    named = {trace.name for trace in figure.data if trace.showlegend is not False}
    assert {"Exposed transfer", "Bubble"} <= named
    assert not bars(timeline(run.ops()), "Exposed transfer")


def test_phases_cover_each_row_without_overlap() -> None:
    simulation = simulated("interleaved-1f1b", 4, 8, 2)
    figure = timeline(simulation.ops())
    for rank in range(4):
        spans = sorted(
            (start, end)
            for name in ("warmup", "steady", "cooldown")
            for row, start, end in bars(figure, name)
            if row == rank
        )
        assert spans[0][0] == 0
        assert spans[-1][1] == pytest.approx(simulation.makespan_ns / MS)
        assert all(before[1] == pytest.approx(after[0]) for before, after in pairwise(spans))


def test_a_receive_is_split_into_waiting_and_transfer_below_its_row() -> None:
    figure = timeline(simulated().ops(), one_comm())
    (before, after), (transfer,) = bars(figure, "Waiting"), bars(figure, "Transfer")
    assert (before[1:], transfer[1:], after[1:]) == ((0, 2), (2, 3), (3, 4))
    assert 1 < before[0] == transfer[0] == after[0] < 1.5
    assert all(abs(row - round(row)) < 0.25 for row, _, _ in bars(figure, "Forward"))


def test_time_begins_with_the_window_and_other_steps_are_left_out() -> None:
    first = simulated().ops()
    second = first.assign(step=1, start_ns=first["start_ns"] + 10**12, end_ns=first["end_ns"] + 10**12)
    both = pd.concat([first, second], ignore_index=True)
    window = StepWindow(1, (0, 1, 2, 3), 10**12, int(second["end_ns"].max()))
    alone, picked = timeline(first), timeline(both, windows=[window])
    assert bars(picked, "Backward") == bars(alone, "Backward")
    assert picked.layout.xaxis.range == alone.layout.xaxis.range


def test_ranks_of_two_replicas_have_rows_of_their_own_with_a_gap_between() -> None:
    one = simulated("1f1b", 2, 4).ops()
    other = one.assign(rank=one["rank"] + 2)
    end = int(one["end_ns"].max())
    windows = [StepWindow(0, (0, 1), 0, end), StepWindow(0, (2, 3), 0, end)]
    rows = sorted({row for row, _, _ in bars(timeline(pd.concat([one, other]), windows=windows), "Forward")})
    assert len(rows) == 4
    assert rows[2] - rows[1] > rows[1] - rows[0]


def test_microbatch_numbers_are_in_the_bars_and_details_in_the_hover() -> None:
    figure = timeline(simulated().ops())
    forward = next(trace for trace in figure.data if trace.name == "Forward")
    assert forward.texttemplate == "%{customdata[3]:d}"
    assert sorted(set(forward.customdata[:, 3])) == list(range(8))
    assert set(forward.hovertext) == {"warmup · simulated", "steady · simulated"}
    for part in ("microbatch", "stage", "chunk", "step", "rank"):
        assert part in forward.hovertemplate


def test_row_labels_name_the_stages() -> None:
    labels = row_labels(simulated("interleaved-1f1b", 2, 4, 2).ops())
    assert labels == {0: "<b>rank 0</b>  stages 0, 2", 1: "<b>rank 1</b>  stages 1, 3"}


def test_fifty_thousand_ops_are_a_few_traces_made_at_once() -> None:
    ops = simulated("interleaved-1f1b", 32, 192, 4).ops()
    begin = time.perf_counter()
    figure = timeline(ops)
    assert time.perf_counter() - begin < 10
    assert len(ops) == 49_152
    assert len(figure.data) < 20
    assert len(figure.layout.shapes) == 0


def test_nothing_to_draw_is_said() -> None:
    figure = timeline(empty_table(OPS))
    assert len(figure.data) == 0
    assert figure.layout.annotations[0].text == "No pipeline ops to draw"
    assert note("why").layout.annotations[0].text == "why"


def test_the_overview_stacks_each_ranks_window_and_marks_the_ideal() -> None:
    figure = overview(step_report(None))
    stacked = [list(trace.x) for trace in figure.data[:3]]
    assert stacked == [[60, 70], [10, 0], [30, 30]]
    assert [trace.name for trace in figure.data[:3]] == ["Compute", "Exposed communication", "Bubble"]
    assert figure.data[3].name == "Ideal bubble would begin here (20.0%)"
    assert set(figure.data[3].x) == {80.0, None}
    ends = [value for value in figure.data[3].y if value is not None]
    lines = list(zip(ends[::2], ends[1::2], strict=True))
    assert len(lines) == 4, "above and below the texts of two rows"
    assert not any(begin < row + 0.2 and row - 0.2 < end for begin, end in lines for row in (0, 1)), (
        "and not through them"
    )


def test_the_overview_of_many_ranks_has_the_means_of_stages_and_names_the_extremes() -> None:
    step = step_report(None)
    first, second = step.ranks
    ranks = [
        replace(second if index % 2 else first, rank=index, stage=index % 2, compute_ns=(50 + index) * MS)
        for index in range(50)
    ]
    figure = overview(replace(step, ranks=tuple(ranks)))
    labels = ["<b>stage 0</b>  25 ranks", "<b>stage 1</b>  25 ranks"]
    extremes = ["rank 49</b>  most compute", "rank 0</b>  least compute"]
    assert list(figure.layout.yaxis.ticktext)[:4] == labels + [f"<b>{text}" for text in extremes]
    assert list(figure.data[0].x)[:4] == [74, 75, 99, 50]
    assert figure.data[0].customdata[0][0] == "stage 0, mean of 25 ranks"


def test_the_overview_of_a_step_without_a_pipeline_has_no_bubbles() -> None:
    step = step_report(None)
    plain = replace(step, ranks=tuple(replace(rank, phases={}) for rank in step.ranks))
    assert not plain.has_pipeline
    assert [trace.name for trace in overview(plain).data[:3]] == [
        "Compute",
        "Exposed communication",
        "Rest: other ranks, input, Python",
    ]


def test_what_may_be_a_bubble_or_communication_does_not_look_like_a_bubble() -> None:
    step = step_report(None)
    unknown = replace(step.ranks[1], bubble_ns=None, exposed_comm_ns=None, not_compute_ns=30 * MS)
    colours = {bar.name: bar.marker.color for bar in overview(replace(step, ranks=(step.ranks[0], unknown))).data[:4]}
    assert len(set(colours.values())) == 4
    assert "Bubble or exposed communication" in colours


def test_without_an_ideal_none_is_marked() -> None:
    step = step_report(None)
    figure = overview(replace(step, bubble=replace(step.bubble, ideal_share=None)))
    assert len(figure.data) == 3


parts = st.integers(-40_000, 90_000).map(lambda us: us * MS // 1000)


@given(parts, parts, parts, parts, st.one_of(st.none(), parts))
def test_the_waterfall_leads_from_nothing_to_the_span(a: int, b: int, c: int, d: int, host: int | None) -> None:
    compute = 20 * MS
    known = parts_ns(compute, a, b, c, d, host, 100 * MS - compute - a - b - c - d - (host or 0))
    bar = waterfall(step_report(known)).data[0]
    edges = [(base, base + size) for base, size in zip(bar.base, bar.x, strict=True)]
    assert len(edges) == (10 if host is not None else 9)
    assert edges[-1] == (0, 100)
    at = 0.0
    for low, high in edges[:-1]:
        assert pytest.approx(at, abs=1e-6) in (low, high)
        at = high if pytest.approx(at, abs=1e-6) == low else low
    assert at == pytest.approx(100, abs=1e-6) or edges[-2][0] == edges[-2][1]


def test_a_step_without_a_waterfall_says_why() -> None:
    assert "plan" in waterfall(step_report(None)).layout.annotations[0].text


@pytest.mark.parametrize("kind", ["F", "B", "I", "W"])
def test_shades_grow_lighter_and_their_ink_can_be_read(kind: str) -> None:
    shades = [shade(KIND_COLOURS[kind], index, 4) for index in range(4)]
    assert shades[0] == KIND_COLOURS[kind].lower()
    brightness = [sum(int(colour[at : at + 2], 16) for at in (1, 3, 5)) for colour in shades]
    assert brightness == sorted(brightness)
    assert ink(shades[3]) == "#16181d"
