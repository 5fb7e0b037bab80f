"""Match one rank of an unlabelled pipeline whose other ranks have no trace, by its messages and autograd's sequence numbers.

Autograd numbers the nodes that a forward makes, and each message bears the number of the next one: so the nodes that a backward
runs name its forward, whatever else the program runs between its ops. A rank is taken for the first of its pipeline, the last or
one between them only where one of these alone explains every message of its steps and everything that its engine ran.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from pptrace.model.tables import Int64
from pptrace.recognise.infer.match import Match, MessageKind, RankMatch, peers_between
from pptrace.recognise.infer.match_chain import forwards_between, outputs_of
from pptrace.recognise.infer.match_checks import check_between_units, in_order
from pptrace.recognise.infer.rank_order import (
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
    forwards_behind,
    grouped,
    ops_of,
    outcome_of,
    trimmed,
)
from pptrace.recognise.infer.schedule_runs import Outputs, units_of


def has_numbers(evidence: Evidence) -> bool:
    """Return whether autograd's nodes bear sequence numbers."""
    return bool((evidence.engine.number >= 0).any())


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
    around = _neighbours(evidence)
    outcomes = [outcome_of(partial(_match_between, evidence, *ranks, sizes)) for ranks in around]
    matches = [match for match in outcomes if isinstance(match, Match)]
    if len(matches) > 1:
        raise MismatchError(f"rank {evidence.rank} may have several positions in a pipeline")
    if not matches:
        reasons = (f"not as {_description(*ranks)} ({err})" for ranks, err in zip(around, outcomes, strict=True))
        raise MismatchError("; ".join(dict.fromkeys(reasons)))
    return matches[0]


