"""The page Live: steps of a run that goes on appear without a reload."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from dashboards.app import create_app
from dashboards.live import WINDOW, LiveSteps
from dashboards.pages import problem
from dashboards.pages.live import body
from dashboards.store import Store
from pptrace.live_records.file import live_files
from tests.dashboards.accessibility import settle, violations
from tests.dashboards.conftest import Serve, Visiting
from tests.support.live_run import LiveFolder
from tests.support.programs import SAMPLES


def test_the_window_has_the_last_steps_and_ends_with_the_run(tmp_path: Path) -> None:
    run, live = LiveFolder(tmp_path), LiveSteps([tmp_path])
    run.write_steps(5)
    first = live.get()
    assert [step.step for step in first.steps] == list(range(5))
    assert not first.is_over
    assert live.get().state == first.state, "nothing has changed"
    run.write_steps(WINDOW)
    run.status("ok")
    last = live.get()
    assert [step.step for step in last.steps] == list(range(5, 5 + WINDOW))
    assert last.is_over


def test_live_files_are_no_reason_to_analyse_the_traces_again(tmp_path: Path) -> None:
    run, store = LiveFolder(tmp_path), Store([tmp_path])
    before = store.get().token
    run.write_steps(2)
    assert store.get().token == before


def test_the_overview_of_a_run_without_traces_leads_to_its_steps(tmp_path: Path) -> None:
    LiveFolder(tmp_path)
    assert "href='/live'" in str(problem.layout(Store([tmp_path]).get()))
    assert "has-live" not in str(problem.layout(Store([tmp_path / "elsewhere"]).get()))


def test_the_page_says_what_is_missing(tmp_path: Path) -> None:
    run, live = LiveFolder(tmp_path, pp=1), LiveSteps([tmp_path])
    assert "No step has ended on all ranks" in str(body(live.get()))
    run.status("failed")
    assert "wrote no step" in str(body(live.get()))
    assert LiveSteps([tmp_path / "elsewhere"]).get() is None


def test_the_page_of_a_run_that_is_over_says_where_its_records_are_cut(tmp_path: Path) -> None:
    run, live = LiveFolder(tmp_path), LiveSteps([tmp_path])
    run.write_steps(6)
    path = live_files(tmp_path)[1]
    path.write_bytes(path.read_bytes()[:-30])
    assert "the live records end" not in str(body(live.get())), "the rank may be writing"
    run.status("failed")
    assert "the live records end with step 4: what rank 1 wrote after it is cut" in str(body(live.get()))


def ask(client: Any, tick: Any, shown: str) -> Any:
    """The answer to a tick of a page that shows this."""
    names = (("live-body", "children"), ("live-shown", "data"), ("live-tick", "disabled"))
    asked = {
        "output": "..live-body.children...live-shown.data...live-tick.disabled..",
        "outputs": [{"id": id, "property": name} for id, name in names],
        "inputs": [{"id": "live-tick", "property": "n_intervals", "value": tick}],
        "state": [{"id": "live-shown", "property": "data", "value": shown}],
        "changedPropIds": ["live-tick.n_intervals"],
    }
    return client.post("/_dash-update-component", json=asked)


def test_a_run_that_is_over_is_not_said_to_write_records_later_and_how_to_see_some_is_said() -> None:
    answer = ask(create_app([SAMPLES / "1f1b_p2"]).server.test_client(), 0, "").get_data(as_text=True)
    assert "This run kept none." in answer
    assert "pptrace run --live -o RUN_DIR" in answer
    assert "pptrace dashboard RUN_DIR" in answer


def test_a_tick_of_another_type_is_refused_and_an_unchanged_one_costs_nothing(tmp_path: Path) -> None:
    LiveFolder(tmp_path).write_steps(3)
    client = create_app([tmp_path]).server.test_client()
    first = ask(client, 1, "")
    assert first.status_code == 200
    shown = first.json["response"]["live-shown"]["data"]
    assert ask(client, 2, shown).status_code == 204
    assert ask(client, "now", shown).status_code == 400


@pytest.mark.browser
def test_new_steps_and_a_slow_rank_appear_without_a_reload(tmp_path: Path, serve: Serve, visit: Visiting) -> None:
    run = LiveFolder(tmp_path)
    run.write_steps(17)
    page = visit(serve([tmp_path]) + "live").page
    page.wait_for_selector("#live-paces .hm")
    assert page.inner_text("#live-last") == "16"
    assert "No slow rank" in page.inner_text("#live-alarm")
    page.evaluate("window.same = true")
    run.write_steps(3, {1: 1.6})  # steps 17 to 19, the last one not observed
    began = time.monotonic()
    page.wait_for_function("() => document.querySelector('#live-last').innerText === '19'")
    assert time.monotonic() - began < 5
    assert "Slow rank 1: its ops take" in page.inner_text("#live-alarm")
    assert page.locator("#live-ranks .bars path").count() >= 2 * 2
    assert page.evaluate("window.same"), "the page is the same"
    run.status("ok")
    page.wait_for_function("() => document.querySelector('#live-last-detail').innerText === 'ok'")
    assert violations(settle(page)) == []
