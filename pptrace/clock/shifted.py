"""Ranks whose times are shifted against those of others on their host, though ranks of a host read one clock.

A recorder reads the clock when it begins and ends: a rank whose ops lie outside of that, where those of others do not, has other
times than it had. Ranks of one host are recorded together: times that do not overlap are off, or of another run. And messages
say how far a clock is off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from pptrace.clock.result import Clock
from pptrace.clock.same_host import host_name, readings_of
from pptrace.model.tables import Int64
from pptrace.model.traces import HOST, ONE_CLOCK
from pptrace.slices import reduce_groups, rows_where

Mask = npt.NDArray[np.bool_]
_BEGINNING_NS = 1_000_000
_ENDING_NS = 10_000_000
"""Ops that begin so much before the first reading of the clock, or end so much after the last one, are no doubt of their times: a
recorder reads it before it starts, and before it stops, which takes a while.
"""
_SYNCHRONISED_NS = 1_000_000_000
"""Closer than this are the clocks of two hosts, which may have one name: NTP keeps them together."""


@dataclass(frozen=True, slots=True)
class RecordedTimes:
    """Begin of the first op of each rank, end of the last one, and of the last one on the host, ns on each rank's own clock.

    Of shape (n,) each, in the order of the ranks. Of ranks without ops it is that of their communication; one without either
    begins last of all and ends first.
    """

    begin_ns: Int64
    end_ns: Int64
    host_end_ns: Int64

    @classmethod
    def of(cls, ranks: Sequence[int], ops: pd.DataFrame, comms: pd.DataFrame) -> RecordedTimes:
        """The times of these ranks' ops (schema OPS), of ranks without any those of their communication (schema COMMS)."""
        names = ["rank", "start_ns", "end_ns", "clock"]
        others = rows_where(comms, ~comms["rank"].isin(ops["rank"].unique()))
        ops = pd.concat((ops[names], others[names])) if len(others) else ops
        ops = ops[ops["rank"].isin(ranks)]
        rank = np.searchsorted(np.asarray(ranks), ops["rank"].to_numpy())
        start_ns, end_ns = (ops[name].to_numpy(dtype=np.int64) for name in ("start_ns", "end_ns"))
        is_host = (ops["clock"] == "host").to_numpy()
        return cls(
            reduce_groups(np.minimum, start_ns, rank, len(ranks)),
            reduce_groups(np.maximum, end_ns, rank, len(ranks)),
            reduce_groups(np.maximum, end_ns[is_host], rank[is_host], len(ranks)),
        )

    def overlap(self, index: int) -> Mask:
        """Shape (n,): which ranks' times overlap those of one; those of ranks without times might."""
        is_known = self.begin_ns <= self.end_ns
        meets = (self.begin_ns <= self.end_ns[index]) & (self.begin_ns[index] <= self.end_ns)
        found: Mask = meets | ~is_known | ~is_known[index]
        return found


def shifted_in_hosts(
    ranks: Sequence[int], facts: Mapping[int, Mapping[str, object]], ops: pd.DataFrame, comms: pd.DataFrame
) -> set[int]:
    """The ranks whose times are not those of their host's other ranks, as readings of its clock and the times themselves tell."""
    found: set[int] = set()
    hosts = ranks_by_host(ranks, facts)
    if not hosts:
        return found
    times = RecordedTimes.of(ranks, ops, comms)
    outside = _outside_of_readings(ranks, facts, times)
    for members in hosts:
        wrong = {index for index in members if outside[index]}
        if len(wrong) == len(members):  # times on a clock that is not that of the readings
            wrong = set()
        others = [index for index in members if index not in wrong]
        overlaps = [times.overlap(index)[others] for index in others]
        most = max(overlaps, key=np.count_nonzero)
        found |= {ranks[index] for index in (*wrong, *_minority(others, most))}
    return found


def shifted_by_messages(
    clock: Clock, ranks: Sequence[int], facts: Mapping[int, Mapping[str, object]], known: Set[int], least_ns: int
) -> set[int]:
    """The ranks that messages have put elsewhere than others on their host, by more than ``least_ns`` and than is uncertain.

    Of a host with ranks that are ``known`` to be shifted there are no others.
    """
    found: set[int] = set()
    for members in ranks_by_host(ranks, facts):
        of_host = [index for index in members if ranks[index] not in clock.unrelated]
        if known & {ranks[index] for index in members}:
            continue
        least = max(least_ns, clock.uncertainty_ns or 0)
        if any(facts.get(ranks[index], {}).get("host") is None for index in of_host):
            least = max(least, _SYNCHRONISED_NS)
        offsets = np.array([clock.offsets_ns[ranks[index]] for index in of_host], dtype=np.int64)
        agreeing = [np.abs(offsets - offset) <= least for offset in offsets]
        if agreeing:
            found |= {ranks[index] for index in _minority(of_host, max(agreeing, key=np.count_nonzero))}
    return found


def ranks_by_host(ranks: Sequence[int], facts: Mapping[int, Mapping[str, object]]) -> list[list[int]]:
    """The indices of the ranks of each host that has several, in files of their own."""
    hosts: dict[str, list[int]] = {}
    for index, rank in enumerate(ranks):
        if host := _host_of(facts.get(rank, {})):
            hosts.setdefault(host, []).append(index)
    return [members for members in hosts.values() if len(members) > 1]


def _host_of(facts: Mapping[str, object]) -> str | None:
    """The name that ranks of one host share: by its recorder, else by the traces; None in a file of several ranks."""
    shared = facts.get(ONE_CLOCK)
    if shared is not None:
        return str(shared) if str(shared).startswith(HOST) else None
    return host_name(facts) if facts.get("host") is None else str(facts["host"])


def _outside_of_readings(
    ranks: Sequence[int], facts: Mapping[int, Mapping[str, object]], times: RecordedTimes
) -> list[bool]:
    """Tell of each rank whether ops begin before its recorder read the clock first, or end on the host after it read it last."""
    outside = []
    for index, rank in enumerate(ranks):
        walls = [wall for wall, _ in readings_of(facts.get(rank, {}))]
        if len(walls) > 1 and min(walls) == max(walls):  # it stopped before it began to record
            walls = []
        is_early = bool(walls) and int(times.begin_ns[index]) < min(walls) - _BEGINNING_NS
        is_late = len(walls) > 1 and int(times.host_end_ns[index]) > max(walls) + _ENDING_NS
        outside.append(is_early or is_late)
    return outside


def _minority(members: Sequence[int], agrees: Mask) -> list[int]:
    """The members that do not agree with most; all of them where no most do."""
    others = [member for member, is_one in zip(members, agrees.tolist(), strict=True) if not is_one]
    return others if 2 * len(others) < len(members) else list(members)
