"""Match unlabelled ranks to pipelines, all of them together or each alone, or give the reason why they do not match."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from pptrace.marks import P2P
from pptrace.model.tables import COMPUTE_KINDS, What
from pptrace.model.wording import counted, listed
from pptrace.recognise.groups.axes import Groups
from pptrace.recognise.groups.topology import GROUP_COLUMNS, global_peer, key_of
from pptrace.recognise.infer.chains import find_pipelines
from pptrace.recognise.infer.match import Match, RankMatch
from pptrace.recognise.infer.match_lone_rank import has_numbers, match_alone
from pptrace.recognise.infer.match_tables import with_matches
from pptrace.recognise.infer.rank_order import Evidence, MismatchError, evidence_of
from pptrace.recognise.infer.whole_steps import match_whole_steps
from pptrace.recognise.ops.from_marks import warnings_of_marks
from pptrace.recognise.recognised_rank import RecognisedRank


@dataclass(frozen=True, slots=True)
class JointMatch:
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
    evidence = {recognised.number: _evidence(recognised, groups) for recognised in ranks if len(recognised.host)}
    if not evidence or any(len(recognised.ops) and not len(recognised.host) for recognised in ranks):
        return JointMatch(tuple(ranks))
    world = num_ranks or groups.world_size or max(len(ranks), *(recognised.number + 1 for recognised in ranks))
    if len(evidence) == len(ranks) == 1:
        return _match_each_alone(ranks, evidence)
    pipelines, cut = match_whole_steps(evidence, lambda parts: find_pipelines(parts, groups, world))
    if not isinstance(pipelines, MismatchError):
        matched = with_matches(ranks, pipelines)
        chains = tuple(match.chain for match in pipelines)
        return JointMatch(matched, chains, (*_notes(pipelines, matched), *cut))
    if world > len(ranks) or not groups.world_size:
        alone = _match_each_alone(ranks, evidence)
        if alone.notes and not alone.refused:
            return alone
    problem = f"not one stage of a pipeline on each rank: {pipelines}"
    return JointMatch(tuple(ranks), notes=(problem,), refused=frozenset(evidence))


def _match_each_alone(ranks: Sequence[RecognisedRank], evidence: Mapping[int, Evidence]) -> JointMatch:
    """Match each of the ranks alone; their results have to agree.

    A trace without autograd's sequence numbers proves nothing, and is left to its own order.
    """
    if not all(map(has_numbers, evidence.values())):
        return JointMatch(tuple(ranks))
    by_rank = {recognised.number: recognised for recognised in ranks}
    ending = {rank: _with_step_ends(of_rank, by_rank[rank]) for rank, of_rank in evidence.items()}
    match, cut = match_whole_steps(ending, _consistent_match)
    if isinstance(match, MismatchError):
        who = f"rank {next(iter(evidence))}" if len(evidence) == 1 else "each rank"
        line = f"no forwards and backwards of {who} are certain without the other ranks' traces: {match}"
        return JointMatch(tuple(ranks), notes=(line,), refused=frozenset(evidence))
    return JointMatch(with_matches(ranks, [match]), notes=(_note_alone(match, by_rank), *cut))


def _with_step_ends(evidence: Evidence, recognised: RecognisedRank) -> Evidence:
    """The evidence in which numbered ranges of steps separate steps as optimizers do."""
    host = recognised.host
    starts = host.loc[(host["what"] == What.STEP.value) & (host["number"] >= 0), "start_ns"].to_numpy()
    return replace(evidence, optimizers=np.sort(np.concatenate((evidence.optimizers, starts))))


def _consistent_match(evidence: Mapping[int, Evidence]) -> Match:
    """The matches of the ranks alone as one, whose microbatches and steps are the same on all of them.

    Raises:
        MismatchError: one proves nothing, or they do not run the same steps.
    """
    matches = {rank: match_alone(of_rank) for rank, of_rank in evidence.items()}
    sizes = next((tuple(unit.count for unit in match.units) for match in matches.values() if match.units), ())
    for rank, match in matches.items():
        if not match.units and sizes:
            matches[rank] = match_alone(evidence[rank], sizes)
        if not matches[rank].units:
            raise MismatchError(
                f"the ends of the steps of rank {rank} are unknown: no range of an optimizer or of a step"
            )
    first, *others = matches.values()
    for later in others:
        if later.units != first.units or not np.array_equal(later.behind, first.behind):
            raise MismatchError(
                f"ranks {first.chain[0]} and {later.chain[0]} do not run the same microbatches in the same steps"
            )
    return replace(first, ranks=tuple(of_rank for match in matches.values() for of_rank in match.ranks))


def alone_with_messages(ranks: Sequence[RecognisedRank]) -> tuple[str, ...]:
    """A warning where one rank's messages between operators could not be matched."""
    with_messages = [
        recognised for recognised in ranks if len(recognised.host) and recognised.calls["kind"].isin(P2P).any()
    ]
    if len(with_messages) != 1 or any(recognised.ops["kind"].isin(COMPUTE_KINDS).any() for recognised in ranks):
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
    inferred = ops[(ops["source"] == "inferred") & ops["kind"].isin(COMPUTE_KINDS)]
    kinds = inferred["kind"].value_counts()
    return len(inferred) > 0 and bool((inferred["stage"] < 0).all()) and kinds.get("F", 0) != kinds.get("B", 0)


