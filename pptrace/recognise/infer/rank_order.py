"""The order of one rank of a pipeline with one stage on each rank: its messages by direction, and the ops between them.

What a rank sends to the next one was made by a forward, and what it sends to the one before it by a backward; what it receives is
read by the op after it. So the k-th message of a channel is that of the k-th op of its kind, and every op lies between two
messages, or between a message and an op. What lies elsewhere (gradients set to zero, clipped or scaled, logging, losses) is none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pandas as pd

from pptrace.model.tables import Int64, What

Bools = npt.NDArray[np.bool_]
_LATEST = np.iinfo(np.int64).max
_EARLIEST = np.iinfo(np.int64).min


@dataclass(frozen=True, slots=True)
class Messages:
    """Sends or receives of one rank in the order of their posting.

    ``row`` is the row in the rank's calls; ``peer`` the global rank, -1 if unknown. ``ready_ns`` is when the host knew a
    receive to be complete, or was done with its posting where nothing tells that.
    """

    row: Int64
    peer: Int64
    post_ns: Int64
    ready_ns: Int64

    def __len__(self) -> int:
        return len(self.row)

    def where(self, is_inside: Bools | Int64) -> Messages:
        return Messages(self.row[is_inside], self.peer[is_inside], self.post_ns[is_inside], self.ready_ns[is_inside])


@dataclass(frozen=True, slots=True)
class Rows:
    """Operators, nodes of autograd's engine or postings of messages in time order, with the columns of ``HOST_ORDER``."""

    start_ns: Int64
    end_ns: Int64
    name: Int64
    number: Int64

    def where(self, is_inside: Bools) -> Rows:
        return Rows(self.start_ns[is_inside], self.end_ns[is_inside], self.name[is_inside], self.number[is_inside])


@dataclass(frozen=True, slots=True)
class Evidence:
    """Evidence of one rank's trace for the match; ``bounds`` are the starts of what no op goes over."""

    rank: int
    sends: Messages
    recvs: Messages
    operators: Rows
    engine: Rows
    postings: Rows
    bounds: Int64
    optimizers: Int64

    def between(self, begin_ns: int, end_ns: int) -> Evidence:
        """Evidence that began in a stretch of time."""

        def is_inside(at: Int64) -> Bools:
            inside: Bools = (at >= begin_ns) & (at < end_ns)
            return inside

        return Evidence(
            self.rank,
            self.sends.where(is_inside(self.sends.post_ns)),
            self.recvs.where(is_inside(self.recvs.post_ns)),
            self.operators.where(is_inside(self.operators.start_ns)),
            self.engine.where(is_inside(self.engine.start_ns)),
            self.postings.where(is_inside(self.postings.start_ns)),
            self.bounds[is_inside(self.bounds)],
            self.optimizers[is_inside(self.optimizers)],
        )


def evidence_of(rank: int, host: pd.DataFrame, calls: pd.DataFrame, peers: Sequence[int]) -> Evidence:
    """The evidence of a rank.

    Args:
        host: what its thread did (schema ``HOST_ORDER``).
        calls: its communication (schema ``CALLS``).
        peers: for each call the other global rank of a message, -1 where unknown.
    """
    what = host["what"].to_numpy()

    def rows(kind: What) -> Rows:
        rows_of_kind = host[what == kind.value]
        return Rows(*(rows_of_kind[name].to_numpy() for name in ("start_ns", "end_ns", "name", "number")))

    bounds = np.isin(what, [What.BOUND.value, What.OPTIMIZER.value, What.STEP.value])
    return Evidence(
        rank,
        _messages(calls, peers, "send"),
        _messages(calls, peers, "recv"),
        rows(What.OPERATOR),
        rows(What.ENGINE),
        rows(What.MESSAGE),
        host.loc[bounds, "start_ns"].to_numpy(),
        rows(What.OPTIMIZER).start_ns,
    )


def _messages(calls: pd.DataFrame, peers: Sequence[int], kind: str) -> Messages:
    rows = np.flatnonzero((calls["kind"] == kind).to_numpy())
    rows = rows[np.argsort(calls["host_ns"].to_numpy()[rows], kind="stable")]
    on_host = (calls["clock"] == "host").to_numpy()[rows]
    post = calls["host_ns"].to_numpy()[rows]
    ready = np.where(on_host, calls["end_ns"].to_numpy()[rows], post)
    return Messages(rows.astype(np.int64), np.asarray(peers, dtype=np.int64)[rows], post, ready)


