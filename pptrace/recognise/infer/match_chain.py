"""Match the ops of an unlabelled pipeline on all of its ranks at once: messages, peers, autograd's engine and the plan.

One rank alone does not tell a forward of few operators from what its program does between ops. All ranks together do: along a
chain each output sent is an input received, each forward lies before its output and after its input, each backward is what the
engine runs between two gradients, and every rank must have as many of both, in an order that a schedule can run. What explains
all messages and all of the engine's work on all ranks is taken; anything less is refused, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from msgspec import Struct

from pptrace.model.tables import Bool, Int64
from pptrace.recognise.infer.evidence import Evidence, Messages, MismatchError, first_match, name_peers
from pptrace.recognise.infer.match import Match, Outputs, RankMatch, trained_outputs
from pptrace.recognise.infer.match_checks import checked
from pptrace.recognise.infer.rank_order import (
    FROM_NEXT,
    FROM_PREVIOUS,
    TO_NEXT,
    TO_PREVIOUS,
    Around,
    Channel,
    Grouped,
    Ops,
    channels_of,
    cut,
    engine_spans,
    first_members,
    forwards_of,
    grouped,
    ops_of,
    without_backwards_of_losses,
)

Channels = Mapping[Channel, Messages]


def match_chain(evidence: Sequence[Evidence]) -> Match:
    """Match the ranks as a pipeline in this order, with one stage on each.

    Raises:
        MismatchError: they cannot be one.
    """
    order = [of_rank.rank for of_rank in evidence]
    around = list(zip([None, *order[:-1]], [*order[1:], None], strict=True))
    channels = [channels_of(of_rank, neighbours) for of_rank, neighbours in zip(evidence, around, strict=True)]
    for (before, of_before), (after, of_after) in pairwise(zip(order, channels, strict=True)):
        for source, sent, target, came in (
            (before, of_before[TO_NEXT], after, of_after[FROM_PREVIOUS]),
            (after, of_after[TO_PREVIOUS], before, of_before[FROM_NEXT]),
        ):
            if len(sent) != len(came):
                by_order = (
                    "" if name_peers(evidence) else ", if that is their order (on gloo record_shapes=True names peers)"
                )
                raise MismatchError(
                    f"rank {source} sends {len(sent)} messages to rank {target}, which receives {len(came)}{by_order}"
                )
            if not len(sent):
                raise MismatchError(f"rank {source} sends nothing to rank {target}")
    evidence = [*evidence[:-1], without_backwards_of_losses(evidence[-1], channels[-1][TO_PREVIOUS])]
    gradients = find_gradients(evidence, channels)
    senders = list(zip(evidence[:-1], channels, gradients.backwards, strict=False))

    def with_outputs(by_total: bool) -> Match:
        outputs = [outputs_of(sender, sent[TO_NEXT], backwards, by_total) for sender, sent, backwards in senders]
        ranks = rank_matches(evidence, around, channels, gradients, [None, *outputs, None])
        return checked(evidence, ranks, outputs[0].sizes, gradients.is_engine_complete)

    return first_match(with_outputs, (True, False))


class Gradients(Struct, frozen=True):
    """The backwards by rank; ``trained`` marks the groups of gradients that are theirs, ``group`` has by edge the group of each
    message.

    Edge i is between rank i − 1 and rank i; None where none of both is of the pipeline. ``is_engine_complete``: no rank's
    engine ran next to the other groups.
    """

    backwards: list[Ops]
    group: list[Int64 | None]
    trained: Bool
    is_engine_complete: bool


def find_gradients(evidence: Sequence[Evidence], channels: Sequence[Channels]) -> Gradients:
    """Work of each rank's engine before it sent gradients. Those next to which the engine of a rank ran nothing are of no
    backward: ranks may agree on shapes both ways.

    Raises:
        MismatchError: the ranks do not have as many.
    """
    group: list[Int64 | None] = []
    for of_rank, messages in zip(evidence, channels, strict=True):
        unused = (messages[channel].post_ns for channel in (TO_NEXT, FROM_NEXT, FROM_PREVIOUS))
        sent = messages[TO_PREVIOUS]
        group.append(cut(sent, of_rank.engine.start_ns, *unused) if len(sent) else None)
    counts = {int(of_edge[-1]) + 1 for of_edge in group if of_edge is not None}
    if len(counts) > 1:
        raise MismatchError(f"the ranks exchange {min(counts)} to {max(counts)} gradients")
    if counts:
        count = counts.pop()
    else:  # as many as times that the engine ran between two messages
        posts = np.sort(evidence[0].postings.start_ns)
        count = len(np.unique(np.searchsorted(posts, evidence[0].engine.start_ns)))
    came = channels[-1][FROM_NEXT]  # of a rank without a trace
    group.append(split_evenly(evidence[-1], came, count, "gradients", "backwards") if len(came) else None)
    spans = []
    for index, (of_rank, messages) in enumerate(zip(evidence, channels, strict=True)):
        before, after = group[index : index + 2]
        received = None if after is None else grouped(messages[FROM_NEXT], after)
        sent_back = None if before is None else grouped(messages[TO_PREVIOUS], before)
        spans.append(engine_spans(of_rank, received, sent_back))
    ran = np.array([high > low for low, high in spans])
    trained: Bool = np.logical_and.reduce(ran)
    if not trained.any():
        raise MismatchError("autograd's engine runs nothing between the messages: no backward")
    backwards = [
        ops_of(of_rank.engine, low[trained], high[trained])
        for of_rank, (low, high) in zip(evidence, spans, strict=True)
    ]
    return Gradients(backwards, group, trained, np.array_equal(trained, ran.any(axis=0)))


def split_evenly(evidence: Evidence, messages: Messages, count: int, what: str, of: str) -> Int64:
    """Op of each message, where each of ``count`` ops has equally many, one after the other."""
    each, remainder = divmod(len(messages), count)
    if remainder or not each:
        raise MismatchError(f"rank {evidence.rank} has {len(messages)} messages with {what} and {count} {of}")
    return np.arange(len(messages), dtype=np.int64) // each


_LIGHT = 10
"""Share (one in so many) of the work before an output that work between the output's tensors lasts at most."""


