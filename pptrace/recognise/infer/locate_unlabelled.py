"""Locate the ranks of runs in which some have operators and messages that no label names: matched jointly, then each alone.

Which ranks form a pipeline, and in which order, tell the peers of their messages, else the only possible order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import permutations

import numpy as np
import pandas as pd
from msgspec import Struct
from msgspec.structs import replace

from pptrace.marks import P2P
from pptrace.model.tables import COMPUTE_KINDS, Int64, What
from pptrace.model.wording import counted, listed
from pptrace.recognise.groups.axes import Groups
from pptrace.recognise.groups.topology import UNKNOWN, call_keys, global_peer
from pptrace.recognise.infer.evidence import Evidence, MismatchError, Result, evidence_of, first_match, outcome_of
from pptrace.recognise.infer.locate import Located, groups_of, locate, on_one_clock
from pptrace.recognise.infer.match import Match, RankMatch, in_steps, with_matches
from pptrace.recognise.infer.match_chain import match_chain
from pptrace.recognise.infer.match_checks import contradiction_of_chunks
from pptrace.recognise.infer.match_lone_rank import match_alone
from pptrace.recognise.infer.one_way import Separated, along_one_axis, separations
from pptrace.recognise.infer.stages import StageAssignment
from pptrace.recognise.recognised_rank import RecognisedRank
from pptrace.slices import distinct_of, rows_among


class JointMatch(Struct, frozen=True):
    """The ranks, with ops and messages where they form pipelines; the pipelines; and warnings.

    ``refused`` are ranks with messages between operators that no pipeline explains.
    """

    ranks: tuple[RecognisedRank, ...]
    pipelines: tuple[tuple[int, ...], ...] = ()
    notes: tuple[str, ...] = ()
    refused: frozenset[int] = frozenset()


def match_ranks(ranks: Sequence[RecognisedRank], groups: Groups, num_ranks: int | None = None) -> JointMatch:
    """Match the ranks whose host threads show messages between operators that no label names.

    ``num_ranks`` are those of the run, where known.
    """
    evidence = {}
    for recognised in ranks:
        if not len(recognised.host):
            continue
        calls, rank = recognised.calls, recognised.number
        peers = _peers_of(rank, calls, groups)
        evidence[rank] = evidence_of(rank, recognised.host, calls, peers)
    if not evidence or any(len(recognised.ops) and not len(recognised.host) for recognised in ranks):
        return JointMatch(tuple(ranks))
    world = num_ranks or groups.world_size or max(len(ranks), *(recognised.number + 1 for recognised in ranks))
    ways = separations(evidence)
    evidence = dict(ways[0].evidence)
    if len(evidence) == len(ranks) == 1:
        return _match_each_alone(ranks, evidence)
    joint = outcome_of(
        lambda options: first_match(lambda way: _match_jointly(ranks, way, groups, world), options), ways
    )
    if isinstance(joint, JointMatch):
        return joint
    along = [outcome_of(lambda way: _match_jointly(ranks, way, groups, world), way) for way in along_one_axis(evidence)]
    if len(matched := [match for match in along if isinstance(match, JointMatch)]) == 1:
        return matched[0]
    if world > len(ranks) or not groups.world_size:
        alone = _match_each_alone(ranks, evidence)
        if alone.notes and not alone.refused:
            return alone
    problem = f"not one stage of a pipeline on each rank: {joint}"
    return JointMatch(tuple(ranks), notes=(problem,), refused=frozenset(evidence))


def _peers_of(rank: int, calls: pd.DataFrame, groups: Groups) -> Int64:
    """The global rank of the peer of each call, −1 where it is unknown."""
    key, keys = call_keys(rank, calls)
    ends = [key, calls["peer"].to_numpy(), calls["local_peer"].to_numpy()]
    number, first = distinct_of(ends)
    peers = []
    for index, peer, local_peer in zip(*(column[first].tolist() for column in ends), strict=True):
        # Collectives alone may have no key: those whose group was found by other ranks' calls.
        group = groups.of_call.get(keys[index], groups.unnamed[rank])
        peers.append(global_peer(peer, local_peer, group if group.is_named else groups.unnamed[rank]))
    return np.array(peers, dtype=np.int64)[number]


def _match_jointly(ranks: Sequence[RecognisedRank], separated: Separated, groups: Groups, num_ranks: int) -> JointMatch:
    """The pipelines that all ranks with messages form.

    Raises:
        MismatchError: they form none.
    """
    pipelines, cut = _match_complete_steps(separated.evidence, lambda parts: _find_pipelines(parts, groups, num_ranks))
    if isinstance(pipelines, MismatchError):
        raise pipelines
    steps = _in_steps(pipelines, ranks)
    chains = tuple(match.chain for match in pipelines)
    axis = "cp" if separated.axis == UNKNOWN and _are_within_stages(separated, chains) else separated.axis
    lines = [f"{line}; taken for those of context parallelism" if axis == "cp" else line for line in separated.lines]
    matched = with_matches(ranks, steps, separated.others, axis)
    return JointMatch(matched, chains, (*_notes(pipelines, steps, matched), *lines, *cut))


def _are_within_stages(separated: Separated, chains: Sequence[tuple[int, ...]]) -> bool:
    """Return whether the messages that are between no two ops are all between ranks of one stage."""
    place = {rank: place for chain in chains for place, rank in enumerate(chain)}
    return all(
        rank in place and place.get(peer) == place[rank]
        for rank, by_kind in separated.others.items()
        for messages in by_kind.values()
        for peer in np.unique(messages.peer).tolist()
    )


def _in_steps(matches: Sequence[Match], ranks: Sequence[RecognisedRank]) -> list[Match]:
    """The matches with the runs of each step as one: those in one numbered range of a step or, where no rank has any, between
    which no optimizer runs.
    """
    hosts = {recognised.number: recognised.host for recognised in ranks}
    hosts = {rank: hosts[rank] for match in matches for rank in match.chain}
    ranges = {rank: host[(host["what"] == What.STEP.value) & (host["number"] >= 0)] for rank, host in hosts.items()}
    if any(map(len, ranges.values())):
        times = {rank: np.sort(of_rank[["start_ns", "end_ns"]].to_numpy().ravel()) for rank, of_rank in ranges.items()}
        return in_steps(matches, times)
    updates = {
        rank: host.loc[host["what"] == What.OPTIMIZER.value, "start_ns"].to_numpy() for rank, host in hosts.items()
    }
    return in_steps(matches, updates, are_updates=True)


def _match_each_alone(ranks: Sequence[RecognisedRank], evidence: Mapping[int, Evidence]) -> JointMatch:
    """Match each of the ranks alone; their results have to agree.

    A trace without autograd's sequence numbers proves nothing, and is left to its own order.
    """
    if not all((of_rank.engine.number >= 0).any() for of_rank in evidence.values()):
        return JointMatch(tuple(ranks))
    by_rank = {recognised.number: recognised for recognised in ranks}
    ending = {}  # numbered ranges of steps separate steps as optimizers do
    for rank, of_rank in evidence.items():
        host = by_rank[rank].host
        starts = host.loc[(host["what"] == What.STEP.value) & (host["number"] >= 0), "start_ns"].to_numpy()
        ending[rank] = replace(of_rank, optimizers=np.sort(np.concatenate((of_rank.optimizers, starts))))
    have_one_clock = on_one_clock({rank: by_rank[rank].info.metadata for rank in evidence})
    match, cut = _match_complete_steps(ending, lambda parts: _consistent_match(parts, have_one_clock))
    if isinstance(match, MismatchError):
        who = f"rank {next(iter(evidence))}" if len(evidence) == 1 else "each rank"
        line = f"no forwards and backwards of {who} are certain without the other ranks' traces: {match}"
        return JointMatch(tuple(ranks), notes=(line,), refused=frozenset(evidence))
    (match,) = _in_steps([match], ranks)
    sizes = sorted(set(match.sizes))
    outside = sorted(_num_operators_outside_ops(by_rank[of_rank.rank], of_rank) for of_rank in match.ranks)
    where = "" if len(match.ranks) == 1 else "on each rank "
    line = (
        f"no labels of ops: {where}forwards and backwards recognised by messages and autograd's sequence numbers, "
        f"{counted(len(match.sizes), 'step')} with {_from_to(sizes)} microbatches; "
        f"{_from_to(outside)} operators of the thread belong to no op"
    )
    return JointMatch(with_matches(ranks, [match]), notes=(line, *cut))


def _match_complete_steps(
    evidence: Mapping[int, Evidence], match: Callable[[Mapping[int, Evidence]], Result]
) -> tuple[Result | MismatchError, tuple[str, ...]]:
    """The result of ``match``; if needed, without the part of the traces before the first optimizer step that all ranks have,
    or after the last one, with a warning: traces may be cut off within a step. The reason where there is no match either way.
    """
    outcome = outcome_of(match, evidence)
    if not isinstance(outcome, MismatchError):
        return outcome, ()
    count = min(len(of_rank.optimizers) for of_rank in evidence.values())
    for begins, ends, where in (
        (False, True, "behind the last"),
        (True, False, "before the first"),
        (True, True, "before the first or behind the last"),
    ):
        if count < 1 + begins:
            continue
        parts = {}
        for rank, of_rank in evidence.items():
            times = of_rank.optimizers[-count:] if begins else of_rank.optimizers[:count]
            begin = int(times[0]) + 1 if begins else np.iinfo(np.int64).min
            end = int(times[-1]) + 1 if ends else np.iinfo(np.int64).max
            parts[rank] = of_rank.between(begin, end)
        matched = outcome_of(match, parts)
        if not isinstance(matched, MismatchError):
            return matched, (f"left out what is {where} optimizer step that all ranks have: {outcome}",)
    return outcome, ()


def _consistent_match(evidence: Mapping[int, Evidence], have_one_clock: Callable[[int, int], bool]) -> Match:
    """The matches of the ranks alone as one, whose microbatches and steps are the same on all of them.

    Args:
        have_one_clock: whether the times of two ranks compare.

    Raises:
        MismatchError: one proves nothing, or they do not run the same steps.
    """
    matches = {rank: match_alone(of_rank) for rank, of_rank in evidence.items()}
    sizes = next((match.sizes for match in matches.values() if match.sizes), ())
    for rank, match in matches.items():
        if not match.sizes and sizes:
            matches[rank] = match_alone(evidence[rank], sizes)
        if not matches[rank].sizes:
            raise MismatchError(
                f"the ends of the steps of rank {rank} are unknown: no range of an optimizer or of a step"
            )
    first, *others = matches.values()
    for later in others:
        if later.sizes != first.sizes or not np.array_equal(later.behind, first.behind):
            raise MismatchError(
                f"ranks {first.chain[0]} and {later.chain[0]} do not run the same microbatches in the same steps"
            )
        if have_one_clock(first.chain[0], later.chain[0]) and not _run_together(first, later):
            raise MismatchError(
                f"ranks {first.chain[0]} and {later.chain[0]} did not run the same steps at one time, by the clock of their host"
            )
    return replace(first, ranks=tuple(of_rank for match in matches.values() for of_rank in match.ranks))


def _run_together(match: Match, other: Match) -> bool:
    """Return whether most runs of two ranks, taken in order, overlap: those of one pipeline lie within each other, and sums of
    gradients keep pipelines together.
    """
    (begin, end), (other_begin, other_end) = (
        (of.ranks[0].forwards.start_ns[of.firsts], of.ranks[0].backwards.end_ns[np.cumsum(of.sizes) - 1])
        for of in (match, other)
    )
    return bool(2 * np.count_nonzero((begin < other_end) & (other_begin < end)) > len(begin))


_MOST_PERMUTED = 5
"""Pipelines of up to so many ranks are tried in every order, where their messages name no peers."""


def _find_pipelines(evidence: Mapping[int, Evidence], groups: Groups, num_ranks: int) -> list[Match]:
    """The pipelines that all of these ranks form, of ``num_ranks`` that have a trace.

    Raises:
        MismatchError: they form none.
    """

    def match_all(chains: Iterable[Sequence[int]]) -> list[Match]:
        return [_match_pipeline(evidence, chain) for chain in chains]

    chains = _chains_by_peers(evidence)
    if not chains and groups.pipelines and {r for p in groups.pipelines for r in p} == set(evidence):
        chains = list(groups.pipelines)
    if chains:
        return match_all(chains)
    ranks = sorted(evidence)
    absent = max(num_ranks, groups.world_size or 0) - len(ranks)
    if absent:
        raise MismatchError(
            f"{counted(absent, 'rank')} of the run show no messages, and those of the others name no peers"
        )
    one = outcome_of(match_all, [ranks])
    if not isinstance(one, MismatchError):
        return one
    outcomes = [outcome_of(match_all, chains) for chains in _replicas(ranks)]
    replicas = [pipelines for pipelines in outcomes if not isinstance(pipelines, MismatchError)]
    if len(replicas) != 1:
        raise one
    return replicas[0]


def _replicas(ranks: Sequence[int]) -> Iterator[list[Sequence[int]]]:
    """The ways to read the ranks as several pipelines of equal length, next to each other or one within the other."""
    size = len(ranks)
    for length in (length for length in range(2, size // 2 + 1) if size % length == 0):
        count = size // length
        yield [ranks[index * length : (index + 1) * length] for index in range(count)]
        yield [ranks[index::count] for index in range(count)]


def _match_pipeline(evidence: Mapping[int, Evidence], order: Sequence[int]) -> Match:
    """The ranks as a pipeline, in this order, in the opposite one, or, if nothing names their peers, in the only one that they
    can have.

    Raises:
        MismatchError: they are none, or may be several; the reason is that against ``order``.
    """
    first = [evidence[rank] for rank in order]
    outcomes = [outcome_of(match_chain, ranks) for ranks in (first, first[::-1])]
    named = any((messages.peer >= 0).any() for rank in first for messages in (rank.sends, rank.recvs))
    if not any(isinstance(match, Match) for match in outcomes) and not named and 2 < len(order) <= _MOST_PERMUTED:
        outcomes += [outcome_of(match_chain, ranks) for ranks in permutations(first)]
    matches = [match for match in outcomes if isinstance(match, Match)]
    if len(matches) > 1:
        raise MismatchError(f"ranks {listed(order)} may be a pipeline in {len(matches)} orders")
    if not matches and isinstance(outcomes[0], MismatchError):
        raise outcomes[0]
    return matches[0]


def _chains_by_peers(evidence: Mapping[int, Evidence]) -> list[tuple[int, ...]]:
    """The chains that messages form, each from its end with the lower rank; [] where a message names no peer.

    Raises:
        MismatchError: they form no chains, or a rank of one has no trace.
    """
    peers: dict[int, set[int]] = {}
    for rank, of_rank in evidence.items():
        known_peers = np.concatenate((of_rank.sends.peer, of_rank.recvs.peer))
        if (known_peers < 0).any():
            return []
        peers[rank] = set(known_peers.tolist())
    absent = sorted(set().union(*peers.values()) - set(evidence))
    if absent:
        raise MismatchError(f"rank {absent[0]}, which others exchange messages with, has no trace with operators")
    chains = []
    remaining = set(peers)
    while remaining:
        chain_ends = sorted(rank for rank in remaining if len(peers[rank]) == 1)
        if not chain_ends:
            rank = min(remaining)
            raise MismatchError(
                f"the messages of rank {rank} and its peers {listed(sorted(peers[rank]))} form no chain"
            )
        chain = [chain_ends[0]]
        while following := peers[chain[-1]] - set(chain):
            if len(peers[chain[-1]]) > 2 or len(following) > 1:
                raise MismatchError(
                    f"rank {chain[-1]} exchanges messages with ranks {listed(sorted(peers[chain[-1]]))}: no chain"
                )
            chain.append(following.pop())
        chains.append(tuple(chain))
        remaining -= set(chain)
    return chains


def alone_with_messages(ranks: Sequence[RecognisedRank]) -> tuple[str, ...]:
    """A warning where one rank's messages between operators could not be matched."""
    with_messages = [
        recognised for recognised in ranks if len(recognised.host) and rows_among(recognised.calls["kind"], P2P).any()
    ]
    if len(with_messages) != 1 or any(rows_among(recognised.ops["kind"], COMPUTE_KINDS).any() for recognised in ranks):
        return ()
    return (
        f"rank {with_messages[0].number} sends and receives between operators, and the ops of a pipeline cannot be recognised in "
        "its order alone: ops are null; give the traces of the other ranks as well",
    )


