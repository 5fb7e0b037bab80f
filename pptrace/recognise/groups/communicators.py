"""Global ranks of the members of communicators in which each process records only its own rank."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from pptrace.model.traces import COMMUNICATORS

Facts = Mapping[int, Mapping[str, Any]]
_UNSURE = (
    "no communicator contains all processes of these files: their ranks are null, and so are the peers of messages"
)


@dataclass(frozen=True, slots=True)
class Members:
    """Calls with the ranks of their groups, each rank's facts of the job, and a warning where ranks are uncertain."""

    calls: Mapping[int, pd.DataFrame]
    distributed: Facts
    warnings: tuple[str, ...] = ()


def with_members(calls: Mapping[int, pd.DataFrame], facts: Facts, distributed: Facts) -> Members:
    """Fill in the ranks of communicators whose members all have a trace and record their rank.

    A process takes its place in the largest communicator for its rank where that has as many ranks as there are files: which is
    right if all of them are in one.

    Args:
        calls, facts, distributed: by rank; ``facts`` name the communicators of ranks whose calls are to be filled in.
    """
    communicators = {
        rank: rank_facts[COMMUNICATORS]
        for rank, rank_facts in facts.items()
        if isinstance(rank_facts.get(COMMUNICATORS), Mapping)
    }
    claimed = [rank for rank in communicators if distributed.get(rank, {}).get("rank") == rank]
    if not claimed:
        return Members(calls, distributed)
    by_group: dict[str, tuple[int, dict[int, int]]] = {}  # size, and the global rank of each member by its rank in it
    for rank in claimed:
        for group, (position, size) in communicators[rank].items():
            by_group.setdefault(group, (size, {}))[1][position] = rank
    ranks = {
        group: [members[position] for position in range(size)] if set(members) == set(range(size)) else []
        for group, (size, members) in by_group.items()
    }
    if sorted(claimed) not in ranks.values():
        unsure = {rank: {} if rank in communicators else rank_facts for rank, rank_facts in distributed.items()}
        return Members(calls, unsure, (_UNSURE,))
    known = {group: json.dumps(members) for group, members in ranks.items() if members}
    filled = {
        rank: table.assign(group_ranks=[known.get(group, "") for group in table["group_id"]])
        if rank in communicators
        else table
        for rank, table in calls.items()
    }
    return Members(filled, distributed)
