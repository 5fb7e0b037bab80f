"""Loads of experts, layers and ranks: routes that were counted, rows that calls carried, and what is expected by chance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pptrace.analysis.expert_parts import LayerLoad, RankLoad
from pptrace.analysis.experts.counted_rows import Floats, Groups, ratios_of_layer, rows_and_ratios
from pptrace.analysis.experts.counts import RankCounts
from pptrace.analysis.experts.handed_in import TokenSizes, expert_flops, handed_in
from pptrace.analysis.experts.lateness import COMBINE, DISPATCH, lateness_of
from pptrace.analysis.experts.routing import groups_of, mean_rows, time_in_experts
from pptrace.analysis.experts.slowness import slowness_of_ranks
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
    rows of all of them: the n-th forward of a layer in a step is its n-th count.
    """
    has_rows = bool((exchanges["rows"] >= 0).all())
    if not counts or (has_rows and not _computes_more(exchanges, counts)):
        return exchanges
    rows = exchanges["rows"].copy()
    layers, of_ranks = layers_of_places(exchanges, counts), _places_of_ranks(exchanges)
    for rank, of_rank in counts.items():
        own = of_ranks.get(rank, _NONE)
        key = [exchanges["step"][own], _layer_numbers(exchanges.where(own), layers), exchanges["microbatch"][own]]
        is_first = (exchanges["backward"][own] == 0) & (exchanges["again"][own] == 0)
        forwards, counted = np.flatnonzero(is_first), np.arange(len(of_rank.step))
        forwards = forwards[np.lexsort((forwards, key[1][forwards], key[0][forwards]))]
        counted = counted[np.lexsort((counted, of_rank.layer, of_rank.step))]
        if len(forwards) != len(counted) or (key[1][forwards] != of_rank.layer[counted]).any():
            if has_rows:  # of one kind for all ranks
                return exchanges
            continue
        found = last_like(key, [column[forwards] for column in key])
        rows[own] = np.where(found >= 0, of_rank.rows[counted][found], UNKNOWN)
    return Slice({**exchanges.columns, "rows": rows})


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
    places, number = _distinct_places(exchanges)
    return np.array([layers.get(place, UNKNOWN) for place in places], dtype=np.int64)[number]


def _distinct_places(exchanges: Slice) -> tuple[list[Place], Int64]:
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
    places, number = _distinct_places(rows)
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
    ratios = None if layer is None else ratios_of_layer(_having(layer, groups, counts), counts, layer)
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
    )


def _having(layer: int, groups: Groups, counts: Mapping[int, RankCounts]) -> Groups:
    """The groups that have a layer."""
    return [group for group in groups if any(rank in counts and (counts[rank].layer == layer).any() for rank in group)]


def _ratios_of_exchanges(rows: Slice) -> Floats:
    """Most rows of a rank over the mean of its group, in each exchange of a group whose rows are known."""
    mean = mean_rows(rows)
    known = ~np.isnan(mean) & (mean > 0)
    group, size = groups_of(rows)
    most = np.zeros(len(size))
    np.maximum.at(most, group[known], rows["rows"][known] / mean[known])
    ratios: Floats = most[np.unique(group[known])]
    return ratios


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


def rank_loads(exchanges: Slice, counts: Mapping[int, RankCounts], sizes: TokenSizes | None) -> tuple[RankLoad, ...]:
    """The loads of all ranks that exchanged; ``sizes`` are those of tokens, where the run's facts tell."""
    before, after = (lateness_of(exchanges, role) for role in (DISPATCH, COMBINE))
    slowness, took, mean = slowness_of_ranks(exchanges), time_in_experts(exchanges), mean_rows(exchanges)
    counted = {} if sizes is None else rows_and_ratios(sizes.ep_groups, counts)
    loads = []
    for own in places_of_each(exchanges["rank"]):
        rank = int(exchanges["rank"][own[0]])
        forward = own[(exchanges["backward"][own] == 0) & (exchanges["again"][own] == 0)]
        if (exchanges["backward"][own] < 0).all():  # without ops nothing tells the direction
            forward = own
        of_rank, (rows, ratio) = counts.get(rank), _rows_of_rank(exchanges["rows"][forward], mean[forward])
        rows, ratio = counted.get(rank, (rows, ratio))
        stages = np.unique(exchanges["stage"][forward]).tolist()
        is_matched = bool((before.waited[own] >= 0).all())
        in_flight, equal = (_in_flight(exchanges.where(own), values[own]) for values in (exchanges["rows"], mean))
        loads.append(
            RankLoad(
                rank=rank,
                stage=stages[0] if len(stages) == 1 and stages[0] >= 0 else None,
                first_expert=None if of_rank is None else common(np.unique(of_rank.first).tolist()),
                num_experts=None if of_rank is None else common(np.unique(of_rank.held).tolist()),
                rows=rows,
                ratio=ratio,
                expert_ns=int(took[own].sum()),
                slowness=slowness.get(rank),
                waited_ns=int((before.waited + after.waited)[own].sum()) if is_matched else None,
                caused_before_ns=int(before.caused[own].sum()) if is_matched else None,
                caused_after_ns=int(after.caused[own].sum()) if is_matched else None,
                bytes=_total(exchanges, own, "bytes"),
                received_bytes=_received(exchanges, own),
                predicted_bytes=handed_in(exchanges.where(own), rank, counts, sizes),
                in_flight_rows=None if in_flight is None else round(in_flight),
                in_flight_ratio=in_flight / equal if in_flight and equal else None,
                flops=expert_flops(exchanges.where(own), of_rank, sizes),
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
    """The most rows of a rank whose backward has not run, in any step; None where directions or rows are not known, where
    forwards run again, for which rows are not kept, and where the exchange of a forward or its backward is not known.
    """
    is_known = (own["backward"] >= 0).all() and (rows >= 0).all() and not own["again"].any()
    if not is_known or not len(rows) or not _has_both_ways(own):
        return None
    at = np.where(own["backward"] == 1, own["back_end_ns"], own["out_end_ns"])
    order = np.lexsort((at, own["step"]))
    held = np.cumsum(np.where(own["backward"] == 1, -rows, rows)[order])
    step = own["step"][order]
    begins = np.flatnonzero(np.diff(step, prepend=step[0] - 1))
    before = np.concatenate(([0], held))[begins]
    return float((np.maximum.reduceat(held, begins) - before).max())


def _has_both_ways(own: Slice) -> bool:
    """Return whether each exchange of a forward has that of its backward: those of overlapped pairs may be left out."""
    key = np.stack([own[name] for name in ("step", "stage", "microbatch", "layer")])
    there, back = (np.unique(key[:, own["backward"] == way], axis=1) for way in (0, 1))
    return np.array_equal(there, back)


def _total(exchanges: Slice, own: Int64, name: str) -> int | None:
    both = np.stack([exchanges[f"{call}_{name}"][own] for call in ("out", "back")])
    return int(both.sum()) if (both >= 0).all() else None


def _received(exchanges: Slice, own: Int64) -> int | None:
    """Bytes that come back; of calls of equal parts as much as is handed in."""
    total = 0
    for call in ("out", "back"):
        handed, got = (exchanges[f"{call}_{name}"][own] for name in ("bytes", "received_bytes"))
        if (handed < 0).any():
            return None
        total += int(np.where(got < 0, handed, got).sum())
    return total


def common(values: Sequence[int]) -> int | None:
    """The value that all have; None where they differ, or there are none."""
    return values[0] if values and all(value == values[0] for value in values) else None
