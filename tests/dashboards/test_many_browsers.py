"""Ten pages at once (three in `make test`) on one server that ends and is started again: each keeps its picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dashboards.app import create_app
from tests.dashboards.attacker import attacked
from tests.dashboards.canvas import STATE, difference, picture
from tests.support.extent import ALL

pytestmark = pytest.mark.browser

LINKS = (
    "step=2",
    "step=3",
    "step=4&sources=planned,simulated,measured",
    "step=2&whatif=schedule%3Dzb-h1",
    "step=3&whatif=schedule%3Dgpipe&sources=whatif",
    "step=2&critical=1",
    "step=2&select=0.2.2",
    "step=3&pinned=2.3&lanes=0",
    "step=2&find=rank+1+B+3",
    "step=4&scale=0.5",
)
SHOWN = LINKS if ALL else (LINKS[2], LINKS[3], LINKS[5])
AGAIN = """link => {
    const root = document.querySelector('#timeline');
    const old = root.timeline;
    clearTimeout(old.writing);
    old.observer.disconnect();
    old.redraw = old.draw = old.write = () => {};
    history.replaceState(null, '', '/timeline?' + link);
    root.dataset.complete = false;
    window.pptraceTimeline.current = new window.pptraceTimeline.Timeline(root);
}"""


def test_pages_at_once_have_their_pictures_and_a_server_that_comes_again_has_the_same(
    run_p4: Path, browser: Any
) -> None:
    pages = [browser.new_page() for _ in SHOWN]
    errors: list[str] = []
    with attacked(create_app([run_p4])) as server:
        for page, link in zip(pages, SHOWN, strict=True):
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.goto(f"http://{server.host}/timeline?{link}", wait_until="commit")
        pictures = [picture(page) for page in pages]
    assert len(set(pictures)) == len(SHOWN)
    first, last = pages[0], pages[-1]
    first.bring_to_front()
    first.evaluate(f"{STATE}.zoom(0.4)")
    first.wait_for_selector("#timeline-message:has-text('does not answer')")
    with attacked(create_app([run_p4]), server.port):
        near = picture(first)
        assert first.locator("#timeline-message").is_hidden()
        first.wait_for_timeout(200)
        for link, expected in [*zip(SHOWN, pictures, strict=True), (first.url.partition("?")[2], near)]:
            last.evaluate(AGAIN, link)
            assert difference(last, expected) == "", link
    for page in pages:
        page.close()
    assert errors == []
