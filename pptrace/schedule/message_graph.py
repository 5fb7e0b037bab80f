"""Replay of a plan's ops and messages, under each of the ways in which runtimes send and receive.

The simulator's replays (:mod:`pptrace.schedule.replay_table`) have messages that cost their readers time and their ranks none. A
runtime that posts a receive when it needs it lets the transfer begin then, and one whose sends and receives meet holds up the
sender too: there a message is a node of its own, and the same engine replays rows and messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from pptrace.errors import ScheduleError
from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.lower import lower
from pptrace.schedule.needs import OUTPUT_OF, Output
from pptrace.schedule.plan import Plan
from pptrace.schedule.plan_table import PlanTable
from pptrace.schedule.replay_program import Program, compile_nodes
from pptrace.schedule.replay_table import ends_of_nodes, makespans

Times = npt.NDArray[Any]
"""Times of one unit: integers, or of predictions floats."""
Index = npt.NDArray[np.intp]


class Messaging(StrEnum):
    """The way of sending and receiving: from when a transfer takes place, and which ranks it holds up."""

    AHEAD = "receives are posted ahead"
    BLOCKING_RECEIVES = "a receive is posted when its rank needs it"
    RENDEZVOUS = "sends and receives wait for each other"
    ONE_CALL_AT_A_TIME = "each send and each receive waits for its other side and for the call before it"
    IN_ORDER = "a stream runs sends and receives in the order in which they are posted, while ops run"


BESIDE_EACH_OTHER = tuple(way for way in Messaging if way is not Messaging.IN_ORDER)
"""The ways that are tried where the order in which calls are posted is not known."""


@dataclass(frozen=True, eq=False)
class Graph:
    """Nodes are the rows of a plan's table, then its messages; ``level`` is the longest chain of nodes that leads to each.

    A call posts messages of one rank together: those of which it is an end (``call_of_end``, by the numbers of :func:`end_of`; −1
    where its rank has done nothing before). ``call_row`` is the row that its rank runs next or, after the last one, that.
    ``edges`` are (needed node, node, the call that is posted between them or −1), ``at_once`` is the program of what each node
    needs if every call is posted as soon as it can be.
    """

    num_rows: int
    call_row: Index
    call_of_end: Index
    level: Index
    edges: Index
    at_once: Program

    @cached_property
    def late(self) -> Program:
        """The same with calls that are posted late: by the latency of their number."""
        source, node, call = self.edges[:, np.lexsort((self.edges[0], self.edges[2], self.edges[1]))]
        is_other = np.ones(len(node), dtype=np.bool_)
        is_other[1:] = (node[1:] != node[:-1]) | (source[1:] != source[:-1]) | (call[1:] != call[:-1])
        return _compiled(self.level, source[is_other], node[is_other], call[is_other])

    def ends(self, durations: Times, transfers: Times, posted: Times | None = None) -> Times:
        """End of each row, shape (replays, rows).

        Args:
            durations: shape (replays, rows).
            transfers: shape (replays, messages).
            posted: how long after what comes before it each call is posted, shape (replays, calls); None for at once.
        """
        taken, is_late = np.concatenate((durations, transfers), axis=1), posted is not None and len(self.call_row) > 0
        program, late = (self.late, posted) if is_late else (self.at_once, None)
        return ends_of_nodes(program, self.num_rows, taken, late)


def end_of(message: npt.NDArray[Any], is_send: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
    """The number of the sending or the receiving end of each message."""
    return 2 * message + ~is_send


def spans_of(
    table: PlanTable,
    graph: Graph | None,
    durations: Times,
    transfers: Times | None = None,
    posted: Times | None = None,
) -> Times:
    """Makespans of replays along a graph or, without one, with messages that cost their readers time alone.

    Args:
        table: of the plan.
        graph: of the same plan.
        durations: shape (replays, rows).
        transfers: shape (replays, messages); None for messages that take no time.
        posted: as :meth:`Graph.ends` takes it; without a graph None.
    """
    if graph is None:
        return makespans(table, durations, 0 if transfers is None else transfers)
    if transfers is None:
        transfers = np.zeros((len(durations), table.num_messages), durations.dtype)
    lengths: Times = graph.ends(durations, transfers, posted).max(axis=1)
    return lengths


def make_graph(plan: Plan, messaging: Messaging, prefetch: int = 0) -> Graph:
    """The graph of a plan of compute actions; receives that block are posted ``prefetch`` ops before they are needed.

    Raises:
        ScheduleError: the plan cannot run to its end so.
    """
    table = plan.table
    num_nodes = len(table) + table.num_messages
    if messaging in (Messaging.AHEAD, Messaging.BLOCKING_RECEIVES):
        posts, waits = _posts_of_one_side(table, prefetch), np.zeros((2, 0), dtype=np.intp)
    else:
        posts, waits = _meetings(plan, messaging)
    end, after, row = posts
    (_, row_of_call), call = _unique_pairs(posts[1:])
    call_of_end = np.full(2 * table.num_messages, -1, dtype=np.intp)
    call_of_end[end] = call
    begins = (end % 2 == 0) | (messaging is not Messaging.AHEAD)  # of receives posted ahead it is not known when
    has_next = row > after  # what a rank does before it posts keeps it from its next op too
    nodes = np.stack((after, len(table) + end // 2, call))[:, begins], np.stack((after, row, call))[:, has_next]
    direct = np.concatenate((_edges_of_rows(table), waits), axis=1)
    edges = np.concatenate((np.pad(direct, ((0, 1), (0, 0)), constant_values=-1), *nodes), axis=1)
    (node, source), _ = _unique_pairs(edges[1::-1])
    level = _level_of_nodes(source, node, num_nodes)
    if num_nodes and level.min() < 0:
        raise ScheduleError(f"{plan.name}: its sends and receives cannot all meet where both ends wait")
    at_once = _compiled(level, source, node, np.full(len(node), -1))
    return Graph(len(table), row_of_call, call_of_end, level, edges, at_once)


def _compiled(level: Index, source: Index, node: Index, call: Index) -> Program:
    """The program of nodes with edges in their order, of one node those without a call first."""
    before = np.full(len(level), len(level), dtype=np.intp)
    is_before = (np.diff(node, prepend=-1) != 0) & (call < 0)
    before[node[is_before]] = source[is_before]
    rest = ~is_before
    return compile_nodes(level, before, (node[rest], source[rest], call[rest]), np.zeros(0, dtype=np.intp))


def _unique_pairs(pairs: Index) -> tuple[Index, Index]:
    """(the distinct columns of pairs of places in order, of each column the number of the one that it is)."""
    most = int(pairs[1].max(initial=0)) + 1
    keys, number = np.unique(pairs[0] * most + pairs[1], return_inverse=True)
    return np.stack(np.divmod(keys, most)), number


def _edges_of_rows(table: PlanTable) -> Index:
    """(needed node, node) of every op and the one before it, of its other needs, and of each message and its sender's op."""
    follows = np.flatnonzero(table.position > 0)
    local, remote = (np.flatnonzero(table.dep_is_message == is_message) for is_message in (False, True))
    messages = len(table) + table.dep_message[remote]
    needed = (follows - 1, table.dep[local], table.dep[remote], messages)
    nodes = (follows, table.dep_reader[local], messages, table.dep_reader[remote])
    return np.stack((np.concatenate(needed), np.concatenate(nodes))).astype(np.intp)


