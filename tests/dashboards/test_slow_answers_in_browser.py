"""Answers that come late, or in another order than they were asked for, in a real headless Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.dashboards.canvas import STATE, drawn
from tests.dashboards.conftest import Serve, Visiting, visiting

pytestmark = pytest.mark.browser

QUESTIONS = [
    ("sums", "sum([0, 4e6], null)", "sum([0, 9e6], [1])", "escape()", "summed && [t.summed, t.side.innerText]"),
    ("find", "find('F 1')", "find('rank 2 B 2')", "escape()", "found && [t.found.text, t.foundNote.innerText]"),
    (
        "whatif",
        "setChange('schedule=gpipe')",
        "setChange('schedule=zb-h1')",
        "setChange('')",
        "change && [t.change, t.sources]",
    ),
    ("critical", "toggleCritical()", "goToStep(3)", "toggleCritical()", "isCritical && t.critical[0]"),
    ("align", "align(places[0])", "align(places[2])", "unalign()", "alignment && t.alignment.rank"),
    ("at", "choose(hits[0])", "choose(hits[2])", "escape()", "chosen && t.chosen.rank"),
]
"""Of each kind of question its path, two that are asked one after the other, what takes them back, and what is shown of them."""


@contextmanager
def held(page: Any, pattern: str, words: str = "") -> Iterator[list[Any]]:
    """Requests to an address, with these words in them, that get no answer until somebody goes on with them."""
    routes: list[Any] = []

    def hold(route: Any) -> None:
        routes.append(route) if words in (route.request.post_data or "") else route.continue_()

    page.route(pattern, hold)
    yield routes
    page.unroute(pattern, hold)


def with_places(visit: Visiting, address: str) -> Any:
    """The timeline at a step, with ``places`` of bars of its ops, by their ranks, and these as ``hits`` of the pointer."""
    opened = drawn(visit(address + "timeline?step=2").page)
    opened.evaluate(
        f"""async () => {{
            window.t = {STATE};
            const {{ found }} = await t.store.json(`find/${{t.about.token}}?q=step+2+F&from=0&events=`);
            const start = (rank) => found.find(([at]) => at === rank)[1];
            const [source, table, step, lane] = ["measured", "ops", 0, 0];
            window.places = [0, 1, 2].map((rank) => ({{ source, step, table, rank, lane, start: start(rank) }}));
            window.hits = [0, 1, 2].map((at) => ({{ part: {{ source }}, table, at, lane, start: start(at) }}));
        }}"""
    )
    return opened


@pytest.fixture(scope="module")
def page(serve: Serve, browser: Any, run_p4: Path) -> Iterator[Any]:
    """One timeline for all tests that leave it as it was."""
    with visiting(browser) as visit:
        yield with_places(visit, serve([run_p4]))


def wait(page: Any, routes: list[Any], number: int) -> None:
    for _ in range(1000):
        if len(routes) < number:
            page.wait_for_timeout(10)
    assert len(routes) == number


def ask(page: Any, routes: list[Any], call: str, number: int) -> None:
    """Call a method of the timeline, and wait until there are so many requests."""
    page.evaluate(f"() => {{ t.{call}; }}")
    wait(page, routes, number)


def answer(page: Any, route: Any) -> None:
    """Let a request go on, and wait until the page has had its answer, and that to a question after it."""
    with page.expect_response(route.request.url):
        route.continue_()
    page.evaluate("() => fetch('/timeline-data/opening').then((answer) => answer.json())")


@pytest.mark.parametrize(("path", "first", "second", "taken_back", "shown"), QUESTIONS)
def test_an_answer_to_an_older_question_changes_nothing(
    page: Any, path: str, first: str, second: str, taken_back: str, shown: str
) -> None:
    now = f"() => t.{shown} || null"
    with held(page, f"**/timeline-data/{path}/**") as routes:
        ask(page, routes, first, 1)
        ask(page, routes, second, 2)
        answer(page, routes[1])
        newer = page.evaluate(now)
        answer(page, routes[0])
        assert (newer is not None, page.evaluate(now)) == (True, newer)
        ask(page, routes, taken_back, 2)
        ask(page, routes, first, 3)
        ask(page, routes, taken_back, 3)
        answer(page, routes[2])
        assert page.evaluate(now) is None


def test_keeping_a_bar_twice_keeps_it_once(page: Any) -> None:
    with held(page, "**/timeline-data/at/**") as routes:
        ask(page, routes, "keep(places[0]), t.keep(places[0])", 2)
        answer(page, routes[0])
        answer(page, routes[1])
    assert page.evaluate("t.kept.length") == 1


def test_what_an_address_says_comes_late_without_undoing_what_was_chosen_since(
    serve: Serve, visit: Visiting, run_p4: Path
) -> None:
    page = with_places(visit, serve([run_p4]))
    page.evaluate("() => t.choose(hits[0])")
    page.wait_for_function("() => /bar=.*select=/.test(location.search)")
    hits = page.evaluate("hits")
    with held(page, "**/timeline-data/at/**") as routes:
        page.reload()
        wait(page, routes, 1)
        page.evaluate(f"hit => {{ {STATE}.choose(hit); }}", hits[2])
        wait(page, routes, 2)
        answer(page, routes[1])
        answer(page, routes[0])
    assert drawn(page).evaluate(f"[{STATE}.chosen.rank, {STATE}.journey.rank]") == [2, 2]


@pytest.mark.parametrize(("name", "shown"), [("bubbles", "#whatif-headline"), ("live", "#no-live")])
def test_a_page_that_asks_again_and_again_waits_for_its_answer(
    serve: Serve, visit: Visiting, run_p4: Path, name: str, shown: str
) -> None:
    page = visit(serve([run_p4]) + "hang").page
    with held(page, "**/_dash-update-component*", "-tick") as routes:
        page.click(f"#to-{name}")
        page.wait_for_timeout(2500)  # in which it would have asked again
        assert len(routes) == 1
        routes[0].continue_()
    page.wait_for_selector(shown)


def test_a_sweep_of_schedules_is_shown_as_it_is_made_and_can_be_stopped(
    serve: Serve, visit: Visiting, run_p4: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dashboards.pages.schedules._SWEPT_S", 0.001)  # a plan an answer
    page = visit(serve([run_p4]) + "schedules?schedule=1f1b&pp=3&microbatches=4").page
    page.wait_for_selector("#plan-bubbles .heatmaplayer .hm")
    page.click("#sweep-stop")
    page.wait_for_selector("#sweep-stop:has-text('Go on')")
    stopped = page.inner_text("#sweep-count")
    assert stopped.endswith(" of 270 combinations of schedule, v and m simulated")
    page.wait_for_timeout(800)  # in which it would have asked again
    assert page.inner_text("#sweep-count") == stopped
    monkeypatch.undo()
    page.click("#sweep-stop")
    page.wait_for_selector("#sweep-bar.gone", state="attached")


def test_tiles_that_a_server_refuses_for_a_while_come_later(serve: Serve, visit: Visiting, run_p4: Path) -> None:
    opened = visit(serve([run_p4]) + "hang")
    page = opened.page
    page.route("**/timeline-data/*/*/**", lambda route: route.fulfill(status=503))
    page.click("#to-timeline")
    page.wait_for_selector("#timeline-message:has-text('does not answer')")
    page.unroute("**/timeline-data/*/*/**")
    page.wait_for_selector("#timeline-message", state="hidden")
    assert drawn(page).evaluate(f"{STATE}.drawn.some(({{ sections }}) => sections.ops)")
    assert [text for text in opened.complaints if "503" not in text] == []
    opened.complaints.clear()


def test_the_step_of_an_address_does_not_undo_what_was_chosen_since(
    serve: Serve, visit: Visiting, run_p4: Path
) -> None:
    page = visit(serve([run_p4]) + "hang").page
    page.wait_for_function("() => document.querySelector('#step')?.innerText.startsWith('2')")
    with held(page, "**/_dash-update-component*", "run-title") as routes:
        page.evaluate(
            "() => { history.pushState({}, '', '/timeline?step=4'); dispatchEvent(new PopStateEvent('popstate')); }"
        )
        drawn(page).keyboard.press("p")
        page.wait_for_function(f"() => {STATE}.step === 3")
        answer(page, routes[0])
    page.wait_for_function("() => document.querySelector('#step')?.innerText.startsWith('3')")
    assert page.evaluate(f"{STATE}.step") == 3


def test_a_plan_that_is_run_cannot_be_run_again_meanwhile(serve: Serve, visit: Visiting, run_p4: Path) -> None:
    page = visit(serve([run_p4]) + "bubbles?microbatches=6").page
    page.wait_for_selector("#try-verify:enabled")
    with held(page, "**/_dash-update-component*", "try-verified.children") as routes:
        page.evaluate("() => document.querySelector('#try-verify').click()")
        page.wait_for_selector("#try-verify:disabled")
        wait(page, routes, 1)
        routes[0].fulfill(json={"multi": True, "response": {"try-verified": {"children": "has run"}}})
    page.wait_for_selector("#try-verified:has-text('has run')")
    page.wait_for_selector("#try-verify:enabled")
