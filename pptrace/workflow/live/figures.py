"""Figures of a step that come from its ranges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankFigures:
    """Figures of a rank in a step, ns, as :class:`pptrace.analysis.result.RankStep` has them; ``wait_ns`` is its waiting in all
    communication.
    """

    compute_ns: int | None
    exposed_comm_ns: int | None
    bubble_ns: int | None
    not_compute_ns: int | None
    wait_ns: int | None


@dataclass(frozen=True, slots=True)
class StepFigures:
    """``span_ns`` is that of the longest pipeline; None where the ranks' times do not compare."""

    span_ns: int | None
    ranks: Mapping[int, RankFigures]
