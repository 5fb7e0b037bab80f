"""Measured data on one clock, by rank and step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import pandas as pd
from msgspec import Struct, field
from msgspec.structs import replace

from pptrace.clock import Clock
from pptrace.intervals import intersect
from pptrace.model.device import BackwardParts, DeviceWork
from pptrace.model.predicted import RankPrediction
from pptrace.model.step_memory import RecordedMemory
from pptrace.model.tables import COMPUTE_KINDS, UNKNOWN
from pptrace.slices import Slice, rows_among, rows_where, slice_of, slices_by_rank
from pptrace.timeline.lanes import Lane
from pptrace.timeline.windows import StepWindow


class RankRows(Struct, frozen=True):
    """Rows of one rank in order of step: its F/B/I/W ops, by start within the step, its other ranges, its communication."""

    ops: Slice
    spans: Slice
    comms: Slice

    def num_ops_by_step(self) -> dict[int, int]:
        """Number of compute ops of each step that has any."""
        steps, counts = np.unique(self.ops["step"], return_counts=True)
        return dict(zip(steps.tolist(), counts.tolist(), strict=True))

    def of_step(self, step: int) -> RankRows:
        tables = (self.ops, self.spans, self.comms)
        return RankRows(*(rows.where(slice(*np.searchsorted(rows["step"], (step, step + 1)))) for rows in tables))


class RowsByRank:
    """The rows of ops and comms by rank."""

    def __init__(self, ops: pd.DataFrame, comms: pd.DataFrame) -> None:
        is_compute = rows_among(ops["kind"], COMPUTE_KINDS)
        tables = (
            (rows_where(ops, is_compute), ("step", "start_ns")),
            (ops[~is_compute], ("step",)),
            (comms, ("step",)),
        )
        self._parts = [(slices_by_rank(table, by), slice_of(table.iloc[:0])) for table, by in tables]

    def of_rank(self, rank: int) -> RankRows:
        return RankRows(*(parts.get(rank, none) for parts, none in self._parts))


class StepsOfRank(Struct, frozen=True):
    """The steps of a rank: those of the report, those whose times compare with the other ranks', and all that it is in, with a
    pipeline or without. ``none_compare``: of no rank there is a step that compares.
    """

    reported: Sequence[int] = ()
    comparable: Sequence[int] = ()
    every: Sequence[int] = ()
    none_compare: bool = False


class AlignedRun(Struct, frozen=True, dict=True):
    """All measured data on one clock: tagged ops, comms with transfer starts, both of them by rank as well, and each rank's lane.

    ``predicted`` are the predictions of ranks that wrote some down. ``lacking`` are the ranks with a trace of whose
    pipeline others have none. ``recorded_memory`` is what recorders measured of the memory of each rank's steps, ``lost_steps``
    those of each rank in which kernels are missing.
    """

    ops: pd.DataFrame
    comms: pd.DataFrame
    memory: pd.DataFrame
    rows: RowsByRank
    lanes: Mapping[int, Lane]
    work: Mapping[int, DeviceWork]
    clock: Clock
    predicted: Mapping[int, RankPrediction] = field(default_factory=dict)
    lacking: frozenset[int] = frozenset()
    recorded_memory: Mapping[int, RecordedMemory] = field(default_factory=dict)
    lost_steps: Mapping[int, frozenset[int]] = field(default_factory=dict)

    def backward_of(self, rank: int) -> BackwardParts:
        """The parts of a rank's backwards in which it computed."""
        parts, lane = self.work[rank].backward, self.lanes[rank]
        weights = intersect(self.clock.to_common_clock(rank, parts.weights), lane.compute)
        return replace(parts, recompute=lane.recompute, weights=weights)

    def lacks_work(self, rank: int, step: int) -> bool:
        """Return whether device work of a rank is missing in a step, so that when it computed is not known."""
        return bool(self.work[rank].missing_device_events) or step in self.lost_steps.get(rank, ())

    def is_comparable(self, window: StepWindow) -> bool:
        """Return whether the times of a window's ranks are comparable across ranks.

        Where they do not, nothing of a step is known but what each rank shows by itself: their clocks are not related, or may be
        off by more than half the window, or a rank's times are those of launching what its device did at other times.
        """
        return not any(self.lacks_work(rank, window.step) for rank in window.ranks) and self.shares_clock(window)

    def shares_clock(self, window: StepWindow) -> bool:
        """Return whether the clocks of a window's ranks are related, to half the window at least."""
        return self.clock.relates(window.ranks) and 2 * (self.clock.uncertainty_ns or 0) <= window.span_ns

    @cached_property
    def compares_without_steps(self) -> bool:
        """Return whether no communication is in a step (no pipeline, no ranges of steps), and its times compare across ranks."""
        if not len(self.comms) or (self.comms["step"] != UNKNOWN).any():
            return False
        ranks = tuple(sorted(self.comms["rank"].unique().tolist()))
        return self.is_comparable(
            StepWindow(UNKNOWN, ranks, int(self.comms["start_ns"].min()), int(self.comms["end_ns"].max()))
        )

    def part(self, rank: int, step: int) -> RankRows:
        """Rows of a rank in a step."""
        return self.rows.of_rank(rank).of_step(step)

    @cached_property
    def memory_events(self) -> Mapping[int, Slice]:
        """The memory events of each rank that has any, in time order."""
        return slices_by_rank(self.memory, ("t_ns",))
