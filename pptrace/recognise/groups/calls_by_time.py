"""Find the groups of collectives that name none, as gloo's, by when they ran, of ranks that read one clock of one host.

No member of a group is through a collective in which all wait for all before the last one has begun it. So a call is of no group
of which another member is in no such call meanwhile; and a call of another rank that is the only one which can be its other side
is of no other group. Ranks that were together by chance leave calls that may be of several groups. All ranks make the calls of
one kind, size and part of the step in groups of one shape: where all such calls can be of those of one shape, and many cannot be
of any other, they are of that one, if it gives the members of each group equally many. What else may be of several stays open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from msgspec import Struct

from pptrace.clock.bounds import ALL_TO_ALL
from pptrace.clock.result import READING_NS
from pptrace.ingest.common.rank_names import ranks_of
from pptrace.model.tables import Bool, Int64
from pptrace.model.wording import counted
from pptrace.recognise.groups.axes import NO_GROUP, groups_by_members
from pptrace.recognise.groups.calls_by_members import DistinctCalls, Members, Signature, is_unnamed, kinds_with_sizes
from pptrace.recognise.groups.topology import Group


class _Calls(Struct, frozen=True):
    """The calls of one kind and size of a rank in order of start: their rows in its table, and the groups that each may be of.

    ``ended_ns`` is when the last of the calls up to each one ended; ``span`` when the first call of the rank began and the last
    ended. ``part`` is that of the step in which each was made
    (:class:`~pptrace.recognise.groups.usage.When`).
    """

    row: Int64
    start_ns: Int64
    end_ns: Int64
    ended_ns: Int64
    span: tuple[int, int]
    is_open: Bool
    part: Int64
    may_be: Mapping[Members, Bool]

    @property
    def num_possible(self) -> Int64:
        """The number of groups that each call may be of."""
        count: Int64 = np.sum([*self.may_be.values()], axis=0, dtype=np.int64)
        return count

    def named(self, ranks: Members) -> Bool:
        """Mark the calls that name this group."""
        return self.may_be[ranks] & ~self.is_open


def with_groups_by_time(
    calls: Mapping[int, pd.DataFrame],
    distributed: Mapping[int, Mapping[str, Any]],
    have_one_clock: Callable[[int, int], bool],
) -> tuple[Mapping[int, pd.DataFrame], tuple[str, ...]]:
    """Fill in the group of collectives that name none, where other ranks were in no call of any other; with a line about them.

    Args:
        calls: by rank its communication (schema CALLS).
        distributed: by rank what its profiler wrote about the job, with the groups that the rank is in (``pg_config``).
        have_one_clock: whether two ranks read one clock of one host.
    """
    unnamed = {rank: is_unnamed(table) & table["kind"].isin(ALL_TO_ALL).to_numpy() for rank, table in calls.items()}
    if not any(rows.any() for rows in unnamed.values()):
        return calls, ()
    sized = kinds_with_sizes(calls.values())
    distinct = {rank: DistinctCalls.of(table, unnamed[rank], sized) for rank, table in calls.items()}
    groups = {rank: groups_by_members(distributed.get(rank, {})) for rank in calls}
    groups = {rank: {} if () in of_rank else of_rank for rank, of_rank in groups.items()}
    found = {rank: np.full(len(table), -1) for rank, table in calls.items()}
    members = list(dict.fromkeys(ranks for of_rank in groups.values() for ranks in of_rank))
    number = {ranks: index for index, ranks in enumerate(members)}
    signatures = (
        signature
        for of_rank in distinct.values()
        for signature, is_open in zip(of_rank.signatures, of_rank.is_unnamed, strict=True)
        if is_open
    )
    for signature in dict.fromkeys(signatures):
        of_ranks = {rank: _calls_of(calls[rank], distinct[rank], signature, groups[rank]) for rank in calls}
        for rank, ranks, rows in _sure(of_ranks, have_one_clock):
            found[rank][rows] = number[ranks]
    num_found = sum(int((of_rank >= 0).sum()) for of_rank in found.values())
    if not num_found:
        return calls, ()
    filled = {
        rank: distinct[rank].with_groups(table, found[rank], [groups[rank].get(ranks, NO_GROUP) for ranks in members])
        for rank, table in calls.items()
    }
    line = (
        f"{counted(num_found, 'collective')} without a recorded group are of the one whose members, by the clock of their host, "
        "were in such a call together"
    )
    return filled, (line,)


_NEAR = 4
"""Places in the order of a group to each side of a member whose calls are compared with its: groups may have a thousand."""


def _calls_of(
    calls: pd.DataFrame, distinct: DistinctCalls, signature: Signature, groups: Mapping[Members, Group]
) -> _Calls:
    codes = [code for code, other in enumerate(distinct.signatures) if other == signature]
    row = np.flatnonzero(np.isin(distinct.number, codes) & (calls["clock"] == "host").to_numpy())
    row = row[np.argsort(calls["start_ns"].to_numpy()[row], kind="stable")]
    start, end = (calls[name].to_numpy() for name in ("start_ns", "end_ns"))
    by_name = {group.id: group.ranks for group in groups.values()}
    names = zip(distinct.first_calls["group_id"], distinct.first_calls["group_ranks"], strict=True)
    known = [ranks_of(ranks) or by_name.get(name, ()) for name, ranks in names]
    open_codes = [code for code in codes if distinct.is_unnamed[code]]
    number = distinct.number[row]
    is_open = np.isin(number, open_codes)
    may_be = {
        ranks: is_open | np.isin(number, [code for code in codes if code not in open_codes and known[code] == ranks])
        for ranks in groups
    }
    span = (int(start.min()), int(end.max())) if len(calls) else (0, -1)
    return _Calls(
        row,
        start[row],
        end[row],
        np.maximum.accumulate(end[row]),
        span,
        is_open,
        calls["backward"].to_numpy()[row],
        may_be,
    )


def _partners(calls: _Calls, others: _Calls, ranks: Members) -> tuple[Int64, Int64, Bool]:
    """The other sides, on one other rank, that calls in a group of these ranks may have: (how many, the only one where it is one,
    whether the other rank may not have been recorded then).
    """
    possible = others.may_be.get(ranks)
    if possible is None:  # another rank's groups are not known
        nothing = np.zeros(len(calls.row), dtype=np.int64)
        return nothing, nothing, np.ones(len(calls.row), dtype=np.bool_)
    begin, end = others.span
    low = np.searchsorted(others.ended_ns, calls.start_ns - READING_NS)
    high = np.maximum(np.searchsorted(others.start_ns, calls.end_ns + READING_NS, side="right"), low)
    before = np.append(0, np.cumsum(possible))
    only = np.searchsorted(before, before[low] + 1) - 1
    return before[high] - before[low], only, (calls.start_ns < begin) | (calls.end_ns > end)


def _sure(
    of_ranks: Mapping[int, _Calls], have_one_clock: Callable[[int, int], bool]
) -> Iterator[tuple[int, Members, Int64]]:
    """(rank, ranks of the group, rows) of open calls that can be of one group alone; none where a call can be of none."""
    groups = list(dict.fromkeys(ranks for calls in of_ranks.values() for ranks in calls.may_be))
    pairs = [
        (ranks, rank, other)
        for ranks in groups
        for rank, other in _neighbours(ranks)
        if rank in of_ranks and other in of_ranks and have_one_clock(rank, other)
    ]
    pairs = [pair for pair in pairs if pair[0] in of_ranks[pair[1]].may_be]
    while sum(_narrow(of_ranks[rank], of_ranks[other], ranks) for ranks, rank, other in pairs):
        pass
    if any((calls.num_possible[calls.is_open] == 0).any() for calls in of_ranks.values() if calls.may_be):
        return  # the clocks, or what was recorded, contradict every group
    sure = {
        (rank, ranks): calls.is_open & may_be & (calls.num_possible == 1)
        for rank, calls in of_ranks.items()
        for ranks, may_be in calls.may_be.items()
        if len(calls.may_be) > 1  # else what names no group is known to be of the only one
    }
    is_changed = True
    while is_changed:  # until each has its other sides among them
        is_changed = False
        for ranks, rank, other in pairs:
            others = of_ranks[other]
            count, only, _ = _partners(of_ranks[rank], others, ranks)
            others_sure = sure.get((other, ranks), others.num_possible == 1)
            named = others.may_be.get(ranks, False) & ~others.is_open
            answered = np.append(others_sure | named, False)[only]
            if (rank, ranks) not in sure:
                continue
            lone = sure[rank, ranks] & ~(answered & (count == 1))
            sure[rank, ranks] &= ~lone
            is_changed |= bool(lone.any())
    met = {key: np.zeros(len(chosen), dtype=np.bool_) for key, chosen in sure.items()}
    for ranks, rank, other in pairs:
        if (rank, ranks) in met:
            met[rank, ranks] |= _partners(of_ranks[rank], of_ranks[other], ranks)[0] > 0
    for (rank, ranks), chosen in _with_shapes(sure, met, of_ranks).items():
        yield rank, ranks, of_ranks[rank].row[chosen]


Chosen: TypeAlias = Mapping[tuple[int, Members], Bool]
"""Calls that are of a group, by rank and the ranks of the group."""
Shape: TypeAlias = tuple[int, int | None]
"""Size and stride of a group."""
_MANY, _SHARE = 8, 0.1
"""The calls that cannot be of a shape from which on none like them are of it: their number, and their share."""


def _with_shapes(sure: Chosen, met: Chosen, of_ranks: Mapping[int, _Calls]) -> Chosen:
    """Add the open calls of each part of the step that can be of groups of one shape alone, and mostly met another side there."""
    chosen = dict(sure)
    for part in np.unique(np.concatenate([calls.part[calls.is_open] for calls in of_ranks.values()])).tolist():
        of_part = {rank: calls.is_open & (calls.part == part) for rank, calls in of_ranks.items()}
        of_part = {rank: rows for rank, rows in of_part.items() if rows.any()}
        shape = _only_shape({rank: (of_ranks[rank], rows) for rank, rows in of_part.items()})
        of_shape = {
            (rank, ranks): of_part[rank] for rank, ranks in sure if shape == _shape_of(ranks) and rank in of_part
        }
        num_met = sum(np.count_nonzero(rows & (met[key] | (len(key[1]) == 1))) for key, rows in of_shape.items())
        if 2 * num_met > sum(map(np.sum, of_part.values())):
            chosen |= {key: chosen[key] | rows for key, rows in of_shape.items()}
    count = {key: int(np.count_nonzero(rows | of_ranks[key[0]].named(key[1]))) for key, rows in chosen.items()}
    for rank, calls in of_ranks.items():  # what a rank in one group alone calls is of that group
        if len(calls.may_be) == 1:
            count.update({(rank, ranks): int(np.count_nonzero(may_be)) for ranks, may_be in calls.may_be.items()})
    return {
        (rank, ranks): rows
        if all(count.get((other, ranks), -1) == count[rank, ranks] for other in ranks if other in of_ranks)
        else sure[rank, ranks]
        for (rank, ranks), rows in chosen.items()
    }


def _only_shape(calls: Mapping[int, tuple[_Calls, Bool]]) -> Shape | None:
    """The one shape of groups that all these calls can be of, one group of each rank; None where many could be of another."""
    num_impossible: dict[Shape, list[int]] = {}
    for of_rank, rows in calls.values():
        for ranks, may_be in of_rank.may_be.items():
            num_impossible.setdefault(_shape_of(ranks), []).append(int(np.count_nonzero(rows & ~may_be)))
    enough = max(_MANY, _SHARE * sum(int(rows.sum()) for _, rows in calls.values()))
    possible = [shape for shape, counts in num_impossible.items() if sum(counts) < enough]
    if len(possible) > 1:  # ranks alone in their groups, which wait for none, are not in all calls together
        possible = [(size, stride) for size, stride in possible if size > 1]
    if len(possible) != 1 or num_impossible[possible[0]] != [0] * len(calls):
        return None
    return possible[0]


def _shape_of(ranks: Members) -> Shape:
    return len(ranks), Group("", "", ranks, len(ranks)).stride


def _neighbours(ranks: Members) -> Iterator[tuple[int, int]]:
    """Pairs of members that are compared: of a small group all, of a large one those near each other in its order."""
    for place, rank in enumerate(ranks):
        near = {ranks[(place + step) % len(ranks)] for step in range(-_NEAR, _NEAR + 1)}
        yield from ((rank, other) for other in sorted(near - {rank}))


def _narrow(calls: _Calls, others: _Calls, ranks: Members) -> bool:
    """Take the group of these ranks from calls without another side on a member, and other groups from the only other sides of
    calls that are of this one; return whether there were any.
    """
    count, only, is_outside = _partners(calls, others, ranks)
    may_be = calls.may_be[ranks]
    impossible = may_be & (count == 0) & ~is_outside
    may_be &= ~impossible
    taken = only[may_be & (calls.num_possible == 1) & (count == 1) & ~is_outside]
    is_changed = bool(impossible.any())
    for other_ranks, of_others in others.may_be.items():
        if other_ranks != ranks:
            is_changed |= bool(of_others[taken].any())
            of_others[taken] = False
    return is_changed
