"""Pipelines that send by broadcasts in groups of two ranks, as early DeepSpeed did, and whose ops are unknown: a line on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from pptrace.marks import P2P, Collective
from pptrace.model.wording import as_ranges
from pptrace.recognise.groups.axes import configured_groups
from pptrace.recognise.groups.topology import Chain, call_keys, ranks_of
from pptrace.slices import rows_among, rows_where

_SHORTEST = 3
"""Ranks of a chain from which on its links are no replicas, of which one sends its parameters or buffers to the other."""


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
    return (
        f"ranks {as_ranges(members)} broadcast in groups of two along a chain and send no messages: if that is a pipeline, its "
        "ops are not recognised; exchange tensors by torch.distributed.send, isend or batch_isend_irecv to have them",
    )


def _groups_of_broadcasts(rank: int, calls: pd.DataFrame, distributed: Mapping[str, Any]) -> Iterator[tuple[int, ...]]:
    """The groups of a rank's broadcasts; all of its groups where none is named."""
    configured = configured_groups(distributed)
    _, keys = call_keys(rank, rows_where(calls, rows_among(calls["kind"], [Collective.BROADCAST])))
    for _, name, _, ranks, _ in keys:
        known = ranks_of(ranks) or (configured[name].ranks if name in configured else ())
        yield from [known] if name or known else [group.ranks for group in configured.values()]
