"""Match the ops of an unlabelled pipeline on all of its ranks at once: messages, peers, autograd's engine and the plan.

One rank alone does not tell a forward of few operators from what its program does between ops. All ranks together do: along a
chain each output sent is an input received, each forward lies before its output and after its input, each backward is what the
engine runs between two gradients, and every rank must have as many of both, in an order that a schedule can run. What explains
all messages and all of the engine's work on all ranks is taken; anything less is refused, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from pptrace.model.tables import Int64
from pptrace.recognise.infer.match import TO_NEXT, TO_PREVIOUS, Match, MessageKind, RankMatch, peers_between
from pptrace.recognise.infer.match_checks import checked
from pptrace.recognise.infer.rank_order import (
    Bools,
    Channels,
    Evidence,
    Grouped,
    Messages,
    MismatchError,
    Ops,
    channels_of,
    cut,
    engine_spans,
    first_match,
    first_members,
    forwards_of,
    grouped,
    ops_of,
    trimmed,
)
from pptrace.recognise.infer.schedule_runs import Outputs, trained_outputs


def match_chain(evidence: Sequence[Evidence]) -> Match:
    """Match the ranks as a pipeline in this order, with one stage on each.

    Raises:
        MismatchError: they cannot be one.
    """
    order = [rank_evidence.rank for rank_evidence in evidence]
    with_neighbours = list(zip(evidence, [None, *order], [*order[1:], None], strict=False))
    channels = [
        channels_of(rank_evidence, previous, following) for rank_evidence, previous, following in with_neighbours
    ]
    for (before, sending), (after, receiving) in pairwise(zip(order, channels, strict=True)):
        _check_counts(before, sending.to_next, after, receiving.from_previous)
        _check_counts(after, receiving.to_previous, before, sending.from_next)
    gradients = find_gradients(evidence, channels)
    senders = list(zip(evidence[:-1], channels, gradients.backwards, strict=False))

    def with_outputs(by_total: bool) -> Match:
        outputs = [outputs_of(sender, sent.to_next, backwards, by_total) for sender, sent, backwards in senders]
        ranks = rank_matches(evidence, channels, gradients, [None, *outputs, None])
        return checked(evidence, ranks, outputs[0].sizes, gradients.is_engine_complete)

    return first_match(partial(with_outputs, by_total) for by_total in (True, False))


def _check_counts(source: int, sends: Messages, target: int, receives: Messages) -> None:
    if len(sends) != len(receives):
        raise MismatchError(
            f"rank {source} sends {len(sends)} messages to rank {target}, which receives {len(receives)}"
        )
    if not len(sends):
        raise MismatchError(f"rank {source} sends nothing to rank {target}")


@dataclass(frozen=True, slots=True)
class Gradients:
    """The backwards by rank; ``kept`` are the groups of gradients that are theirs, ``group`` has by edge the group of each
    message.

    Edge i is between rank i − 1 and rank i; None where none of both is of the pipeline. ``is_engine_complete``: no rank's
    engine ran next to those that are not kept.
    """

    backwards: list[Ops]
    group: list[Int64 | None]
    kept: Bools
    is_engine_complete: bool


def find_gradients(evidence: Sequence[Evidence], channels: Sequence[Channels]) -> Gradients:
    """Work of each rank's engine before it sent gradients. Those next to which the engine of a rank ran nothing are of no
    backward: ranks may agree on shapes both ways.

    Raises:
        MismatchError: the ranks do not have as many.
    """
    group: list[Int64 | None] = []
    for rank_evidence, of_rank in zip(evidence, channels, strict=True):
        unused = (of_rank.to_next.post_ns, of_rank.from_next.post_ns, of_rank.from_previous.post_ns)
        sent = of_rank.to_previous
        group.append(cut(sent, rank_evidence.engine.start_ns, *unused) if len(sent) else None)
    counts = {int(of_edge[-1]) + 1 for of_edge in group if of_edge is not None}
    if len(counts) > 1:
        raise MismatchError(f"the ranks exchange {min(counts)} to {max(counts)} gradients")
    count = counts.pop() if counts else _num_engine_runs(evidence[0])
    came = channels[-1].from_next  # of a rank without a trace
    group.append(split_evenly(evidence[-1], came, count, "gradients", "backwards") if len(came) else None)
    kept = np.ones(count, dtype=bool)
    ran = ~kept
    spans = []
    for index, (rank_evidence, of_rank) in enumerate(zip(evidence, channels, strict=True)):
        before, after = group[index : index + 2]
        received = None if after is None else grouped(of_rank.from_next, after)
        sent_back = None if before is None else grouped(of_rank.to_previous, before)
        spans.append(engine_spans(rank_evidence, received, sent_back))
        kept &= spans[-1][1] > spans[-1][0]
        ran |= spans[-1][1] > spans[-1][0]
    if not kept.any():
        raise MismatchError("autograd's engine runs nothing between the messages: no backward")
    backwards = [
        ops_of(rank_evidence.engine, low[kept], high[kept])
        for rank_evidence, (low, high) in zip(evidence, spans, strict=True)
    ]
    return Gradients(backwards, group, kept, bool((kept == ran).all()))


def _num_engine_runs(evidence: Evidence) -> int:
    """Times that the engine ran between two messages."""
    posts = np.sort(evidence.postings.start_ns)
    return len(np.unique(np.searchsorted(posts, evidence.engine.start_ns)))


def split_evenly(evidence: Evidence, messages: Messages, count: int, what: str, of: str) -> Int64:
    """Op of each message, where each of ``count`` ops has equally many, one after the other.

    Raises:
        MismatchError
    """
    each, remainder = divmod(len(messages), count)
    if remainder or not each:
        raise MismatchError(f"rank {evidence.rank} has {len(messages)} messages with {what} and {count} {of}")
    return np.arange(len(messages), dtype=np.int64) // each


def outputs_of(evidence: Evidence, sent: Messages, backwards: Ops, by_total: bool) -> Outputs:
    """The outputs that a rank sends on.

    Args:
        evidence: of the rank.
        sent: what it sends on.
        backwards: of the rank.
        by_total: of an output are as many tensors as make forwards and backwards equally many; else as are sent most often
            without an operator between them.

    Raises:
        MismatchError
    """
    if by_total:
        num_tensors, remainder = divmod(len(sent), len(backwards))
        if remainder or not num_tensors:
            raise MismatchError(f"rank {evidence.rank} sends {len(sent)} outputs and runs {len(backwards)} backwards")
    else:
        group = cut(sent, evidence.operators.start_ns, evidence.engine.start_ns)
        num_tensors = int(np.bincount(np.bincount(group)).argmax())
    outputs = trained_outputs(sent.post_ns, backwards.start_ns, num_tensors)
    _check_close(evidence, outputs.of(sent))
    return outputs


_LIGHT = 10
"""Share (one in so many) of the work before an output that work between the output's tensors lasts at most."""


