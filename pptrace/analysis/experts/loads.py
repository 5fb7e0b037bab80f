"""Loads of experts, layers and ranks: routes that were counted, rows that calls carried, and what is expected by chance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from pptrace.analysis.experts.counts import (
    Groups,
    RankCounts,
    TokenSizes,
    expert_flops,
    handed_in,
    passes_of,
    ratios_of_layer,
    rows_and_ratios,
)
from pptrace.analysis.experts.routing import groups_of, mean_rows, time_in_experts
from pptrace.analysis.experts.traffic import in_forwards
from pptrace.analysis.experts.turns import Place, distinct_places, forward_of_each, layers_of_places
from pptrace.analysis.experts.types import LayerLoad, LayerSpread, RankLoad
from pptrace.analysis.experts.waits import ROLES, Waits
from pptrace.model.known import common
from pptrace.model.tables import UNKNOWN, Floats, Int64
from pptrace.slices import Slice, last_like, places_of_each


def layer_loads(
    exchanges: Slice, counts: Mapping[int, RankCounts], groups: Groups = (), layers_per_stage: Sequence[int] = ()
) -> tuple[LayerLoad, ...]:
    """The loads of all layers, by stage and place; of layers without exchanges (one rank has all experts) from counts alone.

    ``groups`` are the ranks that exchange tokens, where the run's facts tell: then rows are those of all forwards, else of those
    whose calls tell them. ``layers_per_stage`` tells the stages of layers without exchanges.
    """
    numbers = layers_of_places(exchanges, counts)
    forward = (exchanges["backward"] == 0) & (exchanges["again"] == 0) & (exchanges["layer"] >= 0)
    rows = exchanges.where(forward)
    places, number = distinct_places(rows)
    of_layer: dict[Place, list[int]] = {}  # bidirectional schedules have each layer in two stages
    for index, place in enumerate(places):
        of_layer.setdefault(Place(numbers[place], UNKNOWN) if place in numbers else place, []).append(index)
    loads = [
        _layer_load(places[same[0]], numbers.get(places[same[0]]), rows.where(np.isin(number, same)), counts, groups)
        for same in of_layer.values()
    ]
    if not loads:
        counted = sorted({layer for of_rank in counts.values() for layer in np.unique(of_rank.layer).tolist()})
        known = _places_of_layers(counted, layers_per_stage)
        loads = [_layer_load(place, layer, rows, counts, groups) for layer, place in zip(counted, known, strict=True)]
    return tuple(loads)


def _places_of_layers(layers: Sequence[int], layers_per_stage: Sequence[int]) -> list[Place]:
    """The stage of each layer with experts, and which one of the stage's it is; without stages which one of all."""
    first_of_next = np.cumsum(layers_per_stage)
    if not layers or not len(first_of_next) or layers[-1] >= first_of_next[-1]:
        return [Place(UNKNOWN, nth) for nth in range(len(layers))]
    stages = np.searchsorted(first_of_next, layers, side="right").tolist()
    return [Place(stage, nth - stages.index(stage)) for nth, stage in enumerate(stages)]


def _layer_load(
    place: Place, layer: int | None, rows: Slice, counts: Mapping[int, RankCounts], groups: Groups
) -> LayerLoad:
    having = [group for group in groups if any(layer in counts[rank].layer for rank in group if rank in counts)]
    ratios = None if layer is None else ratios_of_layer(having, counts, layer)
    if ratios is None:
        ratios = _ratios_of_exchanges(rows)
    chosen, kept = _counts_of_layer(layer, counts)
    total = None if chosen is None else chosen.sum(axis=0)
    dropped = None if chosen is None or kept is None else int(chosen.sum() - kept.sum())
    routes = 0 if total is None else int(total.sum())
    dropped_tokens, tokens = _dropped_tokens(layer, counts)
    return LayerLoad(
        layer=layer,
        stage=None if place.stage < 0 else place.stage,
        nth=place.nth,
        routes=None if total is None else tuple(total.tolist()),
        hottest=None if total is None or not routes else int(total.argmax()),
        expert_ratio=None if total is None or not routes else float(total.max() / total.mean()),
        chance_ratio=None if chosen is None else _chance(chosen),
        idle_experts=None if total is None else int((total == 0).sum()),
        dropped=dropped,
        dropped_share=None if dropped is None or not routes else dropped / routes,
        rank_ratio=float(ratios.mean()) if len(ratios) else None,
        worst_rank_ratio=float(ratios.max()) if len(ratios) else None,
        dropped_tokens=dropped_tokens,
        dropped_tokens_share=None if dropped_tokens is None else dropped_tokens / max(tokens, 1),
        least_ratio=None if total is None or not routes else float(total.min() / total.mean()),
        deviation_ratio=None if total is None or not routes else float(total.std() / total.mean()),
    )


