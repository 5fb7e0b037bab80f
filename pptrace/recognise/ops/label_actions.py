"""Labelled ops and messages with their steps and microbatches, by columns; what names leave open follows from their order."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from msgspec import Struct
from msgspec.structs import replace

from pptrace.model.tables import Bool, Int64
from pptrace.recognise.labels import Label
from pptrace.recognise.labels.zero_bubble import ZERO_BUBBLE
from pptrace.recognise.ops.label_columns import BACKWARD_KINDS, IS_COMPUTE, NONE, LabelTable, Ranges
from pptrace.recognise.ops.label_steps import with_steps
from pptrace.schedule.actions import Kind
from pptrace.slices import Slice, group_codes, last_like, reduce_groups

_B, _W = Kind.B.code, Kind.W.code


class LabelledActions(Struct, frozen=True):
    """The ranges of all steps, step by step, and their actions.

    ``actions`` has the columns of :attr:`~pptrace.recognise.ops.label_columns.LabelTable.actions`, the ``range`` and the ``step``
    of each. Where a range holds n ops of equal weight, each has its ``part`` and ``parts`` = n. ``run_sizes`` are the
    microbatches of each run of a schedule, by step, where a step has several.
    """

    ranges: Ranges
    actions: Slice
    run_sizes: Mapping[int, int] = {}

    def in_time_order(self) -> Slice:
        """The actions by the starts of their ranges, and by their parts within one."""
        start = self.ranges.start_ns[self.actions["range"]]
        return self.actions.where(np.lexsort((self.actions["parts"], self.actions["part"], start)))


def steps_of_ranges(ranges: Ranges) -> Ranges:
    """The ranges in time order, each with its step; each part of a split sequence is a microbatch of its own."""
    splits = num_sequences(ranges)

    def renumbered(label: Label) -> Label:
        actions = (
            action
            if action.microbatch is None
            else replace(action, microbatch=action.microbatch * splits + label.sequence)
            for action in label.actions
        )
        return replace(label, actions=tuple(actions))

    if splits > 1:
        ranges = replace(ranges, table=LabelTable(tuple(map(renumbered, ranges.table.labels))))
    return with_steps(ranges.in_time_order())


def with_microbatches(ranges: Ranges) -> LabelledActions:
    """The ops and messages of ranges, whose steps are known, with their microbatches."""
    ranges = _without_rolled_back_ops(ranges.where(np.argsort(ranges.step, kind="stable")))
    actions = ranges.actions()
    unsplit = {"part": np.zeros(len(actions), dtype=np.int64), "parts": np.ones(len(actions), dtype=np.int64)}
    actions = actions.with_columns({"step": ranges.step[actions["range"]], **unsplit})
    actions = _with_weights(ranges, _with_microbatches(ranges, actions))
    return LabelledActions(ranges, *_with_runs(_split_backward(actions)))


def _with_runs(actions: Slice) -> tuple[Slice, Mapping[int, int]]:
    """(actions with microbatches numbered on through the runs of a step, the microbatches of each run by step): labels count
    those of each call of a schedule from 0, of which a step that accumulates gradients has several.

    Nothing is numbered in a step whose ops do not all run equally often, as where some are recomputed, nor in one with
    overlapped pairs.
    """
    names = ("kind", "step", "stage", "chunk", "microbatch")
    table = pd.DataFrame({name: actions[name] for name in names})
    is_known = (table["step"] >= 0) & (table["microbatch"] >= 0)
    ops = table[is_known & IS_COMPUTE[table["kind"]]]
    counts = ops.groupby(list(names)).size().groupby("step").agg(["min", "max"])
    has_pairs = counts.index.isin(table.loc[actions["second_kind"] >= 0, "step"].unique())
    runs = counts.loc[(counts["min"] == counts["max"]) & (counts["max"] > 1) & ~has_pairs, "max"]
    if not len(runs):
        return actions, {}
    sizes = ops.groupby("step")["microbatch"].max()[runs.index] + 1
    chosen = table[is_known & table["step"].isin(runs.index)]
    same = chosen.groupby(list(names))["step"]
    each = same.transform("size") // chosen["step"].map(runs)  # a microbatch may send several tensors
    shift = same.cumcount() // each.clip(lower=1) * chosen["step"].map(sizes)
    microbatch = actions["microbatch"].copy()
    microbatch[chosen.index] += shift.to_numpy(dtype=np.int64)
    return actions.with_columns({"microbatch": microbatch}), dict(
        zip(sizes.index.tolist(), sizes.tolist(), strict=True)
    )


def num_sequences(ranges: Ranges) -> int:
    """Number of parts into which sequences are split."""
    return 1 + max((label.sequence for label in ranges.present()), default=0)


def _without_rolled_back_ops(ranges: Ranges) -> Ranges:
    """Drop ops that zero bubble's post-validation rolled back: where it takes an optimizer step back, the first ops run again."""
    of_zero_bubble = ranges.table.of(lambda label: label.framework == ZERO_BUBBLE, np.bool_)[ranges.label]
    if not of_zero_bubble.any():
        return ranges
    first = ranges.table.first_action[ranges.label]
    rows = np.flatnonzero(ranges.is_op & ranges.names_microbatch)
    names = ("kind", "stage", "chunk", "microbatch")
    keys = [ranges.table.actions[name][first[rows]] for name in names] + [ranges.step[rows]]
    last_rows = np.flatnonzero(of_zero_bubble[rows])
    last = last_like(keys, [key[last_rows] for key in keys])
    last_start = np.append(ranges.start_ns[rows[last_rows]], 0)[last]
    is_last = np.ones(len(ranges), dtype=np.bool_)
    is_last[rows] = (last < 0) | (last_start == ranges.start_ns[rows])
    return ranges.where(is_last)


