"""Find the peers of messages that name a place in a group and not the group, as gloo's do: every message has two ends.

Places are global ranks in the default group. Where messages then lack their other end, they went through other groups: those of
a rank through the one in which all of them have it, else each through its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from msgspec import Struct

from pptrace.marks import P2P
from pptrace.model.tables import UNKNOWN, Bool, Int64
from pptrace.model.wording import as_ranges
from pptrace.recognise.groups.axes import configured_groups, groups_by_members
from pptrace.recognise.groups.topology import axis_of_description
from pptrace.slices import distinct_of, rows_among

Members = tuple[int, ...]


class _Message(NamedTuple):
    """Facts that a rank's messages of one kind tell about their other end."""

    kind: str
    local_peer: int
    num_bytes: int


class _End(NamedTuple):
    """A rank's messages that say the same."""

    rank: int
    message: _Message

    def peer_in(self, members: Members) -> int:
        """The global rank of the peer, if they went through this group; −1 where the group has none."""
        local_peer = self.message.local_peer
        is_member = self.rank in members and local_peer < len(members) and members[local_peer] != self.rank
        return members[local_peer] if is_member else UNKNOWN

    def other_in(self, members: Members) -> _End:
        """Facts that the peer in this group tells about them."""
        kind, local_peer, num_bytes = self.message
        opposite = next(other for other in P2P if other != kind)
        return _End(members[local_peer], _Message(opposite, members.index(self.rank), num_bytes))


Messages = Mapping[int, Mapping[_Message, int]]
"""Messages by rank that name a place in an unnamed group, and how many say the same."""


class _DistinctMessages(Struct, frozen=True):
    """A rank's messages that name a place in an unnamed group: ``rows`` marks them among its calls, ``number`` has for each that
    of what it says.
    """

    rows: Bool
    number: Int64
    distinct: Sequence[_Message]

    @classmethod
    def of(cls, calls: pd.DataFrame) -> _DistinctMessages:
        unnamed = (calls[["group_id", "description", "group_ranks"]] == "").to_numpy().all(axis=1)
        named_locally = ((calls["peer"] < 0) & (calls["local_peer"] >= 0)).to_numpy()
        rows = unnamed & named_locally & rows_among(calls["kind"], P2P)
        columns = [calls[name][rows] for name in ("kind", "local_peer", "bytes")]
        number, first = distinct_of(columns)
        distinct = map(_Message, *(column.iloc[first].tolist() for column in columns))
        return cls(rows, number, tuple(distinct))

    def counted(self) -> dict[_Message, int]:
        return dict(zip(self.distinct, np.bincount(self.number).tolist(), strict=True))

    def with_peers(self, rank: int, calls: pd.DataFrame, peers: Mapping[_End, int]) -> pd.DataFrame:
        """The calls of the rank with global ranks instead of places."""
        if not self.distinct:
            return calls
        peer, local_peer = calls["peer"].to_numpy(copy=True), calls["local_peer"].to_numpy(copy=True)
        peer[self.rows] = np.array([peers.get(_End(rank, message), UNKNOWN) for message in self.distinct])[self.number]
        local_peer[self.rows] = UNKNOWN
        return calls.assign(peer=peer, local_peer=local_peer)


def with_peers_by_members(
    calls: Mapping[int, pd.DataFrame], distributed: Mapping[int, Mapping[str, Any]]
) -> tuple[Mapping[int, pd.DataFrame], tuple[str, ...]]:
    """Fill in the peers of messages that name a place in an unnamed group, unless places are global ranks; with a line about it.

    Where several peers are possible, there is none.

    Args:
        calls: by rank its communication (schema CALLS).
        distributed: by rank what its profiler wrote about the job, with the groups that the rank is in (``pg_config``).
    """
    unnamed = {rank: _DistinctMessages.of(table) for rank, table in calls.items()}
    messages = {rank: of_rank.counted() for rank, of_rank in unnamed.items()}
    named_locally = [rank for rank, of_rank in messages.items() if of_rank]
    if all(_has_both_ends(rank, _usual_group(distributed.get(rank, {})), messages) for rank in named_locally):
        return calls, ()
    groups = {rank: _groups_of(distributed.get(rank, {})) for rank in named_locally}
    possible = {
        end: others for rank in named_locally for end, others in _other_ends(rank, groups[rank], messages).items()
    }
    peers = _peers_of_all(possible)
    filled = {rank: unnamed[rank].with_peers(rank, table, peers) for rank, table in calls.items()}
    line = (
        f"peers of messages of rank {as_ranges(named_locally)} are places in process groups that no call names: those of the "
        "groups in which every message has both ends"
    )
    return filled, (line,)


def _groups_of(distributed: Mapping[str, Any]) -> Sequence[Members]:
    """The sets of ranks of the groups that a rank is in."""
    return [ranks for ranks in groups_by_members(distributed) if ranks]


def _usual_group(distributed: Mapping[str, Any]) -> Members:
    """The group that a message is of for which nothing else speaks: that of the pipeline, else the default group."""
    groups = configured_groups(distributed).values()
    described = (group.ranks for group in groups if axis_of_description(group.description) == "pp")
    world = distributed.get("world_size")
    default = tuple(range(world)) if isinstance(world, int) else ()
    return next(described, next((group.ranks for group in groups if group.description == "default_pg"), default))


def _has_other_end(end: _End, members: Members, messages: Messages) -> bool:
    """Return whether the peer in this group has such a message with this rank, or no trace."""
    peer = end.peer_in(members)
    return peer >= 0 and (peer not in messages or end.other_in(members).message in messages[peer])


def _has_both_ends(rank: int, members: Members, messages: Messages) -> bool:
    """Return whether all messages of a rank have their other end in this group; also where its ranks are unknown."""
    return not members or all(_has_other_end(_End(rank, message), members, messages) for message in messages[rank])


def _other_ends(rank: int, groups: Sequence[Members], messages: Messages) -> dict[_End, set[_End]]:
    """Possible other ends of each of a rank's messages: in the groups in which all have one, else in which there are as many."""
    of_all = [members for members in groups if _has_both_ends(rank, members, messages)]
    result: dict[_End, set[_End]] = {}
    for message, count in messages[rank].items():
        end = _End(rank, message)
        others = [end.other_in(members) for members in of_all or groups if _has_other_end(end, members, messages)]
        result[end] = {
            other
            for other in others
            if of_all or other.rank not in messages or messages[other.rank].get(other.message, 0) == count
        }
    return result


def _peers_of_all(possible: dict[_End, set[_End]]) -> dict[_End, int]:
    """The peer of each end that is sure of it. An end that can have one other end only takes it from all others."""
    rivals: dict[_End, list[_End]] = {}
    for end, others in possible.items():
        for other in others:
            rivals.setdefault(other, []).append(end)
    sure = [end for end, others in possible.items() if len(others) == 1]
    while sure:
        end = sure.pop()
        for other in list(possible[end]):  # none where a rival was as sure
            for rival in rivals[other]:
                if rival != end and other in possible[rival]:
                    possible[rival].discard(other)
                    sure += [rival] * (len(possible[rival]) == 1)
            if len(possible.get(other, ())) > 1:
                possible[other] &= {end}
                sure += [other] * len(possible[other])
    peers = {end: {other.rank for other in others} for end, others in possible.items()}
    return {end: ranks.pop() for end, ranks in peers.items() if len(ranks) == 1}
