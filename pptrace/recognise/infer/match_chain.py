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
    gradients = _gradients(evidence, channels)
    senders = list(zip(evidence[:-1], channels, gradients.backwards, strict=False))

    def with_outputs(by_total: bool) -> Match:
        outputs = [outputs_of(sender, sent.to_next, backwards, by_total) for sender, sent, backwards in senders]
        ranks = _rank_matches(evidence, channels, gradients, outputs)
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
class _Gradients:
    """The backwards by pipeline rank; ``kept`` are the groups of gradients that are theirs, ``group`` by edge the group
    of each message. ``are_whole``: no rank's engine ran next to those that are not kept.
    """

    backwards: list[Ops]
    group: list[Int64]
    kept: Bools
    is_engine_complete: bool


def _gradients(evidence: Sequence[Evidence], channels: Sequence[Channels]) -> _Gradients:
    """Work of each rank's engine before it sent gradients. Those next to which the engine of a rank ran nothing are of no
    backward: ranks may agree on shapes both ways.

    Raises:
        MismatchError: the ranks do not have as many.
    """
    group = []
    for rank_evidence, rank_channels in zip(evidence[1:], channels[1:], strict=True):
        unused = (rank_channels.to_next.post_ns, rank_channels.from_next.post_ns, rank_channels.from_previous.post_ns)
        group.append(cut(rank_channels.to_previous, rank_evidence.engine.start_ns, *unused))
    counts = {int(rank_evidence[-1]) + 1 for rank_evidence in group}
    if len(counts) > 1:
        raise MismatchError(f"the ranks exchange {min(counts)} to {max(counts)} gradients")
    kept = np.ones(counts.pop(), dtype=bool)
    ran = ~kept
    spans = []
    for pp_rank, (rank_evidence, rank_channels) in enumerate(zip(evidence, channels, strict=True)):
        received = grouped(rank_channels.from_next, group[pp_rank]) if pp_rank < len(group) else None
        sent = grouped(rank_channels.to_previous, group[pp_rank - 1]) if pp_rank else None
        spans.append(engine_spans(rank_evidence, received, sent))
        kept &= spans[-1][1] > spans[-1][0]
        ran |= spans[-1][1] > spans[-1][0]
    if not kept.any():
        raise MismatchError("autograd's engine runs nothing between the messages: no backward")
    backwards = [
        ops_of(rank_evidence.engine, low[kept], high[kept])
        for rank_evidence, (low, high) in zip(evidence, spans, strict=True)
    ]
    return _Gradients(backwards, group, kept, bool((kept == ran).all()))


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


def _rank_matches(
    evidence: Sequence[Evidence], channels: Sequence[Channels], gradients: _Gradients, outputs: Sequence[Outputs]
) -> list[RankMatch]:
    """The ops and messages of each rank.

    Raises:
        MismatchError: they do not fit each other.
    """
    if len({of_edge.sizes for of_edge in outputs}) > 1:
        raise MismatchError("the ranks do not send outputs and gradients of the same steps")
    matches = []
    order = [rank_evidence.rank for rank_evidence in evidence]
    around = list(zip([None, *order[:-1]], [*order[1:], None], strict=True))
    for pp_rank, (rank_evidence, rank_channels) in enumerate(zip(evidence, channels, strict=True)):
        groups: dict[MessageKind, Grouped] = {}
        unused: dict[MessageKind, Messages] = {}
        for edge, message_kinds in ((pp_rank, TO_NEXT), (pp_rank - 1, TO_PREVIOUS)):
            if not 0 <= edge < len(outputs):
                continue
            forward, backward = (getattr(rank_channels, name) for name in message_kinds.values())
            output, gradient = message_kinds
            groups[output] = outputs[edge].of(forward)
            unused[output] = outputs[edge].others(forward)
            kept = gradients.kept[gradients.group[edge]]
            groups[gradient] = grouped(backward.where(kept), _renumbered(gradients.group[edge][kept]))
            unused[gradient] = backward.where(~kept)
        forwards = forwards_between(rank_evidence, rank_channels, groups)
        peers = peers_between(*around[pp_rank])
        backwards = gradients.backwards[pp_rank]
        matches.append(RankMatch(rank_evidence.rank, pp_rank, forwards, backwards, groups, unused, peers))
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
