"""Puts all ranks on one clock, and says how well that is known.

A message cannot be received before it is sent, and a collective ends on no rank before it has begun on all. Each such
pair bounds the difference of two ranks' clocks from one side; messages both ways bound it from both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt
import pandas as pd


class ClockMethod(StrEnum):
    SINGLE_RANK = "single-rank"
    SAME_HOST = "same-host"  # the ranks read one clock of one host
    BOUNDS = "message-bounds"  # offsets from the causality of messages and collectives
    NONE = "none"  # nothing relates the ranks: their times are taken as they are


@dataclass(frozen=True, slots=True)
class Clock:
    """What was added to each rank's times, ns, and how far off that may be; None where nothing bounds it."""

    method: ClockMethod
    offsets_ns: Mapping[int, int]
    uncertainty_ns: int | None
    warnings: tuple[str, ...] = field(default=())


_UNBOUNDED = np.iinfo(np.int64).max // 4


def estimate_clock(comms: pd.DataFrame, ranks: Sequence[int], facts: Mapping[int, Mapping[str, object]]) -> Clock:
    """The clock of a set of ranks.

    Args:
        comms: matched communication (schema COMMS) in each rank's own time.
        ranks: the global ranks.
        facts: per rank what its recorder wrote down: ``host`` and ``clock``, readings of the wall and the monotonic clock.
    """
    ordered = sorted(ranks)
    if len(ordered) < 2:
        return Clock(ClockMethod.SINGLE_RANK, dict.fromkeys(ordered, 0), 0)
    low = _lower_bounds(comms, ordered)
    spread = _same_host_spread(ordered, facts)
    if spread is not None:
        violated = int(low.max())  # the diagonal is 0
        if violated <= spread + _READING_NS:
            return Clock(ClockMethod.SAME_HOST, dict.fromkeys(ordered, 0), max(spread, violated))
    if low.max(initial=-_UNBOUNDED, where=~np.eye(len(ordered), dtype=bool)) <= -_UNBOUNDED:
        warning = "the ranks' clocks could not be related: no matched messages; their times are compared as they are"
        return Clock(ClockMethod.NONE, dict.fromkeys(ordered, 0), None, (warning,))
    return _from_bounds(ordered, low)


_READING_NS = 50_000
"""A profiler's own conversion of one host clock may differ by some µs between processes; more than this is no reading error."""


def _same_host_spread(ranks: Sequence[int], facts: Mapping[int, Mapping[str, object]]) -> int | None:
    """How far the ranks' (wall − monotonic) differ, ns, when all ran on one host; None otherwise."""
    hosts = {str(facts.get(rank, {}).get("host")) for rank in ranks}
    if len(hosts) != 1 or "None" in hosts:
        return None
    differences = [
        int(sample["time_ns"]) - int(sample["monotonic_ns"])
        for rank in ranks
        for sample in _samples(facts.get(rank, {}))
    ]
    return max(differences) - min(differences) if differences else None


def _samples(facts: Mapping[str, object]) -> list[Mapping[str, int]]:
    """The clock readings of a rank: {"start": {…}, "stop": {…}}, each with ``time_ns`` and ``monotonic_ns``."""
    readings = facts.get("clock")
    if not isinstance(readings, Mapping):
        return []
    return [
        reading
        for reading in readings.values()
        if isinstance(reading, Mapping)
        and all(isinstance(reading.get(key), int) for key in ("time_ns", "monotonic_ns"))
    ]


Matrix = npt.NDArray[np.int64]
_ALL_TO_ALL = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Collectives in which everyone waits for everyone; a broadcast's root, say, may be done before the others begin."""


def _lower_bounds(comms: pd.DataFrame, ranks: Sequence[int]) -> Matrix:
    """Shape (n, n): offset[j] − offset[i] ≥ low[i, j], from single messages and collectives; its upper bound is −low[j, i]."""
    place = {rank: index for index, rank in enumerate(ranks)}
    low = np.full((len(ranks), len(ranks)), -_UNBOUNDED, dtype=np.int64)
    matched = comms[comms["match"] >= 0]
    sends, recvs = matched[matched["kind"] == "send"], matched[matched["kind"] == "recv"]
    one_way = sends.merge(recvs, on="match", suffixes=("_from", "_to"))
    both = matched[matched["kind"].isin(_ALL_TO_ALL)]
    collective = both.merge(both, on="match", suffixes=("_from", "_to"))
    pairs = pd.concat([one_way, collective[collective["rank_from"] != collective["rank_to"]]])
    if len(pairs):
        slack = pairs["start_ns_from"] - pairs["end_ns_to"]
        tightest = slack.groupby([pairs["rank_from"], pairs["rank_to"]]).max()
        source = [place[rank] for rank in tightest.index.get_level_values(0)]
        target = [place[rank] for rank in tightest.index.get_level_values(1)]
        low[source, target] = tightest.to_numpy()
    np.fill_diagonal(low, 0)
    return low


def _from_bounds(ranks: Sequence[int], low: Matrix) -> Clock:
    """Offsets against the first rank, in the middle of what all chains of messages allow."""
    after_first, before_first = _longest_chains(low), _longest_chains(low.T)
    offsets: dict[int, int] = {}
    uncertainty = 0
    warnings = []
    for index, rank in enumerate(ranks):
        lower, upper = int(after_first[index]), -int(before_first[index])
        if lower > -_UNBOUNDED // 2 and upper < _UNBOUNDED // 2:
            offsets[rank] = (lower + upper) // 2
            uncertainty = max(uncertainty, (abs(upper - lower) + 1) // 2)
        elif lower > -_UNBOUNDED // 2 or upper < _UNBOUNDED // 2:
            offsets[rank] = lower if lower > -_UNBOUNDED // 2 else upper
            warnings.append(f"rank {rank}: messages bound its clock from one side only; its offset is that bound")
        else:
            offsets[rank] = 0
            warnings.append(f"rank {rank}: no message relates its clock to rank {ranks[0]}'s; taken as it is")
    return Clock(ClockMethod.BOUNDS, offsets, None if warnings else uncertainty, tuple(warnings))


def _longest_chains(low: Matrix) -> npt.NDArray[np.int64]:
    """Shape (n,): the tightest bound that a chain of at most n−1 pairs puts on each rank against the first.

    Clocks that drift contradict each other a little, which makes endless chains ever longer: hence the limit.
    """
    best: npt.NDArray[np.int64] = low[0].copy()
    for _ in range(len(low) - 2):
        further = np.maximum((best[:, None] + low).max(axis=0), -_UNBOUNDED)
        if (further <= best).all():
            break
        best = np.maximum(best, further)
    return best


def shift(table: pd.DataFrame, clock: Clock) -> pd.DataFrame:
    """The table with every ``*_ns`` column on the common clock."""
    offset = table["rank"].map(clock.offsets_ns).fillna(0).astype("int64")
    return table.assign(**{name: table[name] + offset for name in table.columns if name.endswith("_ns")})
