"""Match unlabelled ranks to pipelines, or give the reason why they do not match."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pandas as pd

from pptrace.marks import P2P
from pptrace.model.tables import COMPUTE_KINDS
from pptrace.model.wording import counted, listed
from pptrace.recognise.groups.axes import Groups
from pptrace.recognise.groups.topology import GROUP_COLUMNS, global_peer, key_of
from pptrace.recognise.infer.chains import chains_by_peers, match_pipeline
from pptrace.recognise.infer.lone_ranks import JointMatch, match_each_alone, num_operators_outside_ops
from pptrace.recognise.infer.match_tables import Assignment, steps_of_units, with_match
from pptrace.recognise.infer.pipeline_match import MessageKind, PipelineMatch
from pptrace.recognise.infer.rank_order import Evidence, MismatchError, evidence_of
from pptrace.recognise.infer.whole_steps import match_whole_steps
from pptrace.recognise.ops.from_marks import warnings_of_marks
from pptrace.recognise.recognised_rank import RecognisedRank


def match_ranks(ranks: Sequence[RecognisedRank], groups: Groups, num_ranks: int | None = None) -> JointMatch:
    """Match the ranks whose host threads show messages between operators that no label names.

    ``num_ranks`` are those of the run, where known.
    """
    evidence = {recognised.number: _evidence(recognised, groups) for recognised in ranks if len(recognised.host)}
    if not evidence or any(len(recognised.ops) and not len(recognised.host) for recognised in ranks):
        return JointMatch(tuple(ranks))
    world = num_ranks or groups.world_size or max(len(ranks), *(recognised.number + 1 for recognised in ranks))
    if len(evidence) == len(ranks) == 1:
        return match_each_alone(ranks, evidence)
    try:
        matches, cut = _pipelines_of_whole_steps(evidence, groups, world)
    except MismatchError as err:
        problem = f"not one stage of a pipeline on each rank: {err}"
        matched_alone = (
            match_each_alone(ranks, evidence) if world > len(ranks) or not groups.world_size else JointMatch(())
        )
        return (
            matched_alone
            if matched_alone.notes and not matched_alone.refused
            else JointMatch(tuple(ranks), (), (problem,), frozenset(evidence))
        )
    by_rank = {recognised.number: recognised for recognised in ranks}
    for match in matches:
        steps = steps_of_units(match.units, [(by_rank[rank_match.rank], rank_match) for rank_match in match.ranks])
        for stage, rank_match in enumerate(match.ranks):
            assignment = Assignment(match.units, steps, match.behind, stage, _peers(match.chain, stage))
            by_rank[rank_match.rank] = with_match(by_rank[rank_match.rank], rank_match, assignment)
    matched_ranks = tuple(by_rank.values())
    return JointMatch(matched_ranks, tuple(match.chain for match in matches), (*_notes(matches, matched_ranks), *cut))


def _peers(chain: Sequence[int], stage: int) -> Mapping[MessageKind, int]:
    """The ranks at the other ends of a stage's messages."""
    following = {message_kind: chain[stage + 1] for message_kind in _WITH_NEXT if stage + 1 < len(chain)}
    return {**following, **{message_kind: chain[stage - 1] for message_kind in _WITH_PREVIOUS if stage}}


_WITH_NEXT: tuple[MessageKind, ...] = (("F", "send"), ("B", "recv"))
_WITH_PREVIOUS: tuple[MessageKind, ...] = (("F", "recv"), ("B", "send"))


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


def _pipelines_of_whole_steps(
    evidence: Mapping[int, Evidence], groups: Groups, num_ranks: int
) -> tuple[list[PipelineMatch], tuple[str, ...]]:
    """The pipelines, where they need it of a part of the traces, and a line that says so.

    Raises:
        MismatchError: there are none either way.
    """
    return match_whole_steps(evidence, lambda parts: _pipelines(parts, groups, num_ranks))


def _pipelines(evidence: Mapping[int, Evidence], groups: Groups, num_ranks: int) -> list[PipelineMatch]:
    """The pipelines that all of these ranks form, of ``num_ranks`` that have a trace.

    Raises:
        MismatchError: they form none.
    """
    chains = chains_by_peers(evidence)
    if not chains and groups.pipelines and {r for p in groups.pipelines for r in p} == set(evidence):
        chains = list(groups.pipelines)
    if chains:
        return [match_pipeline(evidence, chain) for chain in chains]
    ranks = sorted(evidence)
    absent = max(num_ranks, groups.world_size or 0) - len(ranks)
    if absent:
        raise MismatchError(
            f"{counted(absent, 'rank')} of the run show no messages, and those of the others name no peers"
        )
    try:
        return [match_pipeline(evidence, ranks)]
    except MismatchError as err:
        problem = err
    replicas = list(_replicas(evidence, ranks))
    if len(replicas) != 1:
        raise problem
    return replicas[0]


def _replicas(evidence: Mapping[int, Evidence], ranks: Sequence[int]) -> Iterator[list[PipelineMatch]]:
    """The ways to read the ranks as several pipelines of equal length, next to each other or one within the other."""
    size = len(ranks)
    for length in (length for length in range(2, size // 2 + 1) if size % length == 0):
        count = size // length
        for chains in (
            [ranks[index * length : (index + 1) * length] for index in range(count)],
            [ranks[index::count] for index in range(count)],
        ):
            try:
                yield [match_pipeline(evidence, chain) for chain in chains]
            except MismatchError:
                continue


def _notes(matches: Sequence[PipelineMatch], ranks: Sequence[RecognisedRank]) -> Iterator[str]:
    by_rank = {recognised.number: recognised for recognised in ranks}
    for match in matches:
        counts = sorted({unit.count for unit in match.units})
        microbatches = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        num_outside = sum(num_operators_outside_ops(by_rank[rank_match.rank], rank_match) for rank_match in match.ranks)
        yield (
            f"ranks {_range_of(match.chain)}: {counted(len(match.units), 'step')} of {match.plan.name} with {microbatches} "
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