def _counts_before(groups: Int64) -> Int64:
    """Count the rows of the same group before each row."""
    return np.asarray(pd.Series(groups).groupby(groups).cumcount(), dtype=np.int64)


def _halves(actions: Slice) -> Slice:
    """The simple actions in order, of a pair its forward and its backward; ``row`` is that of the action, ``is_second`` marks the
    second halves.
    """
    is_pair = actions["second_kind"] >= 0
    row = np.repeat(np.arange(len(actions)), 1 + is_pair)
    is_second = np.append(False, row[1:] == row[:-1])[: len(row)]
    firsts = {name: actions[name] for name in ("kind", "stage", "chunk", "microbatch")}
    firsts["kind"] = np.where(is_pair, Kind.F.code, actions["kind"])
    columns = {name: np.where(is_second, actions[f"second_{name}"][row], first[row]) for name, first in firsts.items()}
    return Slice({"row": row, "is_second": is_second, **columns})


def _with_microbatches(ranges: Ranges, actions: Slice) -> Slice:
    """The k-th op or message of a kind that names no microbatch is that of microbatch k; W waits for its backward."""
    halves = _halves(actions)
    row, kind, microbatch, is_second = (halves[name] for name in ("row", "kind", "microbatch", "is_second"))
    is_adjacent = ranges.table.of(lambda label: label.adjacent, np.bool_)[ranges.label] & ~ranges.is_op
    is_open = (microbatch < 0) & (kind != _W) & ~is_adjacent[actions["range"]][row]
    if not is_open.any():
        return actions
    _, step = np.unique(actions["step"][row][is_open], return_inverse=True)
    microbatch[is_open] = _counts_before(step * len(Kind) + kind[is_open])
    second = actions["second_microbatch"].copy()
    second[row[is_second]] = microbatch[is_second]
    return actions.with_columns({"microbatch": microbatch[~is_second], "second_microbatch": second})


