"""The pages for steps, bubbles, communication, memory, stages, comparison and hangs in a real headless Chromium."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pptrace.model.units import milliseconds
from pptrace.workflow.load import load
from tests.dashboards.conftest import Serve, Visiting

pytestmark = pytest.mark.browser


def _slide(page: Any) -> None:
    """Fields and their sliders show the same, whichever is moved; back at today's value there is no change."""

    def has(field: str, value: str) -> None:
        page.wait_for_function("([id, text]) => document.getElementById(id).value === text", arg=[field, value])

    page.wait_for_selector("[role=slider][aria-label=Microbatches][aria-valuenow='4']")
    page.press("[role=slider][aria-label=Microbatches]", "ArrowRight")
    has("plan-try-microbatches", "5")
    page.press("[role=slider][aria-label=Chunks]", "Home")
    has("plan-try-chunks", "")
    page.press("[role=slider][aria-label='Link speed']", "ArrowRight")
    has("plan-try-link_speed", "2")
    page.wait_for_function(
        "() => document.querySelector('#try-result')?.innerText.startsWith('5 microbatches, links 2 times as fast: ')"
    )
    page.click("#try-verify")
    page.wait_for_selector("#verify-result")
    assert " ms in real processes, the median of five steps; " in page.inner_text("#verify-result")
    page.press("[role=slider][aria-label='Link speed']", "ArrowLeft")
    has("plan-try-link_speed", "")


def _save_the_page(page: Any, folder: Path, name: str) -> None:
    """The file has the tables and pictures that the page shows, and neither scripts nor addresses to load."""
    with page.expect_download() as saved:
        page.click("#save-page")
    assert saved.value.suggested_filename == f"pptrace-{name}.html"
    path = folder / saved.value.suggested_filename
    saved.value.save_as(path)
    count = "selector => document.querySelectorAll(selector).length"
    shown = {
        selector: page.evaluate(count, f"#page {selector}")
        for selector in ("table", "h2", ".js-plotly-plot, .timeline")
    }
    alone = page.context.new_page()
    asked: list[str] = []
    alone.on("request", lambda request: asked.append(request.url))
    alone.goto(path.as_uri())
    alone.wait_for_function("() => [...document.images].every(image => image.naturalWidth > 100)")
    assert [alone.evaluate(count, selector) for selector in ("table", "h2", "img")] == list(shown.values())
    assert alone.evaluate(count, "script, button, input, a, canvas") == 0
    assert asked == [path.as_uri()], "nothing else is asked for"
    alone.close()
    page.bring_to_front()


def _draw_schedules(page: Any) -> None:
    """The page begins with the run's own schedule, draws one of any size, and says in a line why one has no such size."""
    page.click("#to-schedules")
    page.wait_for_selector("#plan-timeline[data-complete=true] .legend-entry")
    page.wait_for_selector("#plan-bubbles .heatmaplayer .hm")
    for number, title in enumerate(("Throughput per rank against p", "Throughput of all ranks against p")):
        page.wait_for_selector(f"#plan-curves-{number} .scatterlayer .trace:nth-child(2)")
        assert page.get_by_text(title).is_visible()
    assert page.locator("#plan-pp").input_value() == "4"
    assert "bubble ratio 0.375, 27.3% of the step" in page.locator("#plan-drawn").inner_text()
    assert page.locator("#idle tbody tr").last.inner_text().split() == [
        "all",
        "6.00",
        "12.00",
        "6.00",
        "12.00",
        "36.00",
    ]
    page.fill("#plan-microbatches", "12")
    page.press("#plan-microbatches", "Enter")
    page.wait_for_function("() => document.querySelector('#plan-drawn').innerText.includes('bubble ratio 0.250')")
    page.fill("#plan-chunks", "2")
    page.press("#plan-chunks", "Enter")
    page.wait_for_selector("#plan-refused")
    assert "this schedule has 1 (try interleaved-1f1b)" in page.locator("#plan-refused").inner_text()
    page.wait_for_selector("#plan-bubbles .heatmaplayer .hm")


def test_the_pages_follow_the_step_and_the_change_that_are_chosen(
    run_p4: Path, serve: Serve, visit: Visiting, tmp_path: Path
) -> None:
    """One visit for all of them: most of what a test costs is the first drawing of a page."""
    report = load([run_p4]).report
    page = visit(serve([run_p4]) + "steps").page
    page.set_viewport_size({"width": 1280, "height": 900})
    page.wait_for_selector("#steps-chart .scatterlayer .point")
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280, "nothing is beyond the window"
    links = page.locator("nav a")
    boxes = [links.nth(index).bounding_box() for index in range(links.count())]
    assert len(boxes) == 12, "every page has its link"
    assert all(box["x"] + box["width"] <= 1280 for box in boxes)
    assert len({round(box["y"]) for box in boxes}) == 1, "in one row"
    page.locator("#steps-chart .scatterlayer .trace").nth(1).locator(".point").nth(2).click(force=True)
    span = f"{milliseconds(report.steps[2].span_ns)} ms"
    page.wait_for_function("text => document.querySelector('#chosen-step').innerText.includes(text)", arg=span)
    assert page.inner_text("#step").startswith(str(report.steps[2].step))

    page.click("#to-bubbles")
    page.wait_for_selector("#bubbles-waterfall .barlayer .bars")
    assert f"Where step {report.steps[2].step} went" in page.inner_text("#bubbles-body")
    page.wait_for_selector("#whatif tbody tr")
    page.fill("#plan-try-microbatches", "4")
    page.press("#plan-try-microbatches", "Enter")
    page.wait_for_function(
        "() => document.querySelector('#try-picture .timeline[data-complete=true]')?.timeline.change"
    )
    page.wait_for_function("() => document.querySelector('#try-result')?.innerText.startsWith('4 microbatches: ')")
    page.fill("#plan-try-chunks", "3")
    page.press("#plan-try-chunks", "Enter")
    page.wait_for_function("() => document.querySelector('#try-refused')?.innerText.includes('this schedule has 1')")
    _slide(page)
    _save_the_page(page, tmp_path, "bubbles")
    page.click("#to-timeline")
    page.wait_for_function("() => document.querySelector('#timeline')?.dataset.complete === 'true'")
    _save_the_page(page, tmp_path, "timeline")

    drawn = {
        "communication": "#matrix-transfer .hm",
        "memory": "#memory-in-flight .bars",
        "stages": "#stages-chart .scatterlayer .points",
    }
    for name, picture in drawn.items():
        page.click(f"#to-{name}")
        page.wait_for_selector(picture)
    for kind, start in (("svg", b"<svg"), ("png", b"\x89PNG")):
        with page.expect_download() as saved:
            page.click(f"button[data-picture=stages-chart][data-format={kind}]")
        assert saved.value.suggested_filename == f"pptrace-stages-chart.{kind}"
        content = Path(saved.value.path()).read_bytes()
        assert content.startswith(start)
        if kind == "svg":
            assert re.search(rb"<rect[^>]*fill: rgb\(255, 255, 255\)", content), "on white, whatever the page is"
    for name, id in (("compare", "#no-other"), ("hang", "#no-hang")):
        page.click(f"#to-{name}")
        page.wait_for_selector(id)
    _draw_schedules(page)
