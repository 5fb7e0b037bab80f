"""Pipelines that send by broadcasts in groups of two ranks, as early DeepSpeed did: these broadcasts as sends and receives.

A broadcast in a group of two is a message from its root to the other rank. Over the links of a pipeline activations and
gradients go both ways, tensors of one size, and ranks compute in between: of replicas one copies its parameters and buffers
to the other, or each some, at once or in the optimizer, and a student sends its loss back to its teacher. Links form chains;
whether they explain what the ranks ran, ops and autograd tell (:mod:`pptrace.recognise.infer.locate_unlabelled`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from pptrace.ingest.common.rank_names import ranks_of
from pptrace.marks import P2P, Collective
from pptrace.model.tables import Bool, Int64, What
from pptrace.model.wording import as_ranges
from pptrace.recognise.groups.axes import NO_GROUP, configured_groups
from pptrace.recognise.groups.topology import Chain, call_keys
from pptrace.slices import distinct_of, rows_among, rows_where

_SHORTEST = 3
"""Ranks of a chain from which on its links are no replicas, of which one sends its parameters or buffers to the other."""

_MOST_NEIGHBOURS = 2
_COMPUTING = (What.OPERATOR.value, What.ENGINE.value)
_Links = tuple[Int64, Int64]
"""(rows of a rank's broadcasts in groups of two whose root is known; of each the two ranks in ascending order, and the root)."""


def two_way_broadcasts(calls: pd.DataFrame) -> Int64:
    """The rows of a rank's calls (schema CALLS) that are broadcasts in groups of two of which each is the root of some."""
    rows, ends = _links(calls)
    return rows[_are_of(ends, _two_way(ends))]


def with_messages_of_links(
    calls: Mapping[int, pd.DataFrame], hosts: Mapping[int, pd.DataFrame]
) -> Mapping[int, pd.DataFrame]:
    """The calls with the broadcasts over the links of pipelines as messages; these calls themselves where there are none.

    Args:
        calls: by rank its communication (schema CALLS).
        hosts: by rank, if it may be of such a pipeline, what its thread did (schema HOST_ORDER).
    """
    found = {rank: _posted(calls[rank], hosts[rank]) for rank in hosts}
    links: set[tuple[int, int]] = set()
    for rank, (rows, ends) in found.items():
        two_way, (posted_ns, num_bytes) = _two_way(ends), calls[rank][["host_ns", "bytes"]].to_numpy()[rows].T
        for of_pair in (_are_of(ends, [pair]) for pair in two_way):
            is_sent, sizes = ends[of_pair, 2] == rank, num_bytes[of_pair]
            have_same_size = np.intersect1d(sizes[is_sent], sizes[~is_sent]).size > 0
            if not have_same_size or not _computes_between(posted_ns[of_pair], is_sent, hosts[rank]):
                return calls
        links |= two_way
    if not links or max(Counter(rank for pair in links for rank in pair).values()) > _MOST_NEIGHBOURS:
        return calls
    return dict(calls) | {rank: _with_messages(rank, calls[rank], *of_rank, links) for rank, of_rank in found.items()}


def _posted(calls: pd.DataFrame, host: pd.DataFrame) -> _Links:
    """The broadcasts that the host posted as what may be messages."""
    rows, ends = _links(calls)
    begins = np.append(calls["host_ns"].to_numpy(), np.iinfo(np.int64).max)
    messages = host.loc[host["what"] == What.MESSAGE.value, "start_ns"].to_numpy()
    is_posted = np.diff(np.searchsorted(messages, begins))[rows] > 0
    return rows[is_posted], ends[is_posted]


def _links(calls: pd.DataFrame) -> _Links:
    is_known = (calls["peer"] >= 0).to_numpy() | (calls["local_peer"] >= 0).to_numpy()
    rows = np.flatnonzero(is_known & rows_among(calls["kind"], [Collective.BROADCAST]))
    columns = [calls[name].iloc[rows] for name in ("group_ranks", "peer", "local_peer")]
    number, first = distinct_of(columns)
    distinct = []
    for text, peer, local_peer in zip(*(column.iloc[first].tolist() for column in columns), strict=True):
        members = ranks_of(text)
        root = members[local_peer] if peer < 0 and local_peer < len(members) else peer
        distinct.append((*sorted(members), root) if len(members) == 2 and root in members else (-1, -1, -1))
    ends = np.array(distinct, dtype=np.int64).reshape(-1, 3)[number]
    is_link = ends[:, 2] >= 0
    return rows[is_link], ends[is_link]


def _two_way(ends: Int64) -> set[tuple[int, int]]:
    """The pairs of ranks of which each is the root of some broadcasts."""
    distinct = {*map(tuple, ends.tolist())}
    return {(low, high) for low, high, root in distinct if root == low and (low, high, high) in distinct}


def _are_of(ends: Int64, pairs: Collection[tuple[int, int]]) -> Bool:
    return np.array([(low, high) in pairs for low, high, _ in ends.tolist()], dtype=np.bool_)


def _computes_between(posted_ns: Int64, is_sent: Bool, host: pd.DataFrame) -> bool:
    """Return whether a rank computes between at least every other change of direction over a link, but for one."""
    computing = host.loc[host["what"].isin(_COMPUTING), "start_ns"].to_numpy()
    has_computed = np.diff(np.searchsorted(computing, posted_ns)) > 0
    turns = is_sent[1:] != is_sent[:-1]
    return 2 * int(np.count_nonzero(turns & has_computed)) + 1 >= int(np.count_nonzero(turns))


def _with_messages(
    rank: int, calls: pd.DataFrame, rows: Int64, ends: Int64, links: Collection[tuple[int, int]]
) -> pd.DataFrame:
    """The calls of a rank with its broadcasts over links as sends and receives."""
    is_of_link = _are_of(ends, links)
    rows, (low, high, root) = rows[is_of_link], ends[is_of_link].T
    kind, peer = (calls[name].to_numpy(copy=True) for name in ("kind", "peer"))
    kind[rows] = np.where(root == rank, *P2P)
    peer[rows] = np.where(low == rank, high, low)
    return calls.assign(kind=kind, peer=peer)


def line_of_broadcast_links(
    calls: Mapping[int, pd.DataFrame], distributed: Mapping[int, Mapping[str, Any]]
) -> tuple[str, ...]:
    """A line about broadcasts in groups of two ranks that form a chain, where no rank sends or receives otherwise.

    Args:
        calls: by rank its communication (schema CALLS).
        distributed: by rank what its profiler wrote about the job, with the groups that the rank is in (``pg_config``).
    """
    if any(rows_among(table["kind"], P2P).any() for table in calls.values()):
        return ()
    edges = {
        (pair[0], pair[1])
        for rank, table in calls.items()
        for pair in _groups_of_broadcasts(rank, table, distributed.get(rank, {}))
        if len(pair) == 2
    }
    members = sorted({rank for edge in edges for rank in edge})
    is_line = len(edges) == len(members) - 1 and bool(Chain(tuple(members), frozenset(edges), is_whole=True).ends)
    if len(members) < _SHORTEST or not is_line:
        return ()
    if any(len(_links(table)[0]) for table in calls.values()):
        why = (
            "no schedule explains these broadcasts as its messages: record operators if they are not (--record full), or "
            "exchange tensors by torch.distributed.send, isend or batch_isend_irecv"
        )
    else:
        why = "no call tells its group and its root: record with pptrace run, or calls of NCCL with record_shapes=True"
    return (
        f"ranks {as_ranges(members)} broadcast in groups of two along a chain and send no messages: if that is a pipeline, its "
        f"ops are not recognised, because {why}",
    )


def _groups_of_broadcasts(rank: int, calls: pd.DataFrame, distributed: Mapping[str, Any]) -> Iterator[tuple[int, ...]]:
    """The groups of a rank's broadcasts; all of its groups where none is named."""
    configured = configured_groups(distributed)
    _, keys = call_keys(rank, rows_where(calls, rows_among(calls["kind"], [Collective.BROADCAST])))
    for _, name, _, ranks, _ in keys:
        known = ranks_of(ranks) or configured.get(name, NO_GROUP).ranks
        yield from [known] if name or known else [group.ranks for group in configured.values()]
