"""Predictions and comparisons are made once for each question, whoever asks, until a file changes."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

import dashboards.answers
from dashboards.answers import Answers
from dashboards.paper import OnPaper
from dashboards.store import Loaded, Store
from pptrace.analysis.op_costs import op_costs
from pptrace.api.wishes import Wishes
from pptrace.errors import PptraceError, UsageError
from tests.dashboards.synthetic import write_run
from tests.support.programs import SAMPLES


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_run(tmp_path, "1f1b", pp=2, num_microbatches=2, num_steps=2)


def test_a_question_is_answered_once_until_a_file_changes(small: Path) -> None:
    answers = Answers(Store([small]))
    first = answers.whatif(Wishes(("gpipe",)))
    assert answers.whatif(Wishes(("gpipe",))) is first
    assert answers.whatif(Wishes(("zb-h1",))) is not first
    assert answers.run() is answers.run()
    write_run(small, "1f1b", pp=2, num_microbatches=2, num_steps=3)
    assert answers.whatif(Wishes(("gpipe",))).result.num_steps == 3 > first.result.num_steps


def test_several_who_ask_at_once_wait_for_one_answer(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, made, found = Answers(Store([small])), [], []
    study_of = dashboards.answers.study_of

    def slow(*args: Any, **options: Any) -> Any:
        made.append(args)
        entered.wait(5)
        return study_of(*args, **options)

    monkeypatch.setattr(dashboards.answers, "study_of", slow)
    entered = threading.Event()
    asking = [threading.Thread(target=lambda: found.append(answers.whatif(Wishes()))) for _ in range(4)]
    for thread in asking:
        thread.start()
    entered.set()
    for thread in asking:
        thread.join(60)
    assert (len(made), len(found), len({id(answer) for answer in found})) == (1, 4, 1)


def test_a_refusal_is_an_answer_too(small: Path) -> None:
    answers = Answers(Store([small]))
    lines = []
    for _ in range(2):
        with pytest.raises(PptraceError) as caught:
            answers.whatif(Wishes(("no-such-schedule",)))
        lines.append(str(caught.value))
    assert lines[0] == lines[1]
    with pytest.raises(UsageError, match="60,000,000 actions of a plan are more than a page predicts"):
        answers.whatif(Wishes(microbatches=10_000_000))


def test_a_plan_that_takes_long_to_search_is_refused_at_once(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(Store([small]))
    for schedule in ("zb-auto", "all"):
        with pytest.raises(
            UsageError, match="54,000 actions of a plan that is searched for are more than a page predicts"
        ):
            answers.whatif(Wishes((schedule,), microbatches=9000))
    with pytest.raises(PptraceError, match="27,000 forwards are more than a page can draw; expected at most 6,000"):
        OnPaper("zb-auto", 3, 9000).step()
    monkeypatch.setattr(dashboards.answers, "_MOST_S", -1.0)
    with pytest.raises(UsageError, match=r"0 changes are predicted after .* pptrace whatif, which has no limit"):
        answers.whatif(Wishes())


def test_recordings_are_compared_where_the_dashboard_shows_them() -> None:
    stores = [Store([SAMPLES / name], as_recorded=True) for name in ("1f1b_p2", "1f1b_p4")]
    both = Answers(*stores).comparison()
    assert (both.span.a_ns, both.span.b_ns) == (30_036_022, 85_432_837)


def test_two_runs_are_compared_and_one_alone_is_not(small: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    tmp_path = tmp_path_factory.mktemp("other")
    with pytest.raises(UsageError, match="--compare B"):
        Answers(Store([small])).comparison()
    both = Answers(Store([small]), Store([SAMPLES / "1f1b_p2"])).comparison()
    assert both.span.b_ns == 23_135_620
    one, two = Store([small]), Store([tmp_path / "b"])
    shutil.copytree(SAMPLES / "1f1b_p2", tmp_path / "b")
    answers = Answers(one, two)
    first = answers.comparison()
    assert answers.comparison() is first
    shutil.copytree(SAMPLES / "1f1b_p4", tmp_path / "b", dirs_exist_ok=True)
    assert answers.comparison().span.b_ns == 77_101_199, "the other run is another one"
    with pytest.raises(PptraceError, match="not found"):
        Answers(Store([small]), Store([small / "nowhere"])).comparison()


def test_traces_hold_no_hang_and_a_run_directory_says_how_it_ended(small: Path) -> None:
    assert Answers(Store([small])).hang().verdict is None
    with pytest.raises(PptraceError, match="these inputs are traces"):
        Answers(Store([small / "rank0.json.gz"])).hang()


def test_a_run_whose_ops_were_let_go_is_not_predicted(small: Path) -> None:
    class Light(Store):
        def get(self) -> Loaded:
            return light

    loaded = Store([small]).get()
    data = structs.replace(loaded.analysis.data, ops=loaded.analysis.data.ops.iloc[:0])
    light = replace(loaded, analysis=replace(loaded.analysis, data=data, costs=()))
    answers = Answers(Light([small]))
    for ask in (lambda: answers.of_data(op_costs), lambda: answers.whatif(Wishes())):
        with pytest.raises(PptraceError, match="so many ops that the dashboard keeps its report alone"):
            ask()
    assert answers.run().report is loaded.analysis.report
