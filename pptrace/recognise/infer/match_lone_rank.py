"""Match one rank of an unlabelled pipeline whose other ranks have no trace, by its messages and autograd's sequence numbers.

Autograd numbers the nodes that a forward makes, and each message bears the number of the next one: so the nodes that a backward
runs name its forward, whatever else the program runs between its ops. A rank is taken for the first of its pipeline, the last or
one between them only where one of these alone explains every message of its steps and everything that its engine ran.
"""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from pptrace.model.tables import Int64
from pptrace.recognise.infer.evidence import Evidence, MismatchError, first_match, outcome_of
from pptrace.recognise.infer.match import Match, Outputs, RankMatch, runs_of
from pptrace.recognise.infer.match_chain import Channels, find_gradients, outputs_of, rank_matches, split_evenly
from pptrace.recognise.infer.match_checks import check_between_runs, check_gradients_of_inputs
from pptrace.recognise.infer.rank_order import (
    FROM_NEXT,
    FROM_PREVIOUS,
    TO_NEXT,
    TO_PREVIOUS,
    Around,
    Ops,
    channels_of,
    forwards_behind,
    forwards_of,
    grouped,
    ops_of,
    trimmed,
    without_backwards_of_losses,
)


def match_alone(evidence: Evidence, sizes: tuple[int, ...] = ()) -> Match:
    """Match the rank as part of a pipeline with one stage per rank.

    Args:
        evidence: of the rank; ``optimizers`` are the times of everything that ends a step.
        sizes: the microbatches of each step, where another rank tells them.

    Raises:
        MismatchError: it is none, or may be at several places.
    """
    if not len(evidence.engine.start_ns):
        raise MismatchError(f"autograd's engine runs nothing on rank {evidence.rank}: no backward")
    options = _neighbours(evidence)
    outcomes = [outcome_of(lambda around: _match_between(evidence, around, sizes), around) for around in options]
    matches = [match for match in outcomes if isinstance(match, Match)]
    if len(matches) > 1:
        raise MismatchError(f"rank {evidence.rank} may have several positions in a pipeline")
    if not matches:
        where = (
            "the first rank" if previous is None else "the last rank" if following is None else "a rank in the middle"
            for previous, following in options
        )
        reasons = (f"not as {rank} of a pipeline ({err})" for rank, err in zip(where, outcomes, strict=True))
        raise MismatchError("; ".join(dict.fromkeys(reasons)))
    return matches[0]


def _neighbours(evidence: Evidence) -> list[Around]:
    """Candidates for the ranks around it.

    Raises:
        MismatchError: it exchanges messages with more than two ranks, or with none.
    """
    peers = np.concatenate((evidence.sends.peer, evidence.recvs.peer))
    if not len(peers):
        raise MismatchError(f"rank {evidence.rank} exchanges no messages")
    if (peers < 0).any():
        return [(None, -1), (-1, None), (-1, -1)]
    known = sorted(set(peers.tolist()))
    if len(known) > 2:
        raise MismatchError(
            f"rank {evidence.rank} exchanges messages with {len(known)} ranks ({', '.join(map(str, known[:4]))}, …)"
        )
    if len(known) == 1:
        return [(None, known[0]), (known[0], None)]
    return [(known[0], known[1]), (known[1], known[0])]


def _match_between(evidence: Evidence, around: Around, sizes: tuple[int, ...]) -> Match:
    """The rank between these neighbours; of an output are as many tensors as make forwards and backwards equally many, else as
    are sent most often without an operator between them.
    """
    previous, following = around
    channels = channels_of(evidence, around)
    for name, neighbour, sent, came in (
        ("next", following, TO_NEXT, FROM_NEXT),
        ("previous", previous, TO_PREVIOUS, FROM_PREVIOUS),
    ):
        if neighbour is not None and not (len(channels[sent]) and len(channels[came])):
            raise MismatchError(f"messages with the {name} rank go one way only")
    if following is None:
        evidence = without_backwards_of_losses(evidence, channels[TO_PREVIOUS])
    gradients = find_gradients([evidence], [channels])
    (backwards,) = gradients.backwards

    def with_edges(inputs: Outputs | None, outputs: Outputs | None) -> RankMatch:
        (match,) = rank_matches([evidence], [around], [channels], gradients, [inputs, outputs])
        return replace(match, stage=None)

    def with_outputs(by_total: bool) -> Match:
        outputs = outputs_of(evidence, channels[TO_NEXT], backwards, by_total)
        match = with_edges(_inputs_for(evidence, channels, outputs), outputs)
        return _checked(evidence, match, sizes, is_first=previous is None)

    if following is not None:
        return first_match(with_outputs, (True, False))
    inputs, forwards = _inputs_of_last(evidence, channels, backwards)
    match = replace(with_edges(inputs, None), forwards=forwards)
    return _checked(evidence, match, sizes, is_first=previous is None)


