"""A profiled run has every op, call, wait, optimizer step and training step of its plan in the trace, exactly once."""

from __future__ import annotations

from collections import Counter

import pytest

from instrument.pipeline.megatron_calls import Calls
from instrument.pipeline.order import arrange
from instrument.pipeline.transport import Mode
from pptrace.marks import (
    AwaitMark,
    Axis,
    CollectiveMark,
    OpMark,
    P2PMark,
    SpanKind,
    SpanMark,
    Transfer,
    UnknownMark,
    WaitMark,
    parse_mark,
)
from pptrace.schedule.actions import Action, parse_action
from pptrace.schedule.messages import peer_of
from tests.instrument.pipeline.cases.plans import overlapped, split_1f1b, v_shaped
from tests.instrument.pipeline.cases.training import MICROBATCH_SIZE, SEQUENCE, Case, train_profiled
from tests.support.pool import Pool
from tests.support.profiled import Event

STEPS = 2
MESSAGE_BYTES = MICROBATCH_SIZE * SEQUENCE * 8 * 8  # hidden 8, float64


@pytest.fixture(
    scope="module",
    params=[
        Case("1f1b", 2, 3, dp=2, tied=True),
        Case("split", 2, 3, rows=split_1f1b(2, 3, 1)),
        Case("v", 4, 3, rows=v_shaped(4, 3), mode=Mode.BLOCKING),
        Case("overlapped", 2, 4, rows=overlapped(2, 4, "I"), ahead=1),
        Case("1f1b", 4, 5, ahead=2),
        Case("interleaved-1f1b", 2, 4, chunks=2, mode=Mode.EVEN_ODD, calls=Calls.OVERLAP),
    ],
    ids=lambda case: f"{case.schedule}-pp{case.pp}-dp{case.dp}-ahead{case.ahead}-{case.calls}",
)
def run(request: pytest.FixtureRequest, pool: Pool) -> tuple[Case, list[list[Event]]]:
    """A case, and what each rank's trace has."""
    case: Case = request.param
    return case, pool.run(train_profiled, case, STEPS, world=case.pp * case.dp)


def ranks_of(case: Case) -> list[tuple[int, int, tuple[int, ...]]]:
    """(global rank, pipeline rank, global ranks of the pipeline)."""
    return [
        (pp * case.dp + dp, pp, tuple(stage * case.dp + dp for stage in range(case.pp)))
        for pp in range(case.pp)
        for dp in range(case.dp)
    ]


def test_every_mark_of_the_plan_is_in_the_trace_once(run: tuple[Case, list[list[Event]]]) -> None:
    case, events = run
    plan = case.plan
    for rank, pp_rank, pp_ranks in ranks_of(case):
        marks = [parse_mark(event.name) for event in events[rank]]
        result = Counter(mark for mark in marks if mark is not None)
        expected: list[object] = []
        for step in range(STEPS):
            expected += [SpanMark(kind, step) for kind in (SpanKind.STEP, SpanKind.DATA, SpanKind.OPTIMIZER)]
            for instruction in arrange(plan, pp_rank, case.wiring.posting(plan, tagged=True)):
                if not instruction[0].kind.is_p2p:
                    expected.append(OpMark(instruction[0], step))
                    continue
                transfers = tuple(Transfer(untagged(a), pp_ranks[peer_of(plan, a)], MESSAGE_BYTES) for a in instruction)
                expected.append(P2PMark(transfers, Axis.PP, step))
                expected += [WaitMark(transfer, step) for transfer in transfers]
        collectives = {mark for mark in result if isinstance(mark, CollectiveMark | AwaitMark) or is_sync(mark)}
        assert Counter(expected) == Counter({mark: n for mark, n in result.items() if mark not in collectives})
        assert not any(isinstance(mark, UnknownMark) for mark in result)
        assert bool(collectives) == (case.dp > 1)


def untagged(action: Action) -> Action:
    """Return it as it is read back from a transfer, which tells neither chunk nor phase."""
    return parse_action(str(action))


def is_sync(mark: object) -> bool:
    return isinstance(mark, SpanMark) and mark.kind is SpanKind.GRAD_SYNC


def test_waits_and_ops_lie_where_they_belong(run: tuple[Case, list[list[Event]]]) -> None:
    case, events_of_rank = run
    for rank, _, _ in ranks_of(case):
        events = [(event, parse_mark(event.name)) for event in events_of_rank[rank]]
        calls = [(event, mark) for event, mark in events if isinstance(mark, P2PMark)]
        steps = {mark.step: e for e, mark in events if isinstance(mark, SpanMark) and mark.kind is SpanKind.STEP}
        for event, mark in events:
            if isinstance(mark, WaitMark):
                around = [e for e, call in calls if mark.transfer in call.transfers and mark.step == call.step]
                assert len(around) == 1
                after, within = around[0].end <= event.start, around[0].holds(event)
                assert (after or within) if case.calls.overlaps else after if case.ahead else within
            if isinstance(mark, OpMark):
                assert steps[mark.step].holds(event)
                waits = [wait for wait, inside in events if isinstance(inside, WaitMark)]
                assert not any(
                    other.start < event.end and event.start < other.end for other in (*waits, *(c for c, _ in calls))
                )
