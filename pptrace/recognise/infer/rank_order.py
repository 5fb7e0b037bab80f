"""The order of one rank of a pipeline with one stage on each rank: its messages by direction, and the ops between them.

What a rank sends to the next one was made by a forward, and what it sends to the one before it by a backward; what it receives is
read by the op after it. So the k-th message of a channel is that of the k-th op of its kind, and every op lies between two
messages, or between a message and an op. What lies elsewhere (gradients set to zero, clipped or scaled, logging, losses) is none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from pptrace.intervals import reduce_ranges
from pptrace.model.tables import Bool, Int64
from pptrace.recognise.infer.evidence import Evidence, Messages, MismatchError, Rows

_LATEST = np.iinfo(np.int64).max
_EARLIEST = np.iinfo(np.int64).min

Channel = tuple[str, str]
"""F or B, send or recv: outputs sent on, gradients received, gradients sent back, inputs received."""
TO_NEXT, FROM_NEXT, TO_PREVIOUS, FROM_PREVIOUS = ("F", "send"), ("B", "recv"), ("B", "send"), ("F", "recv")

Around = tuple[int | None, int | None]
"""The previous and the next rank: None where there is none, −1 where it is unknown."""


def channels_of(evidence: Evidence, around: Around) -> dict[Channel, Messages]:
    """The messages by what they carry: by their peers where these are known, else by the pipeline rank and the ops before them.

    Raises:
        MismatchError: a peer is no neighbour.
    """
    (previous, following), sends, recvs = around, evidence.sends, evidence.recvs
    peers = np.concatenate((sends.peer, recvs.peer))
    if len(peers) and (peers >= 0).all():
        strangers = sorted(set(peers.tolist()) - set(around))
        if strangers:
            raise MismatchError(
                f"rank {evidence.rank} exchanges messages with rank {strangers[0]}, which is no neighbour of it"
            )
        to_next, from_next = sends.peer == following, recvs.peer == following
    elif following is None or previous is None:
        to_next = np.full(len(sends), following is not None)
        from_next = np.full(len(recvs), following is not None)
    else:
        to_next, from_next = _by_ops(evidence)
    return {
        TO_NEXT: sends.where(to_next),
        FROM_NEXT: recvs.where(from_next),
        FROM_PREVIOUS: recvs.where(~from_next),
        TO_PREVIOUS: sends.where(~to_next),
    }


def _by_ops(evidence: Evidence) -> tuple[Bool, Bool]:
    """Mark the sends and receives to and from the next rank, where one op lies between any two groups of sends: a backward
    if the engine ran since the group before. A receive is that of the op that runs next, whose output the next group is.
    """
    sends, recvs, nodes = evidence.sends, evidence.recvs, evidence.engine.start_ns
    if not len(sends):
        return np.zeros(0, dtype=bool), np.ones(len(recvs), dtype=bool)
    group = cut(sends, evidence.operators.start_ns, nodes)
    first = first_members(group)
    last = np.append(first[1:], len(group)) - 1
    since = np.append(0, np.searchsorted(nodes, sends.post_ns[last[:-1]]))
    ran = np.searchsorted(nodes, sends.post_ns[first]) > since
    rows = np.sort(np.concatenate((evidence.operators.start_ns, nodes)))
    reader = np.searchsorted(
        np.searchsorted(rows, sends.post_ns[first]), np.searchsorted(rows, recvs.ready_ns), side="right"
    )
    return ~ran[group], np.append(ran, True)[reader]


def cut(messages: Messages, *at: Int64) -> Int64:
    """Number of each message's group: groups end wherever one of the times lies between two postings."""
    before = np.searchsorted(np.sort(np.concatenate(at)), messages.post_ns)
    return np.append(0, np.cumsum(np.diff(before) > 0))[: len(messages)].astype(np.int64)


def first_members(group: Int64) -> Int64:
    """The index of the first member of each group; they are numbered from 0."""
    return np.searchsorted(group, np.arange(group[-1] + 1 if len(group) else 0)).astype(np.int64)


class Grouped(Struct, frozen=True):
    """One end of a channel by ops: the op of each message; for each op the first posting and last completion of its messages."""

    messages: Messages
    group: Int64
    post_ns: Int64
    ready_ns: Int64

    def __len__(self) -> int:
        return len(self.post_ns)


def grouped(messages: Messages, group: Int64) -> Grouped:
    """The messages by op; the group of each is the op's index."""
    first = first_members(group)
    ready = np.maximum.reduceat(messages.ready_ns, first) if len(first) else messages.ready_ns
    return Grouped(messages, group, messages.post_ns[first], ready)


