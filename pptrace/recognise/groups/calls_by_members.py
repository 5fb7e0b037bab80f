"""Find the groups of collectives that name none, as gloo's, by what other ranks do: all members of a group make its collectives.

A rank that is in one group alone tells that group. Others have made as many of its calls; a group of which another member makes
no such call is not meant. Calls of one kind and size that may be of several groups stay open.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from msgspec import Struct

from pptrace.ingest.common.rank_names import ranks_of
from pptrace.marks import Collective
from pptrace.model.tables import MESSAGES, Bool, Int64
from pptrace.model.wording import counted
from pptrace.recognise.groups.axes import NO_GROUP, configured_groups, groups_by_members
from pptrace.recognise.groups.topology import GROUP_COLUMNS, Group
from pptrace.slices import distinct_of, rows_among

_OF_ONE_SIZE = (Collective.ALL_REDUCE, Collective.REDUCE, Collective.BROADCAST)
"""Kinds of which every member of a group calls with the same number of bytes."""
_SEVERAL = 2
"""Calls of a kind and size from which on a member without any is not one whose recording begins or ends elsewhere."""

Signature: TypeAlias = tuple[str, int]
"""Kind and bytes of a call; −1 bytes where members may have other sizes."""
Members: TypeAlias = tuple[int, ...]


class DistinctCalls(Struct, frozen=True):
    """A rank's calls by what they say of themselves: ``number`` has for each call that of its row of ``first_calls``."""

    number: Int64
    first_calls: pd.DataFrame
    signatures: Sequence[Signature]
    is_unnamed: Sequence[bool]

    @classmethod
    def of(cls, calls: pd.DataFrame, unnamed: Bool, sized: Sequence[str]) -> DistinctCalls:
        """The calls of a rank, the sizes of those of some kinds alone."""
        sizes = np.where(rows_among(calls["kind"], sized), calls["bytes"], -1)
        number, first = distinct_of([calls["kind"], sizes, unnamed, *(calls[name] for name in GROUP_COLUMNS)])
        first_calls = calls[["kind", *GROUP_COLUMNS]].iloc[first]
        signatures = zip(first_calls["kind"].astype(str).tolist(), sizes[first].tolist(), strict=True)
        return cls(number, first_calls, tuple(signatures), unnamed[first].tolist())

    def with_groups(self, calls: pd.DataFrame, found: Int64, groups: Sequence[Group]) -> pd.DataFrame:
        """The calls with the groups that were found: ``found`` has for each call the index of its group, −1 for none."""
        if (found < 0).all():
            return calls
        number, first = distinct_of([self.number, found])
        columns = {name: self.first_calls[name].iloc[self.number[first]].tolist() for name in GROUP_COLUMNS}
        for row, index in enumerate(found[first].tolist()):
            if index >= 0:
                group = groups[index]
                values = (group.id, group.description, json.dumps(list(group.ranks)), len(group.ranks))
                for column, value in zip(columns.values(), values, strict=True):
                    column[row] = value
        return calls.assign(**{name: pd.Series(values).array[number] for name, values in columns.items()})


class _Rank(Struct):
    """Groups that the calls of one rank may be of.

    ``groups`` are the first group of each set of ranks that it is in, ``open`` the number of calls without a group, ``known`` the
    number of those of a set of ranks; ``found`` is filled with what the open ones are of.
    """

    groups: dict[Members, Group]
    open: dict[Signature, int]
    known: dict[tuple[Signature, Members], int]
    found: dict[Signature, Members]

    def most(self, signature: Signature, members: Members) -> int:
        """The most calls of these members that the rank can have made."""
        return self.known.get((signature, members), 0) + self.open.get(signature, 0)

    def assign(self, signature: Signature, members: Members) -> None:
        """Take all open calls of a kind and size for those of one group."""
        self.known[signature, members] = self.most(signature, members)
        self.found[signature] = members
        del self.open[signature]


