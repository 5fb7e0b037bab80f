"""The verdict on a run that hung, as text and as JSON, ``pptrace.hang/1``."""

from __future__ import annotations

from typing import Any

from pptrace.hang_diagnosis.words import lines, rank_text
from pptrace.workflow.find_hang import HangResult

HANG_SCHEMA = "pptrace.hang/1"


def hang_text(found: HangResult) -> str:
    """One sentence, and a few lines of who waits where."""
    if found.hang is None:
        seen = f" (read {rank_text(found.ranks)})" if found.ranks else ""
        return f"no hang: {found.reason}{seen}"
    return "\n".join([str(found.hang["detail"]), *(f"  {line}" for line in lines(found.hang))])


def hang_object(found: HangResult) -> dict[str, Any]:
    return {
        "schema": HANG_SCHEMA,
        "hang": found.hang,
        "reason": found.reason or None,
        "ranks": list(found.ranks),
        "warnings": list(found.warnings),
    }
