"""Overlapped pairs whose forward and backward take turns wherever tokens travel: which call is of which half.

The runtime of :mod:`instrument.expert.pieces` starts a call of the forward, then one of the backward, and so on in turn, until
one half has none left and the other goes on alone. That is known where an op has as many calls as forwards of both stages have
that run alone, all of them posted ahead, and each, as long as halves take turns, before the one ahead of it is waited for. In
runtimes that take turns in another way splits do not fit: a call that takes rows back swaps those of the one that brought them.

Layers of exchanges with experts in the model, and which of the forwards that a rank counted each exchange is of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from msgspec import Struct

from pptrace.analysis.experts.counts import RankCounts
from pptrace.errors import ScheduleError
from pptrace.model.tables import UNKNOWN, Bool, Int64
from pptrace.schedule.actions import Action, Kind, parse_action
from pptrace.schedule.plan import Plan
from pptrace.slices import Slice, last_like, places_of_each

_OF_HALVES = ("half", "stage", "microbatch", "second_stage", "second_microbatch")


def turns_of(op: Int64, calls: Slice, ops: Slice) -> Slice:
    """The calls of a rank by op and half, those of each half of an op next to each other in order of time.

    Args:
        op: the op of each call, a row of ``ops``.
        calls: ``start_ns``, ``posted_ns`` and ``asked_ns`` of the calls, which are in order of time.
        ops: those of the rank.

    Returns:
        By call: ``order`` is its place before, ``op`` its op (−1: none), ``half`` a number of the half, or of the whole op,
        ``in_turns`` whether halves took turns there, ``is_second`` whether it is of the second one, which goes backward;
        ``stage`` and ``microbatch`` are those of the half, ``second_stage`` and ``second_microbatch`` those of the second half
        of its op; ``is_mixed``: in its op a call is started while another is under way.
    """
    nothing = np.zeros(len(op), dtype=np.bool_)
    if not len(ops) or not len(op):
        columns: dict[str, Any] = dict.fromkeys(("in_turns", "is_second", "is_mixed"), nothing)
        columns |= dict.fromkeys(_OF_HALVES, np.full(len(op), UNKNOWN))
        return Slice({"order": np.arange(len(op)), "op": op, **columns})
    at = np.maximum(op, 0)
    is_under_way = np.append(
        (op[1:] == op[:-1]) & (op[1:] >= 0) & (calls["asked_ns"][:-1] > calls["start_ns"][1:]), False
    )
    is_mixed = np.bincount(op[is_under_way], minlength=len(ops))[at] > 0
    is_pair, is_forward = (ops.among("kind", (kind,)) for kind in (Kind.OVERLAP_F_B, Kind.F))
    second_stage, second_microbatch = _second_halves(ops, is_pair)
    num_calls = np.bincount(op[op >= 0], minlength=len(ops))
    first, second = (_calls_of_stages(of, ops["stage"], is_forward, num_calls) for of in (ops["stage"], second_stage))
    begins = np.flatnonzero(np.diff(op, prepend=op[0] - 1))
    nth = np.arange(len(op)) - np.repeat(begins, np.diff(np.append(begins, len(op))))
    by_turns = 2 * np.minimum(first, second)[at]
    fits = (calls["posted_ns"] > calls["start_ns"]) & (is_under_way | (nth >= by_turns - 1))
    num_fitting = np.bincount(op[(op >= 0) & fits], minlength=len(ops))
    takes_turns = is_pair & (first >= 0) & (second >= 0) & (num_calls == first + second) & (num_fitting == num_calls)
    in_turns = (op >= 0) & takes_turns[at]
    is_second = in_turns & np.where(nth < by_turns, nth % 2 == 1, (second > first)[at])
    stage, microbatch = (
        np.where(is_second, of_half[at], ops[name][at])
        for name, of_half in (("stage", second_stage), ("microbatch", second_microbatch))
    )
    run = np.cumsum(np.diff(op, prepend=op[:1]) != 0)
    order = np.lexsort((is_second, run))
    halves = (2 * op + is_second, stage, microbatch, second_stage[at], second_microbatch[at])
    columns = {name: np.where(op >= 0, of, UNKNOWN) for name, of in zip(_OF_HALVES, halves, strict=True)}
    columns |= {"op": op, "in_turns": in_turns, "is_second": is_second, "is_mixed": is_mixed}
    return Slice({"order": order, **{name: column[order] for name, column in columns.items()}})


def _calls_of_stages(stage: Int64, of_ops: Int64, is_forward: Bool, num_calls: Int64) -> Int64:
    """The calls that most forwards of each stage have, where they run alone; −1 of a stage without such forwards."""
    calls = np.full(len(stage), UNKNOWN)
    for number in np.unique(of_ops[is_forward & (of_ops >= 0)]).tolist():
        calls[stage == number] = int(np.median(num_calls[is_forward & (of_ops == number)]))
    return calls


def _second_halves(ops: Slice, is_pair: Bool) -> tuple[Int64, Int64]:
    """(stage, microbatch) of the second half of each pair; −1 of all other ops, and where its text does not tell."""
    stage, microbatch = (np.full(len(ops), UNKNOWN) for _ in range(2))
    if not is_pair.any():
        return stage, microbatch
    codes, texts = ops.codes("pair")
    halves = [_second_half(str(text)) for text in texts]
    for column, values in zip((stage, microbatch), zip(*halves, strict=True), strict=True):
        column[is_pair] = np.array(values, dtype=np.int64)[codes[is_pair]]
    return stage, microbatch


def _second_half(text: str) -> tuple[int, int]:
    try:
        parts: tuple[Action, ...] = parse_action(text).parts if text else ()
    except ScheduleError:
        parts = ()
    if not parts or parts[-1].microbatch is None:
        return UNKNOWN, UNKNOWN
    return parts[-1].stage, parts[-1].microbatch


class Place(Struct, frozen=True, order=True):
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
    if not counts:
        return exchanges
    rows, of_ranks = exchanges["rows"].copy(), places_of_each(exchanges["rank"])
    has_rows = bool((rows >= 0).all())
    if has_rows:
        is_first = (exchanges["backward"] == 0) & (exchanges["again"] == 0)
        brought = {rank: rows[own][is_first[own]].sum() for rank, own in of_ranks.items()}
        if all(of_rank.rows.sum() <= brought.get(rank, 0) for rank, of_rank in counts.items()):
            return exchanges
    forward = forward_of_each(exchanges, counts)
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
    layers, of_ranks = layers_of_places(exchanges, counts), places_of_each(exchanges["rank"])
    for rank, of_rank in counts.items():
        own = of_ranks.get(rank, _NONE)
        places, number = distinct_places(exchanges.where(own))
        key = [
            exchanges["step"][own],
            np.array([layers.get(place, UNKNOWN) for place in places], dtype=np.int64)[number],
            exchanges["microbatch"][own],
        ]
        is_first = (exchanges["backward"][own] == 0) & (exchanges["again"][own] == 0)
        forwards, counted = np.flatnonzero(is_first), np.arange(len(of_rank.step))
        forwards = forwards[np.lexsort((forwards, key[1][forwards], key[0][forwards]))]
        counted = counted[np.lexsort((counted, of_rank.layer, of_rank.step))]
        if len(forwards) == len(counted) and (key[1][forwards] == of_rank.layer[counted]).all():
            found = last_like(key, [column[forwards] for column in key])
            forward[own] = np.where(found >= 0, counted[found], UNKNOWN)
    return forward


_NONE: Int64 = np.zeros(0, dtype=np.int64)


def distinct_places(exchanges: Slice) -> tuple[list[Place], Int64]:
    """(the places of exchanges in their order, the index of each exchange's)."""
    pairs, number = np.unique(np.stack((exchanges["stage"], exchanges["layer"])), axis=1, return_inverse=True)
    return [Place(*pair) for pair in pairs.T.tolist()], number.ravel()


def layers_of_places(exchanges: Slice, counts: Mapping[int, RankCounts]) -> dict[Place, int]:
    """The model's number of each layer: those that a rank counted, in order of its stages; none where they are not as many."""
    numbers: dict[Place, int] = {}
    known = exchanges.where((exchanges["layer"] >= 0) & (exchanges["stage"] >= 0))
    of_ranks, names = places_of_each(known["rank"]), ("model_stage", "layer", "stage")
    for rank, of_rank in counts.items():
        own = of_ranks.get(rank, _NONE)
        places = np.unique(np.stack([known[name][own] for name in names]), axis=1).T.tolist()
        of_model = sorted({(model_stage, nth) for model_stage, nth, _ in places})
        layers = np.unique(of_rank.layer).tolist()
        if len(layers) == len(of_model):
            number = dict(zip(of_model, layers, strict=True))
            numbers |= {Place(stage, nth): number[model_stage, nth] for model_stage, nth, stage in places}
    return numbers
