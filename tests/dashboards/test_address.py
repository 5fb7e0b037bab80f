"""Fields of addresses: those that are known are shown, all else is nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from plotly.utils import PlotlyJSONEncoder

from dashboards.address import NOTHING, choice_of, number_of, query_of, step_of
from dashboards.answers import Answers
from dashboards.app import create_app, page_at
from dashboards.pages import schedules
from dashboards.store import Store
from tests.support.programs import SAMPLES


def values_of(page: Any, prop: str = "value") -> dict[str, Any]:
    """The values of a page's components by their ids."""
    found: dict[str, Any] = {}

    def look(node: Any) -> None:
        if isinstance(node, dict):
            props = node.get("props", {})
            if "id" in props and prop in props:
                found[props["id"]] = props[prop]
            for part in node.values():
                look(part)
        elif isinstance(node, list):
            for part in node:
                look(part)

    look(json.loads(json.dumps(page, cls=PlotlyJSONEncoder)))
    return found


@pytest.mark.parametrize(
    "search", [None, "", "?", "step=x", "?step=", "?step=1e3", "?step=" + "1" * 16, "?" + "a=1&" * 60]
)
def test_an_address_without_a_step_asks_for_none(search: str | None) -> None:
    assert step_of(query_of(search)) is None


def test_the_fields_of_an_address_are_the_first_of_their_names() -> None:
    query = query_of("?step=3&chunks=2&chunks=4&x=1.5&far=1e999&axis=pp&empty=")
    assert step_of(query) == 3
    assert [number_of(query, name) for name in ("chunks", "x", "far", "axis", "missing")] == [2, 1.5, None, None, None]
    assert isinstance(number_of(query, "chunks"), int)
    assert choice_of(query, "axis", ["cp", "pp"]) == "pp"
    assert choice_of(query, "axis", ["cp"]) is choice_of(NOTHING, "axis", ["cp"]) is None


def test_the_fields_of_a_change_are_those_of_the_address_and_so_are_their_sliders() -> None:
    store = Store([SAMPLES / "uneven_p4"])
    loaded, answers = store.get(), Answers(store)
    address = "?schedule=zb-h1&microbatches=8&microbatch_size=0.5&link_speed=64&split=3,3,2,2&chunks=two"
    shown = values_of(page_at("/bubbles", loaded, answers, query_of(address)))
    today = values_of(page_at("/bubbles", loaded, answers))
    assert (shown["try-schedule"], today["try-schedule"]) == ("zb-h1", "")
    assert (shown["plan-try-microbatches"], shown["plan-try-microbatches-slider"]) == (8, 8)
    assert (shown["plan-try-microbatch_size"], shown["plan-try-microbatch_size-slider"]) == (0.5, -1)
    assert (shown["plan-try-link_speed"], shown["plan-try-link_speed-slider"]) == (64, 3), (
        "as far as the slider reaches"
    )
    assert (shown["plan-try-chunks"], shown["plan-try-chunks-slider"]) == (None, 1), "no number, no change"
    assert shown["try-split"] == "3,3,2,2"
    other = values_of(page_at("/bubbles", loaded, answers, query_of("?schedule=<script>&split=1,x")))
    assert other["try-schedule"] == ""
    assert other.get("try-split-slider") == today.get("try-split-slider")


def test_a_schedule_on_paper_is_that_of_the_address_or_of_the_run() -> None:
    loaded = Store([SAMPLES / "zbv_p4"]).get()
    sizes = ("plan-schedule", "plan-pp", "plan-microbatches", "plan-chunks", "plan-p2p")
    asked = values_of(schedules.layout(loaded, None, query_of("?schedule=gpipe&pp=3&microbatches=6&p2p=0.25&step=2")))
    assert [asked[name] for name in sizes] == ["gpipe", 3, 6, None, 0.25]
    of_run = values_of(schedules.layout(loaded, None, query_of("?schedule=none&pp=3")))
    assert of_run["plan-schedule"] == "zbv"
    assert (of_run["plan-pp"], of_run["plan-microbatches"]) == (3, 8)


def test_layers_of_stages_and_the_axis_of_links_are_those_of_the_address() -> None:
    store = Store([SAMPLES / "mesh_pp2_tp2_cp2_dp2"])
    loaded, answers = store.get(), Answers(store)
    plain = values_of(page_at("/communication", loaded, answers))["link-axis"]
    assert values_of(page_at("/communication", loaded, answers, {"axis": "none"}))["link-axis"] == plain
    assert values_of(page_at("/stages", loaded, answers, {"layers": "2,6"}))["stage-layers"] == "2,6"


def test_an_address_without_a_page_says_so() -> None:
    app = create_app([SAMPLES / "uneven_p4"])
    (output,) = (output for output in app.callback_map if output.startswith("..page.children..."))
    ends = [name.rsplit(".", 1) for name in output.strip(".").split("...")]
    call = {
        "output": output,
        "outputs": [{"id": name, "property": prop} for name, prop in ends],
        "inputs": [{"id": "location", "property": "pathname", "value": "/nope"}],
        "state": [{"id": "location", "property": "search", "value": ""}],
        "changedPropIds": ["location.pathname"],
    }
    shown = app.server.test_client().post("/_dash-update-component", json=call).get_json()["response"]
    assert "There is no page /nope. See " in str(shown["page"])
    assert not any("here" in str(link) for name, link in shown.items() if name != "page")