def _check_close(evidence: Evidence, sent: Grouped) -> None:
    """Check that nothing long is computed between the tensors of one output.

    Raises:
        MismatchError
    """
    rows = evidence.operators
    last = sent.messages.post_ns[np.append(first_members(sent.group)[1:], len(sent.group)) - 1]
    lasting = np.append(0, np.cumsum(rows.end_ns - rows.start_ns))
    low, high = np.searchsorted(rows.start_ns, sent.post_ns), np.searchsorted(rows.start_ns, last)
    between, before = lasting[high] - lasting[low], lasting[low] - lasting[np.append(0, high[:-1])]
    nodes = evidence.engine.start_ns
    ran = np.searchsorted(nodes, last) > np.searchsorted(nodes, sent.post_ns)
    if ran.any() or (_LIGHT * between > before).any():
        raise MismatchError(f"rank {evidence.rank} computes between messages that would be of one output")


def rank_matches(
    evidence: Sequence[Evidence], channels: Sequence[Channels], gradients: Gradients, outputs: Sequence[Outputs | None]
) -> list[RankMatch]:
    """The ops and messages of each rank; ``outputs`` are by edge, as the groups of gradients are.

    Raises:
        MismatchError: they do not fit each other.
    """
    if len({of_edge.sizes for of_edge in outputs if of_edge is not None}) > 1:
        raise MismatchError("the ranks do not send outputs and gradients of the same steps")
    matches = []
    for index, (rank_evidence, of_rank) in enumerate(zip(evidence, channels, strict=True)):
        groups: dict[MessageKind, Grouped] = {}
        unused: dict[MessageKind, Messages] = {}
        for edge, message_kinds in ((index + 1, TO_NEXT), (index, TO_PREVIOUS)):
            of_edge, group = outputs[edge], gradients.group[edge]
            if of_edge is None or group is None:
                continue
            forward, backward = (getattr(of_rank, name) for name in message_kinds.values())
            output, gradient = message_kinds
            groups[output], unused[output] = of_edge.of(forward), of_edge.others(forward)
            kept = gradients.kept[group]
            groups[gradient] = grouped(backward.where(kept), _renumbered(group[kept]))
            unused[gradient] = backward.where(~kept)
        forwards = forwards_between(rank_evidence, of_rank, groups)
        peers = peers_between(of_rank.previous, of_rank.following)
        backwards = gradients.backwards[index]
        matches.append(RankMatch(rank_evidence.rank, index, forwards, backwards, groups, unused, peers))
    return matches


def _renumbered(group: Int64) -> Int64:
    return np.unique(group, return_inverse=True)[1].astype(np.int64)


def forwards_between(evidence: Evidence, channels: Channels, groups: Mapping[MessageKind, Grouped]) -> Ops:
    """The forwards of a rank, without operators that only some of them have."""
    received, sent = groups.get(("F", "recv")), groups.get(("F", "send"))
    posts = channels.to_next.post_ns
    if sent is not None:
        before = np.searchsorted(posts, sent.post_ns) - 1
        since = np.append(posts, np.iinfo(np.int64).min)[before]
        forwards = forwards_of(evidence, received, sent, since, since)
    else:
        assert received is not None
        ready = np.append(np.sort(channels.from_previous.ready_ns), np.iinfo(np.int64).max)
        until = ready[np.searchsorted(ready, received.ready_ns, side="right")]
        forwards = forwards_of(evidence, received, None, until, until)
    return trimmed(evidence.operators, forwards, at_end=sent is not None)
