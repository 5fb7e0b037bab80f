from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from pptrace.analysis.result import PhaseSummary, StepReport
from pptrace.analysis.whole_run import Bubble, Cause, Waterfall
from pptrace.report.colours import KIND_COLOURS, ink, shade
from pptrace.report.summary_figures import note, overview, waterfall
from tests.support.parts import parts_ns, rank_step

MS = 1_000_000


def step_report(parts: Waterfall | None) -> StepReport:
    of_ranks = ((60 * MS, 10 * MS, 30 * MS), (70 * MS, 0, 30 * MS))
    phases = {"steady": PhaseSummary(0, 100 * MS, 1, 1, 30 * MS)}
    ranks = tuple(
        rank_step(rank, *times, stage=rank, window_ns=100 * MS, phases=phases) for rank, times in enumerate(of_ranks)
    )
    known = {} if parts is None else {name: ns for name, ns in asdict(parts).items() if ns is not None}
    causes = tuple(Cause(name, {}, ns) for name, ns in known.items() if name != "compute") if known else None
    return StepReport(
        **{"step": 2, "start_ns": 0, "end_ns": 100 * MS, "span_ns": 100 * MS},
        bubble=Bubble(0.46, 0.3, 0.25, 0.2, parts),
        ranks=ranks,
        ideal_ns=known.get("compute"),
        causes=causes,
    )


def test_a_note_says_why_there_is_no_picture() -> None:
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