def is_unsure_alone(ranks: Sequence[RecognisedRank], ops: pd.DataFrame) -> bool:
    """Return whether one rank alone has messages between operators, and its order gives more forwards than backwards, or
    fewer, in a pipeline that nothing tells: some of them may be no ops, and shift the microbatches of those behind them.
    """
    if sum(bool(len(recognised.host)) for recognised in ranks) != 1:
        return False
    inferred = ops[(ops["source"] == "inferred") & rows_among(ops["kind"], COMPUTE_KINDS)]
    kinds = inferred["kind"].value_counts()
    return len(inferred) > 0 and bool((inferred["stage"] < 0).all()) and kinds.get("F", 0) != kinds.get("B", 0)


def _notes(matches: Sequence[Match], steps: Sequence[Match], ranks: Sequence[RecognisedRank]) -> Iterator[str]:
    """Lines about matches, and about the same with the runs of each step as one."""
    by_rank = {recognised.number: recognised for recognised in ranks}
    for match, of_steps in zip(matches, steps, strict=True):
        assert match.plan is not None
        sizes = sorted(set(match.sizes))
        num_outside = sum(_num_operators_outside_ops(by_rank[of_rank.rank], of_rank) for of_rank in match.ranks)
        chain = match.chain
        is_range = chain == tuple(range(chain[0], chain[-1] + 1))
        of_chain = f"{chain[0]} to {chain[-1]}" if is_range else listed(chain)
        what = f"{match.plan.name} with {_from_to(sizes)} microbatches"
        has_more = len(match.sizes) > len(of_steps.sizes)
        runs = f", in all {len(match.sizes)} runs of {what}," if has_more else f" of {what}"
        num_others = sum(
            len(left) for of_rank in match.ranks for (_, kind), left in of_rank.others.items() if kind == "send"
        )
        others = f" but {num_others} that no backward follows" if num_others else ""
        yield (
            f"ranks {of_chain}: {counted(len(of_steps.sizes), 'step')}{runs} explain all messages between them{others} and all "
            f"that autograd's engine ran; {counted(num_outside, 'operator')} of their threads belong to no op"
        )
    if not all(match.is_behind_known for match in matches):
        yield "the microbatches of the backwards are unknown: backwards are assumed to run in the order of the forwards"
    if matches[0].by_peers:
        yield "no label names the stages: they are those of the chain of ranks that exchange messages"
    elif any(list(match.chain) != sorted(match.chain) for match in matches):
        yield "no label names the stages: assigned in the only order of the ranks that their messages allow"
    else:
        yield "no label names the stages: ascending order of ranks is assumed"


