"""Collectives that name no group are those of all ranks where they end together on all of them, and only there."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from pptrace.marks import SpanKind, SpanMark
from pptrace.model.traces import Category, Trace
from tests.recognise.kineto_calls import Rank
from tests.support.analysed import analyse
from tests.support.synthetic import MAIN_THREAD, START, marked

RANKS, STEPS, CALLS = 4, 2, 3
STEP, APART, ENDED, CLOCK = 10_000_000, 3_000_000, 100_000, 7_000_000
ALL_REDUCE = "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)"
LATER = [0, 900_000, 2_400_000, 300_000]
"""Delays with which ranks come to a collective, by turns, ns."""


def traces(
    members: list[list[int]],
    skipped: int | None = None,
    later: Sequence[int] = LATER,
    then: list[list[int]] | None = None,
) -> list[Trace]:
    """DDP as torch 2.0 records it: kernels and calls of collectives of these groups, none of which is named.

    Each rank has its own clock, and computes for a time of its own before a collective, which ends on all of a group ``ENDED``
    ns after its last rank came. In the second step groups are those of ``then``.
    """
    of_steps = [{rank: group for group in groups for rank in group} for groups in (members, then or members)]
    made = [Rank(rank, {"backend": "nccl", "world_size": RANKS}, correlation=100) for rank in range(RANKS)]
    for step, call in itertools.product(range(STEPS), range(CALLS)):
        delays = [later[(rank + step + call) % RANKS] for rank in range(RANKS)]
        for rank, trace in enumerate(made):
            at = 50 + step * STEP + call * APART + CLOCK * rank
            begin, end = (
                at + 20 + delays[rank],
                at + 20 + max(delays[other] for other in of_steps[step][rank]) + ENDED,
            )
            if call == 0:
                trace.events.append(marked(SpanMark(SpanKind.STEP, step), START + at, START + at + STEP - 100))
            trace.kernel("gemm", at + 5, at + 10, begin - 10, stream=7)
            if (step, call, rank) != (0, 0, skipped):
                trace.record(at + 12, at + 18)
                trace.kernel(ALL_REDUCE, at + 15, begin, end)
    for rank, trace in enumerate(made):  # a last call, whose kernel the recording does not have
        at = STEPS * STEP + CLOCK * rank
        trace.add(Category.ANNOTATION, "nccl:all_reduce", at, at + 5, thread=MAIN_THREAD)
    return [trace.trace() for trace in made]


ALL, HALVES = [[0, 1, 2, 3]], [[0, 1], [2, 3]]


def test_collectives_that_end_together_on_all_ranks_are_theirs_and_waits_are_known() -> None:
    report = analyse(traces(ALL)).report
    for step in report.steps:
        for rank in step.ranks:
            came = [LATER[(rank.rank + step.step + call) % RANKS] for call in range(CALLS)]
            assert sum(comm.wait_ns or 0 for comm in rank.comms) == sum(max(LATER) - late for late in came)
            assert rank.exposed_comm_ns == CALLS * ENDED
    assert any("no call names its process group: the 7 collectives" in line for line in report.warnings)


@pytest.mark.parametrize(
    "made",
    [
        traces(HALVES),
        traces(ALL, skipped=2),
        traces(ALL)[:3],
        traces(HALVES, later=[0] * RANKS),
        traces(ALL, then=HALVES),
    ],
    ids=["halves", "one call missing", "one rank missing", "halves in lockstep", "all, then halves"],
)
def test_collectives_of_fewer_ranks_or_another_order_stay_unknown(made: list[Trace]) -> None:
    report = analyse(made).report
    assert {comm.axis for step in report.steps for rank in step.ranks for comm in rank.comms} == {"unknown"}
    assert all(comm.wait_ns is None for step in report.steps for rank in step.ranks for comm in rank.comms)
