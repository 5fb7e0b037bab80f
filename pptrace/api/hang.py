"""Diagnosis of a run that hangs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import pandas as pd

from pptrace.api.files import ExportsJson, FilePaths, as_inputs
from pptrace.errors import UsageError
from pptrace.report.hang import hang_object, hang_text
from pptrace.workflow.find_hang import HangResult, find_hang


@dataclass(frozen=True, slots=True)
class HangReport(ExportsJson):
    """Result of :func:`hang`; printed, it is the output of ``pptrace hang``."""

    result: HangResult

    @property
    def verdict(self) -> str | None:
        """``missing``, ``cycle``, ``mismatch`` or ``late``; None where there is no verdict, and :attr:`reason` says why."""
        return None if self.result.hang is None else str(self.result.hang["verdict"])

    @property
    def detail(self) -> str:
        """One sentence: who is to blame and who only waits; "" without a verdict."""
        return "" if self.result.hang is None else str(self.result.hang["detail"])

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks to blame, () without a verdict."""
        return () if self.result.hang is None else tuple(self.result.hang["ranks"])

    @property
    def seen_ranks(self) -> tuple[int, ...]:
        """The ranks of which the inputs say something."""
        return self.result.ranks

    @property
    def reason(self) -> str:
        """Reason for which there is no verdict; "" where there is one."""
        return self.result.reason

    @property
    def warnings(self) -> tuple[str, ...]:
        """Lines about files that could not be read."""
        return self.result.warnings

    @property
    def edges(self) -> pd.DataFrame:
        """Waits of ranks for others: ``rank``, ``waits_for`` (a rank; one row for each), ``call``, ``group``, ``seq``."""
        edges: Sequence[Mapping[str, Any]] = () if self.result.hang is None else self.result.hang["edges"]
        rows = [(edge, other) for edge in edges for other in edge["waits_for"]]
        return pd.DataFrame(
            {
                "rank": pd.array([edge["rank"] for edge, _ in rows], dtype="int64"),
                "waits_for": pd.array([other for _, other in rows], dtype="int64"),
                "call": pd.Series([edge["call"] for edge, _ in rows], dtype="object"),
                "group": pd.Series([edge["group"] for edge, _ in rows], dtype="object"),
                "seq": pd.array([edge["seq"] for edge, _ in rows], dtype="Int64"),
            }
        )

    def _json_object(self) -> dict[str, Any]:
        return hang_object(self.result)

    def __str__(self) -> str:
        return hang_text(self.result)

    def __repr__(self) -> str:
        return f"<pptrace.HangReport: {str(self).splitlines()[0]}>"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def hang(paths: FilePaths) -> HangReport:
    """Say who is to blame for a run that hangs, who only waits, and in how many hops: what ``pptrace hang`` prints.

    Args:
        paths: torch's flight-recorder dumps, a directory with one per rank, or a run directory of ``pptrace run``; one path or
            several.

    Raises:
        PptraceError: there is no dump and no run directory; the message is one line.
    """
    given = as_inputs(paths)
    if not given:
        raise UsageError("no path is given; expected flight-recorder dumps, a directory of them, or a run directory")
    return HangReport(find_hang(given))
