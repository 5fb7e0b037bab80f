"""Match the calls of traces without marks: both ends of a message, and the members of a collective.

Calls of an all-to-all of uneven parts belong together by their splits: what one rank sends to another is what that one gets from
it. Calls whose sizes never agree are kept apart so, also where ranks recorded different numbers of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from pptrace.marks import P2P
from pptrace.model.splits import parse_splits
from pptrace.recognise.messages.match import (
    MatchNumbers,
    messages_by_rank_pair,
    number_by_name,
    shifts_by_sizes,
    with_ends,
)
from pptrace.slices import Slice, slice_of

_Call = tuple[Sequence[int], Sequence[int], int]
"""Rows sent to each member and received from each (empty: not known), and bytes."""


def match_calls(calls: pd.DataFrame, first: int = 0) -> pd.DataFrame:
    """The calls of unmarked traces (schema CALL_COMMS) with ``match`` filled, counted from ``first``.

    Members of a collective have the same group, kind and sequence number or, without one, the same position in the order of the
    group's calls; the two ends of a message the same position in the order of messages from one rank to the other. Where one side
    recorded more than the other, sizes must say how the orders belong together, of all-to-alls of uneven parts their splits;
    otherwise all of them keep -1.
    """
    if calls.empty:
        return calls.copy()
    numbers = MatchNumbers(len(calls))
    ordered = calls.assign(row=np.arange(len(calls))).sort_values("start_ns", kind="stable")
    is_p2p = ordered["kind"].isin(P2P)
    messages = ordered[is_p2p & (ordered["peer"] >= 0)]
    number_by_name(
        messages[(messages["direction"] != "") & (messages["microbatch"] >= 0) & (messages["stage"] >= 0)], numbers
    )
    for rows in messages_by_rank_pair(with_ends(messages[numbers.of_row[messages["row"]] < 0])):
        _number(rows, numbers, exact=True)
    rest = ordered[~is_p2p & (ordered["group"] != "") & (ordered["group_size"] > 1)]
    for _, same in rest.groupby(["group", "kind"], sort=False, observed=True):
        size = int(same["group_size"].iloc[0])
        if same["rank"].nunique() != size:
            continue
        if (same["seq"] >= 0).all():
            nth = same.groupby(["rank", "seq"]).cumcount()
            call = same.groupby([same["seq"], nth], sort=False).ngroup().to_numpy()
            is_complete = np.bincount(call)[call] == size
            _, index = np.unique(call[is_complete], return_inverse=True)
            numbers.give_groups(same["row"].to_numpy()[is_complete], index)
        else:
            _number(list(slice_of(same).by("rank").values()), numbers)
    return calls.assign(match=np.where(numbers.of_row >= 0, numbers.of_row + first, -1))


def _number(sides: Sequence[Slice], numbers: MatchNumbers, exact: bool = False) -> None:
    """Give the i-th calls of all sides one number, as far as their orders belong together: of the run, else of each step."""

    def shifts_of(part: Sequence[Slice]) -> list[int] | None:
        if not exact and have_splits(part):
            return shifts_by_splits(part)
        return shifts_by_sizes([side["bytes"].tolist() for side in part], exact)

    by_step = [side.by("step") for side in sides] if shifts_of(sides) is None else []
    common = sorted(set.intersection(*map(set, by_step)) - {-1}) if by_step else []
    for part in [[of_side[step] for of_side in by_step] for step in common] if by_step else [sides]:
        shifts = shifts_of(part)
        if shifts is not None:
            numbers.give([side["row"][shift:] for side, shift in zip(part, shifts, strict=True)])


def have_splits(sides: Sequence[Slice]) -> bool:
    """Return whether some call of every side has splits."""
    return all(any(side["splits"].tolist()) for side in sides)


def shifts_by_splits(sides: Sequence[Slice]) -> list[int] | None:
    """Number of calls of each side before the first that all sides have; ``sides`` are in the order of the group.

    None where no order of them fits, or more than one.
    """
    calls = [
        [
            (*parse_splits(splits), size)
            for splits, size in zip(side["splits"].tolist(), side["bytes"].tolist(), strict=True)
        ]
        for side in sides
    ]
    base = min(range(len(calls)), key=lambda index: len(calls[index]))
    shifts = []
    for index, side in enumerate(calls):
        spare = len(side) - len(calls[base])
        possible = [
            shift
            for shift in range(spare + 1)
            if index == base
            or all(_belong_together(*pair, base, index) for pair in zip(calls[base], side[shift:], strict=False))
        ]
        if len(possible) != 1:
            return None
        shifts.append(possible[0])
    return shifts


def _belong_together(call: _Call, other_call: _Call, member: int, other: int) -> bool:
    (sent, received, size), (sent_back, received_back, other_size) = call, other_call
    if not sent or not sent_back:
        return bool(sent) == bool(sent_back) and (size == other_size or -1 in (size, other_size))
    if max(member, other) >= min(len(sent), len(sent_back)):
        return False
    return sent[other] == received_back[member] and received[other] == sent_back[member]
