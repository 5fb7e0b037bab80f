"""Verdict from the wait-for graph: the ranks to blame, and those that only wait; as one sentence, and as the JSON field ``hang``.

``mismatch`` is proof and takes precedence. A rank that is gone explains all that wait for it. Ranks that wait for each other
in a cycle do so forever. The ranks that others wait for, and that wait for none, are late. A run may have several causes, of one
kind or of several: all are named which do not follow from those before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from pptrace.hang_diagnosis.calls import Call, CallState, Presence, RankCalls, Stream, rank_text
from pptrace.hang_diagnosis.graph import Conflict, deviants, find_conflicts, hops_to, reachable, rings, shortest_ring
from pptrace.hang_diagnosis.waits import Edge, Waits, find_waits, targets_of


class Verdict(StrEnum):
    MISSING = "missing"
    CYCLE = "cycle"
    MISMATCH = "mismatch"
    LATE = "late"


@dataclass(frozen=True, slots=True)
class Cause:
    """Ranks to blame for one reason, which follows from no other."""

    verdict: Verdict
    ranks: tuple[int, ...]
    conflict: Conflict | None = None
    ring: tuple[Edge, ...] = ()


@dataclass(frozen=True, slots=True)
class Hang:
    """A verdict on a stuck run: that of the first of its causes, and the guilty ranks of all.

    ``hops`` are those from each rank that only waits to the nearest of the guilty.
    """

    verdict: Verdict
    ranks: tuple[int, ...]
    edges: tuple[Edge, ...]
    causes: tuple[Cause, ...]
    hops: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, causes: Sequence[Cause], edges: tuple[Edge, ...]) -> Hang | None:
        """None without causes."""
        if not causes:
            return None
        ranks = tuple(sorted({rank for cause in causes for rank in cause.ranks}))
        hops = hops_to(targets_of(edges), ranks)
        return cls(causes[0].verdict, ranks, edges, tuple(causes), hops)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A hang, or None with the reason why there is no verdict. ``ranks`` is the input by rank."""

    hang: Hang | None
    reason: str
    ranks: Mapping[int, RankCalls]


def diagnose(ranks: Sequence[RankCalls], *, is_stuck: bool = True) -> Diagnosis:
    """Find the ranks to blame, from the state of all ranks at one moment.

    Args:
        is_stuck: whether the run had the time to get where its causes leave it; else a rank that is elsewhere may be about to
            come, and is no cause where there is another.
    """
    rank_calls = {rank.rank: rank for rank in ranks}
    conflicts = find_conflicts(ranks)
    waits = find_waits(ranks, {(conflict.stream, conflict.seq) for conflict in conflicts})
    for rank, call in waits.stuck.items():
        rank_calls[rank] = replace(rank_calls[rank], where=f"stuck in {call}, which others have completed")
    if not waits.edges:
        quiet = _UNRECORDED if any(rank.may_wait for rank in ranks) else "no rank waits for another"
        return Diagnosis(None, _IN_TRANSFER if waits.in_transfer else quiet, rank_calls)
    causes = [*_mismatches(conflicts, waits)]
    causes += _by_presence(Verdict.MISSING, rank_calls, waits, causes)
    causes += _rings(rank_calls, waits, causes)
    if is_stuck or not causes:
        causes += _by_presence(Verdict.LATE, rank_calls, waits, causes)
    hang = Hang.of(causes, waits.edges)
    return Diagnosis(hang, "" if hang else _untraced(waits), rank_calls)


_IN_TRANSFER = (
    "every rank has made the calls that others wait in: they are in transfer, or the network or a device is stuck"
)
_UNRECORDED = (
    "no rank waits for another in a collective; ranks may wait in messages, which gloo's recorder does not keep"
)


def _untraced(waits: Waits) -> str:
    waiting = {edge.rank for edge in waits.edges}
    verb = "waits" if len(waiting) == 1 else "wait"
    return f"{rank_text(waiting)} {verb} for {rank_text(_roots(waits))}, of which nothing is known here"


def _mismatches(conflicts: Sequence[Conflict], waits: Waits) -> Iterator[Cause]:
    """The first conflict in which a rank is stuck, and others with ranks of their own to blame in which one waits."""
    stuck = targets_of(waits.edges)
    waited_in = {(edge.call.stream(edge.rank), edge.call.seq) for edge in waits.edges}
    named: set[int] = set()
    for conflict in conflicts:
        guilty = set(conflict.guilty)
        is_here = (conflict.stream, conflict.seq) in waited_in and not guilty & named
        if stuck.keys() & conflict.calls.keys() and (is_here or not named):
            named |= guilty
            yield Cause(Verdict.MISMATCH, tuple(sorted(guilty)), conflict)


