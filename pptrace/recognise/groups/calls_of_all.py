"""Find collectives of all ranks where no call names its process group, as of Kineto of older versions of torch.

A collective ends together on its ranks, however late each of them came to it. Where all ranks of a run have a trace and make the
same collectives in one order, one offset of each rank's clock lets them end together, and some ranks come much later than
others, they are collectives of all ranks: groups of fewer would end as far apart as they began.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import pandas as pd

from pptrace.clock.bounds import ALL_TO_ALL
from pptrace.clock.result import READING_NS
from pptrace.model.wording import counted

_TOGETHER_NS = 2 * READING_NS
"""Largest distance of the ends of one collective on clocks whose drift is not known."""
_MOST = 0.9
"""Share of the collectives that have to end together: an exchange may be over on one rank before it is on others."""
_LEAST = 3
"""Number of collectives that ranks have to come to at different times: a single one can end together by chance."""
_LATER = 5
"""Times as far apart as their ends are the beginnings of those collectives."""


def with_group_of_all(
    calls: Mapping[int, pd.DataFrame], world: int | None
) -> tuple[Mapping[int, pd.DataFrame], tuple[str, ...]]:
    """Fill in the group of collectives that are of all ranks for sure; with a warning about them.

    Unchanged where a call names a group, or may be a message between two ranks.

    Args:
        calls: by rank its communication (schema CALLS), each rank in its own time.
        world: the number of ranks of the job, None if no trace tells it.
    """
    if world is None or world < 2 or set(calls) != set(range(world)):
        return calls, ()
    ordered = [calls[rank].sort_values("start_ns", kind="stable") for rank in range(world)]
    kinds = ordered[0]["kind"].tolist()
    if not len(kinds) >= _LEAST or not set(kinds) <= set(ALL_TO_ALL):
        return calls, ()
    if any(table["kind"].tolist() != kinds or _is_named(table) for table in ordered):
        return calls, ()
    ran = np.all([(table["clock"] == "device").to_numpy() for table in ordered], axis=0)
    if ran.sum() < _LEAST:
        return calls, ()
    begins, ends = (np.array([table[name].to_numpy()[ran] for table in ordered]) for name in ("start_ns", "end_ns"))
    offset = np.median(ends - ends[0], axis=1).astype(np.int64)[:, None]
    apart, ended_apart = np.ptp(begins - offset, axis=0), np.ptp(ends - offset, axis=0)
    is_together = ended_apart <= _TOGETHER_NS
    is_late = is_together & (apart >= _LATER * ended_apart) & (apart > _TOGETHER_NS)
    if is_together.mean() < _MOST or is_late.sum() < _LEAST:
        return calls, ()
    ranks = json.dumps(list(range(world)))
    line = (
        f"no call names its process group: the {counted(len(kinds), 'collective')} of each rank are taken for those of all "
        f"{world} ranks, since every rank makes them in one order and they end together (within "
        f"{np.median(ended_apart) / 1e3:,.1f} µs, where ranks begin up to {apart.max() / 1e3:,.1f} µs apart)"
    )
    return {rank: table.assign(group_ranks=ranks, group_size=world) for rank, table in calls.items()}, (line,)


def _is_named(calls: pd.DataFrame) -> bool:
    """Return whether a call says of which group it is."""
    names = (calls[["group_id", "description", "group_ranks"]] != "").to_numpy()
    return bool(names.any() or (calls["group_size"] >= 0).any())
