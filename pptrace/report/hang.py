"""The verdict on a run that hung, as text and as JSON, ``pptrace.hang/1``."""

from __future__ import annotations

from typing import Any

from pptrace.hang_diagnosis.calls import lines, rank_text
from pptrace.workflow.find_hang import HangResult

HANG_SCHEMA = "pptrace.hang/1"


def hang_text(report: HangResult) -> str:
    """The verdict in one sentence, and lines of who waits in which call."""
    if report.hang is None:
        seen = f" (read {rank_text(report.ranks)})" if report.ranks else ""
        return f"no hang: {report.reason}{seen}"
    return "\n".join([str(report.hang["detail"]), *(f"  {line}" for line in lines(report.hang))])


def hang_object(report: HangResult) -> dict[str, Any]:
    """The verdict as a JSON object."""
    return {
        "schema": HANG_SCHEMA,
        "hang": report.hang,
        "reason": report.reason or None,
        "ranks": list(report.ranks),
        "warnings": list(report.warnings),
    }
