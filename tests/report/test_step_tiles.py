"""The few figures of a step, from those of its report."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pptrace.analysis.report import Report
from pptrace.analysis.result import StepReport
from pptrace.report.step_tiles import step_tiles
from pptrace.workflow.load import load
from tests.support.programs import SAMPLES


@pytest.fixture(scope="module")
def report() -> Report:
    return load([SAMPLES / "1f1b_p4"], as_recorded=True).report


def shown(step: StepReport, report: Report) -> dict[str, tuple[str, str]]:
    return {tile.name: (tile.value, tile.detail) for tile in step_tiles(step, report)}


def test_tiles_are_the_figures_of_the_text_report(report: Report) -> None:
    tiles = shown(report.steps[1], report)
    assert tiles["period"] == ("86.05 ms", "85.43 – 86.05 ms over 2 steps")
    assert tiles["span"] == ("83.86 ms", "83.59 – 83.86 ms over 2 steps")
    assert tiles["share"] == ("43.0%", "ideal 27.3%")
    assert tiles["slowest"] == ("rank 3", "49.78 ms compute, mean 38.56")
    exposed = sum(rank.exposed_comm_ns or 0 for rank in report.steps[1].ranks) / (4 * 83_862_374)
    parts = report.steps[1].parts
    of_step = f"{parts['communication'] / 86_050_000:.1%}"
    assert tiles["exposed"] == (of_step, f"of the ranks' time {exposed:.1%}, most on rank 2: 11.97 ms")


def test_a_bubble_far_above_its_ideal_is_bad(report: Report) -> None:
    step = report.steps[0]
    bad = {tile.name for tile in step_tiles(step, report) if tile.is_bad}
    fine = replace(step, bubble=replace(step.bubble, ratio=0.4))
    assert bad == {"share"}
    assert not any(tile.is_bad for tile in step_tiles(fine, report))


def test_what_is_not_known_is_a_dash(report: Report) -> None:
    step = report.steps[0]
    unknown = replace(
        step,
        span_ns=None,
        period_ns=None,
        bubble=replace(step.bubble, ratio=None, share=None, ideal_ratio=None, ideal_share=None),
        ranks=tuple(replace(rank, compute_ns=None, exposed_comm_ns=None) for rank in step.ranks),
    )
    tiles = shown(unknown, replace(report, steps=(unknown,)))
    assert {name: value for name, (value, _) in tiles.items()} == {
        "span": "– ms",
        "share": "–",
        "slowest": "–",
        "exposed": "–",
    }


def test_of_one_rank_no_mean_is_shown_and_of_an_unknown_transfer_no_rank(report: Report) -> None:
    step = report.steps[0]
    alone = replace(step, ranks=(replace(step.ranks[2], compute_ns=5_000_000, exposed_comm_ns=None),))
    tiles = shown(alone, report)
    assert tiles["slowest"] == ("rank 2", "5.00 ms compute, the only rank with a trace")
    assert tiles["exposed"] == ("–", "not known of rank 2")


def test_no_rank_has_most_exposed_communication_where_that_of_others_is_not_known(report: Report) -> None:
    step = report.steps[0]
    partly = replace(step, ranks=(*(replace(rank, exposed_comm_ns=None) for rank in step.ranks[:3]), step.ranks[3]))
    assert shown(partly, report)["exposed"] == ("–", "not known of ranks 0 to 2")


def test_a_step_without_a_pipeline_has_compute_and_rest_in_place_of_bubbles(report: Report) -> None:
    step = report.steps[0]
    ranks = tuple(
        replace(rank, ops=(), phases={}, window_ns=100, compute_ns=60 + index, bubble_ns=10)
        for index, rank in enumerate(step.ranks)
    )
    tiles = shown(replace(step, ranks=ranks), report)
    assert list(tiles) == ["period", "compute", "rest", "slowest", "exposed"]
    assert (tiles["compute"][0], tiles["rest"][0]) == ("61.5%", "10.0%")
