"""Questions that each rank answers by itself, and from whose answers the run's is made.

One list for all ways of analysing: in one process each rank is asked in turn, with workers each where it was read. A question
is a module of its own; its line here is all that the analysis knows of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pptrace.analysis.aligned import AlignedRun, StepsOfRank
from pptrace.analysis.links.join import with_links
from pptrace.analysis.links.rank_traffic import traffic_of_rank
from pptrace.analysis.result import Report
from pptrace.analysis.stage_parts import stage_compute, sums_of_rank, with_stages
from pptrace.model.mesh import MeshInfo

Answers = Mapping[str, Any]
"""Answers of one rank by the name of the question, without those that do not apply to it."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question by the name of its block in the report.

    ``of_rank`` is the answer of one rank in some steps, None where it has none; it is sent between processes. ``answer`` adds the
    block of the run to a report, from the answers of the ranks, in order of their numbers, and the facts of their recorders.
    """

    name: str
    of_rank: Callable[[int, StepsOfRank, AlignedRun], Any]
    answer: Callable[[Report, Sequence[Any], Mapping[int, Mapping[str, Any]], MeshInfo], Report]


QUESTIONS = (
    Question("links", traffic_of_rank, with_links),
    Question(
        "stages", sums_of_rank, lambda report, answers, _facts, _mesh: with_stages(report, stage_compute(answers))
    ),
)


def answers_of_rank(rank: int, steps: StepsOfRank, data: AlignedRun) -> Answers:
    """Ask one rank all questions."""
    asked = ((question.name, question.of_rank(rank, steps, data)) for question in QUESTIONS)
    return {name: answer for name, answer in asked if answer is not None}


def with_answers(
    report: Report, of_ranks: Mapping[int, Answers], facts: Mapping[int, Mapping[str, Any]], mesh: MeshInfo
) -> Report:
    """The report with the blocks of all questions, from what each rank answered."""
    for question in QUESTIONS:
        given = [answers[question.name] for _, answers in sorted(of_ranks.items()) if question.name in answers]
        report = question.answer(report, given, facts, mesh)
    return report
