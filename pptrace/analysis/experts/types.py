"""The report's part on experts, as types; each field is the JSON field of the same name, and None is its ``null``."""

from __future__ import annotations

import numpy as np
import pandas as pd
from msgspec import Struct

from pptrace.model.tables import Int64
from pptrace.slices import distinct_of, reduce_groups


class LayerLoad(Struct, frozen=True):
    """Load of one layer's experts in all steps of the report."""

    layer: int | None  #: its number in the model; null without counts
    stage: int | None  #: its stage; null where ops name none; without calls along ep as ``predicted_bytes`` of ranks
    nth: int  #: number among the layers with experts of its stage, from 0
    #: tokens that chose each expert, dropped ones included, of ranks that counted them (``reasons`` names others); null without
    #: counts
    routes: tuple[int, ...] | None
    hottest: int | None  #: expert with most routes; null as ``routes``
    #: routes of the hottest over the mean of all (max / mean, 1 to the number of experts); null as ``routes``
    expert_ratio: float | None
    #: about what ``expert_ratio`` comes to where routes are drawn by chance: 1 + √(2 · ln E · E / routes); null as ``routes``
    chance_ratio: float | None
    idle_experts: int | None  #: experts that nobody chose; null as ``routes``
    dropped: int | None  #: routes that found no room in their expert's capacity; null as ``routes``
    dropped_share: float | None  #: their share of all routes; null as ``routes``
    #: most rows of a rank over the mean of its group (*overload factor*), the mean over microbatches; null where rows are not
    #: known
    rank_ratio: float | None
    worst_rank_ratio: float | None  #: the largest of them; null as ``rank_ratio``
    #: tokens all of whose routes were dropped: the residual connection (and a shared MLP) alone carries them on; null as
    #: ``routes``, and in traces of older versions
    dropped_tokens: int | None = None
    dropped_tokens_share: float | None = None  #: their share of all tokens; null as ``dropped_tokens``
    least_ratio: float | None = None  #: routes of the expert with fewest over the mean; null as ``routes``
    #: standard deviation of the experts' routes over the mean; null as ``routes``
    deviation_ratio: float | None = None


class LayerSpread(Struct, frozen=True):
    """The spread of one figure of ``layers`` over those in which it is known; figures that fewer than two layers have are left
    out.
    """

    #: name of the figure: ``expert_ratio``, ``least_ratio``, ``deviation_ratio``, ``idle_experts``, ``dropped_share``,
    #: ``dropped_tokens_share``, ``rank_ratio`` or ``worst_rank_ratio``
    figure: str
    num_layers: int  #: layers in which it is known
    min: float  #: least, that of a layer, as all of these
    p50: float  #: median
    p75: float  #: 75th percentile
    p90: float  #: 90th percentile
    p95: float  #: 95th percentile
    max: float  #: most


class RankLoad(Struct, frozen=True):
    """Load of one rank in all steps of the report."""

    rank: int  #: global rank
    stage: int | None  #: its stage; null of several
    first_expert: int | None  #: first of the experts that it holds; null without counts, and where its layers differ
    num_experts: int | None  #: number of them; null as ``first_expert``
    #: rows that its experts computed in forwards (without ops of a pipeline, in all exchanges; where ranks share each expert,
    #: those of all of them); null where rows are not known
    rows: int | None
    ratio: float | None  #: rows over the mean of its groups; null as ``rows``
    expert_ns: int  #: time between dispatch and combine, forward and backward
    #: ``expert_ns`` over the time of others of its groups with as many rows, the median; null where the group or rows are not
    #: known, of experts without rows, unless others have none either, and where fewer than three exchanges compare
    slowness: float | None
    waited_ns: int | None  #: time for which it waited in these calls; null where they are not matched
    #: time for which others waited for it in dispatches, to which it came late from elsewhere; null as ``waited_ns``
    caused_before_ns: int | None
    #: time for which others waited for it in combines, because its experts took longer; null as ``waited_ns``
    caused_after_ns: int | None
    bytes: int | None  #: bytes that it handed in to these calls; null where a call does not tell its size
    received_bytes: int | None  #: bytes that came back; null as ``bytes``
    #: bytes that it hands in by its counts, for each of forward, recomputation and backward; null of other runs than those of
    #: ``instrument/``, and where calls of some forwards or backwards are not known
    predicted_bytes: int | None
    #: most rows that its experts hold for their backward (for their W, where it is split), of all layers and microbatches
    #: together: the memory of experts' activations grows with it; null where directions or rows are not known, and with
    #: overlapped pairs that interleave their calls
    in_flight_rows: int | None = None
    #: rows in flight over what they would be with the mean of its groups; null as ``in_flight_rows``
    in_flight_ratio: float | None = None
    #: floating-point operations of its experts' matrix products in ``expert_ns``, padding included; null as ``predicted_bytes``
    flops: int | None = None