def _ratios_of_exchanges(rows: Slice) -> Floats:
    """Most rows of a rank over the mean of its group, in each exchange of a group whose rows are known."""
    mean = mean_rows(rows)
    known = ~np.isnan(mean) & (mean > 0)
    group, size = groups_of(rows)
    most = np.zeros(len(size))
    np.maximum.at(most, group[known], rows["rows"][known] / mean[known])
    return most[np.unique(group[known])]


def _dropped_tokens(layer: int | None, counts: Mapping[int, RankCounts]) -> tuple[int | None, int]:
    """(tokens without a kept route, all tokens) of all forwards of a layer; None where that was not recorded."""
    columns = [np.stack((of.dropped, of.tokens))[:, of.layer == layer] for of in counts.values()]
    if not columns:
        return None, 0
    both = np.concatenate(columns, axis=1)
    if not both.size or (both < 0).any():
        return None, 0
    dropped, tokens = both.sum(axis=1).tolist()
    return dropped, tokens


def _counts_of_layer(layer: int | None, counts: Mapping[int, RankCounts]) -> tuple[Int64, Int64] | tuple[None, None]:
    """(chosen, kept) of all forwards of a layer on all ranks, shape (forwards, experts)."""
    of_layer = [(of_rank, of_rank.layer == layer) for of_rank in counts.values()]
    of_layer = [(of_rank, same) for of_rank, same in of_layer if same.any()]
    if not of_layer:
        return None, None
    num = max(int(of_rank.num[same].max()) for of_rank, same in of_layer)
    tables = [[getattr(of_rank, name)[same, :num] for of_rank, same in of_layer] for name in ("chosen", "kept")]
    if any(table.shape[1] != num for of_name in tables for table in of_name):
        return None, None  # ranks that do not agree
    chosen, kept = map(np.concatenate, tables)
    return chosen, kept


def _chance(chosen: Int64) -> float | None:
    """About the most that the busiest expert has over the mean, where all routes of a layer are drawn alike.

    Of A routes to E experts: 1 + √(2 · ln E · E / A), the largest of E nearly normal numbers.
    """
    routes, num = int(chosen.sum()), chosen.shape[1]
    return None if not routes or num < 2 else 1 + math.sqrt(2 * math.log(num) * num / routes)


