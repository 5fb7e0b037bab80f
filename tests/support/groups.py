"""Process groups, as what profilers write of them and as columns of calls."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType


def facts_of_groups(
    world: int, groups: Iterable[Sequence[int]], descriptions: Mapping[int, str] = MappingProxyType({})
) -> dict[int, dict[str, object]]:
    """Facts that each profiler writes of the groups that its rank is in, under their numbers, with or without a description."""
    entries = [
        {"pg_name": str(index), "pg_desc": descriptions.get(index, "undefined"), "pg_size": len(of_group)}
        | {"ranks": list(of_group)}
        for index, of_group in enumerate(groups)
    ]
    return {
        rank: {"world_size": world, "pg_config": [entry for entry in entries if rank in entry["ranks"]]}
        for rank in range(world)
    }


def group_columns(number: int, ranks: Sequence[int]) -> dict[str, object]:
    """The group of a call."""
    return {"group_id": str(number), "group_ranks": json.dumps(list(ranks)), "group_size": len(ranks)}
