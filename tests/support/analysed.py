"""Traces recognised and analysed as they are, without files."""

from __future__ import annotations

from collections.abc import Sequence

from pptrace.model.traces import Trace
from pptrace.recognise.rank import recognise_rank
from pptrace.recognise.run import RecognisedRun, recognise_ranks
from pptrace.workflow.analyse import Analysis, analyse_ranks


def recognise(traces: Sequence[Trace], schedule: str | None = None, num_ranks: int | None = None) -> RecognisedRun:
    """The run of these traces, one per rank and with their ranks set."""
    return recognise_ranks([recognise_rank(trace) for trace in traces], schedule, num_ranks)


def analyse(
    traces: Sequence[Trace], schedule: str | None = None, step: int | None = None, num_ranks: int | None = None
) -> Analysis:
    """The analysis of these traces, one per rank and with their ranks set."""
    return analyse_ranks([recognise_rank(trace) for trace in traces], schedule, step, num_ranks)
