"""Messages of one rank in its steps: when each was moved, what it cost its reader, and for which of them the rank waited."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pptrace.analysis.stragglers.communication import peer_bit
from pptrace.intervals import lengths_within, times_by_group
from pptrace.model.tables import MESSAGES, Bool, Int64
from pptrace.schedule.actions import Kind
from pptrace.schedule.message_graph import end_of
from pptrace.schedule.plan_table import NONE, PlanTable
from pptrace.slices import Slice, distinct_of, reduce_groups
from pptrace.timeline.lanes import is_message

MOVED = "moved_ns"
"""Column of messages: when each was moved, as :func:`with_moved_times` finds it."""
NEVER = np.iinfo(np.int64).max
"""The time at which all messages of a kernel had been sent, where that is not known."""
CALLS = ("window", "end", "free_ns", "called_ns", "collected_ns")
"""Columns of calls."""


def with_moved_times(comms: Slice, window: Int64) -> Slice:
    """A rank's communication in some windows with the column :data:`MOVED`, ns.

    Of messages posted together a rank sees each complete when those awaited before it are. One of them held it, that which was
    moved last if messages took what those of their link took at least in the window; the others were moved when they would be so.
    """
    end, begin = comms["transfer_end_ns"], comms["transfer_start_ns"]
    is_batched = is_message(comms) & (comms["match"] >= 0) & (comms["posted_ns"] == comms["start_ns"])
    rows = np.flatnonzero(is_batched)
    batch, first = distinct_of((window[rows], comms["start_ns"][rows]))
    if len(first) == len(rows):
        return Slice({**comms.columns, MOVED: end})
    moved = end.copy()
    likely = np.minimum(begin[rows] + _least_of_links(comms.where(rows), window[rows]), end[rows])
    last = reduce_groups(np.maximum, likely, batch, len(first))
    moved[rows] = np.where(likely == last[batch], end[rows], likely)
    return Slice({**comms.columns, MOVED: moved})


def _least_of_links(messages: Slice, window: Int64) -> Int64:
    """The least time that messages of each one's window, peer and kind took, ns.

    If their senders came last: of one that waits for its receiver a part may be under way before (buffered sends).
    """
    kind, _ = messages.codes("kind")
    link, first = distinct_of((window, messages["peer"], kind))
    begin, taken = messages["transfer_start_ns"], messages["transfer_end_ns"] - messages["transfer_start_ns"]
    is_sender_last = messages.among("kind", ("send",)) == (begin == messages["start_ns"])
    least = reduce_groups(np.minimum, taken[is_sender_last], link[is_sender_last], len(first))
    of_all = reduce_groups(np.minimum, taken, link, len(first))
    return np.where(least == NEVER, of_all, least)[link]


def received_messages(table: PlanTable, comms: Slice, window: Int64) -> Slice:
    """The messages of the plan that a rank received, with the cost of each transfer for its reader; one of several tensors lasts
    from the first to the last of them.
    """
    is_received = (comms["kind"] == "recv") & (comms["match"] >= 0)
    sent = _sent_with(comms, window)[is_received]
    received, window = comms.where(is_received), window[is_received]
    message = _messages_of(table, received, np.zeros(len(received), dtype=np.bool_))
    known = message >= 0
    begins, posted = received["transfer_start_ns"], received["start_ns"]
    columns = {
        "window": window,
        "message": message,
        "arrival": received[MOVED],
        "sent": sent,
        "received": received["end_ns"],
        "began": np.maximum(begins, received["asked_ns"]),  # one posted ahead is seen complete when it is asked for
        "ended": received["transfer_end_ns"],
        "sender_is_last": begins > posted,
        "is_early": (begins > posted) & (begins <= received["asked_ns"]),
    }
    messages = _joined_tensors({name: column[known] for name, column in columns.items()})
    began, ended = messages.pop("began"), messages.pop("ended")
    took = {"transfer": np.maximum(messages["arrival"] - began, 0), "recorded": np.maximum(ended - began, 0)}
    return Slice(messages | took)


def _joined_tensors(messages: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """One row for each message, where those of several tensors have one for each."""
    group, first = distinct_of((messages["window"], messages["message"]))
    if len(first) == len(group):
        return messages
    joined = {name: column[first].copy() for name, column in messages.items()}
    for name, column in messages.items():
        last = np.minimum if name in ("began", "is_early") else np.maximum
        last.at(joined[name], group, column)
    return joined


def _sent_with(comms: Slice, window: Int64) -> Int64:
    """Ends of the last transfer of the kernel that carries each message, ns; :data:`NEVER` of one that carries messages of
    unknown peers, and of messages without a kernel.
    """
    sent = np.full(len(comms), NEVER)
    rows = np.flatnonzero(comms.among("kind", MESSAGES) & (comms["clock"] == "device"))
    if len(rows):
        kernel, first = distinct_of((window[rows], *(comms[name][rows] for name in ("stream", "start_ns", "end_ns"))))
        ends = np.where(comms["match"][rows] >= 0, comms["transfer_end_ns"][rows], NEVER)
        sent[rows] = reduce_groups(np.maximum, ends, kernel, len(first))[kernel]
    return sent


def longest_moved_with(pipeline: Sequence[int], comms: Slice, window: Int64, ops: Slice) -> Int64:
    """The peers (:func:`peer_bit`) of the messages that a rank waited longest to be moved before each of its ops.

    Of messages posted together each is seen complete when those awaited before it are, so that several may look as long.
    """
    peers = np.zeros(len(ops), dtype=np.int64)
    begin, end = np.maximum(comms["transfer_start_ns"], comms["asked_ns"]), comms["transfer_end_ns"]
    is_moved = is_message(comms) & (comms["match"] >= 0) & (end > begin)
    peer, is_member = _places_of(pipeline, comms["peer"])
    moved = np.flatnonzero(is_moved & is_member)
    if not len(ops) or not len(moved):
        return peers
    length = (end - begin)[moved]
    middle = begin[moved] + length // 2  # a rank may go on a little before its call is over
    begins, middles = times_by_group((ops["window"], ops["start"]), (window[moved], middle))
    row = np.searchsorted(begins, middles)
    is_before = (row < len(ops)) & (ops["window"][np.minimum(row, len(ops) - 1)] == window[moved])
    row, length, peer = row[is_before], length[is_before], peer[moved][is_before]
    is_long = 2 * length >= reduce_groups(np.maximum, length, row, len(ops))[row]
    np.bitwise_or.at(peers, row[is_long], peer_bit(peer[is_long]))
    return peers


def calls_of(table: PlanTable, comms: Slice, window: Int64, ops: Slice, collections: Int64) -> Slice:
    """The calls by which a rank sends and receives the messages of the plan between its ops, in order of window.

    ``end`` is the end of a message that a call is (:func:`pptrace.schedule.message_graph.end_of`), ``called_ns`` when it was
    posted, ``free_ns`` the end of the op or call that was the last to end before on the rank, ``collected_ns`` how long garbage
    ``collections`` (:mod:`pptrace.intervals`) took of the time between.
    """
    is_matched = is_message(comms) & (comms["match"] >= 0)
    calls, window = comms.where(is_matched), window[is_matched]
    is_send = calls.among("kind", ("send",))
    message = _messages_of(table, calls, is_send)
    lasts = calls["end_ns"] > calls["start_ns"]  # one that takes no time is posted with those that begin as it does
    ended, called, begun = times_by_group(
        (np.concatenate((ops["window"], window[lasts])), np.concatenate((ops["end"], calls["end_ns"][lasts]))),
        (window, calls["start_ns"]),
        (ops["window"], ops["start"]),
    )
    ended = np.sort(ended)
    last, op = np.searchsorted(ended, called, side="right") - 1, np.searchsorted(begun, called) - 1
    waited = called - ended[np.maximum(last, 0)] if len(ended) else called
    is_between = np.zeros(len(called), dtype=np.bool_)
    if len(ops):
        at = np.maximum(op, 0)
        is_between = (op >= 0) & (ops["window"][at] == window) & (ops["end"][at] <= calls["start_ns"])
    known = is_between & (message >= 0) & (waited > 0)
    free = calls["start_ns"] - waited
    collected = lengths_within(collections, np.minimum(free, calls["start_ns"]), calls["start_ns"])
    columns = (window, end_of(message, is_send), free, calls["start_ns"], collected)
    return Slice({name: column[known] for name, column in zip(CALLS, columns, strict=True)})


def _places_of(pipeline: Sequence[int], ranks: Int64) -> tuple[Int64, Bool]:
    """(the pipeline rank of each global rank, whether it is in the pipeline)."""
    members = np.array(pipeline, dtype=np.int64)
    order = np.argsort(members)
    place = order[np.minimum(np.searchsorted(members[order], ranks), len(members) - 1)]
    return place, members[place] == ranks


def waits_for_peers(rank: int, pipeline: Sequence[int], comms: Slice, window: Int64, ops: Slice) -> Slice:
    """The messages between the ranks of a pipeline for which one of them waited, until its peer was ready.

    ``ops`` are the rank's, which tell which of its sends held it up (:func:`_holds_up`).
    """
    is_held = is_message(comms) & (comms["match"] >= 0)
    # What was posted ahead holds up nobody before its rank asks for it: a peer that came by then was in time.
    is_held &= comms["transfer_start_ns"] > np.maximum(comms["start_ns"], comms["asked_ns"])
    of_sends = np.flatnonzero(is_held & comms.among("kind", ("send",)))
    is_held[of_sends] = _holds_up(comms.where(of_sends), ops, comms["start_ns"])
    held, window = comms.where(is_held), window[is_held]
    peer, known = _places_of(pipeline, held["peer"])
    columns = {
        "window": window,
        "rank": np.full(len(window), pipeline.index(rank), dtype=np.int64),
        "freed": held[MOVED],
        "peer": peer,
        "ready": held["transfer_start_ns"],
    }
    return Slice({name: column[known] for name, column in columns.items()})


_GOES_ON = 0.1
"""Share of sends that wait for their readers while an op of their rank begins, from which on posting a send holds up no rank."""
_AT_ONCE, _AT_ONCE_NS = 0.1, 1_000_000
"""A rank that waited for a send goes on within this part of the wait and this time."""


def _holds_up(sends: Slice, ops: Slice, posted: Int64) -> Bool:
    """Mask of the sends that hold up their rank.

    Of a rank that begins ops while its sends wait for their readers those hold it up that it asks for later, as torch's 1F1B
    does before it posts the next: it does nothing when the reader comes, and goes on as soon as the send is over.

    Args:
        sends: that their readers kept waiting.
        ops: of the rank.
        posted: times at which it posted any communication.
    """
    starts, ends = np.sort(ops["start_ns"]), np.sort(ops["end_ns"])
    ready, freed = sends["transfer_start_ns"], sends[MOVED]
    first, last = (np.searchsorted(starts, times) for times in (sends["start_ns"], np.minimum(ready, sends["end_ns"])))
    if (first < last).sum() <= _GOES_ON * len(sends):
        return np.ones(len(sends), dtype=np.bool_)
    ended = np.searchsorted(ends, ready, side="right")
    is_idle = np.searchsorted(starts, ready) <= ended
    free = np.maximum(np.append(ends, NEVER)[ended - 1] if len(ends) else sends["start_ns"], sends["start_ns"])
    begun = np.append(np.sort(np.concatenate((starts, posted))), NEVER)
    until_next = begun[np.searchsorted(begun, freed)] - freed
    holds: Bool = is_idle & (ended > 0) & (until_next <= np.maximum(_AT_ONCE * (freed - free), _AT_ONCE_NS))
    return holds


def _messages_of(table: PlanTable, ends: Slice, is_send: Bool) -> Int64:
    """The message of the plan that each is an end of; −1 where it is of none."""
    is_forward = ends["direction"] == "F"
    producer = np.where(is_forward, Kind.F.code, Kind.B.code)
    stage = ends["stage"] + np.where(is_send, 0, np.where(is_forward, -1, 1))
    slots = table.slots_of(producer, stage, ends["microbatch"])
    return np.where(slots >= 0, table.slot_to_message[slots], NONE)
