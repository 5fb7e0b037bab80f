"""The HTML report in a browser: figures are drawn when their step is opened, and nothing is loaded from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pptrace.report.html import report_page
from pptrace.workflow.load import load

DRAWN = "[...document.querySelectorAll('details[open] .plot')].every(plot => plot.querySelector('.main-svg'))"


def test_a_step_is_drawn_when_it_is_opened(browser: Any, run_p4: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(report_page(load([run_p4])), encoding="utf-8")
    page = browser.new_page()
    requests: list[str] = []
    complaints: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(path.as_uri())
    page.wait_for_function(DRAWN)
    closed = page.query_selector_all("details:not([open])")
    assert len(page.query_selector_all("details[open]")) == 1
    assert closed
    assert not any(step.query_selector(".main-svg") for step in closed)
    width = page.query_selector("details[open] .main-svg").bounding_box()["width"]
    closed[0].query_selector("summary").click()
    page.wait_for_function(DRAWN)
    first, second = page.query_selector_all("details[open]")
    for step in (first, second):
        assert step.query_selector(".main-svg").bounding_box()["width"] == width > 600
        assert "drawing" not in step.query_selector(".plot").inner_text()
    assert (requests, complaints) == ([path.as_uri()], [])
    page.close()
