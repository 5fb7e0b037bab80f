"""Questions that a run is asked: each is a folder of this package, and a field of the report with :class:`AnswerOf`.

    types.py    what the JSON has of the answer, as Structs
    answer.py   of_rank(rank, steps, data): what one rank answers; None: nothing
                answer(inputs): fields of the report and their values, from what all ranks answered
    show.py     tables(report, amount): its tables; FILES: the rows of the files that the dashboard offers, by name

There is no ``of_rank`` where ranks are not asked, no ``answer.py`` where other analyses need the answer before (``stragglers``),
no ``show.py`` where nothing is shown. ``applies(comms, facts)`` in the folder's ``__init__.py`` says whether a run is asked at
all: of one that is not, no other file of the folder is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from types import ModuleType
from typing import TYPE_CHECKING, Any, get_type_hints

import pandas as pd
from msgspec import Struct
from msgspec.structs import replace

from pptrace.analysis.aligned import AlignedRun, StepsOfRank
from pptrace.analysis.matrix.step_matrix import StepMatrix
from pptrace.analysis.report import Report
from pptrace.model.report_table import Amount, ReportTable
from pptrace.recognise.run import RecognisedRun

if TYPE_CHECKING:
    from pptrace.analysis.early_receives.answer import EarlyOfRun
    from pptrace.analysis.experts.answer import ExpertsOfRun

Answers = Mapping[str, Any]
"""Answers of one rank by the name of the question, without those that do not apply to it."""
Rows = tuple[Callable[[Report], Iterable[Any]], str]
"""(rows of a file, from a report; what they are in one line)."""

_FIELDS = {
    name: answer
    for name, hint in get_type_hints(Report, include_extras=True).items()
    for answer in getattr(hint, "__metadata__", ())
}
QUESTIONS = tuple(dict.fromkeys(answer.question for answer in _FIELDS.values()))
"""All questions, in the order in which they are asked: that of the report's fields."""
ASKED_FIRST = ("experts", "early_receives")
"""The questions whose answers other figures need."""


class QuestionInputs(Struct, frozen=True, eq=False):
    """The input of a question: the report so far, and what each rank answered, in order of their numbers.

    ``costs`` are those of whole steps; ``experts`` are None in a run without experts, ``early`` in one without messages.
    """

    report: Report
    of_ranks: Mapping[int, Any]
    run: RecognisedRun
    costs: Sequence[StepMatrix] = ()
    experts: ExpertsOfRun | None = None
    early: EarlyOfRun | None = None


def ask_ranks(
    data: AlignedRun,
    steps: Mapping[int, StepsOfRank],
    facts: Mapping[int, Mapping[str, Any]],
    questions: Sequence[str] = QUESTIONS,
) -> dict[int, Answers]:
    """Ask each rank some questions, in its steps."""
    modules = {name: _part_of(name, "answer") for name in questions if _applies(name, data.comms, facts)}
    asking = {name: module.of_rank for name, module in modules.items() if module and hasattr(module, "of_rank")}
    answers: dict[int, Answers] = {}
    for rank in data.lanes:
        given = ((name, of_rank(rank, steps.get(rank, StepsOfRank()), data)) for name, of_rank in asking.items())
        answers[rank] = {name: answer for name, answer in given if answer is not None}
    return answers


def experts_in(
    answers: Mapping[int, Answers], run: RecognisedRun, steps: Mapping[int, StepsOfRank]
) -> ExpertsOfRun | None:
    """The answers of ranks about experts: explanations of steps need it before the report is made. None of a run without any."""
    of_ranks = _answers_to("experts", answers)
    if not of_ranks and not _applies("experts", run.comms, run.facts):
        return None
    from pptrace.analysis.experts.answer import ExpertsOfRun

    return ExpertsOfRun.of(of_ranks, run.facts, steps, run.schedule.plan)


def early_receives_in(answers: Mapping[int, Answers], costs: Sequence[StepMatrix]) -> EarlyOfRun | None:
    """The answers of ranks about receives that were posted early, a reason of what steps take. None without messages."""
    of_ranks = _answers_to("early_receives", answers)
    if not of_ranks:
        return None
    from pptrace.analysis.early_receives.answer import EarlyOfRun

    return EarlyOfRun.of(of_ranks, costs)


def with_answers(
    report: Report,
    answers: Mapping[int, Answers],
    run: RecognisedRun,
    costs: Sequence[StepMatrix] = (),
    experts: ExpertsOfRun | None = None,
    early: EarlyOfRun | None = None,
) -> Report:
    """The report with the answers to all questions, from what each rank answered."""
    for name in QUESTIONS:
        of_ranks = _answers_to(name, answers)
        if (of_ranks or _applies(name, run.comms, run.facts)) and (module := _part_of(name, "answer")):
            report = replace(report, **module.answer(QuestionInputs(report, of_ranks, run, costs, experts, early)))
    return report


def tables_of_answers(report: Report, amount: Amount) -> list[ReportTable]:
    """The tables of all questions that have an answer, in reading order."""
    answered = [answer for name, answer in _FIELDS.items() if getattr(report, name) not in (None, ())]
    in_order = sorted(answered, key=attrgetter("shown"))
    modules = (_part_of(name, "show") for name in dict.fromkeys(answer.question for answer in in_order))
    return [table for module in modules if module for table in module.tables(report, amount)]


def files_of_answers() -> dict[str, Rows]:
    """The rows of the files of all questions, by name."""
    modules = (_part_of(name, "show") for name in QUESTIONS)
    return {name: rows for module in modules if module for name, rows in module.FILES.items()}


def _answers_to(name: str, answers: Mapping[int, Answers]) -> dict[int, Any]:
    return {rank: given[name] for rank, given in sorted(answers.items()) if name in given}


def _applies(name: str, comms: pd.DataFrame, facts: Mapping[int, Mapping[str, Any]]) -> bool:
    applies = getattr(import_module(f"pptrace.analysis.{name}"), "applies", None)
    return applies is None or bool(applies(comms, facts))


@cache
def _part_of(name: str, part: str) -> ModuleType | None:
    """A file of a question's folder; None where it has none."""
    path = f"pptrace.analysis.{name}.{part}"
    return import_module(path) if find_spec(path) else None
