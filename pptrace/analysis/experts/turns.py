"""Overlapped pairs whose forward and backward take turns wherever tokens travel: which call is of which half.

The runtime of :mod:`instrument.expert.pieces` starts a call of the forward, then one of the backward, and so on in turn, until
one half has none left and the other goes on alone. That is known where an op has as many calls as forwards of both stages have
that run alone, all of them posted ahead, and each, as long as halves take turns, before the one ahead of it is waited for. In
runtimes that take turns in another way splits do not fit: a call that takes rows back swaps those of the one that brought them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pptrace.errors import ScheduleError
from pptrace.model.tables import UNKNOWN, Int64
from pptrace.schedule.actions import Action, Kind, parse_action
from pptrace.slices import Slice

Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """Calls of a rank, those of each half of an op next to each other in order of time: ``order`` are their places before.

    By call: ``op`` is its op (−1: none), ``half`` a number of the half, or of the whole op, ``in_turns`` whether halves took
    turns there, ``is_second`` whether it is of the second one, which goes backward; ``stage`` and ``microbatch`` are those of the
    half, ``second_stage`` and ``second_microbatch`` those of the second half of its op; ``is_mixed``: in its op
    a call is started while another is under way.
    """

    order: Int64
    op: Int64
    half: Int64
    in_turns: Bool
    is_second: Bool
    stage: Int64
    microbatch: Int64
    second_stage: Int64
    second_microbatch: Int64
    is_mixed: Bool


def turns_of(op: Int64, calls: Slice, ops: Slice) -> Turns:
    """The calls of a rank by op and half.

    Args:
        op: the op of each call, a row of ``ops``.
        calls: ``start_ns``, ``posted_ns`` and ``asked_ns`` of the calls, which are in order of time.
        ops: those of the rank.
    """
    nothing = np.zeros(len(op), dtype=np.bool_)
    if not len(ops) or not len(op):
        unknown = np.full(len(op), UNKNOWN)
        places = np.arange(len(op))
        return Turns(places, op, unknown, nothing, nothing, unknown, unknown, unknown, unknown, nothing)
    at = np.maximum(op, 0)
    is_under_way = np.append(
        (op[1:] == op[:-1]) & (op[1:] >= 0) & (calls["asked_ns"][:-1] > calls["start_ns"][1:]), False
    )
    is_mixed = np.bincount(op[is_under_way], minlength=len(ops))[at] > 0
    stage, microbatch = (np.where(op >= 0, ops[name][at], UNKNOWN) for name in ("stage", "microbatch"))
    kind, kinds = ops.codes("kind")
    pairs = np.flatnonzero(kind == (kinds.index(Kind.OVERLAP_F_B) if Kind.OVERLAP_F_B in kinds else UNKNOWN))
    in_turns, is_second = nothing, nothing
    second_stage, second_microbatch = _second_halves(ops, pairs)
    if len(pairs):
        is_forward = kind == (kinds.index(Kind.F) if Kind.F in kinds else UNKNOWN)
        num_calls = np.bincount(op[op >= 0], minlength=len(ops))
        first, second = (
            _calls_of_stages(of, ops["stage"], is_forward, num_calls) for of in (ops["stage"], second_stage)
        )
        nth, by_turns = _nth(op), 2 * np.minimum(first, second)[at]
        fits = (calls["posted_ns"] > calls["start_ns"]) & (is_under_way | (nth >= by_turns - 1))
        num_fitting = np.bincount(op[(op >= 0) & fits], minlength=len(ops))
        takes_turns = (first >= 0) & (second >= 0) & (num_calls == first + second) & (num_fitting == num_calls)
        in_turns = (op >= 0) & takes_turns[at] & np.isin(op, pairs)
        is_second = in_turns & np.where(nth < by_turns, nth % 2 == 1, (second > first)[at])
        stage, microbatch = (
            np.where(is_second, of_half[at], of_op)
            for of_half, of_op in ((second_stage, stage), (second_microbatch, microbatch))
        )
    run = np.cumsum(np.diff(op, prepend=op[:1]) != 0)
    order = np.lexsort((is_second, run))
    half = np.where(op >= 0, 2 * op + is_second, UNKNOWN)
    of_second = [np.where(op >= 0, column[at], UNKNOWN) for column in (second_stage, second_microbatch)]
    return Turns(
        order,
        op[order],
        half[order],
        in_turns[order],
        is_second[order],
        stage[order],
        microbatch[order],
        of_second[0][order],
        of_second[1][order],
        is_mixed[order] & (op[order] >= 0),
    )


def _nth(op: Int64) -> Int64:
    """The number of each call among those of its op that stand together."""
    begins = np.flatnonzero(np.diff(op, prepend=op[0] - 1))
    return np.arange(len(op)) - np.repeat(begins, np.diff(np.append(begins, len(op))))


def _calls_of_stages(stage: Int64, of_ops: Int64, is_forward: Bool, num_calls: Int64) -> Int64:
    """The calls that most forwards of each stage have, where they run alone; −1 of a stage without such forwards."""
    calls = np.full(len(stage), UNKNOWN)
    for number in np.unique(of_ops[is_forward & (of_ops >= 0)]).tolist():
        calls[stage == number] = int(np.median(num_calls[is_forward & (of_ops == number)]))
    return calls


def _second_halves(ops: Slice, pairs: Int64) -> tuple[Int64, Int64]:
    """(stage, microbatch) of the second half of each pair; −1 of all other ops, and where its text does not tell."""
    stage, microbatch = (np.full(len(ops), UNKNOWN) for _ in range(2))
    if not len(pairs):
        return stage, microbatch
    codes, texts = ops.codes("pair")
    halves = [_second_half(str(text)) for text in texts]
    for column, values in zip((stage, microbatch), zip(*halves, strict=True), strict=True):
        column[pairs] = np.array(values, dtype=np.int64)[codes[pairs]]
    return stage, microbatch


def _second_half(text: str) -> tuple[int, int]:
    try:
        parts: tuple[Action, ...] = parse_action(text).parts if text else ()
    except ScheduleError:
        parts = ()
    if not parts or parts[-1].microbatch is None:
        return UNKNOWN, UNKNOWN
    return parts[-1].stage, parts[-1].microbatch