def _inputs_for(evidence: Evidence, channels: Channels, outputs: Outputs) -> Outputs | None:
    """The inputs of those forwards whose outputs a backward followed; None of a first rank."""
    came = channels[FROM_PREVIOUS]
    if not len(came):
        return None
    total = len(channels[TO_NEXT]) // outputs.num_tensors
    op_of = split_evenly(evidence, came, total, "inputs", "outputs")
    trained = np.flatnonzero(np.isin(op_of, np.unique(outputs.messages // outputs.num_tensors)))
    return Outputs(trained.astype(np.int64), len(came) // total, outputs.sizes)


def _inputs_of_last(evidence: Evidence, channels: Channels, backwards: Ops) -> tuple[Outputs, Ops]:
    """The inputs of a last rank, which sends no outputs, and the forwards that read them: those whose nodes a backward ran.

    What most forwards consist of, those of evaluation tell as well.
    """
    came = channels[FROM_PREVIOUS]
    num_tensors, remainder = divmod(len(came), len(backwards))
    num_tensors = 1 if remainder or not num_tensors else num_tensors
    op_of = np.arange(len(came), dtype=np.int64) // num_tensors
    forwards = forwards_of(evidence, channels, {FROM_PREVIOUS: grouped(came, op_of)})
    trained = np.sort(_behind(evidence, forwards, backwards))
    ops = ops_of(evidence.operators, forwards.low[trained], forwards.high[trained])
    messages = np.flatnonzero(np.isin(op_of, trained)).astype(np.int64)
    return Outputs(messages, num_tensors), trimmed(evidence.operators, ops, at_end=False)


def _behind(evidence: Evidence, forwards: Ops, backwards: Ops) -> Int64:
    """Forward of each backward.

    Raises:
        MismatchError: nothing tells that.
    """
    behind = forwards_behind(evidence, forwards, backwards)
    if behind is None:
        raise MismatchError("autograd's sequence numbers do not show which forward each backward belongs to")
    return behind


def _checked(evidence: Evidence, match: RankMatch, declared_sizes: tuple[int, ...], is_first: bool) -> Match:
    """The match, if the rank ran whole steps one after the other and nothing comes between an op and its messages.

    Without sizes where nothing tells when steps end: one microbatch at a time, and no optimizer.
    """
    check_gradients_of_inputs(evidence, match)
    behind = _behind(evidence, match.forwards, match.backwards)
    if len(behind) != len(match.forwards):
        raise MismatchError(
            f"{len(match.forwards)} forwards and {len(behind)} backwards: the trace begins or ends within a step"
        )
    row = match.in_order(behind)
    sizes: list[int] = []  # numbers of microbatches that run until none is under way
    in_flight = count = 0
    for kind, *_ in row:
        in_flight += 1 if kind == "F" else -1
        count += kind == "F"
        if in_flight < 0:
            raise MismatchError("more backwards than forwards: some forwards were not recorded")
        if not in_flight:
            sizes.append(count)
            count = 0
    if not is_first and set(sizes) == {1} and not len(evidence.optimizers):
        if sum(declared_sizes) != len(sizes):
            return Match((match,), (), behind)
        sizes = list(declared_sizes)
    joined, (runs,) = runs_of(sizes, [row], [evidence.optimizers])
    check_between_runs(runs, match, match.others)
    bounds = np.sort(evidence.bounds)
    for (direction, kind), group in match.groups.items():
        ops = match.forwards if direction == "F" else match.backwards
        first, last = (ops.start_ns, group.post_ns) if kind == "send" else (group.post_ns, ops.start_ns)
        if (np.searchsorted(bounds, first) < np.searchsorted(bounds, last)).any():  # behind an optimizer is no gradient
            raise MismatchError(f"a step ends between an op of rank {evidence.rank} and its message")
    _check_backward_follows_gradient(evidence, match)
    return Match((match,), joined, behind)


def _check_backward_follows_gradient(evidence: Evidence, match: RankMatch) -> None:
    """Check that a backward runs nothing made between its gradient and itself, as where ranks exchange messages in a forward."""
    received, backwards, operators = match.groups.get(FROM_NEXT), match.backwards, evidence.operators.start_ns
    if received is None:
        return
    computes = np.searchsorted(operators, backwards.start_ns) > np.searchsorted(operators, received.ready_ns)
    posts = evidence.postings.where(evidence.postings.number >= 0)
    ahead = np.append(posts.number, -1)[np.searchsorted(posts.start_ns, backwards.start_ns) - 1]
    highest = np.maximum.reduceat(evidence.engine.number, backwards.low)
    if (computes & (highest >= ahead)).any():
        raise MismatchError(
            f"rank {evidence.rank} makes nodes between what it receives and the backward that runs them"
        )
