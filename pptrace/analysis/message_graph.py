"""Replay of a plan's ops and messages, under each of the ways in which runtimes send and receive.

The simulator's replays (:mod:`pptrace.schedule.replay_table`) have messages that cost their readers time and their ranks none. A
runtime that posts a receive when it needs it lets the transfer begin then, and one whose sends and receives meet holds up the
sender too: there a message is a node of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from pptrace.errors import ScheduleError
from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.lower import lower
from pptrace.schedule.needs import OUTPUT_OF, Output
from pptrace.schedule.plan import Plan
from pptrace.schedule.plan_table import PlanTable
from pptrace.simulator import makespans

Times = npt.NDArray[Any]
"""Times of one unit: integers, or of predictions floats."""
Index = npt.NDArray[np.intp]


class Messaging(StrEnum):
    """The way of sending and receiving: from when a transfer takes place, and which ranks it holds up."""

    AHEAD = "receives are posted ahead"
    BLOCKING_RECEIVES = "a receive is posted when its rank needs it"
    RENDEZVOUS = "sends and receives wait for each other"
    ONE_CALL_AT_A_TIME = "sends and receives wait for each other, and each for the call before it"


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """Nodes: the rows of a plan's table, then its messages. ``levels`` are (nodes, the nodes each needs, filled up with −1)."""

    num_rows: int
    num_nodes: int
    levels: tuple[tuple[Index, Index], ...]

    def ends(self, durations: Times, transfers: Times) -> Times:
        """End of each row, shape (rows, replays), with durations (replays, rows) and transfers (replays, messages)."""
        taken = np.concatenate((durations, transfers), axis=1).T
        ends = np.zeros((self.num_nodes + 1, len(durations)), taken.dtype)
        for nodes, needs in self.levels:
            ends[nodes] = ends[needs].max(axis=1) + taken[nodes] if needs.shape[1] else taken[nodes]
        return ends[: self.num_rows]


def spans_of(table: PlanTable, graph: Graph | None, durations: Times, transfers: Times | None = None) -> Times:
    """Makespans of replays along a graph or, without one, with messages that cost their readers time alone.

    Args:
        table: of the plan.
        graph: of the same plan.
        durations: shape (replays, rows).
        transfers: shape (replays, messages); None for messages that take no time.
    """
    if graph is None:
        return makespans(table, durations, 0 if transfers is None else transfers)
    if transfers is None:
        transfers = np.zeros((len(durations), table.num_messages), durations.dtype)
    lengths: Times = graph.ends(durations, transfers).max(axis=0)
    return lengths


def make_graph(plan: Plan, messaging: Messaging, prefetch: int = 0) -> Graph:
    """The graph of a plan of compute actions; receives that block are posted ``prefetch`` ops before they are needed.

    Raises:
        ScheduleError: the plan cannot run to its end so.
    """
    edges = np.concatenate([*_edges_of_rows(plan), *_edges_of_messages(plan, messaging, prefetch)], axis=1)
    table = plan.table
    num_nodes = len(table) + table.num_messages
    return Graph(len(table), num_nodes, tuple(_levels(np.unique(edges, axis=1), num_nodes, plan.name)))


def _edges_of_rows(plan: Plan) -> Iterator[Index]:
    """(needed node, node) of every op and the one before it, of needs on its own rank, and of each message and its reader."""
    table = plan.table
    rows = np.arange(len(table))
    follows = table.position > 0
    yield np.stack((rows[follows] - 1, rows[follows]))
    local = ~table.dep_is_message
    yield np.stack((table.dep[local], table.dep_reader[local])).astype(np.intp)
    remote = np.flatnonzero(table.dep_is_message)
    messages = len(table) + table.dep_message[remote]
    yield np.stack((table.dep[remote], messages)).astype(np.intp)
    yield np.stack((messages, table.dep_reader[remote])).astype(np.intp)