def _posts_of_one_side(table: PlanTable, prefetch: int) -> Index:
    """(end of a message, the row after which it is posted, the one that its rank runs next) where sends hold up nobody."""
    senders, readers, _ = table.messages
    follows = table.position[readers] > prefetch
    end = np.concatenate((2 * np.arange(len(readers)), 2 * np.flatnonzero(follows) + 1))
    after = np.concatenate((senders, readers[follows] - 1 - prefetch))
    is_last = np.isin(after, table.rank_ptr[1:] - 1)
    return np.stack((end, after, after + ~is_last))


def _meetings(plan: Plan, messaging: Messaging) -> tuple[Index, Index]:
    """(posts, waits) where both ends of a message wait for each other.

    Posts are (end of a message, what its rank did before its group of transfers, the row behind it), waits (message, the row that
    waits for it). One by one a group's transfers follow each other; on a stream each waits for the one before it, and a row for
    those alone that it reads.
    """
    one_by_one, on_stream = (messaging is way for way in (Messaging.ONE_CALL_AT_A_TIME, Messaging.IN_ORDER))
    table = plan.table
    posts: list[tuple[int, int, int]] = []
    waits: list[tuple[int, int]] = []
    for rank, actions in enumerate(_lowered(plan).ranks):
        row, last = int(table.rank_ptr[rank]) - 1, int(table.rank_ptr[rank + 1]) - 1
        before = -1
        awaited: list[int] = []
        for action in actions:
            if action.kind.is_p2p:
                message = _message_of(plan, action)
                if before >= 0:
                    posts.append((2 * message + (not action.kind.is_send), before, min(row + 1, last)))
                if on_stream:
                    waits += [(previous, len(table) + message) for previous in awaited]
                    awaited = []
                awaited.append(len(table) + message)
                if one_by_one:
                    before, awaited = awaited[-1], awaited[-1:]
                continue
            row += 1
            before = row
            if not on_stream:
                waits += [(message, row) for message in awaited]
                awaited = []
    return np.array(posts, dtype=np.intp).reshape(-1, 3).T, np.array(waits, dtype=np.intp).reshape(-1, 2).T


_lowered = lru_cache(maxsize=2)(lower)
"""Makes the plan with sends and receives, which two ways of meeting ask for."""


def _message_of(plan: Plan, action: Action) -> int:
    """The number of the message that a send or receive is an end of."""
    forward = action.kind in (Kind.SEND_F, Kind.RECV_F)
    hop = 0 if action.kind.is_send else (-1 if forward else 1)
    output = OUTPUT_OF[Kind.F if forward else Kind.B]
    cell = (action.stage + hop) * plan.num_microbatches + (action.microbatch or 0)
    return int(plan.table.slot_to_message[cell * len(Output) + output])


def _level_of_nodes(needed: Index, reader: Index, num_nodes: int) -> Index:
    """The length of the longest chain of nodes that leads to each; −1 where it is never reached."""
    order = np.argsort(needed, kind="stable")
    readers, pointer = reader[order].tolist(), np.searchsorted(needed[order], np.arange(num_nodes + 1)).tolist()
    missing = np.bincount(reader, minlength=num_nodes).tolist()
    level, number = [-1] * num_nodes, 0
    ready = [node for node in range(num_nodes) if not missing[node]]
    while ready:
        following = []
        for node in ready:
            level[node] = number
            for after in readers[pointer[node] : pointer[node + 1]]:
                missing[after] -= 1
                if not missing[after]:
                    following.append(after)
        ready, number = following, number + 1
    return np.array(level, dtype=np.intp)
