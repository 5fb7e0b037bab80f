"""The JSON field ``hang`` of a run: read, and its ranks and waits as text. What makes a verdict is not imported for it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pptrace.marks import P2P

_MAX_LINES = 6
_MAX_RANGES = 8


def hang_of_run(run: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The verdict that ``pptrace run`` recorded; None where there is none, or it is malformed."""
    hang = run.get("hang")
    if not isinstance(hang, dict) or not isinstance(hang.get("detail"), str) or not isinstance(hang.get("ranks"), list):
        return None
    edges = hang.get("edges")
    is_complete = _are_ranks(hang["ranks"]) and isinstance(edges, list) and all(map(_is_edge, edges))
    return hang if is_complete and hang.get("verdict") in ("missing", "cycle", "mismatch", "late") else None


def _is_edge(edge: object) -> bool:
    """Return whether this is what :meth:`pptrace.hang_diagnosis.waits.Edge.as_json` writes."""
    if not isinstance(edge, dict) or not _are_ranks([edge.get("rank")]) or not _are_ranks(edge.get("waits_for")):
        return False
    is_call = isinstance(edge.get("call"), str) and isinstance(edge.get("group"), str)
    return is_call and _are_ranks([edge.get("seq")])


def _are_ranks(values: object) -> bool:
    """Return whether this is a list of whole numbers."""
    return isinstance(values, list) and all(type(value) is int for value in values)


def lines(hang: Mapping[str, Any]) -> list[str]:
    """Lines of who waits in which call for whom, from the JSON field ``hang``: one per call, most ranks first."""
    by_call: dict[tuple[Hashable, ...], list[Mapping[str, Any]]] = {}
    for edge in hang["edges"]:
        message = (edge["rank"], tuple(edge["waits_for"])) if edge["call"] in P2P else ()
        by_call.setdefault((edge["call"], edge["group"], edge["seq"], *message), []).append(edge)
    ordered = sorted(by_call.values(), key=len, reverse=True)
    shown = [_line(edges) for edges in ordered[:_MAX_LINES]]
    left = sum(len(edges) for edges in ordered[_MAX_LINES:])
    return [*shown, f"{left} more {'call waits' if left == 1 else 'calls wait'}"] if left else shown


def _line(edges: Sequence[Mapping[str, Any]]) -> str:
    first = edges[0]
    targets = {rank for edge in edges for rank in edge["waits_for"]}
    waiting = [edge["rank"] for edge in edges]
    verb = "waits" if len(set(waiting)) == 1 else "wait"
    call = f"{first['call']} #{first['seq']}"
    if first["call"] in P2P:
        return (
            f"{rank_text(waiting)} {verb} in {call} {'to' if first['call'] == 'send' else 'from'} {rank_text(targets)}"
        )
    return f"{rank_text(waiting)} {verb} in {call} of group {first['group']} for {rank_text(targets)}"


def rank_text(ranks: Iterable[int]) -> str:
    """Ranks as text, such as ``rank 3``, ``ranks 0 and 2``, ``ranks 4–15, 20``."""
    ordered = sorted(set(ranks))
    parts: list[str] = []
    for first, last in _ranges(ordered):
        parts += [str(first), str(last)] if last == first + 1 else [f"{first}–{last}" if last > first else str(first)]
    if len(parts) > _MAX_RANGES:
        parts = [*parts[:_MAX_RANGES], f"… ({len(ordered)} in all)"]
    if len(parts) == 2 and len(ordered) == 2:
        return f"ranks {parts[0]} and {parts[1]}"
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {', '.join(parts)}"


def _ranges(ordered: Sequence[int]) -> Iterator[tuple[int, int]]:
    start = 0
    for index in range(1, len(ordered) + 1):
        if index == len(ordered) or ordered[index] != ordered[index - 1] + 1:
            yield ordered[start], ordered[index - 1]
            start = index