def _with_weights(ranges: Ranges, actions: Slice) -> Slice:
    """Assign microbatches to weight gradients without one: a flush becomes one op for each outstanding one, in the order of
    their backwards; any other follows the backward before it or, after the last forward, belongs to the last ones in order.
    """
    is_unnamed = (actions["kind"] == _W) & (actions["microbatch"] < 0)
    if not is_unnamed.any():
        return actions
    halves = _halves(actions)
    halves = halves.with_columns({"step": actions["step"][halves["row"]]})
    backwards = halves.where(np.isin(halves["kind"], BACKWARD_KINDS))
    flushes = ranges.table.of(lambda label: label.flushes_weight_grads, np.bool_)[ranges.label[actions["range"]]]
    sources = _sources(ranges, actions, backwards, is_unnamed & ~flushes)
    flushed = _flushed(actions, backwards, np.flatnonzero(is_unnamed & flushes))
    counts = np.where(is_unnamed, sources >= 0, True).astype(np.int64)
    counts[list(flushed)] = [len(due) for due in flushed.values()]
    row = np.repeat(np.arange(len(actions)), counts)
    source = sources[row]
    first = np.cumsum(counts) - counts
    part = np.arange(len(row)) - np.repeat(first, counts)
    for flush, due in flushed.items():
        source[first[flush] : first[flush] + len(due)] = due
    with_weights = actions.where(row)
    is_given = source >= 0
    given = {
        name: np.where(is_given, np.append(backwards[name], NONE)[source], with_weights[name])
        for name in ("stage", "chunk", "microbatch")
    }
    of_flush = (is_unnamed & flushes)[row]
    parts = {"part": np.where(of_flush, part, 0), "parts": np.where(of_flush, counts[row], 1)}
    return with_weights.with_columns(given | parts)


def _sources(ranges: Ranges, actions: Slice, backwards: Slice, is_single: Bool) -> Int64:
    """Backward whose weight gradient each action is; −1 where it is none, or is not one of ``is_single``."""
    sources = np.full(len(actions), NONE)
    rows = np.flatnonzero(is_single)
    steps, step = np.unique(actions["step"], return_inverse=True)
    start = ranges.start_ns[actions["range"]]
    forwards = np.isin(actions["kind"], (Kind.F.code, Kind.OVERLAP_F_B.code))
    last_forward = reduce_groups(np.maximum, start[forwards], step[forwards], len(steps))
    low, high = (np.searchsorted(backwards["step"], steps, side=side) for side in ("left", "right"))
    before = np.searchsorted(backwards["row"], rows, side="right") - 1
    sources[rows] = np.where(before >= low[step[rows]], before, NONE)
    trailing = rows[start[rows] > last_forward[step[rows]]]
    num_trailing = np.bincount(step[trailing], minlength=len(steps))
    begin = high - num_trailing
    begin = np.where(begin < low, np.maximum(begin + (high - low), low), begin)
    last = begin[step[trailing]] + _counts_before(step[trailing])
    is_left = last < high[step[trailing]]
    sources[trailing[is_left]] = last[is_left]
    return sources


def _flushed(actions: Slice, backwards: Slice, flushes: Int64) -> dict[int, Int64]:
    """Backwards of each flush's chunk whose weight gradients are outstanding."""
    weights = actions.where(actions["kind"] == _W)
    names = ("step", "stage", "chunk", "microbatch")
    codes = group_codes([np.concatenate((backwards[name], weights[name])) for name in names])
    codes = pd.factorize(codes)[0]
    is_named = np.zeros(len(backwards) + len(weights), dtype=np.bool_)
    is_named[codes[len(backwards) :]] = True
    flushed: dict[int, Int64] = {}
    for flush in flushes.tolist():
        low = np.searchsorted(backwards["step"], actions["step"][flush])
        seen = np.arange(low, np.searchsorted(backwards["row"], flush, side="right"))
        same = [backwards[name][seen] == actions[name][flush] for name in ("stage", "chunk")]
        due = seen[same[0] & same[1] & ~is_named[codes[seen]]]
        is_named[codes[due]] = True
        flushed[flush] = due
    return flushed


def _split_backward(actions: Slice) -> Slice:
    """B as I where its weight gradient is an op of its own."""
    weights = actions.where(actions["kind"] == _W)
    if not len(weights):
        return actions
    known = [weights[name] for name in ("step", "stage", "chunk", "microbatch")]
    kinds = {}
    for prefix in ("", "second_"):
        kind = actions[f"{prefix}kind"]
        rows = np.flatnonzero(kind == _B)
        keys = [actions["step"], *(actions[f"{prefix}{name}"] for name in ("stage", "chunk", "microbatch"))]
        is_split = last_like([key[rows] for key in keys], known) >= 0
        kinds[f"{prefix}kind"] = kind.copy()
        kinds[f"{prefix}kind"][rows[is_split]] = Kind.I.code
    return actions.with_columns(kinds)
