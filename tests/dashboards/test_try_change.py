"""A change that the page runs in real processes: for whom, one at a time, and only steps that a page can wait for."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import dashboards.answers
from dashboards.answers import Answers
from dashboards.app import create_app
from dashboards.pages.try_change import field
from dashboards.store import Store
from dashboards.wishes import FIELDS
from pptrace.api.options import Value
from pptrace.api.whatif import Predictions
from pptrace.api.wishes import FORM, Wishes
from pptrace.errors import UsageError
from tests.dashboards.attacker import CALLBACK, SECRET
from tests.support.programs import SAMPLES

RUN = SAMPLES / "uneven_p4"


def verify(client: Any, clicks: Any = 1, address: str = "127.0.0.1", **form: Any) -> Any:
    """Click *Verify*, with these fields filled in."""
    asked = {
        "output": "try-verified.children",
        "outputs": {"id": "try-verified", "property": "children"},
        "inputs": [{"id": "try-verify", "property": "n_clicks", "value": clicks}],
        "state": [{"id": field(name), "property": "value", "value": form.get(name)} for name in FIELDS],
        "changedPropIds": ["try-verify.n_clicks"],
    }
    headers = {"Authorization": f"Bearer {SECRET}"}
    return client.post(CALLBACK, json=asked, headers=headers, environ_overrides={"REMOTE_ADDR": address})


def test_a_change_is_run_in_real_processes() -> None:
    answer = verify(create_app([SAMPLES / "1f1b_p2"]).server.test_client(), schedule="gpipe").text
    assert "ms in real processes, the median of five steps" in answer, answer
    assert "were predicted (" in answer, answer


TYPED = {Value.WHOLE: 2, Value.TIMES: 2.5, Value.SHARE: 0.5, Value.SPLIT: "1,1", Value.FLAG: "yes"}
"""Values as a browser sends them, by the type of their field; a schedule is a text."""


@pytest.mark.parametrize("name", FIELDS)
def test_each_field_may_have_a_value_of_its_type(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(self: Answers, wishes: Wishes, _most_s: float) -> Any:
        raise UsageError(f"{getattr(wishes, FORM[name].name)} is asked for")

    monkeypatch.setattr(Answers, "verified", asked)
    typed = TYPED.get(FORM[name].takes, "gpipe")
    answer = verify(create_app([RUN]).server.test_client(), **{name: typed})
    assert answer.status_code == 200, answer.text
    assert "None is asked for" not in answer.text
    assert "is asked for" in answer.text


def test_nothing_is_run_until_it_is_asked_for() -> None:
    client = create_app([RUN]).server.test_client()
    assert verify(client, clicks=None, schedule="gpipe").status_code == 204
    assert verify(client, clicks="1", schedule="gpipe").status_code == 400


def test_browsers_of_other_machines_start_processes_only_where_they_know_a_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[Wishes] = []

    def of_a_change(self: Answers, wishes: Wishes, _most_s: float) -> Any:
        ran.append(wishes)
        raise UsageError("it was run")

    monkeypatch.setattr(Answers, "verified", of_a_change)
    for address in ("10.1.2.3", "fe80::1", ""):
        assert (
            "start the dashboard with --token" in verify(create_app([RUN]).server.test_client(), address=address).text
        )
    assert not ran
    assert "it was run" in verify(create_app([RUN]).server.test_client(), address="::1").text
    known = create_app([RUN], hosts=["localhost"], secret=SECRET).server.test_client()
    assert "it was run" in verify(known, address="10.1.2.3").text
    assert len(ran) == 2


def test_long_steps_are_left_to_the_command_line() -> None:
    with pytest.raises(UsageError, match="which is run six times; a page waits for steps of at most 0 s"):
        Answers(Store([RUN])).verified(Wishes(("gpipe",)), most_s=0.001)


def test_one_plan_is_run_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, entered, leave = Answers(Store([RUN])), threading.Event(), threading.Event()

    def slow(_analysis: Any, predictions: Predictions) -> Predictions:
        entered.set()
        assert leave.wait(30)
        return predictions

    monkeypatch.setattr(dashboards.answers, "verified", slow)
    first = threading.Thread(target=answers.verified, args=(Wishes(("gpipe",)), 10.0))
    first.start()
    assert entered.wait(30)
    with pytest.raises(UsageError, match="another plan is being run"):
        answers.verified(Wishes(("gpipe",)), 10.0)
    leave.set()
    first.join(30)
    assert answers.verified(Wishes(("gpipe",)), 10.0).name == "gpipe"
