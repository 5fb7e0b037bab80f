"""All that is found out from the costs of whole steps together: the slowdowns, and reasons that have findings of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pptrace.analysis.result import Stragglers
from pptrace.analysis.stragglers.costs import MeasuredCosts
from pptrace.analysis.stragglers.links import slow_link
from pptrace.analysis.stragglers.pauses import host_gaps, host_pauses
from pptrace.analysis.stragglers.reason import Reason, measured_lengths
from pptrace.analysis.stragglers.sequences import long_sequences
from pptrace.analysis.stragglers.slowdowns import slowdowns

_MOST_REPLAYED = 100_000_000
"""Ops in the replays of all stages and pipeline ranks together; they take about 40 ns each."""


@dataclass(frozen=True, slots=True, eq=False)
class Study:
    """``stragglers`` is None where there is no whole step."""

    stragglers: Stragglers | None = None
    reasons: tuple[Reason, ...] = ()


def study_steps(plans: Sequence[MeasuredCosts]) -> Study:
    """The study of whole steps, or of as many of them, evenly spaced, as :data:`_MOST_REPLAYED` allows."""
    plans = [costs for costs in plans if len(costs.step)]
    num_replayed = sum(costs.durations.size * (costs.table.num_stages + costs.table.pp) for costs in plans)
    plans = [costs.every(-(-num_replayed // _MOST_REPLAYED)) for costs in plans]
    if not plans:
        return Study()
    measured = measured_lengths(plans)
    finders = (long_sequences, slow_link, host_pauses, host_gaps)
    found = [find(plans, measured) for find in finders]
    return Study(slowdowns(plans), tuple(reason for reason in found if reason is not None))
