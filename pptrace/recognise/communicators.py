"""Communicators that name each process's place alone → the global ranks of their members."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pandas as pd

from pptrace.ingest.nccl_inspector import COMMUNICATORS


def with_members(
    calls: Mapping[int, pd.DataFrame],
    facts: Mapping[int, Mapping[str, Any]],
    distributed: Mapping[int, Mapping[str, Any]],
) -> dict[int, pd.DataFrame]:
    """``calls`` with the ranks of those communicators of which each member has a trace and says its own rank.

    Args:
        calls, facts, distributed: by rank; ``facts`` name the communicators of ranks whose calls are to be filled in.
    """
    ranks = {group: _ordered(own) for group, own in _members(facts, distributed).items()}
    known = {group: json.dumps(own) for group, own in ranks.items() if own}
    filled = dict(calls)
    for rank, own in facts.items():
        if COMMUNICATORS in own and rank in calls:
            table = calls[rank]
            filled[rank] = table.assign(group_ranks=[known.get(group, "") for group in table["group_id"]])
    return filled


def _members(
    facts: Mapping[int, Mapping[str, Any]], distributed: Mapping[int, Mapping[str, Any]]
) -> dict[str, tuple[int, dict[int, int]]]:
    """By communicator its size, and the global rank at each of its places."""
    found: dict[str, tuple[int, dict[int, int]]] = {}
    for rank, own in facts.items():
        if distributed.get(rank, {}).get("rank") == rank:
            for group, (place, size) in own.get(COMMUNICATORS, {}).items():
                found.setdefault(group, (size, {}))[1][place] = rank
    return found


def _ordered(members: tuple[int, Mapping[int, int]]) -> list[int]:
    """The global ranks in the order of their places; [] unless all are known."""
    size, ranks = members
    return [ranks[place] for place in range(size)] if set(ranks) == set(range(size)) and size == len(ranks) else []
