"""The communication calls of a rank, from its log or a dump; and the JSON field ``hang`` of a run, as it is read."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pptrace.marks import P2P

ANY_PEER = -1


class CallState(StrEnum):
    """Progress of a call.

    ``LAUNCHED``: the host has queued it on a device; done if every other rank that it needs has made the matching call.
    ``QUEUED`` is certainly not done; like ``LAUNCHED`` it begins when the rank's earlier calls on the device are done.
    """

    DONE = "done"
    OFFERED = "offered"  # others can match it, and the rank does something else meanwhile
    BLOCKING = "blocking"  # others can match it, and the rank waits for its end
    QUEUED = "queued"
    LAUNCHED = "launched"
    FAILED = "failed"  # the backend aborted it

    @property
    def is_open(self) -> bool:
        return self not in (CallState.DONE, CallState.FAILED)


class Presence(StrEnum):
    """State of a rank's process and of its data."""

    ALIVE = "alive"
    GONE = "gone"  # the process has ended, cleanly or not
    EMPTY = "empty"  # it left a dump without calls, one that cannot be read, or none
    UNKNOWN = "unseen"  # on another node, without data here


@dataclass(frozen=True, slots=True)
class Group:
    """A process group, equal on all its members. ``ranks`` are global, () where unknown; ``label`` is for output."""

    name: str
    ranks: tuple[int, ...] = field(default=(), hash=False)
    label: str = field(default="", compare=False)

    def __str__(self) -> str:
        return self.label or self.name or "without a name"


@dataclass(frozen=True, slots=True)
class Call:
    """A collective or one message.

    ``seq`` counts the group's collectives, or the messages from one rank to another with one ``tag``: matching calls have
    the same. ``recorded`` is its number in the rank's dump, which people look for. ``peer`` is the other end, or the root, as a
    global rank. ``launch`` is shared by the calls of a batch. ``num_bytes`` and ``dtype`` are compared where both sides have
    them.
    """

    kind: str
    group: Group
    seq: int
    state: CallState
    peer: int = ANY_PEER
    num_bytes: int = -1
    dtype: str = ""
    tag: int = 0
    launch: int = -1
    since_ns: int = -1
    where: str = ""
    recorded: int = -1

    @property
    def number(self) -> int:
        """The number to show."""
        return self.recorded if self.recorded >= 0 else self.seq

    @property
    def is_message(self) -> bool:
        return self.kind in P2P

    def stream(self, rank: int) -> Stream:
        """The stream in which the call is counted: equal for matching calls of several ranks."""
        if not self.is_message:
            return Stream(self.group)
        ends = (rank, self.peer) if self.kind == "send" else (self.peer, rank)
        return Stream(self.group, *ends, self.tag)

    @property
    def signature(self) -> tuple[str, Group, int, int]:
        """The properties that repeat in a training loop."""
        return (self.kind, self.group, self.peer, self.num_bytes)

    def __str__(self) -> str:
        if not self.is_message:
            return f"{self.kind} #{self.number} of group {self.group}"
        peer = "any rank" if self.peer == ANY_PEER else f"rank {self.peer}"
        tag = f" with tag {self.tag}" if self.tag else ""
        return f"{self.kind} #{self.number} {'to' if self.kind == 'send' else 'from'} {peer}{tag}"


@dataclass(frozen=True, slots=True)
class Stream:
    """The collectives of a group, or the messages of a group from ``source`` to ``target``."""

    group: Group
    source: int = -1
    target: int = -1
    tag: int = 0


@dataclass(frozen=True, slots=True)
class RankCalls:
    """Calls and state of a rank.

    Args:
        calls: its last calls, in the order in which it made them.
        num_made: how many calls of a stream it has made, where that is more than ``calls`` hold.
        num_done: how many collectives of a group its dump says to be complete.
        note: how it ended, or why it has no data: "killed by SIGKILL".
        where: where it is, outside of communication: "in sleep, called from train (train.py:7)".
        may_wait: whether it may wait in a call that is not recorded.
        is_halted: whether a signal stopped or killed its process: what it had yet to transfer stays undone.
    """

    rank: int
    calls: tuple[Call, ...] = ()
    presence: Presence = Presence.ALIVE
    num_made: Mapping[Stream, int] = field(default_factory=dict)
    num_done: Mapping[Stream, int] = field(default_factory=dict)
    note: str = ""
    where: str = ""
    may_wait: bool = False
    is_halted: bool = False


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