def without_inferred(recognised: RecognisedRank) -> RecognisedRank:
    """Drop the ops and messages inferred from the rank's own order."""
    is_inferred = (recognised.ops["source"] == "inferred") & recognised.ops["kind"].isin(COMPUTE_KINDS)
    if not is_inferred.any():
        return recognised
    return replace(
        recognised,
        ops=recognised.ops[~is_inferred],
        comms=recognised.comms[recognised.comms["axis"] != "pp"],
        warnings=warnings_of_marks(recognised.warnings),
    )


def _evidence(recognised: RecognisedRank, groups: Groups) -> Evidence:
    calls, rank = recognised.calls, recognised.number
    keys = zip(*(calls[name] for name in GROUP_COLUMNS), strict=True)
    of_call = [groups.of_call[key_of(rank, key)] for key in keys]
    peers = [
        global_peer(peer, index, group if group.id or group.ranks else groups.unnamed[rank])
        for peer, index, group in zip(calls["peer"], calls["local_peer"], of_call, strict=True)
    ]
    return evidence_of(rank, recognised.host, calls, peers)


def _notes(matches: Sequence[Match], ranks: Sequence[RecognisedRank]) -> Iterator[str]:
    by_rank = {recognised.number: recognised for recognised in ranks}
    for match in matches:
        assert match.plan is not None
        counts = sorted({unit.count for unit in match.units})
        num_outside = sum(
            _num_operators_outside_ops(by_rank[rank_match.rank], rank_match) for rank_match in match.ranks
        )
        yield (
            f"ranks {_range_of(match.chain)}: {counted(len(match.units), 'step')} of {match.plan.name} with {_from_to(counts)} "
            "microbatches explain all messages between them and all that autograd's engine ran; "
            f"{counted(num_outside, 'operator')} of their threads belong to no op"
        )
    if not all(match.is_behind_known for match in matches):
        yield "the microbatches of the backwards are unknown: backwards are assumed to run in the order of the forwards"
    if matches[0].by_peers:
        yield "no label names the stages: they are those of the chain of ranks that exchange messages"
    elif any(list(match.chain) != sorted(match.chain) for match in matches):
        yield "no label names the stages: assigned in the only order of the ranks that their messages allow"
    else:
        yield "no label names the stages: ascending order of ranks is assumed"


def _range_of(ranks: Sequence[int]) -> str:
    return f"{ranks[0]} to {ranks[-1]}" if list(ranks) == list(range(ranks[0], ranks[-1] + 1)) else listed(ranks)


def _note_alone(match: Match, by_rank: Mapping[int, RecognisedRank]) -> str:
    """Describe what was recognised; all ranks run the same steps."""
    units = match.units
    sizes = sorted({unit.count for unit in units})
    lefts = sorted(_num_operators_outside_ops(by_rank[of_rank.rank], of_rank) for of_rank in match.ranks)
    where = "" if len(match.ranks) == 1 else "on each rank "
    return (
        f"no labels of ops: {where}forwards and backwards recognised by messages and autograd's sequence numbers, "
        f"{counted(len(units), 'step')} with {_from_to(sizes)} microbatches; "
        f"{_from_to(lefts)} operators of the thread belong to no op"
    )


def _from_to(numbers: Sequence[int]) -> str:
    return f"{numbers[0]}" if numbers[0] == numbers[-1] else f"{numbers[0]} to {numbers[-1]}"


def _num_operators_outside_ops(recognised: RecognisedRank, match: RankMatch) -> int:
    """The operators of a rank's thread that are of no forward."""
    total = int((recognised.host["what"] == What.OPERATOR.value).sum())
    return total - int((match.forwards.high - match.forwards.low).sum())
