"""The type of what has a finding of its own within causes, and the replays by which its gain is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pptrace.analysis.gain_interval import FEWEST_STEPS, LEAST_SHARE, gain_interval
from pptrace.analysis.message_graph import spans_of
from pptrace.analysis.stragglers.costs import MeasuredCosts, longest_of_steps
from pptrace.model.tables import Int64
from pptrace.simulator import makespans

_LEAST_LOW = 0.25
"""Share of a gain: where its interval begins below this, it is that of single steps, which are outliers."""


@dataclass(frozen=True, slots=True, eq=False)
class Reason:
    """Reason why steps are slow, where more is known than the cause: ``gains`` are what each whole step would get back, ns.

    ``causes`` are the causes that its time is part of, that of the finding first. ``title`` has a place for its share of the
    step, ``detail`` says what was seen and what to do. Below ``least_share`` of the step it is not mentioned. ``is_cause``: the
    causes of steps have it apart already.
    """

    name: str
    causes: tuple[str, ...]
    where: Mapping[str, int | str]
    title: str
    detail: str
    gains: Int64
    evidence: Mapping[str, Any] = field(default_factory=dict)
    least_share: float = LEAST_SHARE
    is_cause: bool = False

    @property
    def gain(self) -> int:
        """Gain of a mean step, ns."""
        return int(self.gains.sum()) // len(self.gains)

    def is_finding(self, span: int) -> bool:
        """Return whether it is worth a line in steps of this length, ns: large, and not only by what happened in one of them."""
        low, _ = gain_interval(self.gains)
        is_sure = low is None or low >= _LEAST_LOW * self.gain or len(self.gains) < FEWEST_STEPS
        return self.gain >= self.least_share * span and self.gain > 0 and is_sure


def step_lengths(
    costs: MeasuredCosts,
    durations: Int64,
    transfers: Int64,
    delays: Int64 | None = None,
    moving: Int64 | None = None,
) -> Int64:
    """The length of each step, ns: :func:`window_lengths` of the pipeline that takes longest."""
    return longest_of_steps(costs.step, window_lengths(costs, durations, transfers, delays, moving))


def window_lengths(
    costs: MeasuredCosts,
    durations: Int64,
    transfers: Int64,
    delays: Int64 | None = None,
    moving: Int64 | None = None,
) -> Int64:
    """The length of each window, ns, with some durations and delays (windows, rows) and transfers (windows, messages) of its ops.

    Without ``delays``, ops begin as late as was measured (:attr:`MeasuredCosts.lateness`), and without ``moving`` transfers keep
    them as long. Where messages are replayed along a graph, it says what they keep.
    """
    spans = np.empty(len(costs.step), dtype=np.int64)
    late = costs.lateness if delays is None else delays
    moved = costs.moving if moving is None else moving
    for part in costs.parts():
        of_messages = np.maximum(transfers[part], 0).astype(np.int64)
        if costs.graph is not None:
            before, posted = costs.posted_if(late[part], part)
            taken = durations[part].astype(np.int64) + before
            spans[part] = spans_of(costs.table, costs.graph, taken, of_messages, posted)
            continue
        taken = durations[part].astype(np.int64) + late[part]
        latencies = np.where(costs.sender_is_last[part], of_messages, 0)
        spans[part] = makespans(costs.table, taken + moved[part], latencies)
    return spans


def measured_lengths(plans: Sequence[MeasuredCosts]) -> list[Int64]:
    """The length of each step of each plan as measured, ns."""
    return [step_lengths(costs, costs.durations, costs.transfers) for costs in plans]