def with_groups_by_members(
    calls: Mapping[int, pd.DataFrame], distributed: Mapping[int, Mapping[str, Any]]
) -> tuple[Mapping[int, pd.DataFrame], tuple[str, ...]]:
    """Fill in the group of collectives that name none, where the calls of its other members leave one; with a line about them.

    Args:
        calls: by rank its communication (schema CALLS).
        distributed: by rank what its profiler wrote about the job, with the groups that the rank is in (``pg_config``).
    """
    unnamed = {rank: is_unnamed(table) for rank, table in calls.items()}
    if not any(rows.any() for rows in unnamed.values()):
        return calls, ()
    sized = kinds_with_sizes(calls.values())
    distinct = {rank: DistinctCalls.of(table, unnamed[rank], sized) for rank, table in calls.items()}
    ranks = {rank: _rank_of(of_rank, distributed.get(rank, {})) for rank, of_rank in distinct.items()}
    while any(_assign_one(rank, ranks) for rank in sorted(ranks)):
        pass
    filled = {rank: _filled(table, distinct[rank], ranks[rank]) for rank, table in calls.items()}
    num_filled = sum(int((filled[rank]["group_ranks"] != calls[rank]["group_ranks"]).sum()) for rank in calls)
    if not num_filled:
        return calls, ()
    line = (
        f"{counted(num_filled, 'collective')} without a recorded group are of the one whose members all make such calls"
    )
    return filled, (line,)


def is_unnamed(calls: pd.DataFrame) -> Bool:
    """Mark the collectives of a host that name neither their group nor its ranks."""
    named = (calls[["group_id", "description", "group_ranks"]] != "").to_numpy().any(axis=1)
    on_host = (calls["clock"] == "host").to_numpy()
    unnamed: Bool = ~named & on_host & ~rows_among(calls["kind"], MESSAGES)
    return unnamed


def kinds_with_sizes(calls: Iterable[pd.DataFrame]) -> Sequence[str]:
    """Kinds of which sizes tell calls: those of which no call lacks its size."""
    without = {kind for table in calls for kind in table.loc[table["bytes"] < 0, "kind"].unique().tolist()}
    return [kind for kind in _OF_ONE_SIZE if kind not in without]


def _rank_of(calls: DistinctCalls, distributed: Mapping[str, Any]) -> _Rank:
    groups, configured = groups_by_members(distributed), configured_groups(distributed)
    result = _Rank(groups if () not in groups else {}, {}, {}, {})
    counts = np.bincount(calls.number, minlength=len(calls.signatures)).tolist()
    columns = (calls.first_calls["group_id"].tolist(), calls.first_calls["group_ranks"].tolist())
    for signature, is_open, count, name, ranks in zip(
        calls.signatures, calls.is_unnamed, counts, *columns, strict=True
    ):
        if is_open:
            result.open[signature] = result.open.get(signature, 0) + count
        else:
            members = ranks_of(ranks) or configured.get(name, NO_GROUP).ranks
            result.known[signature, members] = result.known.get((signature, members), 0) + count
    return result


def _assign_one(rank: int, ranks: Mapping[int, _Rank]) -> bool:
    """Assign the open calls of each kind and size of a rank that can be of one group alone; return whether there were any."""
    of_rank, is_changed = ranks[rank], False
    for signature in list(of_rank.open):
        possible = [members for members in of_rank.groups if rank in members and _may_be(signature, members, ranks)]
        due = [members for members in possible if _is_due(rank, signature, members, ranks)]
        chosen = due if len(due) == 1 else possible
        if len(chosen) == 1:
            of_rank.assign(signature, chosen[0])
            is_changed = True
    return is_changed


def _may_be(signature: Signature, members: Members, ranks: Mapping[int, _Rank]) -> bool:
    """Return whether all members that have a trace can have made such a call in their group."""
    most = [ranks[member].most(signature, members) for member in members if member in ranks]
    return min(most) > 0 or max(most) < _SEVERAL


def _is_due(rank: int, signature: Signature, members: Members, ranks: Mapping[int, _Rank]) -> bool:
    """Return whether all open calls are needed for those that other members have made in the group for sure."""
    others = (ranks[member] for member in members if member != rank and member in ranks)
    needed = max((other.known.get((signature, members), 0) for other in others), default=0)
    return needed > 0 and ranks[rank].most(signature, members) == needed


def _filled(calls: pd.DataFrame, distinct: DistinctCalls, of_rank: _Rank) -> pd.DataFrame:
    """The calls with the groups that were found."""
    if not of_rank.found or len(of_rank.groups) == 1:
        return calls
    members = list(of_rank.groups)
    index = [
        members.index(of_rank.found[signature]) if unnamed and signature in of_rank.found else -1
        for signature, unnamed in zip(distinct.signatures, distinct.is_unnamed, strict=True)
    ]
    return distinct.with_groups(calls, np.array(index)[distinct.number], list(of_rank.groups.values()))