def rank_loads(waits: Waits, counts: Mapping[int, RankCounts], sizes: TokenSizes | None) -> tuple[RankLoad, ...]:
    """The loads of all ranks that exchanged; ``sizes`` are those of tokens, where the run's facts tell."""
    exchanges, (before, after) = waits.exchanges, (waits.lateness[role] for role in ROLES)
    took, mean = time_in_experts(exchanges), waits.mean_rows
    counted = {} if sizes is None else rows_and_ratios(sizes.ep_groups, counts)
    forward_of = forward_of_each(exchanges, counts)
    loads = []
    for rank, own in places_of_each(exchanges["rank"]).items():
        forward = own[in_forwards(exchanges.where(own))]
        of_rank, (rows, ratio) = counts.get(rank), _rows_of_rank(exchanges["rows"][forward], mean[forward])
        rows, ratio = counted.get(rank, (rows, ratio))
        stages = np.unique(exchanges["stage"][forward]).tolist()
        is_matched = bool((before.waited[own] >= 0).all())
        passes = None if of_rank is None else passes_of(exchanges.where(own), forward_of[own], len(of_rank.step))
        in_flight, equal = (_in_flight(exchanges.where(own), values[own]) for values in (exchanges["rows"], mean))
        handed, got = (  # of calls of equal parts as much comes back as is handed in
            np.stack([exchanges[f"{call}_{name}"][own] for call in ROLES.values()])
            for name in ("bytes", "received_bytes")
        )
        loads.append(
            RankLoad(
                rank=rank,
                stage=stages[0] if len(stages) == 1 and stages[0] >= 0 else None,
                first_expert=None if of_rank is None else common(np.unique(of_rank.first).tolist()),
                num_experts=None if of_rank is None else common(np.unique(of_rank.held).tolist()),
                rows=rows,
                ratio=ratio,
                expert_ns=int(took[own].sum()),
                slowness=waits.slowness.get(rank),
                waited_ns=int((before.waited + after.waited)[own].sum()) if is_matched else None,
                caused_before_ns=int(before.caused[own].sum()) if is_matched else None,
                caused_after_ns=int(after.caused[own].sum()) if is_matched else None,
                bytes=int(handed.sum()) if (handed >= 0).all() else None,
                received_bytes=int(np.where(got < 0, handed, got).sum()) if (handed >= 0).all() else None,
                predicted_bytes=handed_in(passes, rank, counts, sizes),
                in_flight_rows=None if in_flight is None else round(in_flight),
                in_flight_ratio=in_flight / equal if in_flight and equal else None,
                flops=expert_flops(passes, of_rank, sizes),
            )
        )
    return tuple(loads)


def _rows_of_rank(rows: Int64, mean: Floats) -> tuple[int | None, float | None]:
    """(the rows of a rank's exchanges together, these over the means of their groups)."""
    known = ~np.isnan(mean)
    expected = float(mean[known].sum())
    total = int(rows.sum()) if len(rows) and (rows >= 0).all() else None
    return total, float(rows[known].sum() / expected) if expected else None


def _in_flight(own: Slice, rows: Int64 | Floats) -> float | None:
    """The most rows of a rank whose backward has not run, in any step; None where directions or rows are not known, and where the
    exchange of a forward or its backward is not known.

    A forward that runs again keeps no rows; its recomputation does. Where weight gradients are apart, they read the rows last.
    """
    key = [own[name] for name in _OF_FORWARD]
    # of overlapped pairs the exchange of a forward or that of its backward may be left out
    there, back = (np.unique(np.stack(key)[:, own["backward"] == way], axis=1) for way in (0, 1))
    is_known = (own["backward"] >= 0).all() and (rows >= 0).all() and np.array_equal(there, back)
    if not is_known or not len(rows):
        return None
    again = own["again"] == 1
    is_repeated = (last_like(key, [column[again] for column in key]) >= 0) & (own["backward"] == 0) & ~again
    at = np.where(own["backward"] == 1, np.maximum(own["back_end_ns"], own["freed_ns"]), own["out_end_ns"])
    order = np.lexsort((at, own["step"]))
    held = np.cumsum(np.where(own["backward"] == 1, -rows, np.where(is_repeated, 0, rows))[order])
    step = own["step"][order]
    begins = np.flatnonzero(np.diff(step, prepend=step[0] - 1))
    before = np.concatenate(([0], held))[begins]
    return float((np.maximum.reduceat(held, begins) - before).max())


_OF_FORWARD = ("step", "stage", "microbatch", "layer")
"""Columns that tell of which forward an exchange is."""


FIGURES = (
    "expert_ratio",
    "least_ratio",
    "deviation_ratio",
    "idle_experts",
    "dropped_share",
    "dropped_tokens_share",
    "rank_ratio",
    "worst_rank_ratio",
)


def spread_over_layers(layers: Sequence[LayerLoad]) -> tuple[LayerSpread, ...]:
    """The spread of each of :data:`FIGURES` that two or more layers have; each percentile is the value of a layer."""
    known = {name: [value for layer in layers if (value := getattr(layer, name)) is not None] for name in FIGURES}
    places = (0, 50, 75, 90, 95, 100)
    return tuple(
        LayerSpread(name, len(values), *map(float, np.percentile(values, places, method="nearest")))
        for name, values in known.items()
        if len(values) > 1
    )
