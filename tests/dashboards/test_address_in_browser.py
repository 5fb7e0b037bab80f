"""Addresses of pages in a real headless Chromium: a link shows the same, and Back and Forward go from view to view."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dashboards.accessibility import settle
from tests.dashboards.conftest import Serve, Visiting
from tests.support.extent import ALL
from tests.support.programs import SAMPLES

pytestmark = pytest.mark.browser

HAS = "part => location.search.includes(part)"


def shot(page: Any, awaited: str) -> bytes:
    """The pixels of the page."""
    page.bring_to_front()
    page.mouse.move(0, 0)
    settle(page).wait_for_selector(awaited)
    page.evaluate("document.activeElement.blur() || scrollTo(0, 0)")
    return settle(page).screenshot(full_page=True, animations="disabled", caret="hide")


def picture(page: Any, awaited: str, wanted: bytes) -> bytes:
    """The pixels of the page when they are the wanted ones, or no longer change."""
    before = wanted
    while True:
        pixels = shot(page, awaited)
        if pixels in (before, wanted):
            return pixels
        before = pixels
        page.wait_for_timeout(150)


def fill(page: Any, **fields: str) -> None:
    for name, text in fields.items():
        page.fill(f"#plan-{name}", text)
        page.press(f"#plan-{name}", "Enter")


def test_a_link_to_a_page_shows_what_was_chosen_on_it(serve: Serve, visit: Visiting) -> None:
    """The step, what was typed, and what comes of it; the timeline's links are in its own tests."""
    address = serve([SAMPLES / "uneven_p4"])
    second, first = visit(address + "hang").page, visit(address).page  # one behind another is drawn once a second
    for page in (first, second):
        page.set_viewport_size({"width": 1280, "height": 800})
    settle(first).click("#step")
    first.locator(".dash-dropdown-content .dash-dropdown-option", has_text="4  ·").first.click()
    first.wait_for_function(HAS, arg="step=4")
    awaited = {"schedules": "#plan-curves-1 .trace"}  # a page with a step and fields
    if ALL:
        awaited |= {"communication": "#matrix-transfer .hm", "bubbles": "#try-picture .timeline[data-complete=true]"}
    for name, drawn in awaited.items():
        first.bring_to_front()
        first.click(f"#to-{name}")
        first.wait_for_function(HAS, arg="step=4")
        if name == "schedules":
            settle(first)
            fill(first, microbatches="6", forward="1.5")
            first.wait_for_function(HAS, arg="forward=1.5")
            first.wait_for_function("() => document.querySelector('#plan-drawn').innerText.includes('31.50 ms')")
            fill(first, layers="8", hidden="64", heads="4", sequence="32", vocabulary="100")
            first.fill("#size-sweep_tp", "1,2")
            first.press("#size-sweep_tp", "Enter")
            first.wait_for_selector("#estimates td")
        if name == "bubbles":
            settle(first)
            fill(first, **{"try-microbatches": "16"})
            first.wait_for_function(HAS, arg="microbatches=16")
            first.wait_for_function("() => document.querySelector('#try-result')?.innerText.startsWith('16 ')")
        shown = shot(first, drawn)
        second.goto(first.url)
        again = picture(second, drawn, shown)
        assert again == shown or again == picture(first, drawn, again), name
        assert second.url == first.url


def test_back_and_forward_go_through_the_views_that_were_visited(serve: Serve, visit: Visiting) -> None:
    page = settle(visit(serve([SAMPLES / "uneven_p4"])).page)
    page.locator(".show-me").first.click()
    page.wait_for_selector("#timeline[data-complete=true]")
    page.keyboard.press("w")
    page.wait_for_function("() => /from=.*&to=/.test(location.search)")
    page.wait_for_timeout(300)  # the address is written when the view has come to rest
    zoomed = page.url
    for _ in range(2):
        page.click("#to-schedules")  # the second time it is there already
    settle(page)
    fill(page, microbatches="6")
    page.wait_for_function(HAS, arg="microbatches=6")
    page.click("#to-steps")
    settle(page).wait_for_selector("#steps-chart .point")
    page.go_back()
    page.wait_for_function("() => document.querySelector('#plan-microbatches')?.value === '6'")
    page.go_back()
    page.wait_for_selector("#timeline[data-complete=true]")
    page.wait_for_timeout(300)
    assert page.url == zoomed
    page.go_back()
    page.wait_for_selector("#verdict")
    page.go_forward()
    page.wait_for_selector("#timeline[data-complete=true]")
    page.go_forward()
    page.wait_for_function("() => document.querySelector('#plan-microbatches')?.value === '6'")
    page.go_forward()
    page.wait_for_selector("#steps-chart")
