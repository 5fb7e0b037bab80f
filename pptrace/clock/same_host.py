"""Clocks of ranks on one host, by readings that each recorder took, or by the host's name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from pptrace.clock.bounds import Matrix, Pairs, is_bounded, offset_ranges
from pptrace.clock.op_order import with_op_ends
from pptrace.clock.result import READING_NS
from pptrace.model.traces import HOST_NAME

_ANY_HOST = frozenset({"", "localhost", "localhost.localdomain", "(none)", "none", "unknown"})
"""Names of hosts without a name of their own."""


def same_host_spread(ranks: Sequence[int], facts: Mapping[int, Mapping[str, object]]) -> int | None:
    """Spread of the ranks' (wall − monotonic), ns, when all ran on one host; None otherwise."""
    hosts = {str(facts.get(rank, {}).get("host")) for rank in ranks}
    if len(hosts) != 1 or "None" in hosts:
        return None
    differences = [wall - monotonic for rank in ranks for wall, monotonic in readings_of(facts.get(rank, {}))]
    return max(differences) - min(differences) if differences else None


def readings_of(facts: Mapping[str, object]) -> list[tuple[int, int]]:
    """(wall, monotonic) clock, ns, of each reading that a rank's recorder took; its fact is damaged where one lacks."""
    readings = facts.get("clock")  # {"start": {"time_ns": …, "monotonic_ns": …}, "stop": …}
    found = []
    for reading in readings.values() if isinstance(readings, Mapping) else ():
        wall, monotonic = (
            (reading.get("time_ns"), reading.get("monotonic_ns")) if isinstance(reading, Mapping) else (None, None)
        )
        if isinstance(wall, int) and isinstance(monotonic, int):
            found.append((wall, monotonic))
    return found


def pairs_of_same_host_name(ranks: Sequence[int], facts: Mapping[int, Mapping[str, object]]) -> Pairs:
    """Pairs of ranks on hosts of one name, as their traces say; a recorder's own fact about the host outweighs the name."""
    names = [host_name(facts.get(rank, {})) for rank in ranks]
    return np.array([[name is not None and name == other for other in names] for name in names], dtype=np.bool_)


def drop_contradicted(
    named: Pairs,
    low: Matrix,
    ranks: Sequence[int],
    comms: pd.DataFrame,
    ops: pd.DataFrame,
    pipelines: Sequence[Sequence[int]],
) -> Pairs:
    """The pairs with one host name that share a clock: neither messages nor the order of ops contradict it.

    Containers and hosts may share a name. Where messages do not relate the ranks, their traces have to cover a common time.

    Args:
        low: what messages tell (:func:`~pptrace.clock.bounds.lower_bounds`).
        comms, ops: in each rank's own time.
    """
    same = named.copy()
    labelled = ops[ops["source"] == "label"]
    bounds = with_op_ends(low, ranks, labelled, pipelines) if len(labelled) else low
    rows = pd.concat([table[["rank", "start_ns", "end_ns"]] for table in (comms, ops)])
    extents = rows.groupby("rank").agg(begin=("start_ns", "min"), end=("end_ns", "max"))
    spans = {int(str(rank)): (int(begin), int(end)) for rank, begin, end in extents.itertuples()}
    for members in {tuple(np.flatnonzero(row).tolist()) for row in named if row.any()}:
        inside = np.ix_(members, members)
        related = all(is_bounded(*bound) for bound in offset_ranges(low[inside]))
        begins, lasts = zip(*(spans.get(ranks[index], _ANY_TIME) for index in members), strict=True)
        if bounds[inside].max() > READING_NS or not (related or max(begins) <= min(lasts)):
            same[inside] = False
    return same


def host_name(facts: Mapping[str, object]) -> str | None:
    """The name of the host, as the trace has it; None where it is that of any host, or the recorder says more."""
    name = facts.get(HOST_NAME)
    is_name = isinstance(name, str) and name.strip().lower() not in _ANY_HOST
    return str(name) if is_name and facts.get("host") is None else None


_ANY_TIME = (np.iinfo(np.int64).min, np.iinfo(np.int64).max)