def _edges_of_messages(plan: Plan, messaging: Messaging, prefetch: int) -> Iterator[Index]:
    """Needs of a message besides its sender's op, and what else than its reader needs it."""
    table = plan.table
    if messaging is Messaging.BLOCKING_RECEIVES:
        remote = np.flatnonzero(table.dep_is_message)
        readers = table.dep_reader[remote].astype(np.intp)
        held = table.position[readers] > prefetch
        yield np.stack((readers[held] - 1 - prefetch, len(table) + table.dep_message[remote[held]])).astype(np.intp)
    elif messaging is not Messaging.AHEAD:
        meetings = _meetings(plan, one_by_one=messaging is Messaging.ONE_CALL_AT_A_TIME)
        yield np.array(list(meetings), dtype=np.intp).reshape(-1, 2).T


def _meetings(plan: Plan, *, one_by_one: bool) -> Iterator[tuple[int, int]]:
    """(needed node, node) at both ends of every message: the op before its group of transfers, and the op behind it.

    ``one_by_one``: a group's transfers follow each other.
    """
    table = plan.table
    for rank, actions in enumerate(lower(plan).ranks):
        row = int(table.rank_ptr[rank]) - 1
        begun: list[int] = []
        ended: list[int] = []
        for action in actions:
            if action.kind.is_p2p:
                message = len(table) + _message_of(plan, action)
                yield from ((node, message) for node in begun)
                ended.append(message)
                if one_by_one:
                    begun = ended = [message]
                continue
            row += 1
            yield from ((node, row) for node in ended)
            begun, ended = [row], []


def _message_of(plan: Plan, action: Action) -> int:
    """The number of the message that a send or receive is an end of."""
    forward = action.kind in (Kind.SEND_F, Kind.RECV_F)
    hop = 0 if action.kind.is_send else (-1 if forward else 1)
    output = OUTPUT_OF[Kind.F if forward else Kind.B]
    cell = (action.stage + hop) * plan.num_microbatches + (action.microbatch or 0)
    return int(plan.table.slot_to_message[cell * len(Output) + output])


def _levels(edges: Index, num_nodes: int, name: str) -> Iterator[tuple[Index, Index]]:
    """The nodes level by level, each with what it needs."""
    source, target = edges
    missing = np.bincount(target, minlength=num_nodes)
    by_source, by_target = np.argsort(source, kind="stable"), np.argsort(target, kind="stable")
    of_source, of_target = (
        np.searchsorted(source[by_source], np.arange(num_nodes + 1)),
        np.searchsorted(target[by_target], np.arange(num_nodes + 1)),
    )
    ready, num_done = np.flatnonzero(missing == 0), 0
    while len(ready):
        yield ready, _needs(ready, source[by_target], of_target, num_nodes)
        num_done += len(ready)
        freed = target[by_source[_ranges(of_source[ready], of_source[ready + 1])]]
        np.subtract.at(missing, freed, 1)
        candidates = np.unique(freed)
        ready = candidates[missing[candidates] == 0]
    if num_done < num_nodes:
        raise ScheduleError(f"{name}: its sends and receives cannot all meet where both ends wait")


def _needs(nodes: Index, needed: Index, pointer: Index, num_nodes: int) -> Index:
    """Needs of each node, shape (nodes, the most that one has); ``num_nodes``, which is none, where it has fewer."""
    counts = pointer[nodes + 1] - pointer[nodes]
    column = np.arange(int(counts.max(initial=0)))
    places = np.minimum(pointer[nodes][:, np.newaxis] + column, max(len(needed) - 1, 0))
    return np.where(column < counts[:, np.newaxis], needed[places], num_nodes)


def _ranges(begin: Index, end: Index) -> Index:
    """All numbers from each beginning to before its end."""
    counts = end - begin
    offsets = np.repeat(end - np.cumsum(counts), counts)
    return np.arange(int(counts.sum())) + offsets
