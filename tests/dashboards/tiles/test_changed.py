"""A what-if as a source of the timeline: asked for once, then drawn from tiles like the others."""

from __future__ import annotations

from typing import Any

import pytest

from dashboards.app import create_app
from pptrace.schedule.registry import build
from tests.support.programs import SAMPLES
from tests.support.tile import sections_of

HERE = {"Host": "127.0.0.1"}


@pytest.fixture(scope="module")
def client() -> Any:
    return create_app([SAMPLES / "uneven_p4"]).server.test_client()


def about(client: Any) -> dict[str, Any]:
    return client.get("/timeline-data/about", headers=HERE).json


def test_a_changed_step_has_every_op_of_its_plan_from_the_start_of_the_measured_one(client: Any) -> None:
    known = about(client)
    assert "zb-h1" in known["schedules"]
    asked = client.get(f"/timeline-data/whatif/{known['token']}?schedule=zb-h1", headers=HERE).json
    assert asked == {"source": "whatif:schedule=zb-h1", "name": "zb-h1", "kinds": ["F", "I", "W"], "reason": ""}
    step, begin, end = known["steps"][1]
    shift = (3 * end // known["buckets"]).bit_length()
    tile = client.get(
        f"/timeline-data/tile/{known['token']}/{asked['source']}/{step}/stage/0/{shift}/0", headers=HERE
    ).data
    ops = sections_of(tile)["ops"]
    plan = build("zb-h1", pp=4, num_microbatches=4)
    assert ops["count"] == sum(len(plan.compute_actions(rank)) for rank in range(4))
    bar = client.get(f"/timeline-data/bar/{known['token']}/{asked['source']}/{step}/ops/0", headers=HERE).json
    assert bar[0][1].startswith("Forward of microbatch 0"), bar
    assert begin > 0


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("schedule=none", "'none' is not known"),
        ("chunks=x", "expected a number"),
        ("", "no such change"),
        ("split=1,1", "split"),
    ],
)
def test_what_cannot_be_predicted_has_its_reason(client: Any, query: str, reason: str) -> None:
    answer = client.get(f"/timeline-data/whatif/{about(client)['token']}?{query}", headers=HERE).json
    assert answer["source"] == ""
    assert reason in answer["reason"]


@pytest.mark.parametrize(
    ("source", "status"),
    [("whatif:schedule=gpipe", 200), ("whatif:schedule=none", 404), ("whatif:", 404), ("whatif:x=1", 404)],
)
def test_a_change_that_is_not_kept_is_predicted_again_if_it_can_be(client: Any, source: str, status: int) -> None:
    """As after the server was started again: pages that are open ask for tiles alone."""
    path = f"/timeline-data/tile/{about(client)['token']}/{source}/2/stage/0/20/0"
    assert client.get(path, headers=HERE).status_code == status
