"""Predictions that pages show while they are made: begun, paused, left alone, and the same in the end as all at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import dashboards.predicting
from dashboards.answers import Answers
from dashboards.pages import bubbles
from dashboards.predicting import Predicting, Progress
from dashboards.store import Store
from dashboards.wishes import wishes_of
from pptrace.analysis.whatif.change import Change
from pptrace.analysis.whatif.result import Scenario
from pptrace.analysis.whatif.study import Study
from pptrace.api.whatif import predict_changes, study_of
from pptrace.api.wishes import Wishes
from pptrace.errors import PptraceError, UsageError
from pptrace.workflow.load import load
from tests.dashboards.synthetic import write_run
from tests.support.programs import SAMPLES

UNEVEN = SAMPLES / "uneven_p4"


@pytest.fixture(scope="module")
def study() -> Study:
    return study_of(load([UNEVEN]), Wishes())


class Gate:
    """Lets one change after the other be predicted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._free, self.entered = threading.Semaphore(0), 0
        predict = Study.scenario

        def held(study: Study, change: Change, name: str) -> Scenario:
            self.entered += 1
            assert self._free.acquire(timeout=60)
            return predict(study, change, name)

        monkeypatch.setattr(Study, "scenario", held)

    def let(self, count: int) -> None:
        self._free.release(count)


def until(is_so: Callable[[], bool]) -> None:
    ends = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_what_is_predicted_one_after_the_other_is_in_the_end_what_all_at_once_are(study: Study) -> None:
    progress = Predicting(lambda: study, Wishes()).wait(60)
    assert progress.is_over
    assert progress.predictions.result == predict_changes(load([UNEVEN]), Wishes()).result
    assert Predicting(lambda: study, Wishes(("gpipe",))).wait(60).num_changes == 1


def test_pages_show_what_there_is_and_can_stop_and_go_on(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    assert study.today is not None, "known before: it is no change"
    gate, going = Gate(monkeypatch), Predicting(lambda: study, Wishes())
    assert going.progress() == Progress(0, None, None)
    going.go_on()
    gate.let(2)
    until(lambda: going.progress().done == 2)
    partial = going.progress()
    assert not partial.is_over
    assert (partial.num_changes > 10, len(partial.predictions.result.scenarios)) == (True, 2)
    until(lambda: gate.entered == 3)
    going.pause()
    gate.let(50)
    until(lambda: going.progress().done == 3)
    time.sleep(0.1)
    assert (going.progress().done, gate.entered) == (3, 3), "the change that was being predicted is the last"
    assert going.wait(60).is_over
    assert going.progress() is going.progress()


def test_where_nobody_asks_any_more_nothing_more_is_predicted(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    assert study.today is not None, "known before: it is no change"
    gate, going = Gate(monkeypatch), Predicting(lambda: study, Wishes())
    going.go_on()
    until(lambda: gate.entered == 1)
    monkeypatch.setattr(dashboards.predicting, "_IDLE_S", 0.05)
    time.sleep(0.1)
    gate.let(50)
    time.sleep(0.3)
    assert gate.entered == 1
    assert going.progress().done == 1


def test_what_cannot_be_predicted_is_said_to_each_who_asks(study: Study) -> None:
    going = Predicting(lambda: study, Wishes(("no-such-schedule",)))
    for _ in range(2):
        with pytest.raises(PptraceError, match="no-such-schedule"):
            going.wait(60)

    def fail() -> Study:
        raise ZeroDivisionError("by none")

    with pytest.raises(PptraceError, match=r"ZeroDivisionError: by none \(a mistake in pptrace"):
        Predicting(fail, Wishes()).wait(60)


def test_a_wait_has_an_end(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    progress = Predicting(lambda: study, Wishes()).wait(0.2)
    assert (progress.done, progress.is_over) == (0, False)
    gate.let(50)
    answers = Answers(Store([UNEVEN]))
    monkeypatch.setattr(dashboards.answers, "_MOST_S", 0.0)
    with pytest.raises(UsageError, match="0 changes are predicted after 0 s, the most that a page waits"):
        answers.whatif(Wishes())


def test_a_page_that_has_what_there_is_gets_the_bar_alone(small_answers: Answers) -> None:
    first = bubbles._answer(small_answers, {}, None, is_paused=True)
    assert first[:2] == ([], "predicting")
    assert first[6], "a page that is paused does not ask"
    small_answers.predicting(Wishes()).wait(60)
    body, place, done, most, _, _, is_still, state = bubbles._answer(small_answers, {}, first[-1], is_paused=False)
    assert (place, done, is_still) == ("gone", most, True)
    assert body
    again = bubbles._answer(small_answers, {}, state, is_paused=False)
    assert again[0] is bubbles.no_update
    wrong = {"wgrad_share": 7.0}
    with pytest.raises(PptraceError):
        small_answers.predicting(wishes_of(wrong)).wait(60)
    refused = bubbles._answer(small_answers, wrong, state, is_paused=False)
    assert "--wgrad-share is 7" in str(refused[0])
    assert refused[1:] == ("gone", "0", "1", "", "Stop", True, "")


@pytest.fixture
def small_answers(tmp_path: Path) -> Answers:
    return Answers(Store([write_run(tmp_path, "1f1b", pp=2, num_microbatches=2, num_steps=2)]))
