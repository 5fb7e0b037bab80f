"""The report's part on experts, as types; each field is the JSON field of the same name, and None is its ``null``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from pptrace.model.tables import Int64
from pptrace.slices import distinct_of


@dataclass(frozen=True, slots=True)
class LayerLoad:
    """Load of one layer's experts in all steps of the report: the ``nth`` layer with experts of its ``stage``, from 0.

    ``layer`` is its number in the model. ``routes`` are how often tokens chose each expert, dropped ones included, over all
    ranks; ``expert_ratio`` is the most of one expert over the mean, ``hottest`` that expert, ``idle_experts`` how many nobody
    chose; ``least_ratio`` and ``deviation_ratio`` are the fewest of one and the standard deviation over the mean.
    ``chance_ratio`` is what the ratio of one microbatch comes to if all routes go to an expert by chance. ``rank_ratio`` is the
    same of the rows that ranks compute: most of a group over its mean, in the mean over microbatches, and ``worst_rank_ratio``
    the largest of them. ``dropped`` routes found no room; ``dropped_tokens`` have no other one either.
    """

    layer: int | None
    stage: int | None
    nth: int
    routes: tuple[int, ...] | None
    hottest: int | None
    expert_ratio: float | None
    chance_ratio: float | None
    idle_experts: int | None
    dropped: int | None
    dropped_share: float | None
    rank_ratio: float | None
    worst_rank_ratio: float | None
    dropped_tokens: int | None = None
    dropped_tokens_share: float | None = None
    least_ratio: float | None = None
    deviation_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class LayerSpread:
    """The spread of one figure of :class:`LayerLoad` over the layers in which it is known: percentiles, each that of a layer."""

    figure: str
    num_layers: int
    min: float
    p50: float
    p75: float
    p90: float
    p95: float
    max: float


@dataclass(frozen=True, slots=True)
class RankLoad:
    """Load of one rank in all steps of the report: the rows that its experts computed, those of forwards alone.

    ``ratio`` is that over the mean of the ranks of its groups. ``expert_ns`` is the time between the calls that bring rows and
    those that take them back, forward and backward, ``slowness`` how many times as long it takes as others with as many rows
    do. ``waited_ns`` are its own waits in these calls, ``caused_ns`` those of others for it: ``before`` the layer, in calls
    that bring rows, and ``after`` its experts. ``bytes`` is what it hands in to calls of tokens, ``predicted_bytes`` what the
    counts of routes come to. ``in_flight_rows`` is the most rows whose backward has not run, ``in_flight_ratio`` that over what
    it would be with the mean of its groups: the memory of experts grows with it. ``flops`` are those of its experts' matrix
    products in all of this, padding included.
    """

    rank: int
    stage: int | None
    first_expert: int | None
    num_experts: int | None
    rows: int | None
    ratio: float | None
    expert_ns: int
    slowness: float | None
    waited_ns: int | None
    caused_before_ns: int | None
    caused_after_ns: int | None
    bytes: int | None
    received_bytes: int | None
    predicted_bytes: int | None
    in_flight_rows: int | None = None
    in_flight_ratio: float | None = None
    flops: int | None = None


@dataclass(frozen=True, slots=True)
class ExpertCalls:
    """All calls of one layer and direction (``F``, ``B``) that bring rows (``dispatch``) or take them back (``combine``), over
    all ranks and steps, ns.

    ``last_rank`` came last most often, in ``last_share`` of them; ``last_reason`` is why: ``rows`` (its experts have most),
    ``slow`` (it takes longer for as many rows), ``before`` (it came late to the layer); None where it is last no more often than
    by chance, or nothing tells.
    """

    layer: int | None
    stage: int | None
    nth: int | None
    direction: str | None
    role: str
    count: int
    bytes: int | None
    received_bytes: int | None
    wait_ns: int | None
    transfer_ns: int | None
    hidden_ns: int | None
    exposed_ns: int | None
    last_rank: int | None
    last_share: float | None
    last_reason: str | None


@dataclass(frozen=True, slots=True)
class ExpertStep:
    """Waits of all ranks in the calls of experts of one step, ns, and the rank that they were for most of all.

    The others waited for ``late_rank`` for ``late_ns``, in dispatches and combines together, which is ``late_share`` of the
    waits; ``reason`` says why, as in :class:`ExpertCalls`. ``rank_ratio`` is the most rows of a rank over the mean of its group,
    in the mean over the step's exchanges.
    """

    step: int
    wait_ns: int | None
    late_rank: int | None
    late_ns: int | None
    late_share: float | None
    reason: str | None
    rank_ratio: float | None


@dataclass(frozen=True, slots=True)
class TrafficPair:
    """Rows from one rank to another in dispatches of forwards; ``share`` is that of all rows of ``source``, own ones included."""

    source: int
    target: int
    rows: int
    bytes: int | None
    share: float


@dataclass(frozen=True, slots=True)
class ExpertTraffic:
    """Rows from rank to rank in dispatches of forwards, those that stay on their rank included.

    ``known_from`` is ``splits`` of the calls or ``counts`` of the runtime. ``away_rows`` and ``away_bytes`` go to other ranks.
    ``pairs`` are those of the ``num_pairs`` pairs of two ranks that have most rows.
    """

    known_from: str
    num_rows: int
    away_rows: int
    away_bytes: int | None
    num_pairs: int
    pairs: tuple[TrafficPair, ...]


@dataclass(frozen=True, slots=True)
class RoutingGain:
    """Gain of a mean step if all experts had equally many rows, by replay, with its 90 % interval, ns.

    ``bubble_ns`` is the bubble of all ranks in the replay of the step as it was, ``equal_bubble_ns`` with equal rows.
    """

    gain_ns: int
    gain_low_ns: int | None
    gain_high_ns: int | None
    share: float
    bubble_ns: int
    equal_bubble_ns: int


@dataclass(frozen=True, slots=True)
class ExpertsReport:
    """Figures of the run's experts. ``source`` is what tells: ``counts`` (recorded by the runtime), ``splits`` of calls, or
    ``calls`` alone. ``reasons`` say why figures are None, a line each. ``dispatcher`` is the way of tokens to experts; ``etp``
    ranks share each expert. ``padding_share`` is that of the rows which no route takes. ``over_layers`` sums ``layers`` up.
    """

    source: str
    num_experts: int | None
    top_k: int | None
    layers: tuple[LayerLoad, ...]
    ranks: tuple[RankLoad, ...]
    calls: tuple[ExpertCalls, ...]
    routing: RoutingGain | None
    reasons: tuple[str, ...]
    dispatcher: str | None = None
    etp: int | None = None
    padding_share: float | None = None
    steps: tuple[ExpertStep, ...] = ()
    traffic: ExpertTraffic | None = None
    over_layers: tuple[LayerSpread, ...] = ()


SPLITS, COUNTS = "splits", "counts"
MOST_PAIRS = 100
"""Most pairs that the report has; the matrix has all."""
Group = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class TrafficMatrix:
    """Rows from rank to rank, a cell for each pair of members of a group, own ones included, by source and target.

    ``bytes`` are −1 where they are not known. ``groups`` are the ranks that exchange tokens, in ascending order.
    """

    known_from: str
    source: Int64
    target: Int64
    rows: Int64
    bytes: Int64
    groups: tuple[Group, ...]

    @property
    def sent(self) -> Int64:
        """Rows of each cell's source to all targets."""
        number, _ = distinct_of([self.source])
        total = np.zeros(int(number.max(initial=-1)) + 1, dtype=np.int64)
        np.add.at(total, number, self.rows)
        of_cell: Int64 = total[number]
        return of_cell

    def table(self) -> pd.DataFrame:
        """A row for each cell: ``source``, ``target``, ``rows`` and ``bytes``, <NA> where they are not known."""
        names = ("source", "target", "rows", "bytes")
        table = pd.DataFrame({name: getattr(self, name) for name in names}).astype({"bytes": "Int64"})
        return table.assign(bytes=table["bytes"].mask(table["bytes"] < 0))

    def pairs(self, most: int | None = None) -> tuple[TrafficPair, ...]:
        """The cells; of ``most`` those of two ranks that have most rows, the first of them first."""
        order = np.arange(len(self.rows))
        if most is not None:
            order = np.flatnonzero(self.source != self.target)
            order = order[np.lexsort((self.target[order], self.source[order], -self.rows[order]))][:most]
        share = self.rows / np.maximum(self.sent, 1)
        columns = (self.source, self.target, self.rows, self.bytes, share)
        return tuple(
            TrafficPair(source, target, rows, None if size < 0 else size, part)
            for source, target, rows, size, part in zip(*(column[order].tolist() for column in columns), strict=True)
        )


_NONE: Int64 = np.zeros(0, dtype=np.int64)
NO_PAIRS = TrafficMatrix(SPLITS, _NONE, _NONE, _NONE, _NONE, ())
"""The matrix of a run without any pair."""


def report_traffic(matrix: TrafficMatrix | None) -> ExpertTraffic | None:
    """The report's part of a matrix."""
    if matrix is None:
        return None
    is_away = matrix.source != matrix.target
    sizes = matrix.bytes[is_away]
    return ExpertTraffic(
        known_from=matrix.known_from,
        num_rows=int(matrix.rows.sum()),
        away_rows=int(matrix.rows[is_away].sum()),
        away_bytes=int(sizes.sum()) if (sizes >= 0).all() else None,
        num_pairs=int(is_away.sum()),
        pairs=matrix.pairs(MOST_PAIRS),
    )
