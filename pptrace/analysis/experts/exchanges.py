"""The exchanges of one rank with the experts of a layer: rows go to them (*dispatch*), and what these make of them comes back
(*combine*).

    forward    [counts] dispatch  experts  combine          backward   dispatch of gradients  experts  combine of gradients

Each is a call along ep of all tokens of a microbatch, and between both the experts compute; calls that carry little, of counts
or weights, are none of them. What a rank sends back is what it received: where splits are recorded, others are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from pptrace.analysis.aligned import RankRows
from pptrace.analysis.experts import EXPERT_AXES
from pptrace.analysis.experts.turns import turns_of
from pptrace.intervals import lengths_within
from pptrace.marks import Axis, Collective
from pptrace.model.tables import UNKNOWN, Bool, Int64, splits_by_size
from pptrace.schedule.actions import Kind
from pptrace.schedule.needs import OUTPUT_OF, Output
from pptrace.slices import Slice, last_like

CALL_COLUMNS = ("match", "start_ns", "end_ns", "transfer_start_ns", "transfer_end_ns", "bytes", "received_bytes")
"""Columns of both calls of an exchange, with ``out_`` and ``back_`` in front of their names."""
EXCHANGES = (
    *("rank", "step", "backward", "stage", "microbatch", "layer", "again", "sent", "rows"),
    *("op_stage", "op_microbatch", "op_output", "begin_ns", "out_row", "freed_ns"),
    *(f"{call}_{name}" for call in ("out", "back") for name in (*CALL_COLUMNS, "hidden_ns")),
)
"""Columns of exchanges, the transfer that compute hides among them. −1: not known.