class Ops(Struct, frozen=True):
    """Forwards or backwards of a rank in the order of their messages.

    ``low`` and ``high`` are the indices of their rows, ``low`` ≤ row < ``high``, among the operators or the engine's nodes.
    """

    low: Int64
    high: Int64
    start_ns: Int64
    end_ns: Int64

    def __len__(self) -> int:
        return len(self.low)


def ops_of(rows: Rows, low: Int64, high: Int64) -> Ops:
    """The ops that consist of these rows, each of one at least."""
    return Ops(low, high, rows.start_ns[low], reduce_ranges(np.maximum, rows.end_ns, low, high))


def without_backwards_of_losses(evidence: Evidence, sent: Messages) -> Evidence:
    """The evidence of a last rank without what autograd's engine ran inside its losses, which are of their forwards.

    A loss may run backwards of its own, as of a head for one part of its input after the other. These run nodes that were made
    since the engine began to run, before a gradient is ``sent`` back: then the backward that sends it is the run with the oldest
    node, the first that a forward made.
    """
    nodes, starts, operators = evidence.engine, evidence.engine.start_ns, evidence.operators
    numbered = operators.where(operators.number >= 0)
    since = np.append(numbered.number, _LATEST)[np.searchsorted(numbered.start_ns, starts)]
    begins = np.append(_EARLIEST, operators.start_ns)[np.searchsorted(operators.start_ns, starts)]
    is_of_loss = np.zeros(len(starts), dtype=np.bool_)
    bounds = np.unique(np.append(0, np.searchsorted(starts, sent.post_ns)))
    for low, high in pairwise(bounds.tolist()):
        if nodes.number[low:high].max() >= since[low]:
            oldest = low + np.where(nodes.number[low:high] >= 0, nodes.number[low:high], _LATEST).argmin()
            is_of_loss[low : np.searchsorted(starts, begins[oldest])] = True
    is_gradient = np.isin(evidence.gradients.start_ns, starts[is_of_loss], invert=True)
    return replace(evidence, engine=nodes.where(~is_of_loss), gradients=evidence.gradients.where(is_gradient))


def engine_spans(evidence: Evidence, received: Grouped | None, sent: Grouped | None) -> tuple[Int64, Int64]:
    """First and last node that the engine ran for each group of gradients: after they came, before its input's are sent.

    Raises:
        MismatchError: the engine ran elsewhere as well.
    """
    nodes = evidence.engine.start_ns
    low = np.zeros(len(sent or received or ()), dtype=np.int64)
    if received is not None:
        low = np.maximum.accumulate(np.searchsorted(nodes, received.ready_ns))
    if sent is not None:
        high = np.searchsorted(nodes, sent.post_ns)
        low = np.maximum(low, np.append(0, high[:-1]))
    else:
        high = np.append(low[1:], len(nodes))
    if np.maximum(high - low, 0).sum() != len(nodes):
        raise MismatchError(f"autograd's engine runs on rank {evidence.rank} where no gradients are sent or received")
    return low, high


def forwards_of(evidence: Evidence, channels: Mapping[Channel, Messages], groups: Mapping[Channel, Grouped]) -> Ops:
    """The forwards: each the operators before its output is sent, on the last rank those after its input came; without what
    only some of them have.

    Between its messages there may be more, which an op, a bound or another message parts from the forward.

    Args:
        channels: all messages of the rank.
        groups: its inputs and outputs by op.

    Raises:
        MismatchError: no operator ran there.
    """
    rows, received, sent = evidence.operators, groups.get(FROM_PREVIOUS), groups.get(TO_NEXT)
    starts, parts = rows.start_ns, [evidence.engine.start_ns, evidence.bounds]
    if sent is not None:
        posts = channels[TO_NEXT].post_ns
        low = np.searchsorted(starts, np.append(posts, _EARLIEST)[np.searchsorted(posts, sent.post_ns) - 1])
        high = np.searchsorted(starts, sent.post_ns)
        if received is not None:
            low = np.maximum(low, np.searchsorted(starts, received.ready_ns))
            parts.append(evidence.sends.post_ns)
        else:
            parts.append(evidence.inputs)  # a first stage's, as of one before it that has no backward
    else:
        assert received is not None
        ready = np.append(np.sort(channels[FROM_PREVIOUS].ready_ns), _LATEST)
        low = np.searchsorted(starts, received.ready_ns)
        high = np.searchsorted(starts, ready[np.searchsorted(ready, received.ready_ns, side="right")])
    if (high <= low).any():
        raise MismatchError(f"rank {evidence.rank} runs no operator next to outputs that it sends or receives")
    parting = np.sort(np.concatenate(parts))
    if sent is not None:
        start = np.append(_EARLIEST, parting)[np.searchsorted(parting, starts[high - 1], side="right")]
        low = np.maximum(low, np.searchsorted(starts, start))
    else:
        end = np.append(parting, _LATEST)[np.searchsorted(parting, starts[low], side="right")]
        high = np.minimum(high, np.searchsorted(starts, end))
    return trimmed(rows, ops_of(rows, low, high), at_end=sent is not None)