def _neighbours(evidence: Evidence) -> list[tuple[int | None, int | None]]:
    """Candidates for the previous and the next rank: None where there is none, −1 where it is unknown.

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


def _description(previous: int | None, following: int | None) -> str:
    where = "the first rank" if previous is None else "the last rank" if following is None else "a rank in the middle"
    return f"{where} of a pipeline"


def _match_between(evidence: Evidence, previous: int | None, following: int | None, sizes: tuple[int, ...]) -> Match:
    """The rank between these neighbours; of an output are as many tensors as make forwards and backwards equally many, else as
    are sent most often without an operator between them.

    Raises:
        MismatchError
    """
    channels = channels_of(evidence, previous, following)
    for name, neighbour in (("next", following), ("previous", previous)):
        to, back = (getattr(channels, f"{message_kind}_{name}") for message_kind in ("to", "from"))
        if (neighbour is not None) and not (len(to) and len(back)):
            raise MismatchError(f"messages with the {name} rank go one way only")
    gradients = _gradients(evidence, channels)

    def checked_with(forwards: _Side) -> Match:
        groups, others = {**forwards.groups, **gradients.groups}, {**forwards.others, **gradients.others}
        peers = peers_between(previous, following)
        match = RankMatch(evidence.rank, None, forwards.ops, gradients.ops, groups, others, peers)
        return _checked(evidence, match, sizes, is_first=previous is None)

    def with_outputs(by_total: bool) -> Match:
        return checked_with(_forwards_with_outputs(evidence, channels, gradients.ops, by_total))

    if following is None:
        return checked_with(_forwards_of_last(evidence, channels, gradients.ops))
    return first_match(partial(with_outputs, by_total) for by_total in (True, False))


@dataclass(frozen=True, slots=True)
class _Side:
    """Forwards or backwards with their messages; ``others`` are messages of none of them."""

    ops: Ops
    groups: Mapping[MessageKind, Grouped]
    others: Mapping[MessageKind, Messages]


def _gradients(evidence: Evidence, channels: Channels) -> _Side:
    """The backwards: what the engine ran between two messages.

    Raises:
        MismatchError: the engine ran elsewhere as well, or gradients are not received for each.
    """
    received, sent = channels.from_next, channels.to_previous
    group = None
    if len(sent):
        others = (channels.to_next.post_ns, channels.from_next.post_ns, channels.from_previous.post_ns)
        group = cut(sent, evidence.engine.start_ns, *others)
        count = int(group[-1]) + 1
    else:
        posts = np.sort(evidence.postings.start_ns)
        count = len(np.unique(np.searchsorted(posts, evidence.engine.start_ns)))
    came = None
    if len(received):
        came = grouped(received, _evenly_split(evidence, received, count, "gradients", "backwards"))
    low, high = engine_spans(evidence, came, None if group is None else grouped(sent, group))
    kept = high > low
    if not kept.any():
        raise MismatchError("autograd's engine runs nothing between the messages: no backward")
    groups: dict[MessageKind, Grouped] = {}
    left: dict[MessageKind, Messages] = {}
    for message_kind, messages, of_op in (
        (("B", "recv"), received, None if came is None else came.group),
        (("B", "send"), sent, group),
    ):
        if of_op is not None:
            is_kept = kept[of_op]
            groups[message_kind] = grouped(
                messages.where(is_kept), np.unique(of_op[is_kept], return_inverse=True)[1].astype(np.int64)
            )
            left[message_kind] = messages.where(~is_kept)
    return _Side(ops_of(evidence.engine, low[kept], high[kept]), groups, left)


def _evenly_split(evidence: Evidence, messages: Messages, count: int, what: str, of: str) -> Int64:
    """Op of each message, where each of ``count`` ops has equally many, one after the other.

    Raises:
        MismatchError
    """
    each, remainder = divmod(len(messages), count)
    if remainder or not each:
        raise MismatchError(f"rank {evidence.rank} has {len(messages)} messages with {what} and {count} {of}")
    return np.arange(len(messages), dtype=np.int64) // each


def _forwards_with_outputs(evidence: Evidence, channels: Channels, backwards: Ops, by_total: bool) -> _Side:
    """The forwards whose outputs are sent on, with the inputs of those that read some.

    Raises:
        MismatchError
    """
    sent = channels.to_next
    outputs = outputs_of(evidence, sent, backwards, by_total)
    groups: dict[MessageKind, Grouped] = {("F", "send"): outputs.of(sent)}
    left: dict[MessageKind, Messages] = {("F", "send"): outputs.others(sent)}
    came = channels.from_previous
    if len(came):
        total = len(sent) // outputs.num_tensors
        op_of = _evenly_split(evidence, came, total, "inputs", "outputs")
        ops = np.unique(outputs.messages // outputs.num_tensors)
        rows = np.flatnonzero(np.isin(op_of, ops))
        inputs = Outputs(rows.astype(np.int64), len(came) // total)
        groups["F", "recv"], left["F", "recv"] = inputs.of(came), inputs.others(came)
    return _Side(forwards_between(evidence, channels, groups), groups, left)


def _forwards_of_last(evidence: Evidence, channels: Channels, backwards: Ops) -> _Side:
    """The forwards of a last rank, which sends no outputs: those whose nodes a backward ran, of all that read an input.

    Raises:
        MismatchError
    """
    came = channels.from_previous
    num_tensors, remainder = divmod(len(came), len(backwards))
    num_tensors = 1 if remainder or not num_tensors else num_tensors
    groups = {("F", "recv"): grouped(came, np.arange(len(came), dtype=np.int64) // num_tensors)}
    forwards = forwards_between(evidence, channels, groups)
    behind = _behind(evidence, forwards, backwards)
    kept = np.sort(behind)
    rows = np.flatnonzero(np.isin(np.arange(len(came)) // num_tensors, kept))
    inputs = Outputs(rows.astype(np.int64), num_tensors)
    trained = ops_of(evidence.operators, forwards.low[kept], forwards.high[kept])
    ops = trimmed(evidence.operators, trained, at_end=False)
    return _Side(ops, {("F", "recv"): inputs.of(came)}, {("F", "recv"): inputs.others(came)})


def _behind(evidence: Evidence, forwards: Ops, backwards: Ops) -> Int64:
    """Forward of each backward.

    Raises:
        MismatchError: nothing tells that.
    """
    behind = forwards_behind(evidence, forwards, backwards)
    if behind is None:
        raise MismatchError("autograd's sequence numbers do not show which forward each backward belongs to")
    if len(np.unique(behind)) < len(behind):
        raise MismatchError("two backwards run what one forward made")
    return behind


def _checked(evidence: Evidence, match: RankMatch, declared_sizes: tuple[int, ...], is_first: bool) -> Match:
    """The match, if the rank ran whole steps one after the other and nothing comes between an op and its messages.

    Without units where nothing tells when steps end: one microbatch at a time, and no optimizer.

    Raises:
        MismatchError
    """
    behind = _behind(evidence, match.forwards, match.backwards)
    if len(behind) != len(match.forwards):
        raise MismatchError(
            f"{len(match.forwards)} forwards and {len(behind)} backwards: the trace begins or ends within a step"
        )
    row = in_order(match, behind)
    sizes = tuple(_sizes([kind for kind, _, _ in row]))
    if not is_first and set(sizes) == {1} and not len(evidence.optimizers):
        if sum(declared_sizes) != len(sizes):
            return Match((match,), (), behind)
        sizes = declared_sizes
    units = units_of(sizes, [row], [evidence.optimizers])
    check_between_units(row, match, units, message_kinds=tuple(match.others))
    for message_kind, group in match.groups.items():
        _check_no_bound(evidence, match.forwards if message_kind[0] == "F" else match.backwards, message_kind, group)
    _check_backward_follows_gradient(evidence, match)
    return Match((match,), units, behind)


def _sizes(kinds: list[str]) -> Iterator[int]:
    """Numbers of microbatches that run until none is under way, one after the other.

    Raises:
        MismatchError: a backward comes before its forward.
    """
    in_flight = count = 0
    for kind in kinds:
        in_flight += 1 if kind == "F" else -1
        count += kind == "F"
        if in_flight < 0:
            raise MismatchError("more backwards than forwards: some forwards were not recorded")
        if not in_flight:
            yield count
            count = 0


def _check_no_bound(evidence: Evidence, ops: Ops, message_kind: MessageKind, group: Grouped) -> None:
    """Check that no step ends, and no barrier comes, between an op and its messages: what is sent behind an optimizer is no
    gradient.

    Raises:
        MismatchError
    """
    bounds = np.sort(evidence.bounds)
    first, last = (ops.start_ns, group.post_ns) if message_kind[1] == "send" else (group.post_ns, ops.start_ns)
    if (np.searchsorted(bounds, first) < np.searchsorted(bounds, last)).any():
        raise MismatchError(f"a step ends between an op of rank {evidence.rank} and its message")


def _check_backward_follows_gradient(evidence: Evidence, match: RankMatch) -> None:
    """A backward runs nothing that was made between its gradient and itself, as where ranks exchange messages within a forward.

    Raises:
        MismatchError
    """
    received, backwards, operators = match.groups.get(("B", "recv")), match.backwards, evidence.operators.start_ns
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
