"""Confidence of inferred ops: do the observed messages agree with them?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from pptrace.model.tables import Int64
from pptrace.model.traces import Events
from pptrace.schedule.actions import Kind

_TO_NEXT, _TO_PREVIOUS = (Kind.SEND_F, Kind.RECV_B), (Kind.SEND_B, Kind.RECV_F)
_TOLERATED = 10
"""One op in this many may lack its message or its counterpart: traces begin and end anywhere."""


def peers_of(events: Events, rows: Int64) -> list[int]:
    """The peer of each call by its own communication record or one inside it; -1 without one."""
    args = events.comm_args[(events.comm_args["src"] >= 0) | (events.comm_args["dst"] >= 0)]
    rows_with_peer = args["event"].to_numpy()
    order = np.argsort(events.start_ns[rows_with_peer], kind="stable")
    rows_with_peer, peers = rows_with_peer[order], args[["src", "dst"]].max(axis=1).to_numpy()[order]
    low = np.searchsorted(events.start_ns[rows_with_peer], events.start_ns[rows])
    high = np.searchsorted(events.start_ns[rows_with_peer], events.ends_of(rows))
    peers_of_rows = []
    for row, first, last in zip(rows.tolist(), low.tolist(), high.tolist(), strict=True):
        peers_inside = {
            int(peers[at]) for at in range(first, last) if events.thread[rows_with_peer[at]] == events.thread[row]
        }
        peers_of_rows.append(peers_inside.pop() if len(peers_inside) == 1 else -1)
    return peers_of_rows


def is_one_stage(messages: Sequence[tuple[Kind, int]], sent: Sequence[Kind], forwards: int, backwards: int) -> bool:
    """Return whether messages are those of a rank with one stage of a pipeline, so that the ops next to them give their
    directions.

    Such a rank has one neighbour before it and another one behind it, and a message of each kind for all of its ops or none.

    Args:
        messages: what each message is by the op next to it, and its peer (-1: unknown).
        sent: the kinds of those that are some op's first.
        forwards, backwards: how many ops there are.
    """
    after = {peer for kind, peer in messages if kind in _TO_NEXT and peer >= 0}
    before = {peer for kind, peer in messages if kind in _TO_PREVIOUS and peer >= 0}
    if len(after) > 1 or len(before) > 1 or after & before:
        return False
    counts = Counter(sent)
    wanted = {Kind.SEND_F: forwards, Kind.RECV_F: forwards, Kind.SEND_B: backwards, Kind.RECV_B: backwards}
    return all(not counts[kind] or wanted[kind] - counts[kind] <= max(1, wanted[kind] // _TOLERATED) for kind in wanted)


def confidence(explained: int, total: int, forwards: int, backwards: int, agree: bool) -> str:
    """A word for the reliability of inferred ops.

    low: less than three quarters of the operators (or kernels) lie in them, or forwards and backwards are not about equally
    many. high: nine tenths lie in them, and the messages agree. medium: all others, such as those of ranks with several chunks,
    and those of kernels, which have no directions.
    """
    if 4 * explained < 3 * total or abs(forwards - backwards) > max(1, forwards // _TOLERATED):
        return "low confidence"
    return "high confidence" if agree and 10 * explained >= 9 * total else "medium confidence"
