"""Checks of a match of ranks: equal runs on all ranks, autograd's numbers, an executable plan, and clocks.

Several chunks per rank, inferred from order alone, must agree with messages and autograd. Many programs
run forwards and then backwards with messages between them: a ring runs them in the order of breadth-first chunks,
and a loop by hand may run the backwards of chunks in an order of its own. What a pipeline sends and receives, and the nodes of
autograd that a backward runs, tell them apart.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

import numpy as np
import pandas as pd

from pptrace.errors import ScheduleError
from pptrace.model.mesh import MeshInfo
from pptrace.model.tables import COMPUTE_KINDS, Int64
from pptrace.recognise.infer.evidence import Evidence, MismatchError, Rows, evidence_of, name_peers, outcome_of
from pptrace.recognise.infer.match import Match, OrderedOp, RankMatch, runs_of
from pptrace.recognise.infer.rank_order import (
    FROM_NEXT,
    FROM_PREVIOUS,
    TO_NEXT,
    TO_PREVIOUS,
    Channel,
    Grouped,
    Ops,
    check_only_forwards,
    forwards_behind,
)
from pptrace.recognise.recognised_rank import RecognisedRank
from pptrace.recognise.schedule.measured_steps import match_registry
from pptrace.schedule import registry
from pptrace.schedule.plan import Plan
from pptrace.schedule.replay import replay
from pptrace.schedule.text import from_rows
from pptrace.slices import rows_among


def checked(
    evidence: Sequence[Evidence], ranks: Sequence[RankMatch], sizes: Sequence[int], is_engine_complete: bool
) -> Match:
    """The match, if all ranks ran the same runs, in an order that can run to its end.

    Where no numbers of nodes bear it out, nothing else may explain the traces as well. ``is_engine_complete``:
    whether each rank's engine ran wherever another's did.
    """
    for of_rank, match in zip(evidence, ranks, strict=True):
        start, end = (
            np.concatenate([getattr(ops, name) for ops in (match.forwards, match.backwards)])
            for name in ("start_ns", "end_ns")
        )
        order = np.argsort(start, kind="stable")
        if (end[order][:-1] > start[order][1:]).any():  # it has taken the work of an op that is lost
            raise MismatchError(f"an op of rank {match.rank} would begin within another")
        check_gradients_of_inputs(of_rank, match)
    behind, is_known, by_nodes = _forwards_behind(evidence, ranks)
    rows = [match.in_order(behind) for match in ranks]
    sizes, runs = runs_of(sizes, rows, [of_rank.optimizers for of_rank in evidence])
    by_peers = name_peers(evidence)
    for of_match, match in zip(runs, ranks, strict=True):
        check_between_runs(of_match, match, (TO_PREVIOUS, FROM_NEXT))
    if not by_nodes:
        if not is_engine_complete:
            raise MismatchError("autograd's engine ran on some ranks alone next to messages that may be gradients")
        last = ranks[-1]
        check_only_forwards(evidence[-1], last.forwards, last.backwards, last.groups[FROM_PREVIOUS])
        if set(sizes) == {1}:
            for of_rank, match in zip(evidence, ranks, strict=True):
                _check_backward_follows_gradient(of_rank, match)
    plans = {}
    for index, size in enumerate(sizes):
        cells = [
            [f"{stage}{kind}{number}" for kind, number, _ in of_match[index]] for stage, of_match in enumerate(runs)
        ]
        plans[size] = _plan_of(cells, by_peers or by_nodes)
    _check_times(ranks)
    return Match(tuple(ranks), sizes, behind, is_known, plans[max(plans)], by_peers)


_MOST_DIFFERENT = 4
"""Bytes of an output and its gradient differ by this factor at most: of a number in float8 and in float32."""


def check_gradients_of_inputs(evidence: Evidence, match: RankMatch) -> None:
    """Check that gradients go back for what came: of its size, and made by the backwards.

    Raises:
        MismatchError: they are none, as where a student answers its teacher's logits with its loss.
    """
    for output, gradient in ((TO_NEXT, FROM_NEXT), (FROM_PREVIOUS, TO_PREVIOUS)):
        if output not in match.groups or gradient not in match.groups:
            continue
        sizes, of_gradients = (match.groups[channel].messages.num_bytes for channel in (output, gradient))
        largest = of_gradients.max()
        fits = (sizes <= _MOST_DIFFERENT * largest) & (largest <= _MOST_DIFFERENT * sizes)
        if min(sizes.min(), of_gradients.min()) >= 0 and not fits.any():
            raise MismatchError(
                f"rank {match.rank} exchanges messages of {sizes.max()} bytes for such of {largest}: no outputs and gradients"
            )
    _check_one_gradient_each(match)
    if TO_PREVIOUS in match.groups:
        _check_new_gradients(evidence, match)


def _check_new_gradients(evidence: Evidence, match: RankMatch) -> None:
    """Check that each backward accumulates a gradient of what its forward received, which is added to none.

    Raises:
        MismatchError: it accumulates those of parameters alone: in the first backward of a step all are new, in others all are
            added to those before.
    """
    backward = np.searchsorted(match.backwards.start_ns, evidence.gradients.start_ns, side="right")
    is_new = evidence.gradients.number == 0
    has_new, has_added = (
        np.bincount(backward[chosen], minlength=len(match.backwards) + 1)[1:] > 0 for chosen in (is_new, ~is_new)
    )
    if set(zip(has_new.tolist(), has_added.tolist(), strict=True)) == {(True, False), (False, True)}:
        raise MismatchError(f"the backwards of rank {match.rank} make gradients of parameters alone")


def _check_one_gradient_each(match: RankMatch) -> None:
    """Check that no backward sends more tensors than others do while outputs are left that no backward followed.

    Raises:
        MismatchError: it may be two, of which the trace lacks one's nodes.
    """
    gradients, outputs_left = match.groups.get(TO_PREVIOUS), match.others.get(FROM_PREVIOUS)
    if gradients is None or outputs_left is None or not len(outputs_left):
        return
    num_tensors = np.bincount(gradients.group)
    if num_tensors.max() > np.median(num_tensors):
        raise MismatchError(
            f"a backward of rank {match.rank} would send {num_tensors.max()} tensors, others {np.median(num_tensors):.0f}, and "
            "outputs are left that no backward followed"
        )


def check_between_runs(runs: Sequence[Sequence[OrderedOp]], match: RankMatch, channels: Collection[Channel]) -> None:
    """Check that the messages of some channels that are of no op come between runs: ranks agree on shapes while no microbatch is
    in flight.

    Raises:
        MismatchError: one comes within a run, whose own gradient may be lost.
    """
    first, last = (np.array([ops[end][2] for ops in runs], dtype=np.int64) for end in (0, -1))
    for channel, messages in match.others.items():
        time_ns = messages.ready_ns if channel[1] == "recv" else messages.post_ns
        if channel in channels and (np.searchsorted(first, time_ns) > np.searchsorted(last, time_ns)).any():
            raise MismatchError(f"autograd's engine runs nothing next to a message of rank {match.rank} within a step")


def _check_backward_follows_gradient(evidence: Evidence, match: RankMatch) -> None:
    """A backward begins with the gradient that came. With one microbatch at a time little else tells a pipeline from two ranks
    that compute in turn.

    Raises:
        MismatchError: something else runs first.
    """
    received = match.groups.get(FROM_NEXT)
    if received is None:
        return
    rows = evidence.operators.start_ns
    if (np.searchsorted(rows, match.backwards.start_ns) > np.searchsorted(rows, received.ready_ns)).any():
        raise MismatchError(f"rank {evidence.rank} computes between what it receives and its backward")


def _forwards_behind(evidence: Sequence[Evidence], ranks: Sequence[RankMatch]) -> tuple[Int64, bool, bool]:
    """Forward of each backward, which are in one order on all ranks; whether anything tells that: the nodes that it ran, or
    that on some rank never more than one forward waits for its backward (else they come in the order of the forwards); and
    whether the nodes do.

    Raises:
        MismatchError: ranks tell different ones.
    """
    behind_by_rank = [
        behind
        for rank_evidence, match in zip(evidence, ranks, strict=True)
        if (behind := forwards_behind(rank_evidence, match.forwards, match.backwards)) is not None
    ]
    if any(not np.array_equal(behind_by_rank[0], other) for other in behind_by_rank[1:]):
        raise MismatchError("the ranks do not run the backwards of the same microbatches in the same order")
    if behind_by_rank:
        return behind_by_rank[0], True, True
    is_one_at_a_time = any((match.forwards.start_ns[1:] > match.backwards.start_ns[:-1]).all() for match in ranks)
    return np.arange(len(ranks[0].backwards), dtype=np.int64), is_one_at_a_time, False


def _plan_of(cells: Sequence[Sequence[str]], may_be_unknown: bool) -> Plan:
    """The plan of a run's ops.

    Raises:
        MismatchError: it cannot run; or it is that of no schedule, although only orders can tell the ops.
    """
    try:
        plan = match_registry(from_rows(cells, "custom"))
    except ScheduleError as err:
        raise MismatchError(f"the order of the ranks makes no plan: {err}") from None
    if replay(plan).blocked:
        raise MismatchError("in this order of ops a rank would deadlock")
    if plan.name not in registry.SCHEDULES and not may_be_unknown:
        raise MismatchError("the order of ops matches no known schedule, and the messages name no peers")
    return plan


_SLACK_NS = 100_000
_DRIFT = 10_000
"""Clocks may move against each other by one in so many parts of the time."""


def _check_times(ranks: Sequence[RankMatch]) -> None:
    """Check whether, where receives show when they were complete, one offset between the clocks of neighbours lets every
    message be sent before it has come.

    Raises:
        MismatchError: none does.
    """
    for before, after in pairwise(ranks):
        forward_lead = _least_lead(before.groups[TO_NEXT], after.groups[FROM_PREVIOUS])
        backward_lead = _least_lead(after.groups[TO_PREVIOUS], before.groups[FROM_NEXT])
        if forward_lead is None or backward_lead is None:
            continue
        spans = (group.post_ns[-1] - group.post_ns[0] for group in before.groups.values())
        if forward_lead + backward_lead > _SLACK_NS + max(map(int, spans)) // _DRIFT:
            raise MismatchError(
                f"messages between ranks {before.rank} and {after.rank} would come before they are sent, whatever their clocks"
            )


def _least_lead(sent: Grouped, came: Grouped) -> int | None:
    """Time by which the receiving clock must be ahead at least, ns; None where no completion is known."""
    if not (came.messages.ready_ns > came.messages.post_ns).all():
        return None
    return int((sent.messages.post_ns - came.messages.ready_ns).max())


def contradiction_of_chunks(ranks: Sequence[RecognisedRank], ops: pd.DataFrame, mesh: MeshInfo) -> str:
    """The contradiction to the chunks of these ranks, in words; "" without one.

    Args:
        ranks: those whose host threads show the messages and operators.
        ops: of all ranks, with their stages.
        mesh: with the pipelines and the number of chunks.
    """
    inferred = ops[(ops["source"] == "inferred") & rows_among(ops["kind"], COMPUTE_KINDS) & (ops["stage"] >= 0)]
    by_rank = {int(str(rank)): rank_ops.sort_values("start_ns") for rank, rank_ops in inferred.groupby("rank")}
    with_inferred_ops = [recognised for recognised in ranks if recognised.number in by_rank]
    last = (mesh.pp or 1) * (mesh.vpp or 1) - 1
    ratios = set()
    for recognised in with_inferred_ops:
        rank_ops = by_rank[recognised.number]
        if len(set(rank_ops.groupby("step").size())) > 1:
            continue  # one step was cut off, and some of its messages without their ops
        for kind, num_planned in _num_planned_messages(rank_ops, last).items():
            ratios.add(int((recognised.calls["kind"] == kind).sum()) / max(num_planned, 1))
    if any(not ratio.is_integer() for ratio in ratios) or len(ratios) > 1:
        return f"the ranks send and receive other numbers of messages than stages 0 to {last} do"
    for recognised in with_inferred_ops:
        if not _backwards_match_forwards(recognised, by_rank[recognised.number]):
            return f"backwards of rank {recognised.number} run the nodes of other forwards than in that order"
    return ""


def _num_planned_messages(ops: pd.DataFrame, last: int) -> dict[str, int]:
    """Number of messages that the ops of a rank send and receive, each of one tensor."""
    forward, stage = (ops["kind"] == "F").to_numpy(), ops["stage"].to_numpy()
    to_and_from_next = np.count_nonzero(forward & (stage < last)), np.count_nonzero(~forward & (stage < last))
    to_and_from_previous = np.count_nonzero(forward & (stage > 0)), np.count_nonzero(~forward & (stage > 0))
    return {
        "send": int(to_and_from_next[0] + to_and_from_previous[1]),
        "recv": int(to_and_from_next[1] + to_and_from_previous[0]),
    }


def _backwards_match_forwards(recognised: RecognisedRank, ops: pd.DataFrame) -> bool:
    """Return whether each backward runs the nodes of the forward of its stage and microbatch, as far as nodes are numbered."""
    evidence = evidence_of(recognised.number, recognised.host, recognised.calls, np.full(len(recognised.calls), -1))
    forwards, backwards = ops[ops["kind"] == "F"], ops[ops["kind"] == "B"]

    def rows_of(ops_of_kind: pd.DataFrame, rows: Rows) -> Ops:
        start, end = ops_of_kind["start_ns"].to_numpy(), ops_of_kind["end_ns"].to_numpy()
        return Ops(np.searchsorted(rows.start_ns, start), np.searchsorted(rows.start_ns, end), start, end)

    ops_and_rows = rows_of(forwards, evidence.operators), rows_of(backwards, evidence.engine)
    behind = outcome_of(lambda pair: forwards_behind(evidence, *pair), ops_and_rows)
    if isinstance(behind, MismatchError):
        return False
    columns = ["step", "stage", "microbatch"]
    return behind is None or bool((forwards[columns].to_numpy()[behind] == backwards[columns].to_numpy()).all())
