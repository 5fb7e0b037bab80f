"""Evidence that findings need: the kinds that a run is too short for, or has nothing to compare with, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from pptrace.analysis.matrix.step_matrix import StepMatrix
from pptrace.analysis.result import MissingEvidence, StepReport
from pptrace.analysis.steps.step_series import FEWEST_OF_LEVEL
from pptrace.analysis.stragglers.hosts import FEWEST_WINDOWS
from pptrace.analysis.stragglers.links import FEWEST_ALIKE, num_links

STRAGGLER = "straggler"
_OF_PLAN = ("imbalance", STRAGGLER, "jitter", "communication", "host")
"""Kinds of findings that need steps which can be compared with their plan."""
_NEEDED_STEPS = (
    ("interval of the gain", 2),
    ("pauses", FEWEST_WINDOWS),
    ("outliers", FEWEST_OF_LEVEL),
    ("change of level", 2 * FEWEST_OF_LEVEL),
)


def missing_evidence(steps: Sequence[StepReport], plans: Sequence[StepMatrix]) -> tuple[MissingEvidence, ...]:
    """The kinds of findings that this run does not show.

    Args:
        steps: all steps of the report.
        plans: the costs of those that are whole.
    """
    return tuple(_missing(steps, plans))


def _missing(steps: Sequence[StepReport], plans: Sequence[StepMatrix]) -> Iterator[MissingEvidence]:
    known = [step for step in steps if step.span_ns is not None and not step.is_evaluation]
    if not known:
        return
    has_pipeline = any(step.has_pipeline for step in known)
    whole = [step for step in known if step.causes is not None] if has_pipeline else known
    if not whole:
        yield MissingEvidence(_OF_PLAN, "no step has every op of a known plan")
    if lacking := [(kind, needed) for kind, needed in _NEEDED_STEPS if len(whole) < needed]:
        needs = ", ".join(f"{kind} ({needed})" for kind, needed in lacking)
        number = f"{len(whole)} whole step{'s' if len(whole) != 1 else ''}"
        yield MissingEvidence(tuple(kind for kind, _ in lacking), f"{number}, too few for {needs}")
    if not any(step.has_devices for step in known):
        counts = [(int((costs.transfers < 0).sum()), costs.transfers.size) for costs in plans]
        unknown, total = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0)
        if unknown:
            yield MissingEvidence(
                ("host",),
                f"{unknown} of {total} messages between stages have no known transfer: waits for them and ops that begin late "
                "cannot be distinguished",
            )
    yield from _without_like(plans)


def _without_like(plans: Sequence[StepMatrix]) -> Iterator[MissingEvidence]:
    """Evidence that a single pipeline cannot give: it has no other to be compared with."""
    if not plans or max(costs.table.pp for costs in plans) == 1:
        return
    if max(len(np.unique(costs.ranks, axis=0)) for costs in plans) > 1:
        return
    yield MissingEvidence((STRAGGLER,), "one pipeline: a slow worker cannot be distinguished from a heavy stage")
    if (links := max(map(num_links, plans))) <= FEWEST_ALIKE:
        count = "1 link" if links == 1 else f"{links} links"
        yield MissingEvidence(("slow link",), f"{count} of one pipeline: too few to tell which is slow")