def _rings(rank_calls: Mapping[int, RankCalls], waits: Waits, before: Sequence[Cause]) -> list[Cause]:
    """Ranks that wait for each other in a cycle and for nothing else that is known.

    One of them that skipped a collective that it called before is a mismatch.
    """
    targets = targets_of(waits.edges)
    free = _roots(waits)
    any_of = {edge.rank for edge in waits.edges if edge.any_of}
    named = {rank for cause in before for rank in cause.ranks}
    causes: list[Cause] = []
    for ring in rings(targets):
        if any_of & set(ring) and reachable(targets, ring) & free:
            continue  # one of the receives from any rank may still be served
        if reachable(targets, ring) & named:
            continue
        edges = tuple(edge for edge in waits.edges if edge.rank in ring and set(edge.waits_for) & set(ring))
        calls, guilty = {edge.rank: edge.call for edge in edges}, list[int]()
        if any(not edge.call.is_message for edge in edges):
            history = {rank: rank_calls[rank].calls for rank in calls}
            guilty = _others_than_most(calls) or deviants(calls, history)
        verdict = Verdict.MISMATCH if guilty else Verdict.CYCLE
        causes.append(Cause(verdict, tuple(sorted(guilty)) or ring, ring=edges))
        named |= set(ring)
    return causes


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


def _by_presence(
    verdict: Verdict, rank_calls: Mapping[int, RankCalls], waits: Waits, before: Sequence[Cause]
) -> list[Cause]:
    """The roots that are there and late, or that are missing; of which there is no data are missing too."""
    ranks = tuple(
        rank
        for rank in _independent_roots(rank_calls, waits, before)
        if (rank_calls[rank].presence if rank in rank_calls else Presence.EMPTY) in _PRESENCES[verdict]
    )
    return [Cause(verdict, ranks)] if ranks else []


_PRESENCES = {Verdict.MISSING: (Presence.GONE, Presence.EMPTY), Verdict.LATE: (Presence.ALIVE,)}


def _independent_roots(rank_calls: Mapping[int, RankCalls], waits: Waits, before: Sequence[Cause]) -> list[int]:
    """The roots that none of the causes before explains.

    Beside these a rank is innocent whose last call failed, as calls do where the other end is gone; that took part in a call that
    does not fit; whose calls are complete but for the transfer; or that may wait in a call that is not recorded.
    """
    roots = sorted(_roots(waits))
    if not before:
        return roots
    explained = {rank for cause in before for rank in (*cause.ranks, *(cause.conflict.calls if cause.conflict else ()))}
    explained |= {
        rank.rank
        for rank in rank_calls.values()
        if rank.may_wait or (rank.calls and rank.calls[-1].state is CallState.FAILED)
    }
    return [rank for rank in roots if rank not in explained and rank not in waits.in_transfer]


def _roots(waits: Waits) -> set[int]:
    """The ranks that others wait for and that wait for none."""
    targets = targets_of(waits.edges)
    return {rank for others in targets.values() for rank in others if rank not in targets}


_MAX_LINKS = 4


def sentence(diagnosis: Diagnosis) -> str:
    """One sentence: the ranks to blame, those that only wait, and their hops; the reason where there is no verdict."""
    hang = diagnosis.hang
    if hang is None:
        return f"no verdict: {diagnosis.reason}"
    blames: list[str] = []
    for cause, previous in zip(hang.causes[:_MAX_LINKS], (None, *hang.causes), strict=False):
        describe = {
            Verdict.MISSING: _missing,
            Verdict.LATE: _late,
            Verdict.CYCLE: _cycle,
            Verdict.MISMATCH: _mismatch,
        }[cause.verdict]
        prefix = "" if previous is not None and previous.verdict is cause.verdict else f"{cause.verdict}: "
        blames.append(prefix + describe(diagnosis, cause))
    more = {rank for cause in hang.causes[_MAX_LINKS:] for rank in cause.ranks}
    if more:
        blames.append(f"so {'is' if len(more) == 1 else 'are'} {rank_text(more)}")
    return "; ".join(blames) + _only_waiting(hang)


def as_json(diagnosis: Diagnosis) -> dict[str, Any] | None:
    """The JSON field ``hang``; None where there is no verdict."""
    hang = diagnosis.hang
    if hang is None:
        return None
    return {
        "verdict": str(hang.verdict),
        "ranks": list(hang.ranks),
        "detail": sentence(diagnosis),
        "edges": [edge.as_json() for edge in hang.edges],
    }


