"""The communication calls of a rank, as a live rank's log or a dump gives them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

P2P = ("send", "recv")
ANY_PEER = -1


class CallState(StrEnum):
    """How far a call is.

    ``LAUNCHED`` is what the host has handed to a device without knowing more: done if every other rank that it needs has made
    its own. ``QUEUED`` is known not to be done; like ``LAUNCHED`` it begins when the rank's earlier calls on the device are.
    """

    DONE = "done"
    OFFERED = "offered"  # others can meet it, and the rank does something else meanwhile
    BLOCKING = "blocking"  # others can meet it, and the rank waits for its end
    QUEUED = "queued"
    LAUNCHED = "launched"
    FAILED = "failed"  # the backend gave it up

    @property
    def is_open(self) -> bool:
        return self not in (CallState.DONE, CallState.FAILED)


class Presence(StrEnum):
    """What is known of a rank besides its calls."""

    ALIVE = "alive"
    GONE = "gone"  # the process has ended, cleanly or not
    EMPTY = "empty"  # it left a dump without calls, one that cannot be read, or none
    UNSEEN = "unseen"  # on another node, of which nothing is known here


@dataclass(frozen=True, slots=True)
class Group:
    """A process group, equal on all its members. ``ranks`` are global, () where not known; ``label`` is for people."""

    name: str
    ranks: tuple[int, ...] = field(default=(), hash=False)
    label: str = field(default="", compare=False)

    def __str__(self) -> str:
        return self.label or self.name or "without a name"


@dataclass(frozen=True, slots=True)
class Call:
    """A collective or one message.

    ``seq`` counts the group's collectives, or the messages from one rank to another with one ``tag``: the calls that meet have
    the same. ``peer`` is the other end, or the root, as a global rank. ``launch`` is shared by the calls of a batch.
    ``num_bytes`` and ``dtype`` are compared where both sides tell them.
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

    @property
    def is_message(self) -> bool:
        return self.kind in P2P

    def stream(self, rank: int) -> Stream:
        """What the call is counted in: the same for the calls of several ranks that meet."""
        if not self.is_message:
            return Stream(self.group)
        ends = (rank, self.peer) if self.kind == "send" else (self.peer, rank)
        return Stream(self.group, *ends, self.tag)

    @property
    def signature(self) -> tuple[str, Group, int, int]:
        """What a script's loop repeats."""
        return (self.kind, self.group, self.peer, self.num_bytes)

    def __str__(self) -> str:
        if not self.is_message:
            return f"{self.kind} #{self.seq} of group {self.group}"
        peer = "any rank" if self.peer == ANY_PEER else f"rank {self.peer}"
        tag = f" with tag {self.tag}" if self.tag else ""
        return f"{self.kind} #{self.seq} {'to' if self.kind == 'send' else 'from'} {peer}{tag}"


@dataclass(frozen=True, slots=True)
class Stream:
    """The collectives of a group, or the messages of a group from ``source`` to ``target``."""

    group: Group
    source: int = -1
    target: int = -1
    tag: int = 0


@dataclass(frozen=True, slots=True)
class RankCalls:
    """What is known of a rank.

    Args:
        calls: its last calls, in the order in which it made them.
        num_made: how many calls of a stream it has made, where more is known than ``calls`` tell.
        note: how it ended, or why nothing is known of it: "killed by SIGKILL".
        where: where it is, outside of communication: "in sleep, called from train (train.py:7)".
    """

    rank: int
    calls: tuple[Call, ...] = ()
    presence: Presence = Presence.ALIVE
    num_made: Mapping[Stream, int] = field(default_factory=dict)
    note: str = ""
    where: str = ""
