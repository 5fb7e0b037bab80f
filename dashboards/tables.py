"""Tables of a run by name: what files and assistants ask for. Each is made of the report, or of what is kept of long answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
from msgspec import structs

from dashboards.answers import Answers
from dashboards.wishes import wishes_of
from pptrace.analysis.op_costs import op_costs
from pptrace.analysis.questions import files_of_answers
from pptrace.analysis.report import Report
from pptrace.analysis.result import StepReport
from pptrace.report.columns import as_rows


@dataclass(frozen=True, slots=True)
class TableRequest:
    """A request for a table: the run, the step, and options."""

    answers: Answers
    step: int | None
    options: Mapping[str, str]

    @property
    def report(self) -> Report:
        return self.answers.run().report

    def the_step(self) -> StepReport:
        """The step; the typical one where none is named.

        Raises:
            LookupError: there is no such step.
        """
        if self.step is None:
            step = self.report.typical_step
        else:
            step = next((step for step in self.report.steps if step.step == self.step), None)
        if step is None:
            raise LookupError("there is no such step")
        return step


def _frame(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a table of the API, None where it has <NA>."""
    columns = {str(name): [None if value is pd.NA else value for value in table[name].tolist()] for name in table}
    return as_rows(columns)


def _differences(wanted: TableRequest) -> Iterable[Any]:
    series = wanted.report.step_series
    entries: tuple[Any, ...] = () if series is None else (*series.outliers, *series.changes)
    for entry in entries:
        fixed = {name: value for name, value in structs.asdict(entry).items() if name not in ("differences", "ops")}
        for cause in entry.differences or (None,):
            yield fixed | ({} if cause is None else structs.asdict(cause))


def _comms(wanted: TableRequest) -> Iterable[Any]:
    for rank in wanted.the_step().ranks:
        for comm in rank.comms:
            yield {"rank": rank.rank, "stage": rank.stage} | structs.asdict(comm)


def _comm_totals(wanted: TableRequest) -> Iterable[Any]:
    for entry in wanted.report.device:
        for comm in entry.comms:
            yield {"rank": entry.rank} | structs.asdict(comm)


def _blame(wanted: TableRequest) -> Iterable[Any]:
    blame = wanted.the_step().blame
    if blame is not None:
        for of, charged in (("rank", blame.by_rank), ("stage", blame.by_stage), ("kind", blame.by_kind)):
            yield from ({"of": of, "name": name, "ns": ns} for name, ns in charged.items())


def _phases(wanted: TableRequest) -> Iterable[Any]:
    for rank in wanted.the_step().ranks:
        for name, phase in rank.phases.items():
            yield {"rank": rank.rank, "stage": rank.stage, "phase": name} | structs.asdict(phase)


@dataclass(frozen=True, slots=True)
class Table:
    """A table by its rows; ``meaning`` is one line, ``is_of_step`` whether a step is chosen."""

    rows: Callable[[TableRequest], Iterable[Any]]
    meaning: str
    is_of_step: bool = False


def _of_answers(rows: Callable[[Report], Iterable[Any]], meaning: str) -> Table:
    return Table(lambda wanted: rows(wanted.report), meaning)


TABLES: Mapping[str, Table] = {
    "steps": Table(lambda wanted: _frame(wanted.answers.run().steps), "every step: span, bubble, waterfall"),
    "ranks": Table(
        lambda wanted: _frame(wanted.answers.run().ranks),
        "every rank of every step: compute, exposed communication, bubble",
    ),
    "step-differences": Table(_differences, "outliers and changes of level: what those steps have more of"),
    "findings": Table(lambda wanted: wanted.report.findings, "what stands out, with what it costs a step"),
    "waterfall": Table(
        lambda wanted: ({"part": name, "ns": ns} for name, ns in (wanted.the_step().parts or {}).items()),
        "parts of a step, which sum to its length",
        is_of_step=True,
    ),
    "causes": Table(
        lambda wanted: wanted.the_step().causes or (), "causes of a step's length with their places", is_of_step=True
    ),
    "blame": Table(_blame, "whom the bubbles of a step are charged to: ranks, stages, kinds of op", is_of_step=True),
    "phases": Table(_phases, "warmup, steady and cooldown of each rank in a step, with their bubble", is_of_step=True),
    "comms": Table(_comms, "communication of a step by rank, axis and kind", is_of_step=True),
    "whatif": Table(
        lambda wanted: wanted.answers.whatif(wishes_of(wanted.options)).result.scenarios,
        "predictions of other schedules, splits, links",
    ),
    "comm-totals": Table(_comm_totals, "communication of whole traces by rank, axis and kind"),
    "stages": Table(lambda wanted: wanted.answers.of_data(op_costs), "what an op costs in each stage, by kind"),
    **{name: _of_answers(*table) for name, table in files_of_answers().items()},
    "expert-traffic": Table(
        lambda wanted: () if (matrix := wanted.answers.run().analysis.expert_traffic) is None else matrix.pairs(),
        "rows of every rank to the experts of every other one in its group",
    ),
    "compared-parts": Table(lambda wanted: wanted.answers.comparison().result.parts, "parts of two runs, side by side"),
    "compared-facts": Table(
        lambda wanted: wanted.answers.comparison().result.facts, "facts that differ between two runs"
    ),
    "hang": Table(lambda wanted: _frame(wanted.answers.hang().edges), "who waits for whom in a run that hung"),
}
