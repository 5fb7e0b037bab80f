"""Match traced ranks of an unlabelled pipeline one by one, where others have no trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pptrace.model.tables import What
from pptrace.model.wording import counted
from pptrace.recognise.infer.match_lone_rank import LoneMatch, UnknownStepEndsError, has_numbers, match_alone
from pptrace.recognise.infer.match_tables import Assignment, steps_of_units, with_match
from pptrace.recognise.infer.pipeline_match import RankMatch
from pptrace.recognise.infer.rank_order import Evidence, MismatchError
from pptrace.recognise.infer.whole_steps import match_whole_steps
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


def match_each_alone(ranks: Sequence[RecognisedRank], evidence: Mapping[int, Evidence]) -> JointMatch:
    """Match each of the ranks alone; their results have to agree.

    A trace without autograd's sequence numbers proves nothing, and is left to its own order.
    """
    if not all(map(has_numbers, evidence.values())):
        return JointMatch(tuple(ranks))
    by_rank = {recognised.number: recognised for recognised in ranks}
    ending = {rank: _with_step_ends(match, by_rank[rank]) for rank, match in evidence.items()}
    try:
        matches, cut = match_whole_steps(ending, _consistent_matches)
    except MismatchError as err:
        who = f"rank {next(iter(evidence))}" if len(evidence) == 1 else "each rank"
        line = f"no forwards and backwards of {who} are certain without the other ranks' traces: {err}"
        return JointMatch(tuple(ranks), notes=(line,), refused=frozenset(evidence))
    steps = steps_of_units(matches[0].units, [(by_rank[match.rank.rank], match.rank) for match in matches])
    for match in matches:
        assignment = Assignment(match.units, steps, match.behind, None, match.peers)
        by_rank[match.rank.rank] = with_match(by_rank[match.rank.rank], match.rank, assignment)
    return JointMatch(tuple(by_rank.values()), notes=(_note(matches, by_rank), *cut))


def _with_step_ends(evidence: Evidence, recognised: RecognisedRank) -> Evidence:
    """The evidence in which numbered ranges of steps separate steps as optimizers do."""
    host = recognised.host
    starts = host.loc[(host["what"] == What.STEP.value) & (host["number"] >= 0), "start_ns"].to_numpy()
    return replace(evidence, optimizers=np.sort(np.concatenate((evidence.optimizers, starts))))


def _consistent_matches(evidence: Mapping[int, Evidence]) -> list[LoneMatch]:
    """The match of each rank alone.

    Raises:
        MismatchError: one proves nothing, or they do not run the same steps.
    """
    certain: dict[int, LoneMatch] = {}
    open_steps: dict[int, UnknownStepEndsError] = {}
    for rank, match in evidence.items():
        try:
            certain[rank] = match_alone(match)
        except UnknownStepEndsError as err:
            open_steps[rank] = err
    if not certain:
        raise next(iter(open_steps.values()))
    sizes = tuple(unit.count for unit in next(iter(certain.values())).units)
    matches = [certain[rank] if rank in certain else match_alone(match, sizes) for rank, match in evidence.items()]
    first = matches[0]
    for later in matches[1:]:
        if later.units != first.units or not np.array_equal(later.behind, first.behind):
            raise MismatchError(
                f"ranks {first.rank.rank} and {later.rank.rank} do not run the same microbatches in the same steps"
            )
    return matches


def _note(matches: Sequence[LoneMatch], by_rank: Mapping[int, RecognisedRank]) -> str:
    """Describe what was recognised; all ranks run the same steps."""
    units = matches[0].units
    sizes = sorted({unit.count for unit in units})
    lefts = sorted(num_operators_outside_ops(by_rank[match.rank.rank], match.rank) for match in matches)
    where = "" if len(matches) == 1 else "on each rank "
    return (
        f"no labels of ops: {where}forwards and backwards recognised by messages and autograd's sequence numbers, "
        f"{counted(len(units), 'step')} with {_from_to(sizes)} microbatches; "
        f"{_from_to(lefts)} operators of the thread belong to no op"
    )


def _from_to(numbers: Sequence[int]) -> str:
    return f"{numbers[0]}" if numbers[0] == numbers[-1] else f"{numbers[0]} to {numbers[-1]}"


def num_operators_outside_ops(recognised: RecognisedRank, match: RankMatch) -> int:
    """The operators of a rank's thread that are of no forward."""
    total = int((recognised.host["what"] == What.OPERATOR.value).sum())
    return total - int((match.forwards.high - match.forwards.low).sum())
