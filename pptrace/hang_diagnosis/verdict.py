"""Verdict from the wait-for graph: the ranks to blame, and those that only wait.

``mismatch`` is proof and takes precedence. A rank that is gone explains all that wait for it. Ranks that wait for each other
in a cycle do so forever. Otherwise the ranks that others wait for, and that wait for none, are late.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from pptrace.hang_diagnosis.calls import Call, Presence, RankCalls
from pptrace.hang_diagnosis.conflicts import Conflict, deviants, find_conflicts
from pptrace.hang_diagnosis.graph import hops_to, reachable, rings
from pptrace.hang_diagnosis.waits import Edge, Waits, find_waits


class Verdict(StrEnum):
    MISSING = "missing"
    CYCLE = "cycle"
    MISMATCH = "mismatch"
    LATE = "late"


@dataclass(frozen=True, slots=True)
class Hang:
    """A verdict on a stuck run. ``hops`` are those from each rank that only waits to the nearest of the guilty."""

    verdict: Verdict
    ranks: tuple[int, ...]
    edges: tuple[Edge, ...]
    hops: Mapping[int, int] = field(default_factory=dict)
    conflict: Conflict | None = None
    ring: tuple[Edge, ...] = ()


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A hang, or None with the reason why there is no verdict. ``ranks`` is the input by rank."""

    hang: Hang | None
    reason: str
    ranks: Mapping[int, RankCalls]


def diagnose(ranks: Sequence[RankCalls]) -> Diagnosis:
    """Find the ranks to blame, from the state of all ranks at one moment."""
    rank_calls = {rank.rank: rank for rank in ranks}
    conflicts = find_conflicts(ranks)
    waits = find_waits(ranks, {(conflict.stream, conflict.seq) for conflict in conflicts})
    if not waits.edges:
        return Diagnosis(None, _why_none(waits), rank_calls)
    hang = (
        _mismatch(conflicts, waits)
        or _missing(rank_calls, waits)
        or _ring(rank_calls, waits)
        or _late(rank_calls, waits)
    )
    return Diagnosis(hang, "" if hang else _UNTRACED_RANKS, rank_calls)


_UNTRACED_RANKS = (
    "what the waiting ranks wait for lies on ranks of which nothing is known here: run this on all of them"
)


def _why_none(waits: Waits) -> str:
    if waits.in_transfer:
        return "every rank has made the calls that others wait in: they are in transfer, or the network or a device is stuck"
    return "no rank waits for another"


def _mismatch(conflicts: Sequence[Conflict], waits: Waits) -> Hang | None:
    stuck = waits.targets()
    for conflict in conflicts:
        if stuck.keys() & conflict.calls.keys():
            return _hang(Verdict.MISMATCH, conflict.guilty, waits, conflict=conflict)
    return None


def _missing(rank_calls: Mapping[int, RankCalls], waits: Waits) -> Hang | None:
    gone = [rank for rank in _roots(waits) if _presence(rank_calls, rank) in (Presence.GONE, Presence.EMPTY)]
    return _hang(Verdict.MISSING, gone, waits) if gone else None


def _ring(rank_calls: Mapping[int, RankCalls], waits: Waits) -> Hang | None:
    """Ranks that wait for each other in a cycle. One of them that skipped a collective that it called before is a mismatch."""
    targets = waits.targets()
    free = _roots(waits)
    any_of = {edge.rank for edge in waits.edges if edge.any_of}
    for ring in rings(targets):
        if any_of & set(ring) and reachable(targets, ring) & free:
            continue  # one of the receives from any rank may still be served
        edges = tuple(edge for edge in waits.edges if edge.rank in ring and set(edge.waits_for) & set(ring))
        if any(not edge.call.is_message for edge in edges):
            calls = {edge.rank: edge.call for edge in edges}
            guilty = deviants(calls, {rank: rank_calls[rank].calls for rank in calls})
            guilty = _others_than_most(calls) or guilty
            if guilty:
                return _hang(Verdict.MISMATCH, guilty, waits, ring=edges)
        return _hang(Verdict.CYCLE, ring, waits, ring=edges)
    return None


def _others_than_most(calls: Mapping[int, Call]) -> list[int]:
    """Ranks in another kind of collective than most of those that wait for each other in one process group.

    They have different numbers where C++ posts some of them, which are counted apart.
    """
    if len({(call.group.ranks, str(call.group)) for call in calls.values()}) > 1:
        return []
    kinds = Counter(call.kind for call in calls.values()).most_common(2)
    if len(kinds) < 2 or kinds[0][1] == kinds[1][1]:
        return []
    return [rank for rank, call in calls.items() if call.kind != kinds[0][0]]


def _late(rank_calls: Mapping[int, RankCalls], waits: Waits) -> Hang | None:
    late = [rank for rank in _roots(waits) if _presence(rank_calls, rank) is Presence.ALIVE]
    return _hang(Verdict.LATE, late, waits) if late else None


def _roots(waits: Waits) -> set[int]:
    """The ranks that others wait for and that wait for none."""
    targets = waits.targets()
    return {rank for others in targets.values() for rank in others if rank not in targets}


def _presence(rank_calls: Mapping[int, RankCalls], rank: int) -> Presence:
    return rank_calls[rank].presence if rank in rank_calls else Presence.EMPTY


def _hang(
    verdict: Verdict,
    guilty: Sequence[int],
    waits: Waits,
    conflict: Conflict | None = None,
    ring: tuple[Edge, ...] = (),
) -> Hang:
    hops = hops_to(waits.targets(), guilty)
    return Hang(verdict, tuple(sorted(guilty)), waits.edges, hops, conflict, ring)