class MismatchError(Exception):
    """Reason for which the order of a rank, or of several, cannot be that of a pipeline with one stage on each rank."""


Match = TypeVar("Match")


def outcome_of(hypothesis: Callable[[], Match]) -> Match | MismatchError:
    """The match of a hypothesis with the evidence, or the reason against it."""
    try:
        return hypothesis()
    except MismatchError as err:
        return err


def first_match(hypotheses: Iterable[Callable[[], Match]]) -> Match:
    """The match of the first hypothesis that explains the evidence.

    Raises:
        MismatchError: none does; the reason is that against the first.
    """
    reasons: list[MismatchError] = []
    for hypothesis in hypotheses:
        match = outcome_of(hypothesis)
        if not isinstance(match, MismatchError):
            return match
        reasons.append(match)
    raise reasons[0]


@dataclass(frozen=True, slots=True)
class Channels:
    """The messages of a rank by what they carry: outputs sent on, inputs received, gradients received and sent back.

    ``previous`` and ``following`` are the ranks that they are exchanged with: None where there is none, −1 where it is unknown.
    """

    previous: int | None
    following: int | None
    to_next: Messages
    from_next: Messages
    to_previous: Messages
    from_previous: Messages


def channels_of(evidence: Evidence, previous: int | None, following: int | None) -> Channels:
    """The messages by direction: by their peers where these are known, else by the pipeline rank and the ops before them.

    Raises:
        MismatchError: a peer is no neighbour.
    """
    sends, recvs = evidence.sends, evidence.recvs
    neighbours = [rank for rank in (previous, following) if rank is not None]
    peers = np.concatenate((sends.peer, recvs.peer))
    if len(peers) and (peers >= 0).all():
        strangers = sorted(set(peers.tolist()) - set(neighbours))
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
    return Channels(
        previous=previous,
        following=following,
        to_next=sends.where(to_next),
        from_next=recvs.where(from_next),
        to_previous=sends.where(~to_next),
        from_previous=recvs.where(~from_next),
    )


def _by_ops(evidence: Evidence) -> tuple[Bools, Bools]:
    """Mark the sends and receives to and from the next rank, where one op lies between any two groups of sends: a backward
    if the engine ran since the group before. A receive is that of the op that runs next, whose output the next group is.
    """
    sends, recvs, nodes = evidence.sends, evidence.recvs, evidence.engine.start_ns
    if not len(sends):
        return np.zeros(0, dtype=bool), np.ones(len(recvs), dtype=bool)
    group = cut(sends, evidence.operators.start_ns, nodes)
    first = np.searchsorted(group, np.arange(group[-1] + 1))
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
    times = np.sort(np.concatenate(at))
    before = np.searchsorted(times, messages.post_ns)
    return np.append(0, np.cumsum(np.diff(before) > 0))[: len(messages)].astype(np.int64)