def _from_to(numbers: Sequence[int]) -> str:
    return f"{numbers[0]}" if numbers[0] == numbers[-1] else f"{numbers[0]} to {numbers[-1]}"


def _num_operators_outside_ops(recognised: RecognisedRank, match: RankMatch) -> int:
    """The operators of a rank's thread that are of no forward."""
    total = int((recognised.host["what"] == What.OPERATOR.value).sum())
    return total - int((match.forwards.high - match.forwards.low).sum())


def locate_unlabelled(ranks: Sequence[RecognisedRank], num_ranks: int | None, spanned: Sequence[int]) -> Located:
    """Match ranks without labels jointly and locate all; once more without what order alone inferred, where that is refuted.

    Args:
        num_ranks: the ranks that the run had, when known.
        spanned: the ranks of OpenTelemetry spans.
    """
    ranks = tuple(ranks)
    groups = groups_of(ranks)
    joint = match_ranks(ranks, groups[1], num_ranks)
    groups = groups if joint.ranks is ranks else groups_of(joint.ranks)
    located = locate(joint.ranks, groups, joint.pipelines, num_ranks, spanned)
    unproved, against = _unproved(ranks, joint, located.placed)
    if unproved:
        no_pipeline = [
            recognised.number
            for recognised in ranks
            if recognised.number in unproved & joint.refused
            and recognised.host["what"].isin((What.OPERATOR.value, What.ENGINE.value)).any()
        ]
        proved = [rank.without_inferred() if rank.number in unproved else rank for rank in ranks]
        located = locate(proved, groups_of(proved, no_pipeline), joint.pipelines, num_ranks, spanned)
    lines = joint.notes if not joint.refused or (located.placed.mesh.vpp or 1) == 1 else ()
    lines += alone_with_messages(located.ranks) if not joint.notes else ()
    lines += (f"several stages per rank are ruled out as well: {against}",) if against else ()
    return replace(located, warnings=(*lines, *located.warnings))


def _unproved(
    ranks: Sequence[RecognisedRank], joint: JointMatch, placed: StageAssignment
) -> tuple[frozenset[int], str]:
    """The ranks of which order alone inferred ops that may be none, and what speaks against several stages on each."""
    has_chunks = (placed.mesh.vpp or 1) > 1
    refused = [recognised for recognised in ranks if recognised.number in joint.refused]
    against = contradiction_of_chunks(refused, placed.ops, placed.mesh) if has_chunks and refused else ""
    inferred = placed.ops[(placed.ops["source"] == "inferred") & rows_among(placed.ops["kind"], COMPUTE_KINDS)]
    # More backwards than forwards may include separate weight gradients.
    is_split = (inferred["stage"] < 0).all() and (inferred["kind"] == "B").sum() > (inferred["kind"] == "F").sum()
    if refused and (against or not (has_chunks or is_split)):
        return joint.refused, against
    if not any(recognised.is_paired for recognised in joint.ranks) and is_unsure_alone(ranks, placed.ops):
        return frozenset(recognised.number for recognised in ranks), ""
    return frozenset(), ""
