"""The dashboard as a person sees it: in a real headless Chromium."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pptrace.model.units import milliseconds, percent
from pptrace.workflow.load import load
from tests.dashboards.accessibility import settle, violations
from tests.dashboards.conftest import Serve, Visiting
from tests.dashboards.synthetic import write_run, write_run_json
from tests.support.extent import ALL
from tests.support.kineto import event_row, write_rows
from tests.support.programs import SAMPLES

pytestmark = pytest.mark.browser

DRAWN = "#timeline[data-complete=true]"


def choose_step(page: Any, _index: int, step: int) -> None:
    page.click("#step")
    page.locator(".dash-dropdown-content .dash-dropdown-option", has_text=f"{step}  ·").first.click()


def click_step(page: Any, index: int, _step: int) -> None:
    points = page.locator("#overview-steps .trace").first.locator(".point")
    points.nth(index).click(force=True)  # what plotly lays over it takes the click


def open_timeline(page: Any) -> None:
    page.click("#to-timeline")
    page.wait_for_selector(DRAWN)


@pytest.mark.parametrize("which", ["sample", *(["synthetic"] if ALL else [])])
def test_the_overview_shows_the_numbers_of_the_typical_step_until_another_is_chosen(
    which: str, run_p4: Path, serve: Serve, visit: Visiting
) -> None:
    """Chosen in the list of steps, and by its point in their chart."""
    path = SAMPLES / "zbv_p4" if which == "sample" else run_p4
    report = load([path]).report
    step = report.typical_step
    assert step != report.steps[0]
    page = visit(serve([path])).page
    assert page.text_content("#tile-span") == f"{milliseconds(step.span_ns)} ms"
    assert page.text_content("#tile-share") == percent(step.bubble.share)
    assert page.text_content("#tile-share-detail") == f"ideal {percent(step.bubble.ideal_share)}"
    slowest = max(step.ranks, key=lambda rank: rank.compute_ns)
    assert page.text_content("#tile-slowest") == f"rank {slowest.rank}"
    assert page.text_content("#tile-exposed") == percent(step.parts["communication"] / step.length_ns)
    assert page.text_content("#verdict .verdict").startswith(report.verdict.partition("; the most")[0])
    assert page.locator("#verdict .verdict-bar span").count() == sum(ns > 0 for ns in step.parts.values())
    page.wait_for_selector("#rank-bars .barlayer .bars")
    shown = page.locator("#rank-bars .ytick").all_text_contents()
    assert [text.split("stage")[0].strip() for text in shown] == [f"rank {rank.rank}" for rank in step.ranks]
    widths = page.evaluate(
        "document.querySelector('#rank-bars .js-plotly-plot').calcdata.slice(0, 3).map(t => t.map(p => p.s1 - p.s0))"
    )
    for part, name in zip(widths, ("compute_ns", "exposed_comm_ns", "bubble_ns"), strict=True):
        assert part == pytest.approx([getattr(rank, name) / 1e6 for rank in step.ranks])
    assert page.locator("#phases tbody tr").count() == len(step.ranks)
    assert page.locator("#phases tbody tr").first.locator("td").first.text_content() == str(step.ranks[0].rank)
    for name in ("rank-bars", "waterfall"):
        page.wait_for_selector(f"#{name} .barlayer .bars")
        assert page.locator(f"#{name} svg.main-svg").first.bounding_box()["height"] > 250, "tall enough to read"
    for choose, other in ((choose_step, report.steps[0]), (click_step, step)):
        choose(page, [each.step for each in report.steps].index(other.step), other.step)
        page.wait_for_function(
            "text => document.querySelector('#tile-span').textContent === text", arg=f"{milliseconds(other.span_ns)} ms"
        )
        assert page.text_content("#tile-share") == percent(other.bubble.share)


def test_an_empty_directory_says_so_until_it_has_files_and_is_reloaded(
    tmp_path: Path, serve: Serve, visit: Visiting
) -> None:
    page = visit(serve([tmp_path]) + "timeline").page
    for name in ("timeline", "overview"):
        page.click(f"#to-{name}")  # the first time it is there already
        page.wait_for_selector(f"#to-{name}[aria-current=page]")
        assert "empty" in page.text_content("#problem")
        assert str(tmp_path) in page.text_content("#problem")
    assert page.locator("#step-box.hidden").count() == 1
    assert page.locator("#whole-run").is_hidden(), "there are no files of a run that was not analysed"
    assert "What can be opened" in page.inner_text("#page")
    assert violations(settle(page)) == []
    write_run(tmp_path, "gpipe", pp=2, num_microbatches=2)
    page.reload()
    assert page.text_content("#tile-slowest") == "rank 1"


def test_a_damaged_run_says_what_is_wrong_with_each_file_and_rank(
    tmp_path: Path, serve: Serve, visit: Visiting
) -> None:
    (tmp_path / "rank0.json.gz").write_bytes(b"")
    (tmp_path / "rank1.json.gz").write_bytes(b"this is no trace")
    advice = visit(serve([tmp_path])).page.text_content("#problem + p")
    assert advice.startswith("rank0.json.gz and 1 more file cannot be read: why is below"), "not that there are none"
    broken = {"status": "failed", "trace": None, "error": "RuntimeError: out of luck"}
    write_run_json(tmp_path, 3, status="failed", rank2=broken)
    page = visit(serve([tmp_path])).page
    assert "rank0.json.gz" in page.text_content("#problem")
    assert "failed" in page.text_content("#run-facts")
    assert "RuntimeError: out of luck" in page.text_content("#run-ranks")
    files = page.locator("#files tbody tr").all_text_contents()
    assert len(files) == 3
    assert "empty" in files[0]
    assert "this is no trace" in files[1]
    assert violations(settle(page)) == []


def test_a_run_that_lost_a_rank_shows_the_others_and_says_so(tmp_path: Path, serve: Serve, visit: Visiting) -> None:
    write_run(tmp_path, "1f1b", pp=3, num_microbatches=4)
    (tmp_path / "rank2.json.gz").unlink()
    lost = {"status": "killed", "trace": None, "error": "killed by SIGKILL"}
    write_run_json(tmp_path, 3, status="failed", rank2=lost)
    page = visit(serve([tmp_path])).page
    assert page.text_content("#tile-span").endswith(" ms")
    problem = page.text_content("#run-problem")
    assert "failed" in problem
    assert "rank 2: killed by SIGKILL" in problem
    assert "rank 2" in page.text_content("#warnings")
    open_timeline(page)
    assert page.evaluate("document.querySelector('#timeline').timeline.rows.length") == 2
    assert violations(settle(page)) == []


def test_a_trace_without_marks_says_that_there_are_no_steps(tmp_path: Path, serve: Serve, visit: Visiting) -> None:
    write_rows(tmp_path / "rank0.json.gz", [event_row("user_annotation", "loop", 1.0, 2.0)])
    page = visit(serve([tmp_path])).page
    assert "No pipeline steps" in page.text_content("#no-steps")
    shown = page.locator("#warning-lines li").all_text_contents()
    assert shown == list(load([tmp_path]).report.warnings)
    assert len(shown) > 0
    page.click("#to-timeline")
    page.wait_for_selector("#timeline-message")
    assert "No pipeline steps" in page.text_content("#timeline-message")
    assert page.locator(".timeline-tools").is_hidden(), "there is nothing to use them on"
    assert violations(settle(page)) == []