``backward`` is 1 or 0, ``layer`` counts the layers with experts of the stage from 0, ``again`` marks a recomputation; ``sent``
are the rows that the rank handed in, ``rows`` those that its experts computed. ``op_`` is what the op around it fills
in the plan (:class:`pptrace.schedule.needs.Output`), of an overlapped pair its forward. ``begin_ns`` is when the experts may
begin: after the last call before that which takes rows back. ``freed_ns`` is when the W of a backward has read its rows, 0 where
none is known. ``out_row`` is the row of the dispatch in its rank's communication.
"""
_LEAST_PART = 0.5
"""Calls whose rows are so many times as wide as the widest, or more, carry tokens."""
_LEAST_PADDED = 1 / 16
"""The same of the sizes of all-to-alls of equal parts, which are padded to what the routes of each need."""
_CALLS = (Collective.ALL_TO_ALL, Collective.ALL_GATHER, Collective.REDUCE_SCATTER)


def no_exchanges() -> Slice:
    """A table of exchanges without rows."""
    return Slice.empty(*EXCHANGES)


def join_exchanges(ranks: Iterable[Slice]) -> Slice:
    """The exchanges of all ranks, one behind the other."""
    return Slice.joined(list(ranks) or [no_exchanges()])


def exchanges_of(rank: int, rows: RankRows, steps: Sequence[int], compute: Int64) -> Slice:
    """The exchanges of a rank in some steps, in order of time (columns :data:`EXCHANGES`); ``compute`` is when it computes."""
    comms = rows.comms
    among = np.isin(comms["step"], np.asarray(steps, dtype=np.int64)) & (comms["group_size"] != 1)
    place = np.flatnonzero(among & comms.among("axis", EXPERT_AXES) & comms.among("kind", _CALLS))
    if not len(place):
        return no_exchanges()
    place = place[np.argsort(comms["start_ns"][place], kind="stable")]
    calls = comms.where(place)
    sent, received = _rows_of_calls(calls)
    before = {
        f"{name}_before": np.concatenate((calls["start_ns"][:1], np.maximum.accumulate(calls[name])[:-1]))
        for name in ("end_ns", "posted_ns")
    }
    calls = calls.with_columns({"out_row": place, "sent": sent, "received": received, **before})
    calls = calls.where(_carry_tokens(calls))
    turns = turns_of(_op_of(calls, rows.ops), calls, rows.ops)
    calls = calls.where(turns["order"])
    out = _first_calls(calls, turns["half"])
    columns = _places(turns.where(out), rows.ops)
    is_clear = columns.pop("is_clear") == 1
    out, columns = out[is_clear], {name: column[is_clear] for name, column in columns.items()}
    dispatch, combine, in_turns = calls.where(out), calls.where(out + 1), turns["in_turns"][out]
    columns |= {name: dispatch[name] for name in ("step", "sent", "out_row")} | {"rank": np.full(len(out), rank)}
    columns["freed_ns"] = _freed_by_weights(columns, rows.ops)
    shared = comms.where(among & comms.among("axis", (Axis.ETP,))).in_order_of("start_ns")
    columns["rows"] = _rows_with_shared(shared, dispatch, combine, in_turns)
    came = np.maximum(dispatch["end_ns"], dispatch["asked_ns"])
    free = np.where(in_turns, combine["posted_ns_before"], combine["end_ns_before"])
    columns["begin_ns"] = np.clip(free, came, np.maximum(combine["start_ns"], came))
    for name, call in (("out", dispatch), ("back", combine)):
        columns |= {f"{name}_{column}": call[column] for column in CALL_COLUMNS}
        columns[f"{name}_hidden_ns"] = lengths_within(compute, call["transfer_start_ns"], call["transfer_end_ns"])
    return Slice({name: columns[name] for name in EXCHANGES})


def _rows_with_shared(shared: Slice, dispatch: Slice, combine: Slice, in_turns: Bool) -> Int64:
    """The rows of a rank's experts in exchanges: those that it received, or where it shares its experts all that the first call
    along etp between dispatch and combine brings; −1 where that call's splits are not known, and in halves that take turns,
    where it may be one of the other half.
    """
    received: Int64 = dispatch["received"]
    if not len(shared):
        return received
    _, gathered = _rows_of_calls(shared)
    at = np.searchsorted(shared["start_ns"], dispatch["start_ns"])
    first = np.minimum(at, len(shared) - 1)
    is_between = (at < len(shared)) & (shared["start_ns"][first] < combine["start_ns"])
    return np.where(in_turns, UNKNOWN, np.where(is_between, gathered[first], received))


def _rows_of_calls(calls: Slice) -> tuple[Int64, Int64]:
    """(rows sent, rows received) by each call; −1 where its splits are not known."""
    codes, texts = calls.codes("splits")
    sums = np.full((2, len(texts)), UNKNOWN)
    for places, rows in splits_by_size(texts).values():
        sums[:, places] = rows.sum(axis=2)
    return sums[0, codes], sums[1, codes]


def _carry_tokens(calls: Slice) -> Bool:
    """Mark the calls of tokens: those with splits of the widest rows; where no call has splits, the largest."""
    sizes, sent, received = np.maximum(calls["bytes"], 0), calls["sent"], calls["received"]
    has_splits = sent >= 0
    if not has_splits.any():
        least = np.where(calls.among("kind", (Collective.ALL_TO_ALL,)), _LEAST_PADDED, _LEAST_PART)
        largest: Bool = sizes >= least * sizes.max(initial=0)
        return largest
    wide = np.where(sent > 0, sizes // np.maximum(sent, 1), 0)
    wide = np.maximum(wide, np.where(received > 0, calls["received_bytes"] // np.maximum(received, 1), 0))
    is_empty = has_splits & (sent == 0) & (received == 0)  # their width is not known
    carries: Bool = is_empty | (has_splits & (wide >= _LEAST_PART * wide.max(initial=0)))
    return carries


def _op_of(calls: Slice, ops: Slice) -> Int64:
    """The op that each call begins in, as a row of ``ops``; −1 outside of all."""
    if not len(ops):
        return np.full(len(calls), UNKNOWN)
    order = np.argsort(ops["start_ns"], kind="stable")
    index = np.searchsorted(ops["start_ns"][order], calls["start_ns"], side="right") - 1
    op = order[np.maximum(index, 0)]
    is_inside = (index >= 0) & (calls["start_ns"] < ops["end_ns"][op])
    return np.where(is_inside, op, UNKNOWN)


def _first_calls(calls: Slice, op: Int64) -> Int64:
    """The calls that bring rows to experts and are followed, in the same op (or half of it), by the one that brings them back.

    What belongs together is found by splits, which the second call swaps, and by kinds, an all-gather and a reduce-scatter: a
    call may be alone, where nothing needs a gradient, or where a recomputation ends before it. All-to-alls of unknown splits are
    the first and second, the third and fourth, … of an op; of an odd number of them none.
    """
    if len(calls) <= 1:
        return np.zeros(0, dtype=np.int64)
    step, (codes, kinds), (of_splits, texts) = calls["step"], calls.codes("kind"), calls.codes("splits")
    is_next = (op[1:] == op[:-1]) & (step[1:] == step[:-1])
    begins = np.flatnonzero(np.concatenate(([True], ~is_next)))
    lengths = np.diff(np.append(begins, len(is_next) + 1))
    sizes = np.repeat(lengths, lengths)
    number = {text: code for code, text in enumerate(texts)}
    swapped = [UNKNOWN if not text else number.get(">".join(reversed(text.split(">"))), UNKNOWN) for text in texts]
    fits = np.array(swapped, dtype=np.int64)[of_splits[:-1]] == of_splits[1:]
    is_open = np.array([not text for text in texts])[of_splits[:-1]]
    fits |= is_open & (sizes[:-1] % 2 == 0)
    exchanged, gathered, scattered = (codes == kinds.index(kind) if kind in kinds else codes < 0 for kind in _CALLS)
    fits = np.where(exchanged[:-1] & exchanged[1:], fits, gathered[:-1] & scattered[1:]) & is_next
    nth = np.arange(len(fits)) - np.maximum.accumulate(np.where(fits, 0, np.arange(1, len(fits) + 1)))
    return np.flatnonzero(fits & (nth % 2 == 0))


def _places(calls: Slice, ops: Slice) -> dict[str, Int64]:
    """Direction, stage, microbatch and layer of the exchanges that begin with these calls (:func:`turns_of`), and what their ops
    fill in the plan.

    ``is_clear``: which calls belong together. In an overlapped pair those of both halves may take turns: where it is not known
    how, it has to have those of its forward and of its backward, each waited for before the next one starts.
    """
    op, half, in_turns, is_second, stage, microbatch, second_stage, second_microbatch = (
        calls[name]
        for name in ("op", "half", "in_turns", "is_second", "stage", "microbatch", "second_stage", "second_microbatch")
    )
    unknown = np.full(len(op), UNKNOWN)
    if not len(op) or not len(ops):
        names = ("backward", "stage", "microbatch", "layer", "op_stage", "op_microbatch", "op_output")
        return dict.fromkeys(names, unknown) | {"again": np.zeros_like(unknown), "is_clear": np.ones_like(unknown)}
    codes, kinds = ops.codes("kind")
    kind, at = codes[np.maximum(op, 0)], op >= 0
    output = np.where(at, np.array([OUTPUT_OF.get(Kind(name), Output.FORWARD) for name in kinds])[kind], UNKNOWN)
    is_pair = at & ops.among("kind", (Kind.OVERLAP_F_B,))[op]
    op_stage, op_microbatch = (np.where(at, ops[name][np.maximum(op, 0)], UNKNOWN) for name in ("stage", "microbatch"))
    begins = np.flatnonzero(np.concatenate(([True], half[1:] != half[:-1])))
    sizes = np.diff(np.append(begins, len(op)))
    nth, size = np.arange(len(op)) - np.repeat(begins, sizes), np.repeat(sizes, sizes)
    forward = (output == Output.FORWARD) & ~is_pair
    alone = np.unique(ops["stage"][ops.among("kind", (Kind.F,))])
    num_layers = _num_layers(stage, stage[forward], size[forward], alone)
    # A pair is its forward, then its backward, of another stage, where these do not take turns.
    num_second = np.where(second_stage < 0, num_layers, _num_layers(second_stage, stage[forward], size[forward], alone))
    is_known = is_pair & ~in_turns & (num_layers >= 0) & (num_second >= 0)
    in_row = is_known & ((size == num_layers + num_second) | (size == num_layers + 2 * num_second))
    is_behind = in_row & (nth >= num_layers)
    is_back = np.where(is_pair, is_behind | is_second, ~forward)
    # of each half of a pair, or else op: the exchange's place in it, how many it has, and the layers of its stage
    place, num_of_half = np.where(is_behind, nth - num_layers, nth), np.where(is_behind, size - num_layers, size)
    num_of_half[in_row & ~is_behind] = num_layers[in_row & ~is_behind]
    layers = np.where(is_behind, num_second, num_layers)
    once, twice = at & (num_of_half == layers), at & is_back & (num_of_half == 2 * layers)
    again = twice & (place % 2 == 0)  # each layer runs again, then its backward
    layer = np.select([once & ~is_back, once, twice], [place, layers - 1 - place, layers - 1 - place // 2], UNKNOWN)
    layer[is_behind & (second_stage < 0)] = UNKNOWN
    return {
        "backward": np.where(at, is_back & ~again, UNKNOWN),
        "stage": np.where(is_behind, second_stage, stage),
        "microbatch": np.where(is_behind, second_microbatch, microbatch),
        "layer": layer,
        "again": again.astype(np.int64),
        "op_stage": op_stage,
        "op_microbatch": op_microbatch,
        "op_output": output,
        "is_clear": (~is_pair | np.where(in_turns, once, in_row & ~calls["is_mixed"])).astype(np.int64),
    }


def _freed_by_weights(columns: Mapping[str, Int64], ops: Slice) -> Int64:
    """The end of the W of each backward; 0 where there is none, and of forwards."""
    late = ops.where(ops.among("kind", (Kind.W,)))
    names = ("step", "stage", "microbatch")
    place = last_like([columns[name] for name in names], [late[name] for name in names])
    return np.where(columns["backward"] == 1, np.append(late["end_ns"], 0)[place], 0)


def _num_layers(of: Int64, stage: Int64, size: Int64, alone: Int64) -> Int64:
    """The layers with experts of the stages ``of``: as many as most forwards of each have exchanges; −1 of one without forwards.

    ``stage`` and ``size`` are those of exchanges of forwards, and the exchanges of their ops; ``alone`` are the stages that have
    forwards at all.
    """
    num = np.where(np.isin(of, alone), 0, UNKNOWN)
    for number in np.unique(stage).tolist():
        num[of == number] = int(np.median(size[stage == number]))
    return num
