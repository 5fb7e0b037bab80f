"""Communication calls as the hooks see them, and who may watch them.

The hooks of ``torch.distributed`` tell each call to every observer, in this order, from the thread that calls:

    posted ─► returned ─► [waiting ─►] completed        a call that raises ends with ``failed`` instead

``posted`` comes before torch's own function runs, ``returned`` when it has returned. A synchronous call is complete then;
an asynchronous one is complete when the script has waited for its ``Work`` (or has seen it completed). A batch
(``batch_isend_irecv``, a coalescing manager) is one call for each of its messages, with the same ``batch``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

UNHOOKED = "collective"
"""The kind of a collective that C++ posted by itself: it is known that there was one, not which."""
SETUP = "init_process_group"
"""The kind of the call in which all ranks make the default process group."""


@dataclass(frozen=True, slots=True)
class CallGroup:
    """A process group as this rank knows it. ``ranks`` are global; ``axis`` is "" where nothing tells it."""

    name: str
    ranks: tuple[int, ...]
    backend: str
    description: str = ""
    axis: str = ""


@dataclass(slots=True, eq=False)
class Call:
    """One collective, or one message of a send or receive.

    ``number`` counts the calls of this process from 0. ``kind`` is a :class:`pptrace.marks.Collective`'s value, ``send`` or
    ``recv``. ``peer`` is the global rank at a message's other end or a rooted collective's root; -1 where there is none, or
    where a receive takes a message of any rank. ``num_bytes`` is this rank's message, the larger of input and output.
    ``sequence`` counts the collectives of the group, and of messages those of the same direction with the same peer in the
    group, from 0.
    ``tag`` is a message's, 0 where it has none.
    """

    number: int
    kind: str
    group: CallGroup
    peer: int
    num_bytes: int
    sequence: int
    batch: int = -1
    is_async: bool = False
    tag: int = 0


class CallObserver(Protocol):
    """Someone who watches calls. What a method raises takes the observer out; the call itself goes on."""

    def posted(self, call: Call) -> None: ...

    def returned(self, call: Call) -> None: ...

    def waiting(self, call: Call) -> None: ...

    def completed(self, call: Call) -> None: ...

    def failed(self, call: Call) -> None: ...
