"""A verdict as one sentence, and as the JSON field ``hang``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pptrace.hang_diagnosis.calls import Call, Presence
from pptrace.hang_diagnosis.conflicts import Conflict
from pptrace.hang_diagnosis.field import rank_text
from pptrace.hang_diagnosis.graph import shortest_ring
from pptrace.hang_diagnosis.verdict import Cause, Diagnosis, Hang, Verdict

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
            return "missing (there is no dump of it)"
        reason = f" ({rank_calls.note})" if rank_calls.note else ""
        return f"{'gone' if rank_calls.presence is Presence.GONE else 'missing'}{reason}"

    return _joined(cause.ranks, describe)


def _late(diagnosis: Diagnosis, cause: Cause) -> str:
    def describe(rank: int) -> str:
        rank_calls = diagnosis.ranks[rank]
        if rank_calls.where:
            return rank_calls.where
        last = f"after {rank_calls.calls[-1]}" if rank_calls.calls else "having made none"
        return f"outside of any communication call, {last}"

    return _joined(cause.ranks, describe)


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
    describe_call = _difference(calls.values())
    parts: dict[str, list[int]] = {}
    for rank, call in calls.items():
        parts.setdefault(describe_call(call), []).append(rank)
    ordered = sorted(parts.items(), key=lambda part: (not set(part[1]) <= set(guilty), -len(part[1])))
    descriptions = [f"{text} on {rank_text(ranks_of_text)}" for text, ranks_of_text in ordered[:_MAX_LINKS]]
    first = next(iter(calls.values()))
    if first.is_message:
        name = f"message #{conflict.seq} from rank {conflict.stream.source} to rank {conflict.stream.target}"
    else:
        name = f"collective #{conflict.seq} of group {conflict.stream.group}"
    first_text, *other_texts = descriptions
    return f"{name} is {' but '.join([first_text, ', '.join(other_texts)]) if other_texts else first_text}"


def _difference(calls: Iterable[Call]) -> Callable[[Call], str]:
    """A function that describes each call, as briefly as distinguishes them."""
    listed = list(calls)

    def kind(call: Call) -> str:
        return call.kind

    def with_root(call: Call) -> str:
        return f"{call.kind} with root {call.peer}"

    def with_size(call: Call) -> str:
        return f"{call.kind} of {call.num_bytes} bytes"

    def with_dtype(call: Call) -> str:
        return f"{call.kind} of {call.dtype}"

    if listed[0].is_message:
        sizes = {call.num_bytes for call in listed if call.num_bytes >= 0}
        return with_size if len(sizes) > 1 else with_dtype
    for describe in (kind, with_root, with_size):
        comparable = [
            call for call in listed if describe is kind or (call.peer if describe is with_root else call.num_bytes) >= 0
        ]
        rooted = describe is not with_root or all(
            call.kind in ("broadcast", "reduce", "gather", "scatter") for call in listed
        )
        if rooted and len({describe(call) for call in comparable}) > 1:
            return describe
    return with_dtype


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
