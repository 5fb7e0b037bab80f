"""Questions of an assistant about a run: report, findings, evidence, tables and predictions, as values of JSON.

Nothing is written and no path is taken: every answer is about the run that was opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from dashboards.answers import Answers
from dashboards.assistant.paging import Query, page_of_frame, page_of_rows
from dashboards.evidence import evidence_of, place_of
from dashboards.tables import TABLES, TableRequest
from dashboards.wishes import wishes_of
from pptrace.analysis.report import Report
from pptrace.analysis.result import Finding
from pptrace.errors import UsageError
from pptrace.report.tables import warning_lines
from pptrace.report.whatif import headline, replay_line

_FRAMES = {
    "ops": "every op: rank, step, kind, stage, chunk, microbatch, phase, start and end",
    "messages": "every send, receive and collective: bytes, waiting and transfer times",
}
_ONLY_PAGES = ("findings", "whatif", "compared-parts", "compared-facts")
"""Tables that are tools of their own, or of two runs."""
_MOST_WARNINGS = 40
_MOST_STEPS = 200


class Tools:
    """The tools, over the answers that a dashboard of the same paths would give. Usable from any thread."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def report(self) -> dict[str, Any]:
        """The verdict, facts and figures of the run, and the report that ``pptrace analyze`` prints."""
        run = self._answers.run()
        report = run.report
        typical = report.typical_step
        warnings = warning_lines(report)
        return {
            "verdict": report.verdict,
            "run": _facts(report),
            "steps": [step.step for step in report.steps[:_MOST_STEPS]],
            "num_steps": len(report.steps),
            "typical_step": None if typical is None else self._step(typical.step),
            "findings": [finding.title for finding in report.findings],
            "hang": report.hang,
            "warnings": warnings[:_MOST_WARNINGS],
            "num_warnings": len(warnings),
            "text": run.to_text(),
        }

    def _step(self, number: int) -> dict[str, Any]:
        step = TableRequest(self._answers, number, {}).the_step()
        return {
            "step": step.step,
            "period_ns": step.period_ns,
            "span_ns": step.span_ns,
            "bubble": _plain(step.bubble),
            "parts_ns": step.parts,
            "critical_path": _plain(step.critical_path),
        }

    def findings(self) -> dict[str, Any]:
        """All findings, numbered from 0, and the kinds for which the run has too little evidence."""
        report = self._answers.run().report
        found = [{"finding": index} | _plain(entry) for index, entry in enumerate(report.findings)]
        return {"findings": found, "not_enough_evidence": _plain(report.missing_evidence)}

    def evidence(self, finding: int) -> dict[str, Any]:
        """The evidence of a finding: the step where it shows most, its ranks there, causes of that kind, ops to blame.

        Raises:
            UsageError: there is no such finding.
        """
        report = self._answers.run().report
        if not 0 <= finding < len(report.findings):
            raise UsageError(
                f"finding {finding}: expected 0 to {len(report.findings) - 1}, as the findings are numbered"
            )
        entry = report.findings[finding]
        return {"finding": _plain(entry), "place": _place(entry, report), "timeline": evidence_of(entry, report)}

    def tables(self) -> dict[str, Any]:
        """The names of all tables with their meaning, and whether a step is chosen in them."""
        named = {name: table for name, table in TABLES.items() if name not in _ONLY_PAGES}
        of_run = [
            {"table": name, "meaning": table.meaning, "of_one_step": table.is_of_step} for name, table in named.items()
        ]
        return {
            "tables": of_run
            + [{"table": name, "meaning": text, "of_one_step": False} for name, text in _FRAMES.items()]
        }

    def table(self, name: str, step: int | None, query: Query) -> dict[str, Any]:
        """A page of a table; of one step the typical one, where none is named.

        Raises:
            UsageError: there is no such table, step or column.
            PptraceError: the run does not have it.
        """
        if name in _FRAMES:
            data = self._answers.whole_run().analysis.data
            return {"table": name} | page_of_frame(
                data.ops if name == "ops" else data.comms, self._of_step(step, query)
            )
        if name not in TABLES or name in _ONLY_PAGES:
            known = [*(name for name in TABLES if name not in _ONLY_PAGES), *_FRAMES]
            raise UsageError(f"table {name[:40]!r} is not known; expected one of {', '.join(known)}")
        wanted = TableRequest(self._answers, step, {})
        table = TABLES[name]
        try:
            page = page_of_rows(table.rows(wanted), query if table.is_of_step else self._of_step(step, query))
            of_step = {"step": wanted.the_step().step} if table.is_of_step else {}
        except LookupError as err:
            raise UsageError(f"step {step}: {err}; the report lists the steps") from None
        return {"table": name} | of_step | page

    def _of_step(self, step: int | None, query: Query) -> Query:
        """The query for the rows of one step alone, of a table that has those of all.

        Raises:
            UsageError: there is no such step.
        """
        if step is None:
            return query
        if step not in {entry.step for entry in self._answers.run().report.steps}:
            raise UsageError(f"step {step}: there is none; the report lists the steps")
        return replace(query, where={**query.where, "step": step})

    def whatif(self, form: Mapping[str, object], query: Query) -> dict[str, Any]:
        """Predictions: what is wished for in one scenario; without wishes all sensible changes, the best first.

        Raises:
            PptraceError: it cannot be predicted.
        """
        result = self._answers.whatif(wishes_of(form)).result
        page = page_of_rows(result.scenarios, query)
        about = {"headline": headline(result), "check": replay_line(result), "today": _plain(result.today)}
        return about | {"warnings": list(result.warnings)} | page


def _plain(value: Any) -> Any:
    return msgspec.to_builtins(value, str_keys=True)


def _facts(report: Report) -> dict[str, Any]:
    schedule = report.schedule
    return {
        "framework": report.framework,
        "mesh": _plain(report.mesh),
        "schedule": {
            "name": schedule.name,
            "runs": schedule.runs,
            "num_microbatches": schedule.num_microbatches,
            "num_stages": schedule.num_stages,
            "num_chunks": schedule.num_chunks,
            "source": schedule.source,
        },
        "clock": {"method": report.clock.method, "uncertainty_ns": report.clock.uncertainty_ns},
        "inputs": [item.path for item in report.inputs[:_MOST_WARNINGS]],
    }


def _place(finding: Finding, report: Report) -> dict[str, Any] | None:
    place = place_of(finding, report)
    if place is None:
        return None
    cause, step = finding.evidence.get("cause"), place.step
    blame = step.blame
    return {
        "step": step.step,
        "span_ns": step.span_ns,
        "ranks": list(place.ranks),
        "causes": [_plain(entry) for entry in step.causes or () if entry.cause == cause],
        "blamed_op": _plain(place.op),
        "bubble_charged_to_rank_ns": None if blame is None else _plain(blame.by_rank),
    }
