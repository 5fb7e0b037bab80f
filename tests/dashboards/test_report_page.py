"""The HTML report in a browser: its timeline draws what the page holds, and nothing is loaded from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from msgspec import structs

from pptrace.api.simulate import simulate
from pptrace.report.html import report_page, simulation_page, timeline_page
from pptrace.report.tiles.inline import inline_run, inline_simulation
from pptrace.workflow.load import load
from tests.dashboards.canvas import texts_of
from tests.dashboards.synthetic import write_run
from tests.support.programs import SAMPLES

COMPLETE = "() => [...document.querySelectorAll('.timeline')].every((root) => root.dataset.complete === 'true')"
DRAWN = f"() => !document.querySelector('.timeline').timeline.isAsked && ({COMPLETE})()"
VIEW = "() => { const { timeline } = document.querySelector('.timeline'); return [timeline.t0, timeline.t1, timeline.step]; }"
PLACE_OF = """([at, kind, microbatch]) => {
  const { timeline } = document.querySelector('.timeline');
  const part = timeline.drawn.find(({ type }) => type === 'tile');
  const { ops } = part.sections;
  const bar = ops.start.findIndex((start, bar) => start >= timeline.t0 && ops.rank[ops.track[bar]] === at
    && part.texts.kind[ops.kind[bar]] === kind && ops.microbatch[bar] === microbatch);
  const [y, height] = part.placeOf('ops', at, 0, 0);
  const box = timeline.canvas.getBoundingClientRect();
  return [box.left + timeline.x(ops.start[bar] + ops.length[bar] / 2), box.top + y + height / 2];
}"""
"""The middle of an op on the screen: index of its rank, kind, microbatch."""
PLACE_OF_MEMORY = """() => {
  const { timeline } = document.querySelector('.timeline');
  const [y, height] = timeline.placeOf('measured', 'memory', 0, 0, 0);
  const box = timeline.canvas.getBoundingClientRect();
  return [box.left + (timeline.left + timeline.right) / 2, box.top + y + height / 2];
}"""


@contextmanager
def shown(browser: Any, path: Path, text: str, scheme: Any = "light") -> Iterator[Any]:
    """A page from a file, which asks for nothing else and complains of nothing."""
    path.write_text(text, encoding="utf-8")
    page = browser.new_page()
    page.emulate_media(color_scheme=scheme)
    requests: list[str] = []
    complaints: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(path.as_uri())
    page.wait_for_function(COMPLETE)
    yield page
    assert (set(requests), complaints) == ({path.as_uri()}, [])
    page.close()


@pytest.fixture(scope="module")
def report(run_p4: Path) -> str:
    return report_page(load([run_p4]))


@pytest.fixture
def page(browser: Any, report: str, tmp_path: Path) -> Iterator[Any]:
    with shown(browser, tmp_path / "report.html", report) as page:
        yield page


def _point_at(page: Any, *place: object) -> str:
    page.locator(".timeline canvas.timeline-canvas").scroll_into_view_if_needed()
    page.mouse.move(*page.evaluate(PLACE_OF, list(place)))
    page.wait_for_selector(".timeline-tip:visible")
    return str(page.locator(".timeline-tip").inner_text())


def _click(page: Any) -> None:
    """Click where the pointer is."""
    page.mouse.down()
    page.mouse.up()


def test_the_timeline_says_what_is_known_of_an_op_and_of_a_message(page: Any, report: str) -> None:
    assert "plotly" not in report, "nothing but the timeline is drawn by scripts"
    shown_text = re.sub(r"\s+", " ", _point_at(page, 1, "F", 2))
    for part in ("Forward of microbatch 2", "rank1", "stage1", "chunk0", "from1", "length", "phasesteady"):
        assert part in shown_text
    assert "from its label" in shown_text
    _click(page)
    page.wait_for_selector(".timeline-side .bar-card:has-text('Forward of microbatch 2')")
    texts = page.locator(".timeline-legend").inner_text()
    assert {"Forward", "Backward", "warmup", "cooldown"} <= set(texts.split("\n"))


@pytest.mark.parametrize("width", [340, 1300])
def test_a_page_of_any_width_tells_the_bar_under_the_pointer_and_stays_usable_when_it_is_chosen(
    page: Any, width: int
) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    page.wait_for_timeout(200)
    assert "Backward of microbatch 3" in _point_at(page, 2, "B", 3)
    _click(page)
    page.wait_for_selector(".timeline-side .bar-card:has-text('Backward of microbatch 3')")
    assert page.locator(".timeline-tip").is_hidden()
    assert page.locator("canvas.timeline-canvas").bounding_box()["width"] > width * 0.6
    page.locator(".timeline-side").get_by_text("Pin rank").click()
    page.locator(".timeline-side").get_by_text("Unpin rank").wait_for()
    page.locator(".timeline-side").get_by_title("Close (Esc)").click()
    page.locator(".timeline-side").wait_for(state="hidden")


def test_the_wheel_is_the_page_s_until_the_timeline_was_clicked(page: Any) -> None:
    _point_at(page, 1, "F", 2)
    before = page.evaluate(VIEW)
    top = page.evaluate("() => scrollY")
    page.mouse.wheel(0, 100)
    page.wait_for_function("top => scrollY > top", arg=top)
    assert page.evaluate(VIEW) == before
    _point_at(page, 1, "F", 2)
    _click(page)
    page.mouse.wheel(0, 100)
    page.wait_for_function(f"before => ({VIEW})()[1] !== before", arg=before[1])


def test_a_step_is_shown_when_its_link_is_followed_and_keys_move_in_time(page: Any) -> None:
    first = page.evaluate(VIEW)
    number = int(page.locator("details:not([open]) a[data-step]").first.get_attribute("data-step"))
    other = page.locator(f"details:has(a[data-step='{number}'])")
    other.locator("summary").click()
    other.locator("a[data-step]").click()
    second = page.evaluate(VIEW)
    assert second[2] == number != first[2]
    assert second[0] >= first[1] or second[1] <= first[0], "another range of time"
    page.locator(".timeline-canvas").focus()
    for key, is_as_meant in (
        ("w", lambda view: view[1] - view[0] < second[1] - second[0]),
        ("0", lambda view: view[1] - view[0] > second[1] - second[0]),
        ("f", lambda view: view == second),
    ):
        page.keyboard.press(key)
        page.wait_for_function(COMPLETE)
        assert is_as_meant(page.evaluate(VIEW)), key
    page.keyboard.press("?")
    keys = page.locator(".timeline-help").inner_text()
    assert "next, previous step" in keys
    assert "critical path" not in keys, "which a server answers"


def test_keys_are_the_pages_until_the_timeline_has_the_focus(page: Any) -> None:
    before = page.evaluate(VIEW)
    page.keyboard.press("w")
    page.keyboard.press("n")
    assert page.evaluate(VIEW) == before


def _of_short_bars(page: Any) -> str:
    """Lines of the card of the first bars that are drawn as shares."""
    lines = page.evaluate(
        """() => {
          const { timeline } = document.querySelector('.timeline');
          for (let x = Math.max(timeline.x(timeline.zero), timeline.left); x < timeline.right; x += 1) {
            const hit = timeline.barAt(x, timeline.topOf(timeline.rows.find(({ type }) => type === 'rank')) + 10);
            if (hit && hit.cell !== undefined) return timeline.localLines(hit);
          }
          return [];
        }"""
    )
    return str(lines)


def test_bars_that_the_page_has_no_room_for_are_shares_and_it_says_so(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "long").mkdir()
    run = write_run(tmp_path / "long", "1f1b", pp=4, num_microbatches=400, num_steps=5)
    analysis = load([run])
    whole = inline_run(analysis)
    room = len(whole.data) // 2
    timeline = inline_run(analysis, most=room)
    assert len(timeline.data) < len(whole.data)
    assert whole.lacks == ""
    assert re.fullmatch(
        r"This page holds every bar of steps? .*\. Elsewhere it holds bars of .* ms or more and .*", timeline.lacks
    )
    with shown(browser, tmp_path / "page.html", timeline_page("long", timeline)) as page:
        assert timeline.lacks in page.inner_text("body")
        held = page.evaluate("() => document.querySelector('.timeline').timeline.about.firstStep")
        status = ".timeline-status:has-text('coarse')"
        page.evaluate("() => { const { timeline } = document.querySelector('.timeline'); timeline.zoom(0.02); }")
        page.wait_for_function(COMPLETE)
        assert not page.query_selector(status), f"step {held} is held whole"
        page.evaluate(
            """() => {
              const { timeline } = document.querySelector('.timeline');
              const steps = timeline.about.steps.map(([number]) => number);
              timeline.goToStep(timeline.step === steps.at(-1) ? steps[0] : steps.at(-1));
              timeline.zoom(0.02);
            }"""
        )
        page.wait_for_selector(status)
        assert "of which this file holds only shares of time" in _of_short_bars(page)
        page.evaluate(
            """(step) => {
              const { timeline } = document.querySelector('.timeline');
              timeline.goToStep(step);
              timeline.show(0, timeline.about.span);
            }""",
            held,
        )
        page.wait_for_function(DRAWN)
        assert "too short to be seen at this zoom" in _of_short_bars(page)


@pytest.mark.parametrize(
    ("name", "shown_name"), [("", "simulated step of 1f1b"), ("predicted step of zbv", "predicted step of zbv")]
)
def test_a_simulated_step_is_called_what_it_is_and_has_no_number(
    browser: Any, name: str, shown_name: str, tmp_path: Path
) -> None:
    timeline = inline_simulation(simulate("1f1b", pp=2, microbatches=4).simulation, name=name)
    with shown(browser, tmp_path / "page.html", timeline_page("paper", timeline)) as page:
        drawing = page.evaluate("() => document.querySelector('.timeline').timeline.svg()")
        texts = set(texts_of(drawing))
        assert {shown_name, "ms from the start"} <= texts
        _point_at(page, 1, "F", 2)
        _click(page)
        page.wait_for_selector(".timeline-side .bar-card")
        words = page.locator(".timeline-side").inner_text() + page.locator(".timeline-tip").inner_text()
        assert "microbatch 2" in words
        assert not any("step" in text for text in {*texts, words} - {shown_name})


def test_a_page_says_why_it_lacks_pictures_where_scripts_are_off(page: Any) -> None:
    assert page.locator("noscript p").count() == 0, "text that nobody sees"
    page.context.new_cdp_session(page).send("Emulation.setScriptExecutionDisabled", {"value": True})
    page.reload()
    assert page.locator("noscript p").is_visible()
    assert page.locator("noscript p").inner_text().startswith("Pictures are not drawn: this browser runs no scripts.")
    assert page.get_by_role("heading", name="Findings").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_who_waits_for_whom_is_drawn_in_the_colours_of_the_page(browser: Any, scheme: str, tmp_path: Path) -> None:
    with shown(browser, tmp_path / "hang.html", report_page(load([SAMPLES / "hang_p4"])), scheme) as page:
        style = "([selector, name]) => getComputedStyle(document.querySelector(selector))[name]"
        text, soft = (page.evaluate(style, [selector, "color"]) for selector in ("main", "th"))
        ring, line = ".waits circle[stroke-width]", ".waits path[stroke]"
        assert [page.evaluate(style, [part, "stroke"]) for part in (ring, line)] == [text, soft]
        assert page.evaluate(style, [".waits svg", "backgroundColor"]) == "rgba(0, 0, 0, 0)"
        assert page.locator(".waits svg").bounding_box()["height"] > 200


PAPER = """() => {
  const { timeline } = document.querySelector('.timeline');
  const style = (selector) => getComputedStyle(document.querySelector(selector));
  const width = document.querySelector('main').clientWidth;
  return {
    corner: [...timeline.canvas.getContext('2d').getImageData(2, 2, 1, 1).data],
    ground: style('html').backgroundColor,
    text: style('html').color,
    tools: style('.timeline-tools').display,
    colours: style('.bar span').printColorAdjust,
    beyond: [...document.querySelectorAll('.scroll')].filter((box) => box.scrollWidth > width).length,
  };
}"""


def test_a_page_printed_from_a_dark_system_is_light_and_whole(browser: Any, report: str, tmp_path: Path) -> None:
    with shown(browser, tmp_path / "report.html", report, "dark") as page:
        assert page.evaluate(PAPER)["corner"][0] < 60
        page.set_viewport_size({"width": 718, "height": 1000})  # A4 with its margins
        page.emulate_media(media="print", color_scheme="dark")
        page.wait_for_function(f"() => ({PAPER})().corner[0] > 200")
        assert page.evaluate(PAPER) == {
            "corner": [255, 255, 255, 255],
            "ground": "rgb(255, 255, 255)",
            "text": "rgb(28, 33, 40)",
            "tools": "none",
            "colours": "exact",
            "beyond": 0,
        }
        page.emulate_media(media="screen", color_scheme="dark")
        page.wait_for_function(f"() => ({PAPER})().corner[0] < 60")


def test_what_a_page_holds_is_never_called_coarse(browser: Any, tmp_path: Path) -> None:
    timeline = inline_simulation(simulate("1f1b", pp=4, microbatches=3_200).simulation)
    assert timeline.lacks == ""
    with shown(browser, tmp_path / "page.html", timeline_page("long", timeline)) as page:
        shifts = set()
        while (shift := page.evaluate("() => document.querySelector('.timeline').timeline.shift")) > 8:
            shifts.add(shift)
            assert page.inner_text(".timeline-status") == "", shift
            page.evaluate("() => document.querySelector('.timeline').timeline.zoom(0.6)")
            page.wait_for_function(DRAWN)
        assert len(shifts) > 8


@pytest.mark.parametrize("num_events", [900, 20_000])
def test_memory_under_the_pointer_is_that_of_its_moment_at_every_zoom(
    browser: Any, run_p4: Path, num_events: int, tmp_path: Path
) -> None:
    analysis = load([run_p4])
    origin, end = int(analysis.data.ops["start_ns"].min()), int(analysis.data.ops["end_ns"].max())
    times = np.sort(np.random.default_rng(1).choice(end - origin, num_events, replace=False))
    held = np.random.default_rng(2).integers(1, 900, num_events) * 1_000_000
    columns = {"rank": 0, "t_ns": origin + times, "allocated_bytes": held, "reserved_bytes": held}
    run = replace(analysis, data=structs.replace(analysis.data, memory=pd.DataFrame(columns)))
    with shown(browser, tmp_path / "page.html", timeline_page("memory", inline_run(run))) as page:
        for index in (10, num_events // 3, num_events // 2):
            middle = int(times[index] + times[index + 1]) // 2
            page.evaluate(
                "([from, to]) => document.querySelector('.timeline').timeline.show(from, to)",
                [middle - 500, middle + 500],
            )
            page.wait_for_function(DRAWN)
            page.locator(".timeline canvas.timeline-canvas").scroll_into_view_if_needed()
            page.mouse.move(*page.evaluate(PLACE_OF_MEMORY))
            page.wait_for_selector(f".timeline-tip:visible:has-text('allocated{held[index] // 1_000_000} MB')")
            assert page.inner_text(".timeline-status") == ""

    without_room = inline_run(run, most=0)
    with shown(browser, tmp_path / "small.html", timeline_page("memory", without_room)) as page:
        page.evaluate("() => document.querySelector('.timeline').timeline.zoom(0.01)")
        page.wait_for_function(DRAWN)
        shown_text = page.inner_text(".timeline-status")
        assert shown_text == ("" if num_events == 900 else "coarse: this file holds no finer memory of this time")


def test_shares_of_closed_groups_say_where_finer_ones_are_missing(browser: Any, tmp_path: Path) -> None:
    text = report_page(load([SAMPLES / "mesh_pp2_tp2_cp2_dp2"]))
    with shown(browser, tmp_path / "report.html", text) as page:
        page.locator(".timeline-canvas").focus()
        for key in "ggo":
            page.keyboard.press(key)
        for factor, is_coarse in ((1, False), (1 / 4, False), (1 / 40, True)):
            page.evaluate("(factor) => document.querySelector('.timeline').timeline.zoom(factor)", factor)
            page.wait_for_function(DRAWN)
            shown_text = page.inner_text(".timeline-status")
            assert shown_text == (
                "coarse: this file holds no finer shares of closed groups of this time" if is_coarse else ""
            )
        page.keyboard.press("o")
        page.wait_for_function(DRAWN)
        assert page.inner_text(".timeline-status") == "", "each bar of the ranks is there"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_simulated_step_is_drawn_in_the_colours_of_the_system(browser: Any, scheme: str, tmp_path: Path) -> None:
    text = simulation_page(simulate("interleaved-1f1b", pp=4, microbatches=8).simulation)
    with shown(browser, tmp_path / "plan.html", text, scheme) as page:
        shown_text = _point_at(page, 3, "B", 5)
        assert "Backward of microbatch 5" in shown_text
        assert "simulated" in shown_text
        ground = page.evaluate(
            """() => { const { canvas } = document.querySelector('.timeline').timeline;
              return canvas.getContext('2d').getImageData(2, canvas.height - 3, 1, 1).data[0]; }"""
        )
        assert (ground > 200) == (scheme == "light")