class ExpertCalls(Struct, frozen=True):
    """All calls of one layer, direction and role, over all ranks and steps."""

    layer: int | None  #: layer, as in ``layers``; null as there
    stage: int | None  #: its stage; null as in ``layers``
    nth: int | None  #: number among the layers with experts of the stage; null where it is not known
    direction: str | None  #: ``F`` or ``B``; null where it is not known
    role: str  #: ``dispatch`` (brings rows to the experts) or ``combine`` (takes them back)
    count: int  #: calls of all ranks
    bytes: int | None  #: bytes handed in; null where a call does not tell its size
    received_bytes: int | None  #: bytes received, over a whole group as many; null as ``bytes``
    #: time of waiting for the last member: data of those that are there may flow before it comes, so that this is an upper bound;
    #: null where the calls are not matched
    wait_ns: int | None
    transfer_ns: int | None  #: transfer from then on; null as ``wait_ns``
    hidden_ns: int | None  #: transfer that compute hides; null as ``wait_ns``
    exposed_ns: int | None  #: transfer that no compute hides; null as ``wait_ns``
    #: rank that came last most often, so that others waited; null as ``wait_ns``, and where all came together
    last_rank: int | None
    last_share: float | None  #: share of the calls in which it did; null as ``last_rank``
    #: reason: ``rows`` (its experts have most rows), ``slow`` (1.15 times as long as others or more, for as many rows),
    #: ``before`` (it came late to the layer); null where it is last no more often than by chance, or none of them is sure
    last_reason: str | None


class ExpertStep(Struct, frozen=True):
    """Waits of all ranks in the calls of experts of one step; every step of the report has an entry."""

    step: int  #: number of the step
    #: waits of all ranks in dispatches and combines; over all steps as much as over all ``calls``; null where a call of the step
    #: is not matched, or there is none
    wait_ns: int | None
    #: rank for which the others waited longest, dispatches and combines together; null as ``wait_ns``, and where all came
    #: together
    late_rank: int | None
    late_ns: int | None  #: time for which they did; null as ``late_rank``
    late_share: float | None  #: share of ``wait_ns`` that this is; null as ``late_rank``
    #: reason, as ``last_reason``, of this step alone; null where others of its group are waited for as long by chance (1.5 times
    #: its part of their waits is the least that counts), or none is sure
    reason: str | None
    #: most rows of a rank over the mean of its group, the mean over all exchanges of the step; null where rows are not known
    rank_ratio: float | None


class TrafficPair(Struct, frozen=True):
    """Rows of tokens from one rank to another in dispatches of forwards."""

    source: int  #: global rank that has the tokens
    target: int  #: global rank whose experts compute them
    rows: int  #: rows from the one to the other
    bytes: int | None  #: their bytes; null as ``away_bytes``
    share: float  #: share of all rows that the source sends to experts, its own included


class ExpertTraffic(Struct, frozen=True):
    """Rows of tokens from the rank that has them to the rank whose experts compute them, in dispatches of forwards."""

    known_from: str  #: ``splits`` of the calls or ``counts`` of the runtime
    num_rows: int  #: all rows, with those that stay on their rank
    away_rows: int  #: rows to other ranks
    #: their bytes; null where calls do not tell the bytes of a row, or what travels are not these rows (``counts`` of ``padded``
    #: and ``all-gather``)
    away_bytes: int | None
    num_pairs: int  #: pairs of two different ranks in one group
    pairs: tuple[TrafficPair, ...]  #: the 100 of them with most rows


class RoutingGain(Struct, frozen=True):
    """Gain of a mean step if all experts had equally many rows, by replay."""

    gain_ns: int  #: time that a mean step gets back
    gain_low_ns: int | None  #: lower end of its 90 % interval; null of a single step
    gain_high_ns: int | None  #: upper end of it; null of a single step
    share: float  #: share of the step
    bubble_ns: int  #: bubble of all ranks in the replay of the step as it was
    equal_bubble_ns: int  #: bubble of all ranks in the replay with equal rows


class ExpertsReport(Struct, frozen=True):
    """Experts in all steps of the report together."""

    #: origin of the rows: ``counts`` (of each expert's routes, by the runtime), ``splits`` of all-to-alls, or ``calls`` alone
    source: str
    num_experts: int | None  #: experts of a layer; null without counts, and where layers differ (pyramids)
    top_k: int | None  #: experts of a token; null without counts
    layers: tuple[LayerLoad, ...]  #: one entry per layer; empty where there are none
    ranks: tuple[RankLoad, ...]  #: one entry per rank; empty where times of ranks do not compare
    calls: tuple[ExpertCalls, ...]  #: one entry per layer, direction and role; empty as ``ranks``
    #: gain of a mean step if all experts had equally many rows; null where rows are not known, or no step has every op of a plan
    routing: RoutingGain | None
    reasons: tuple[str, ...]  #: reasons why figures are null, a line each; empty where none are
    #: way of tokens to experts, ``all-to-all``, ``padded`` or ``all-gather``; null of other runs than those of ``instrument/``
    dispatcher: str | None = None
    etp: int | None = None  #: ranks that share each expert; null as ``dispatcher``
    #: share of the rows that experts compute which no route takes: with ``padded`` they are as many for the busiest expert of a
    #: rank as for all others; null as ``etp``, and where of all ranks that share experts some have no trace
    padding_share: float | None = None
    #: one entry per step; empty without calls, of traces without steps, and as ``ranks``
    steps: tuple[ExpertStep, ...] = ()
    #: rows from rank to rank; null where neither splits nor counts tell it, or nothing tells which ranks exchange with each other
    traffic: ExpertTraffic | None = None
    over_layers: tuple[LayerSpread, ...] = ()  #: spread of each figure over the layers; empty of fewer than two layers


SPLITS, COUNTS = "splits", "counts"
MOST_PAIRS = 100
"""Most pairs that the report has; the matrix has all."""
Group = tuple[int, ...]


class TrafficMatrix(Struct, frozen=True, eq=False):
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
        number, first = distinct_of([self.source])
        return reduce_groups(np.add, self.rows, number, len(first))[number]

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
