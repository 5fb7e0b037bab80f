"""Programs of the processes: a list of instructions for each rank, which crosses to it as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from pptrace.model.tables import Int32
from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.lower import lower
from pptrace.schedule.needs import OUTPUT_OF, Output
from pptrace.schedule.plan import Plan

RENDEZVOUS, ONE_BY_ONE, IN_ORDER = "rendezvous", "one_call_at_a_time", "in_order"


class Workload(Struct, frozen=True):
    """A step to run: what each row of the plan's table and each of its messages takes, ns, and bytes of a message.

    ``messaging`` is the way of sending and receiving: ``ahead``, ``blocking_receives``, ``rendezvous``, ``one_call_at_a_time``
    or ``in_order`` (:class:`pptrace.schedule.message_graph.Messaging`); receives that block are posted ``prefetch`` ops before
    they are needed.
    """

    plan: Plan
    durations: Sequence[int]
    transfers: Sequence[int]
    messaging: str
    message_bytes: int
    prefetch: int = 0


def programs(work: Workload) -> list[list[list[Any]]]:
    """The instructions of each rank.

    ``["op", ns]`` sleeps. ``["transfers", [[message, peer, is_send, ns], …]]`` are sends and receives that are posted together;
    the rank goes on when all of them are through, but for sends that nobody waits for, or at once where a stream runs them: then
    ``["reads", [message, …]]`` waits for what the op behind it reads.
    """
    groups = _in_order if work.messaging in (RENDEZVOUS, ONE_BY_ONE, IN_ORDER) else _when_needed
    return [list(groups(work, rank)) for rank in range(work.plan.pp)]


def _in_order(work: Workload, rank: int) -> Iterator[list[Any]]:
    """Instructions with sends and receives where lowering puts them."""
    table = work.plan.table
    row = int(table.rank_ptr[rank])
    group: list[list[Any]] = []
    for action in lower(work.plan).ranks[rank]:
        if action.kind.is_p2p:
            group.append(_transfer(work, action))
            if work.messaging != RENDEZVOUS:
                yield ["transfers", group]
                group = []
            continue
        if group:
            yield ["transfers", group]
            group = []
        reads = table.dep_message[table.dep_is_message & (table.dep_reader == row)].tolist()
        if reads and work.messaging == IN_ORDER:
            yield ["reads", reads]
        yield ["op", int(work.durations[row])]
        row += 1
    if group:
        yield ["transfers", group]


def _when_needed(work: Workload, rank: int) -> Iterator[list[Any]]:
    """Instructions with each receive directly before its reader, and each send directly behind its sender."""
    table = work.plan.table
    needs = np.flatnonzero(table.dep_is_message)

    def transfers(row: int, own_end: Int32, other_end: Int32, is_send: bool) -> Iterator[list[Any]]:
        """The messages with one end at a row, if there are any."""
        own = needs[own_end[needs] == row]
        pairs = zip(table.dep_message[own].tolist(), table.rank[other_end[own]].tolist(), strict=True)
        if group := [_entry(work, message, peer, is_send) for message, peer in pairs]:
            yield ["transfers", group]

    for row in range(*table.rank_ptr[rank : rank + 2].tolist()):
        yield from transfers(row, table.dep_reader, table.dep, False)
        yield ["op", int(work.durations[row])]
        yield from transfers(row, table.dep, table.dep_reader, True)


def _entry(work: Workload, message: int, peer: int, is_send: bool) -> list[Any]:
    return [message, peer, is_send, int(work.transfers[message])]


def _transfer(work: Workload, action: Action) -> list[Any]:
    plan = work.plan
    forward = action.kind in (Kind.SEND_F, Kind.RECV_F)
    hop = 1 if forward == action.kind.is_send else -1
    peer = plan.placement[action.stage + hop]
    source = action.stage if action.kind.is_send else action.stage + hop
    output = OUTPUT_OF[Kind.F if forward else Kind.B]
    slot = (source * plan.num_microbatches + (action.microbatch or 0)) * len(Output) + output
    return _entry(work, int(plan.table.slot_to_message[slot]), peer, action.kind.is_send)