def forwards_behind(evidence: Evidence, forwards: Ops, backwards: Ops) -> Int64 | None:
    """Forward whose nodes each backward ran, by their sequence numbers: a thread numbers the nodes that it makes, and
    a message bears the number of the next one. None where the trace has no such numbers.

    Raises:
        MismatchError: a backward runs nodes of none, of several, or of one that another runs.
    """
    known = evidence.postings.number >= 0
    times, numbers = evidence.postings.start_ns[known], evidence.postings.number[known]
    after, before = np.searchsorted(times, forwards.end_ns), np.searchsorted(times, forwards.start_ns) - 1
    latest = np.append(numbers, -1)[np.searchsorted(times, backwards.start_ns) - 1]
    lowest, highest = np.empty_like(latest), np.empty_like(latest)
    for index, (low, high) in enumerate(zip(backwards.low.tolist(), backwards.high.tolist(), strict=True)):
        nodes = evidence.engine.number[low:high]
        nodes = nodes[nodes >= 0]
        if (nodes < latest[index]).any():  # some may be made as the backward begins
            nodes = nodes[nodes < latest[index]]
        if not len(nodes):
            return None
        lowest[index], highest[index] = nodes.min(), nodes.max()
    if (after >= len(times)).any():
        return None
    made, since = np.maximum.accumulate(numbers[after]), np.append(numbers, -1)[before]
    unnumbered = np.searchsorted(evidence.postings.start_ns[~known], forwards.end_ns)
    if ((np.diff(made) == 0) & (np.diff(unnumbered) > 0)).any():  # messages under torch.no_grad have no numbers
        return None
    behind = np.searchsorted(made, highest, side="right").astype(np.int64)
    is_one = np.array_equal(np.searchsorted(made, lowest, side="right"), behind) and (behind < len(made)).all()
    if not is_one or (lowest < since[behind]).any():
        raise MismatchError(f"a backward of rank {evidence.rank} runs what several forwards made, or none")
    if len(np.unique(behind)) < len(behind):
        raise MismatchError("two backwards run what one forward made")
    return behind


def check_only_forwards(evidence: Evidence, forwards: Ops, backwards: Ops, received: Grouped) -> None:
    """Check that the last rank runs its forwards where they are assumed, since nothing else comes between an input and the
    backward: the last that could be one is the first that could be.

    Raises:
        MismatchError: they may as well be later, where inputs are received ahead.
    """
    rows, first = evidence.operators.start_ns, int(np.searchsorted(evidence.operators.start_ns, received.ready_ns[0]))
    parts = np.sort(np.concatenate((evidence.engine.start_ns, evidence.bounds, received.ready_ns)))
    piece = np.searchsorted(parts, rows, side="right")
    latest = len(rows)
    for index in range(len(forwards) - 1, -1, -1):
        latest = min(latest, int(np.searchsorted(rows, backwards.start_ns[index])))
        if latest <= first or piece[latest - 1] != piece[forwards.low[index]]:
            raise MismatchError(
                f"rank {evidence.rank} may have run its forwards later than right after their inputs came"
            )
        latest = int(np.searchsorted(piece, piece[latest - 1]))


def trimmed(rows: Rows, ops: Ops, at_end: bool) -> Ops:
    """The ops without what only some of them have, where most consist of the same operators: a step's first forward may have
    begun with the preparing of its input. ``at_end``: whether that comes before them, else after.
    """
    texts = [rows.name[low:high].tobytes() for low, high in zip(ops.low.tolist(), ops.high.tolist(), strict=True)]
    counts = Counter(texts)
    usual = min(counts, key=lambda text: (-counts[text], len(text)), default=b"")
    low, high = ops.low.copy(), ops.high.copy()
    size = rows.name.itemsize
    for index, text in enumerate(texts):
        at = _find(text, usual, size, at_end) if text != usual else -1
        if at >= 0:
            low[index] += at
            high[index] = low[index] + len(usual) // size
    return ops_of(rows, low, high)


def _find(text: bytes, part: bytes, size: int, at_end: bool) -> int:
    """Index at which the items of a part begin among those of a text, its last or its first occurrence; -1 without any."""
    at = text.rfind(part) if at_end else text.find(part)
    while at >= 0 and at % size:
        at = text.rfind(part, 0, at + len(part) - 1) if at_end else text.find(part, at + 1)
    return at // size if at >= 0 else -1