def first_members(group: Int64) -> Int64:
    """The places of the first members of groups that are numbered from 0."""
    return np.searchsorted(group, np.arange(group[-1] + 1 if len(group) else 0)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Grouped:
    """One end of a channel by ops: for each op the first posting and the last completion of its messages."""

    messages: Messages
    group: Int64  # of each message
    post_ns: Int64
    ready_ns: Int64

    def __len__(self) -> int:
        return len(self.post_ns)


def grouped(messages: Messages, group: Int64) -> Grouped:
    """The messages by op; the group of each is the op's index."""
    first = first_members(group)
    ready = np.maximum.reduceat(messages.ready_ns, first) if len(first) else messages.ready_ns
    return Grouped(messages, group, messages.post_ns[first], ready)


@dataclass(frozen=True, slots=True)
class Ops:
    """Forwards or backwards of a rank in the order of their messages.

    ``low`` and ``high`` are the places of their rows, ``low`` ≤ row < ``high``, among the operators or the engine's nodes.
    """

    low: Int64
    high: Int64
    start_ns: Int64
    end_ns: Int64

    def __len__(self) -> int:
        return len(self.low)


def ops_of(rows: Rows, low: Int64, high: Int64) -> Ops:
    """The ops that consist of these rows."""
    ends = [rows.end_ns[first:after].max() for first, after in zip(low, high, strict=True)]
    return Ops(low, high, rows.start_ns[low], np.array(ends, dtype=np.int64))


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


def forwards_of(evidence: Evidence, received: Grouped | None, sent: Grouped | None, since: Int64, until: Int64) -> Ops:
    """The forwards: each the operators before its output is sent, else those after its input came.

    Between its messages there may be more, which an op, a bound or another message parts from the forward.

    Args:
        received: the inputs, by op; None on the first rank.
        sent: the outputs; None on the last rank.
        since: for each op, on all ranks but the last, when its rank sent something on before.
        until: for each op of the last rank when the next input came.

    Raises:
        MismatchError: no operator ran there.
    """
    rows = evidence.operators
    between = [evidence.engine.start_ns, evidence.bounds]
    if sent is not None:
        low = np.searchsorted(rows.start_ns, since)
        if received is not None:
            low = np.maximum(low, np.searchsorted(rows.start_ns, received.ready_ns))
            between.append(evidence.sends.post_ns)
        high = np.searchsorted(rows.start_ns, sent.post_ns)
        _check_rows(evidence, low, high)
        parts = np.sort(np.concatenate(between))
        start = np.append(_EARLIEST, parts)[np.searchsorted(parts, rows.start_ns[high - 1], side="right")]
        return ops_of(rows, np.maximum(low, np.searchsorted(rows.start_ns, start)), high)
    assert received is not None
    low, high = np.searchsorted(rows.start_ns, received.ready_ns), np.searchsorted(rows.start_ns, until)
    _check_rows(evidence, low, high)
    parts = np.sort(np.concatenate(between))
    end = np.append(parts, _LATEST)[np.searchsorted(parts, rows.start_ns[low], side="right")]
    return ops_of(rows, low, np.minimum(high, np.searchsorted(rows.start_ns, end)))


def forwards_behind(evidence: Evidence, forwards: Ops, backwards: Ops) -> Int64 | None:
    """Forward whose nodes each backward ran, by their sequence numbers: a thread numbers the nodes that it makes, and
    a message bears the number of the next one. None where the trace has no such numbers.

    Raises:
        MismatchError: a backward runs nodes of none, or of several.
    """
    known = evidence.postings.number >= 0
    times, numbers = evidence.postings.start_ns[known], evidence.postings.number[known]
    after, before = np.searchsorted(times, forwards.end_ns), np.searchsorted(times, forwards.start_ns) - 1
    nodes = [evidence.engine.number[low:high] for low, high in zip(backwards.low, backwards.high, strict=True)]
    next_numbers = np.append(numbers, -1)[np.searchsorted(times, backwards.start_ns) - 1].tolist()
    nodes = [
        _made_before(numbers_of_backward[numbers_of_backward >= 0], latest)
        for numbers_of_backward, latest in zip(nodes, next_numbers, strict=True)
    ]
    if (after >= len(times)).any() or not all(map(len, nodes)):
        return None
    made, since = np.maximum.accumulate(numbers[after]), np.append(numbers, -1)[before]
    unnumbered = np.searchsorted(evidence.postings.start_ns[~known], forwards.end_ns)
    if ((np.diff(made) == 0) & (np.diff(unnumbered) > 0)).any():  # messages under torch.no_grad have no numbers
        return None
    lowest = np.searchsorted(made, [numbers_of_backward.min() for numbers_of_backward in nodes], side="right")
    highest = np.searchsorted(made, [numbers_of_backward.max() for numbers_of_backward in nodes], side="right")
    if (
        (lowest != highest).any()
        or (highest >= len(made)).any()
        or any(
            numbers_of_backward.min() < since[index]
            for numbers_of_backward, index in zip(nodes, lowest.tolist(), strict=True)
        )
    ):
        raise MismatchError(f"a backward of rank {evidence.rank} runs what several forwards made, or none")
    return highest.astype(np.int64)


def _made_before(nodes: Int64, number: int) -> Int64:
    """Nodes of a backward with numbers below; all where there are none: some may be made as the backward begins."""
    return nodes[nodes < number] if (nodes < number).any() else nodes


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


def _check_rows(evidence: Evidence, low: Int64, high: Int64) -> None:
    if (high <= low).any():
        raise MismatchError(f"rank {evidence.rank} runs no operator next to outputs that it sends or receives")


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
