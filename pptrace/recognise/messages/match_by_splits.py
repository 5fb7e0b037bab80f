"""Calls of an all-to-all of uneven parts that belong together: what one rank sends to another is what that one gets from it.

Calls whose sizes never agree are kept apart so, also where ranks recorded different numbers of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from pptrace.model.splits import parse_splits
from pptrace.slices import Slice

_Call = tuple[tuple[int, ...], tuple[int, ...], int]
"""Rows sent to each member and received from each (empty: not known), and bytes."""


def have_splits(sides: Sequence[Slice]) -> bool:
    """Return whether some call of every side has splits."""
    return all(any(side["splits"].tolist()) for side in sides)


def shifts_by_splits(sides: Sequence[Slice]) -> list[int] | None:
    """Number of calls of each side before the first that all sides have; ``sides`` are in the order of the group.

    None where no order of them fits, or more than one.
    """
    calls = [list(map(_call, side["splits"].tolist(), side["bytes"].tolist())) for side in sides]
    base = min(range(len(calls)), key=lambda index: len(calls[index]))
    shifts = []
    for index, side in enumerate(calls):
        spare = len(side) - len(calls[base])
        possible = [shift for shift in range(spare + 1) if _fit(calls[base], base, side[shift:], index)]
        if len(possible) != 1:
            return None
        shifts.append(possible[0])
    return shifts


def _call(splits: str, num_bytes: int) -> _Call:
    sent, received = parse_splits(splits)
    return tuple(sent), tuple(received), num_bytes


def _fit(calls: Sequence[_Call], member: int, others: Sequence[_Call], other: int) -> bool:
    return member == other or all(
        _belong_together(call, member, another, other) for call, another in zip(calls, others, strict=False)
    )


def _belong_together(call: _Call, member: int, another: _Call, other: int) -> bool:
    (sent, received, size), (sent_back, received_back, other_size) = call, another
    if not sent or not sent_back:
        return bool(sent) == bool(sent_back) and (size == other_size or -1 in (size, other_size))
    if max(member, other) >= min(len(sent), len(sent_back)):
        return False
    return sent[other] == received_back[member] and received[other] == sent_back[member]