def outputs_of(evidence: Evidence, sent: Messages, backwards: Ops, by_total: bool) -> Outputs:
    """The outputs that a rank sends on, between whose tensors it computes nothing long.

    Args:
        evidence: of the rank.
        sent: what it sends on.
        backwards: of the rank.
        by_total: of an output are as many tensors as make forwards and backwards equally many; else as are sent most often
            without an operator between them.
    """
    rows, nodes = evidence.operators, evidence.engine.start_ns
    if by_total:
        num_tensors, remainder = divmod(len(sent), len(backwards))
        if remainder or not num_tensors:
            raise MismatchError(f"rank {evidence.rank} sends {len(sent)} outputs and runs {len(backwards)} backwards")
    else:
        num_tensors = int(np.bincount(np.bincount(cut(sent, rows.start_ns, nodes))).argmax())
    outputs = trained_outputs(sent.post_ns, backwards.start_ns, num_tensors)
    by_op = outputs.of(sent)
    last = by_op.messages.post_ns[np.append(first_members(by_op.group)[1:], len(by_op.group)) - 1]
    lasting = np.append(0, np.cumsum(rows.end_ns - rows.start_ns))
    low, high = np.searchsorted(rows.start_ns, by_op.post_ns), np.searchsorted(rows.start_ns, last)
    between, before = lasting[high] - lasting[low], lasting[low] - lasting[np.append(0, high[:-1])]
    ran = np.searchsorted(nodes, last) > np.searchsorted(nodes, by_op.post_ns)
    if ran.any() or (_LIGHT * between > before).any():
        raise MismatchError(f"rank {evidence.rank} computes between messages that would be of one output")
    return outputs


def rank_matches(
    evidence: Sequence[Evidence],
    around: Sequence[Around],
    channels: Sequence[Channels],
    gradients: Gradients,
    outputs: Sequence[Outputs | None],
) -> list[RankMatch]:
    """The ops and messages of each rank; ``outputs`` are by edge, as the groups of gradients are.

    Raises:
        MismatchError: they do not fit each other.
    """
    if len({of_edge.sizes for of_edge in outputs if of_edge is not None}) > 1:
        raise MismatchError("the ranks do not send outputs and gradients of the same steps")
    matches = []
    for index, (of_rank, messages) in enumerate(zip(evidence, channels, strict=True)):
        groups: dict[Channel, Grouped] = {}
        others: dict[Channel, Messages] = {}
        peers: dict[Channel, int] = {}
        previous, following = around[index]
        for edge, neighbour, output, gradient in (
            (index + 1, following, TO_NEXT, FROM_NEXT),
            (index, previous, FROM_PREVIOUS, TO_PREVIOUS),
        ):
            peers |= dict.fromkeys((output, gradient), -1 if neighbour is None else neighbour)
            of_edge, group = outputs[edge], gradients.group[edge]
            if of_edge is None or group is None:
                continue
            groups[output], others[output] = of_edge.of(messages[output]), of_edge.others(messages[output])
            trained = gradients.trained[group]
            op = np.unique(group[trained], return_inverse=True)[1].astype(np.int64)
            groups[gradient] = grouped(messages[gradient].where(trained), op)
            others[gradient] = messages[gradient].where(~trained)
        forwards, backwards = forwards_of(of_rank, messages, groups), gradients.backwards[index]
        matches.append(RankMatch(of_rank.rank, index, forwards, backwards, groups, others, peers))
    return matches
