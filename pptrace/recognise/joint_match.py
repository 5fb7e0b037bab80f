"""The ops of a pipeline without labels, matched on all of its ranks at once: messages, peers, autograd's engine and the plan.

One rank alone does not tell a forward of few operators from what its program does between ops. All ranks together do: along a
chain each output sent is an input received, each forward lies before its output and after its input, each backward is what the
engine runs between two gradients, and every rank must have as many of both, in an order that a schedule can run. What explains
all messages and all of the engine's work on all ranks is taken; anything less is refused, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations

import numpy as np

from pptrace.errors import ScheduleError
from pptrace.recognise.identify import identify
from pptrace.recognise.rank_order import (
    Bools,
    Channels,
    Evidence,
    Grouped,
    Messages,
    MismatchError,
    Ops,
    channels_of,
    check_only_forwards,
    cut,
    engine_spans,
    first_of,
    forwards_behind,
    forwards_of,
    grouped,
    ops_of,
    trimmed,
)
from pptrace.recognise.units import Op, Trained, Unit, trained, units_of
from pptrace.schedule import registry
from pptrace.schedule.plan import Plan
from pptrace.schedule.replay import replay
from pptrace.schedule.text import from_rows
from pptrace.tables import Int64

Way = tuple[str, str]
"""F or B, send or recv."""


@dataclass(frozen=True, slots=True)
class RankMatch:
    """The ops and messages of one rank: ``groups`` has those of ops by what they are; ``others`` those of none, with which ranks
    agree on shapes or which carry evaluation.
    """

    rank: int
    forwards: Ops
    backwards: Ops
    groups: Mapping[Way, Grouped]
    others: Mapping[Way, Messages]


@dataclass(frozen=True, slots=True)
class PipelineMatch:
    """A chain of ranks, stage by stage, with what each did; ``units`` are its runs of the schedule, in order.

    ``plan`` is that of the largest unit; ``by_peers`` says whether the messages name the ranks that they go to; ``behind`` is for
    each backward the place of its forward, ``is_behind_known`` whether that is more than the order of the forwards.
    """

    ranks: tuple[RankMatch, ...]
    units: tuple[Unit, ...]
    plan: Plan
    by_peers: bool
    behind: Int64
    is_behind_known: bool

    @property
    def chain(self) -> tuple[int, ...]:
        return tuple(match.rank for match in self.ranks)


def match_chain(evidence: Sequence[Evidence]) -> PipelineMatch:
    """The ranks as a pipeline in this order, with one stage on each.

    Raises:
        MismatchError: they cannot be one.
    """
    order = [own.rank for own in evidence]
    places = list(zip(evidence, [None, *order], [*order[1:], None], strict=False))
    channels = [channels_of(own, previous, following) for own, previous, following in places]
    for (before, sending), (after, receiving) in pairwise(zip(order, channels, strict=True)):
        _check_counts(before, sending.to_next, after, receiving.from_previous)
        _check_counts(after, receiving.to_previous, before, sending.from_next)
    gradients = _gradients(evidence, channels)
    problem: MismatchError | None = None
    for by_total in (True, False):
        try:
            outputs = [
                _outputs(own, sending.to_next, gradients.backwards[place], by_total)
                for place, (own, sending) in enumerate(zip(evidence[:-1], channels, strict=False))
            ]
            ranks = _rank_matches(evidence, channels, gradients, outputs)
            return _checked(evidence, ranks, outputs[0].found.sizes, gradients.are_whole)
        except MismatchError as err:
            problem = problem or err
    assert problem is not None
    raise problem


def _check_counts(source: int, sends: Messages, target: int, receives: Messages) -> None:
    if len(sends) != len(receives):
        raise MismatchError(
            f"rank {source} sends {len(sends)} messages to rank {target}, which receives {len(receives)}"
        )
    if not len(sends):
        raise MismatchError(f"rank {source} sends nothing to rank {target}")


@dataclass(frozen=True, slots=True)
class _Gradients:
    """The backwards by place in the pipeline; ``kept`` are the groups of gradients that are theirs, ``group`` by edge the group
    of each message. ``are_whole``: beside those that are not kept no rank's engine ran.
    """

    backwards: list[Ops]
    group: list[Int64]
    kept: Bools
    are_whole: bool


def _gradients(evidence: Sequence[Evidence], channels: Sequence[Channels]) -> _Gradients:
    """What each rank's engine ran before it sent gradients. Those beside which the engine of a rank ran nothing are of no
    backward: ranks may agree on shapes both ways.

    Raises:
        MismatchError: the ranks do not have as many.
    """
    group = []
    for own, own_channels in zip(evidence[1:], channels[1:], strict=True):
        others = (own_channels.to_next.post_ns, own_channels.from_next.post_ns, own_channels.from_previous.post_ns)
        group.append(cut(own_channels.to_previous, own.engine.start_ns, *others))
    counts = {int(own[-1]) + 1 for own in group}
    if len(counts) > 1:
        raise MismatchError(f"the ranks exchange {min(counts)} to {max(counts)} gradients")
    kept = np.ones(counts.pop(), dtype=bool)
    ran = ~kept
    spans = []
    for place, (own, own_channels) in enumerate(zip(evidence, channels, strict=True)):
        received = grouped(own_channels.from_next, group[place]) if place < len(group) else None
        sent = grouped(own_channels.to_previous, group[place - 1]) if place else None
        spans.append(engine_spans(own, received, sent))
        kept &= spans[-1][1] > spans[-1][0]
        ran |= spans[-1][1] > spans[-1][0]
    if not kept.any():
        raise MismatchError("autograd's engine runs nothing between the messages: no backward")
    backwards = [ops_of(own.engine, low[kept], high[kept]) for own, (low, high) in zip(evidence, spans, strict=True)]
    return _Gradients(backwards, group, kept, bool((kept == ran).all()))


@dataclass(frozen=True, slots=True)
class _Outputs:
    """The messages of outputs between two ranks that backwards followed, ``num_tensors`` for each forward."""

    found: Trained
    num_tensors: int

    def of(self, messages: Messages) -> Grouped:
        group = np.arange(len(self.found.messages), dtype=np.int64) // self.num_tensors
        return grouped(messages.where(self.found.messages), group)


def _outputs(evidence: Evidence, sent: Messages, backwards: Ops, by_total: bool) -> _Outputs:
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
        num_tensors, rest = divmod(len(sent), len(backwards))
        if rest or not num_tensors:
            raise MismatchError(f"rank {evidence.rank} sends {len(sent)} outputs and runs {len(backwards)} backwards")
    else:
        group = cut(sent, evidence.operators.start_ns, evidence.engine.start_ns)
        num_tensors = int(np.bincount(np.bincount(group)).argmax())
    outputs = _Outputs(trained(sent.post_ns, backwards.start_ns, num_tensors), num_tensors)
    _check_close(evidence, outputs.of(sent))
    return outputs


_LIGHT = 10
"""What a program does between the tensors of one output lasts at most one in so many parts of what came before them."""


def _check_close(evidence: Evidence, sent: Grouped) -> None:
    """Between the tensors of one output nothing long is computed.

    Raises:
        MismatchError
    """
    rows = evidence.operators
    last = sent.messages.post_ns[np.append(first_of(sent.group)[1:], len(sent.group)) - 1]
    lasting = np.append(0, np.cumsum(rows.end_ns - rows.start_ns))
    low, high = np.searchsorted(rows.start_ns, sent.post_ns), np.searchsorted(rows.start_ns, last)
    between, before = lasting[high] - lasting[low], lasting[low] - lasting[np.append(0, high[:-1])]
    nodes = evidence.engine.start_ns
    ran = np.searchsorted(nodes, last) > np.searchsorted(nodes, sent.post_ns)
    if ran.any() or (_LIGHT * between > before).any():
        raise MismatchError(f"rank {evidence.rank} computes between messages that would be of one output")


def _rank_matches(
    evidence: Sequence[Evidence], channels: Sequence[Channels], gradients: _Gradients, outputs: Sequence[_Outputs]
) -> list[RankMatch]:
    """The ops and messages of each rank.

    Raises:
        MismatchError: they do not fit each other.
    """
    if len({own.found.sizes for own in outputs}) > 1:
        raise MismatchError("the ranks do not send outputs and gradients of the same steps")
    found = []
    for place, (own, own_channels) in enumerate(zip(evidence, channels, strict=True)):
        groups: dict[Way, Grouped] = {}
        others: dict[Way, Messages] = {}
        for edge, ways in ((place, _TO_NEXT), (place - 1, _TO_PREVIOUS)):
            if not 0 <= edge < len(outputs):
                continue
            forward, backward = (getattr(own_channels, name) for name in ways.values())
            output, gradient = ways
            groups[output] = outputs[edge].of(forward)
            others[output] = forward.where(~np.isin(np.arange(len(forward)), outputs[edge].found.messages))
            kept = gradients.kept[gradients.group[edge]]
            groups[gradient] = grouped(backward.where(kept), _renumbered(gradients.group[edge][kept]))
            others[gradient] = backward.where(~kept)
        forwards = _forwards(own, own_channels, groups)
        found.append(RankMatch(own.rank, forwards, gradients.backwards[place], groups, others))
    return found


_TO_NEXT: Mapping[Way, str] = {("F", "send"): "to_next", ("B", "recv"): "from_next"}
_TO_PREVIOUS: Mapping[Way, str] = {("F", "recv"): "from_previous", ("B", "send"): "to_previous"}


def _renumbered(group: Int64) -> Int64:
    return np.unique(group, return_inverse=True)[1].astype(np.int64)


def _forwards(evidence: Evidence, channels: Channels, groups: Mapping[Way, Grouped]) -> Ops:
    """The forwards of a rank, without what only some of them have."""
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


def _checked(
    evidence: Sequence[Evidence], ranks: Sequence[RankMatch], sizes: Sequence[int], are_whole: bool
) -> PipelineMatch:
    """The match, if all ranks ran the same units, in an order that can run to its end.

    Where no numbers of nodes bear it out, nothing else may explain the traces as well. ``are_whole``: whether each rank's engine
    ran wherever another's did.

    Raises:
        MismatchError
    """
    behind, is_known, by_nodes = _forwards_behind(evidence, ranks)
    rows = [_in_order(match, behind) for match in ranks]
    units = units_of(sizes, rows, [own.optimizers for own in evidence])
    by_peers = all((own.peer >= 0).all() for rank in evidence for own in (rank.sends, rank.recvs))
    for row, match in zip(rows, ranks, strict=True):
        _check_between_units(row, match, units)
    if not by_nodes:
        if not are_whole:
            raise MismatchError("autograd's engine ran on some ranks alone beside messages that may be gradients")
        check_only_forwards(evidence[-1], ranks[-1].forwards, ranks[-1].backwards, ranks[-1].groups["F", "recv"])
        if all(unit.count == 1 for unit in units):
            for own, match in zip(evidence, ranks, strict=True):
                _check_at_once(own, match)
    plans = {}
    for unit in units:
        cells = tuple(tuple(unit.cells(row, place)) for place, row in enumerate(rows))
        plans[unit.count] = _plan_of(cells, by_peers or by_nodes)
    _check_times(ranks)
    return PipelineMatch(tuple(ranks), units, plans[max(plans)], by_peers, behind, is_known)


def _check_between_units(row: Sequence[Op], match: RankMatch, units: Sequence[Unit]) -> None:
    """What is sent back and is no gradient comes between units: no microbatch is under way while ranks agree on shapes.

    Raises:
        MismatchError: it comes within one, whose own gradient may be lost.
    """
    starts = [unit.starts(row) for unit in units]
    first, last = (np.array([own[end] for own in starts], dtype=np.int64) for end in (0, -1))
    for way, messages in match.others.items():
        at = messages.ready_ns if way[1] == "recv" else messages.post_ns
        if way[0] == "B" and (np.searchsorted(first, at) > np.searchsorted(last, at)).any():
            raise MismatchError(f"autograd's engine runs nothing beside a gradient of rank {match.rank} within a step")


def _check_at_once(evidence: Evidence, match: RankMatch) -> None:
    """A backward begins with the gradient that came. With one microbatch at a time little else tells a pipeline from two ranks
    that compute in turn.

    Raises:
        MismatchError: something else runs first.
    """
    received = match.groups.get(("B", "recv"))
    if received is None:
        return
    rows = evidence.operators.start_ns
    if (np.searchsorted(rows, match.backwards.start_ns) > np.searchsorted(rows, received.ready_ns)).any():
        raise MismatchError(f"rank {evidence.rank} computes between what it receives and its backward")


def _in_order(match: RankMatch, behind: Int64) -> list[Op]:
    """The ops of a rank in time order."""
    forwards = [("F", place, start) for place, start in enumerate(match.forwards.start_ns.tolist())]
    backwards = [
        ("B", place, start) for place, start in zip(behind.tolist(), match.backwards.start_ns.tolist(), strict=True)
    ]
    return sorted([*forwards, *backwards], key=lambda op: op[2])


def _forwards_behind(evidence: Sequence[Evidence], ranks: Sequence[RankMatch]) -> tuple[Int64, bool, bool]:
    """For each backward, which are in one order on all ranks, its forward; whether anything tells that: the nodes that it ran, or
    that on some rank never more than one forward waits for its backward (else they come in the order of the forwards); and
    whether the nodes do.

    Raises:
        MismatchError: ranks tell different ones.
    """
    told = [
        behind
        for own, match in zip(evidence, ranks, strict=True)
        if (behind := forwards_behind(own, match.forwards, match.backwards)) is not None
    ]
    if any(not np.array_equal(told[0], other) for other in told[1:]):
        raise MismatchError("the ranks do not run the backwards of the same microbatches in the same order")
    if told:
        if len(np.unique(told[0])) < len(told[0]):
            raise MismatchError("two backwards run what one forward made")
        return told[0], True, True
    alone = any((match.forwards.start_ns[1:] > match.backwards.start_ns[:-1]).all() for match in ranks)
    return np.arange(len(ranks[0].backwards), dtype=np.int64), alone, False


def _plan_of(cells: Sequence[Sequence[str]], may_be_new: bool) -> Plan:
    """The plan of a unit's ops.

    Raises:
        MismatchError: it cannot run; or it is that of no schedule, although only orders can tell the ops.
    """
    try:
        plan = identify(from_rows(cells, "custom"))
    except ScheduleError as err:
        raise MismatchError(f"the order of the ranks makes no plan: {err}") from None
    if replay(plan).blocked:
        raise MismatchError("in the order of the ranks one would wait for ever")
    if plan.name not in registry.SCHEDULES and not may_be_new:
        raise MismatchError("the order of the ranks is that of no known schedule, and their messages name no peers")
    return plan


_SLACK_NS = 100_000
_DRIFT = 10_000
"""Clocks may move against each other by one in so many parts of the time."""


def _check_times(ranks: Sequence[RankMatch]) -> None:
    """Whether, where receives show when they were complete, one offset between the clocks of neighbours lets every message be
    sent before it has come.

    Raises:
        MismatchError: none does.
    """
    for before, after in pairwise(ranks):
        there = _latest_lead(before.groups["F", "send"], after.groups["F", "recv"])
        back = _latest_lead(after.groups["B", "send"], before.groups["B", "recv"])
        if there is None or back is None:
            continue
        spans = (own.post_ns[-1] - own.post_ns[0] for own in before.groups.values())
        if there + back > _SLACK_NS + max(map(int, spans)) // _DRIFT:
            raise MismatchError(
                f"messages between ranks {before.rank} and {after.rank} would come before they are sent, whatever their clocks"
            )


def _latest_lead(sent: Grouped, came: Grouped) -> int | None:
    """By how much the receiving clock must be ahead at least; None where no completion is known."""
    if not (came.messages.ready_ns > came.messages.post_ns).all():
        return None
    return int((sent.messages.post_ns - came.messages.ready_ns).max())


MOST_PERMUTED = 5
"""Pipelines of up to so many ranks are tried in every order, where their messages name no peers."""


def match_pipeline(evidence: Mapping[int, Evidence], order: Sequence[int]) -> PipelineMatch:
    """The ranks as a pipeline, in this order, in the opposite one, or, if nothing names their peers, in the only one that they
    can have.

    Raises:
        MismatchError: they are none, or may be several; the reason is that against ``order``.
    """
    first = [evidence[rank] for rank in order]
    found: list[PipelineMatch] = []
    problems: list[MismatchError] = []
    for ranks in (first, first[::-1]):
        try:
            found.append(match_chain(ranks))
        except MismatchError as err:
            problems.append(err)
    named = any((own.peer >= 0).any() for rank in first for own in (rank.sends, rank.recvs))
    if not found and not named and 2 < len(order) <= MOST_PERMUTED:
        found = list(_in_any_order(first))
    if len(found) > 1:
        raise MismatchError(f"ranks {_listed(order)} may be a pipeline in {len(found)} orders")
    if not found:
        raise problems[0]
    return found[0]


def _in_any_order(evidence: Sequence[Evidence]) -> Iterator[PipelineMatch]:
    for ranks in permutations(evidence):
        try:
            yield match_chain(ranks)
        except MismatchError:
            continue


def chains_by_peers(evidence: Mapping[int, Evidence]) -> list[tuple[int, ...]]:
    """The chains that messages form, each from its end with the lower rank; [] where a message names no peer.

    Raises:
        MismatchError: they form no chains, or a rank of one has no trace.
    """
    peers: dict[int, set[int]] = {}
    for rank, own in evidence.items():
        known = np.concatenate((own.sends.peer, own.recvs.peer))
        if (known < 0).any():
            return []
        peers[rank] = set(known.tolist())
    absent = sorted(set().union(*peers.values()) - set(evidence))
    if absent:
        raise MismatchError(f"rank {absent[0]}, which others exchange messages with, has no trace with operators")
    chains = []
    left = set(peers)
    while left:
        ends = sorted(rank for rank in left if len(peers[rank]) == 1)
        if not ends:
            rank = min(left)
            raise MismatchError(
                f"the messages of rank {rank} and its peers {_listed(sorted(peers[rank]))} form no chain"
            )
        chain = [ends[0]]
        while more := peers[chain[-1]] - set(chain):
            if len(peers[chain[-1]]) > 2 or len(more) > 1:
                raise MismatchError(
                    f"rank {chain[-1]} exchanges messages with ranks {_listed(sorted(peers[chain[-1]]))}: no chain"
                )
            chain.append(more.pop())
        chains.append(tuple(chain))
        left -= set(chain)
    return chains


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def numbers_of(units: Sequence[Unit]) -> tuple[Int64, Int64]:
    """For each forward, and each backward, its unit and its microbatch."""
    counts = np.array([unit.count for unit in units], dtype=np.int64)
    unit = np.repeat(np.arange(len(counts)), counts)
    return unit, np.arange(len(unit)) - np.repeat(np.cumsum(counts) - counts, counts)