def _missing(diagnosis: Diagnosis, cause: Cause) -> str:
    def describe(rank: int) -> str:
        rank_calls = diagnosis.ranks.get(rank)
        if rank_calls is None:
            return "missing"
        reason = f" ({rank_calls.note})" if rank_calls.note else ""
        return f"{'gone' if rank_calls.presence is Presence.GONE else 'missing'}{reason}"

    return _joined(cause.ranks, describe)


def _late(diagnosis: Diagnosis, cause: Cause) -> str:
    def describe(rank: int) -> str:
        rank_calls = diagnosis.ranks[rank]
        if rank_calls.where:
            return rank_calls.where
        last = f"after {rank_calls.calls[-1]}" if rank_calls.calls else _last_made(diagnosis, rank)
        return f"outside of any communication call, {last}"

    return _joined(cause.ranks, describe)


def _last_made(diagnosis: Diagnosis, rank: int) -> str:
    """The last collective of a rank without open calls, in the first group that waits for it."""
    made = diagnosis.ranks[rank].num_made
    edges = diagnosis.hang.edges if diagnosis.hang else ()
    calls = (edge.call for edge in edges if rank in edge.waits_for and not edge.call.is_message)
    return next(
        (f"after #{count - 1} of group {call.group}" for call in calls if (count := made.get(Stream(call.group), 0))),
        "with none open" if made else "having made none",
    )


def _joined(ranks: Sequence[int], describe: Callable[[int], str]) -> str:
    """The description of each rank, those with equal ones joined."""
    same: dict[str, list[int]] = {}
    for rank in ranks:
        same.setdefault(describe(rank), []).append(rank)
    parts = []
    for text, ranks_of_text in list(same.items())[:_MAX_LINKS]:
        verb = "is" if len(ranks_of_text) == 1 else "are"
        parts.append(f"{rank_text(ranks_of_text)} {verb} {text}")
    left = sum(len(ranks_of_text) for ranks_of_text in list(same.values())[_MAX_LINKS:])
    return "; ".join([*parts, f"and {left} more ranks"] if left else parts)


def _cycle(_: Diagnosis, cause: Cause) -> str:
    targets = {edge.rank: set(edge.waits_for) for edge in cause.ring}
    ring = shortest_ring(targets, cause.ranks)
    calls = {edge.rank: edge.call for edge in cause.ring}
    links = [f"rank {rank} in {calls[rank]}" for rank in ring if rank in calls]
    shown = ", ".join(links[:_MAX_LINKS]) + (f" and {len(links) - _MAX_LINKS} more" if len(links) > _MAX_LINKS else "")
    return f"{rank_text(cause.ranks)} wait for each other: {shown}"


def _mismatch(_: Diagnosis, cause: Cause) -> str:
    if cause.conflict is None:
        calls = {edge.rank: edge.call for edge in cause.ring}
        guilty_calls = ", ".join(f"{rank_text([rank])} is in {calls[rank]}" for rank in cause.ranks if rank in calls)
        others = ", ".join(
            f"rank {rank} is in {call}" for rank, call in list(calls.items())[:_MAX_LINKS] if rank not in cause.ranks
        )
        return f"{guilty_calls}, out of the order that it kept before" + (f", while {others}" if others else "")
    return _conflict(cause.conflict, cause.ranks)


def _conflict(conflict: Conflict, guilty: Sequence[int]) -> str:
    calls = conflict.calls
    parts: dict[str, list[int]] = {}
    for rank, call in calls.items():
        parts.setdefault(conflict.text.format(call), []).append(rank)
    ordered = sorted(parts.items(), key=lambda part: (not set(part[1]) <= set(guilty), -len(part[1])))
    descriptions = [f"{text} on {rank_text(ranks_of_text)}" for text, ranks_of_text in ordered[:_MAX_LINKS]]
    first = next(iter(calls.values()))
    number = calls.get(conflict.stream.source, first).number
    if first.is_message:
        name = f"message #{number} from rank {conflict.stream.source} to rank {conflict.stream.target}"
    else:
        name = f"collective #{number} of group {conflict.stream.group}"
    first_text, *other_texts = descriptions
    return f"{name} is {' but '.join([first_text, ', '.join(other_texts)]) if other_texts else first_text}"


def _only_waiting(hang: Hang) -> str:
    waiting = sorted(rank for rank in hang.hops if rank not in hang.ranks)
    others = sorted({edge.rank for edge in hang.edges} - set(hang.ranks) - set(waiting))
    if not waiting:
        text = ""
    else:
        most = max(hang.hops[rank] for rank in waiting)
        away = "1 hop away" if most == 1 else f"up to {most} hops away"
        verb = "only waits" if len(waiting) == 1 else "only wait"
        text = f"; {rank_text(waiting)} {verb}, {away}"
    if others:
        text += f"; {rank_text(others)} {'waits' if len(others) == 1 else 'wait'} for something else"
    return text
