"""Layers of exchanges with experts in the model, and which of the forwards that a rank counted each exchange is of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pptrace.analysis.experts.counts import RankCounts
from pptrace.model.tables import UNKNOWN, Int64
from pptrace.schedule.plan import Plan
from pptrace.slices import Slice, last_like, places_of_each


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Layer with experts: its stage (−1: not known), and which one of the stage's, from 0."""

    stage: int
    nth: int


def with_model_stages(exchanges: Slice, plan: Plan | None) -> Slice:
    """The exchanges with the stage of the model that each one's stage is (``model_stage``): where a pipeline rank has stages of
    two chains, their order is not that of their layers.
    """
    stage = exchanges["stage"]
    of_model = stage if plan is None else np.where(stage >= 0, stage % plan.chain_length, stage)
    return Slice({**exchanges.columns, "model_stage": of_model})


def with_rows(exchanges: Slice, counts: Mapping[int, RankCounts]) -> Slice:
    """The exchanges with rows from counts, where calls tell none, or other ones, because ranks that share each expert compute the
    rows of all of them.
    """
    has_rows = bool((exchanges["rows"] >= 0).all())
    if not counts or (has_rows and not _computes_more(exchanges, counts)):
        return exchanges
    rows, forward, of_ranks = exchanges["rows"].copy(), forward_of_each(exchanges, counts), _places_of_ranks(exchanges)
    for rank, of_rank in counts.items():
        own = of_ranks.get(rank, _NONE)
        if (forward[own] < 0).all():
            if has_rows:  # of one kind for all ranks
                return exchanges
            continue
        rows[own] = np.where(forward[own] >= 0, of_rank.rows[forward[own]], UNKNOWN)
    return Slice({**exchanges.columns, "rows": rows})


def forward_of_each(exchanges: Slice, counts: Mapping[int, RankCounts]) -> Int64:
    """The forward of its rank's counts that each exchange is of, its recomputation's and its backward's too: the n-th forward of
    a layer in a step is its n-th count. −1 where there is none, and of ranks whose forwards are not those that they counted.
    """
    forward = np.full(len(exchanges), UNKNOWN)
    layers, of_ranks = layers_of_places(exchanges, counts), _places_of_ranks(exchanges)
    for rank, of_rank in counts.items():
        own = of_ranks.get(rank, _NONE)
        key = [exchanges["step"][own], _layer_numbers(exchanges.where(own), layers), exchanges["microbatch"][own]]
        is_first = (exchanges["backward"][own] == 0) & (exchanges["again"][own] == 0)
        forwards, counted = np.flatnonzero(is_first), np.arange(len(of_rank.step))
        forwards = forwards[np.lexsort((forwards, key[1][forwards], key[0][forwards]))]
        counted = counted[np.lexsort((counted, of_rank.layer, of_rank.step))]
        if len(forwards) == len(counted) and (key[1][forwards] == of_rank.layer[counted]).all():
            found = last_like(key, [column[forwards] for column in key])
            forward[own] = np.where(found >= 0, counted[found], UNKNOWN)
    return forward


def _computes_more(exchanges: Slice, counts: Mapping[int, RankCounts]) -> bool:
    """Return whether a rank counted more rows in its forwards than calls brought it."""
    is_first = (exchanges["backward"] == 0) & (exchanges["again"] == 0)
    brought = {rank: exchanges["rows"][own][is_first[own]].sum() for rank, own in _places_of_ranks(exchanges).items()}
    return any(of_rank.rows.sum() > brought.get(rank, 0) for rank, of_rank in counts.items())


def _places_of_ranks(exchanges: Slice) -> dict[int, Int64]:
    """The places of each rank's exchanges."""
    return {int(exchanges["rank"][own[0]]): own for own in places_of_each(exchanges["rank"])}


_NONE: Int64 = np.zeros(0, dtype=np.int64)


def _layer_numbers(exchanges: Slice, layers: Mapping[Place, int]) -> Int64:
    """The model's number of the layer of each exchange."""
    places, number = distinct_places(exchanges)
    return np.array([layers.get(place, UNKNOWN) for place in places], dtype=np.int64)[number]


def distinct_places(exchanges: Slice) -> tuple[list[Place], Int64]:
    """(the places of exchanges in their order, the index of each exchange's)."""
    pairs, number = np.unique(np.stack((exchanges["stage"], exchanges["layer"])), axis=1, return_inverse=True)
    return [Place(*pair) for pair in pairs.T.tolist()], number.ravel()


def layers_of_places(exchanges: Slice, counts: Mapping[int, RankCounts]) -> dict[Place, int]:
    """The model's number of each layer: those that a rank counted, in order of its stages; none where they are not as many."""
    numbers: dict[Place, int] = {}
    known = exchanges.where((exchanges["layer"] >= 0) & (exchanges["stage"] >= 0))
    of_ranks, names = _places_of_ranks(known), ("model_stage", "layer", "stage")
    for rank, of_rank in counts.items():
        own = of_ranks.get(rank, _NONE)
        places = np.unique(np.stack([known[name][own] for name in names]), axis=1).T.tolist()
        of_model = sorted({(model_stage, nth) for model_stage, nth, _ in places})
        layers = np.unique(of_rank.layer).tolist()
        if len(layers) == len(of_model):
            number = dict(zip(of_model, layers, strict=True))
            numbers |= {Place(stage, nth): number[model_stage, nth] for model_stage, nth, stage in places}
    return numbers
