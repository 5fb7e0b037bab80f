"""Receives posted early: named where they hold up something, by counted nanoseconds, and nowhere else."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from pptrace.analysis.early_receives.answer import EarlyOfRun
from pptrace.analysis.early_receives.of_rank import NOT_RECORDED, OTHER_ORDERS, RankOrder
from pptrace.analysis.early_receives.repair import NO_BETTER
from pptrace.analysis.early_receives.types import HeldCall, HeldRank
from pptrace.analysis.whole_run import EARLY_RECEIVES
from pptrace.marks import Axis, OpMark, P2PMark, Transfer, WaitMark
from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.messages import peer_of
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import build
from pptrace.schedule.text import from_csv, to_rows
from pptrace.workflow.analyse import Analysis
from tests.schedule.rendezvous import StuckError
from tests.schedule.rendezvous import run as run_blocking
from tests.schedule.torch_tables import with_torch_messages
from tests.support.analysed import analyse
from tests.support.synthetic import (
    BYTES,
    Event,
    Job,
    PaperRun,
    Recording,
    events_launched_ahead,
    groups_of,
    host_events,
    marked,
    record,
    run_on_paper,
    run_on_streams,
)

STEPS = 6
EARLY = from_csv(
    "0F0,0SEND_F0,2RECV_F0,0F1,0SEND_F1,2RECV_F1,2F0,2SEND_F0,2F1,2SEND_F1,"
    "2RECV_B0,2B0,2SEND_B0,2RECV_B1,2B1,2SEND_B1,0RECV_B0,0B0,0RECV_B1,0B1\n"
    "1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1,1SEND_F1,3RECV_F0,3F0,3RECV_F1,3F1,"
    "3B0,3SEND_B0,3B1,3SEND_B1,1RECV_B0,1B0,1SEND_B0,1RECV_B1,1B1,1SEND_B1\n"
)
"""Rank 0 posts what it receives for its second stage with what it sends: rank 1 needs 1,000 ns until it can send that."""


def cost(action: Action) -> int:
    return 1000 if action.kind is Kind.F else 2000


def analysed(run: PaperRun, events: Callable[..., list[Event]] = host_events, pause: int = 500) -> Analysis:
    return analyse(Recording(Job(run.plan, 1, STEPS), run, events, pause).traces())


def span(run: PaperRun) -> int:
    begin, end = run.window
    return end - begin


def test_a_rank_that_waits_in_its_calls_is_held_up_until_the_sender_can_send() -> None:
    early = analysed(run_on_paper(EARLY, cost)).report.early_receives
    # 0F0 ends at 1,000; rank 1 runs 1F0 until 2,000 and 1F1 from 3,000 to 4,000, for which rank 0 waits both times.
    assert early.pairs == (
        HeldCall(0, "2RECV_F0", 2, 0, 1, "0F1", STEPS, 1000, 1000),
        HeldCall(0, "2RECV_F1", 2, 1, 1, "2F0", STEPS, 1000, 1000),
    )
    assert early.ranks == (HeldRank(0, 2 * STEPS, 2000, 1000),)
    assert (early.where, early.num_steps, early.held_ns, early.reason) == ("host", STEPS, 2000, None)


def test_the_repaired_order_gains_what_a_machine_with_blocking_calls_says() -> None:
    before = run_on_paper(EARLY, cost)
    analysis = analysed(before)
    after = run_on_paper(analysis.order.repaired, cost)
    assert to_rows(analysis.order.posted) == to_rows(EARLY)
    assert to_rows(analysis.order.repaired.compute_only()) == to_rows(EARLY.compute_only())
    gain = span(before) - span(after)
    assert gain == 2000
    assert analysis.order.gains.tolist() == [gain] * STEPS
    assert analysis.report.early_receives.gain_ns == gain
    (finding,) = [one for one in analysis.report.findings if one.evidence.get("reason") == EARLY_RECEIVES]
    assert (finding.gain_ns, finding.evidence["where"]) == (gain, {"rank": 0})
    assert finding.evidence["num_receives"] == 2 * STEPS
    assert sum(cause.ns for cause in analysis.report.steps[0].causes or () if cause.reason == EARLY_RECEIVES) == gain


def test_the_order_of_one_step_keeps_no_rows_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views of them would, in a run of millions of messages a third of the memory of its analysis."""
    orders: list[RankOrder] = []
    of = EarlyOfRun.of
    monkeypatch.setattr(EarlyOfRun, "of", lambda ranks, costs: orders.extend(ranks.values()) or of(ranks, costs))
    analysed(run_on_paper(EARLY, cost))
    assert [len(order.posted) for order in orders] == [12, 12]
    assert all(column.base is None for order in orders for column in order.posted.columns.values())


def test_a_stream_that_runs_calls_in_order_holds_up_sends() -> None:
    """torch's own order for three ranks: each receive for stage 3 stands before a send of stage 0, and waits for rank 2."""
    run = run_on_streams(with_torch_messages(build("interleaved-1f1b", 3, 3)), cost, 10)
    analysis = analysed(run, events_launched_ahead, pause=50_000)
    early = analysis.report.early_receives
    assert early.where == "stream"
    done = {str(one.action): one for rank in run.ranks for one in rank}
    held = {(pair.receive, pair.held): pair.held_ns for pair in early.pairs if pair.rank == 0}
    # A send could go when its op has ended, rank 1 waits for it, and the stream would have come to it but for the receive.
    assert held == {
        (receive, send): done[receive].met - max(done[receive].start, done[op].end, done[other].start)
        for receive, op, send, other in (
            ("3RECV_F0", "0F1", "0SEND_F1", "1RECV_F1"),
            ("3RECV_F1", "0F2", "0SEND_F2", "1RECV_F2"),
            ("3RECV_F2", "3F0", "3SEND_F0", "4RECV_F0"),
        )
    }
    assert set(held.values()) == {1000}
    assert (
        analysis.order.gains.tolist() == [span(run) - span(run_on_streams(analysis.order.repaired, cost, 10))] * STEPS
    )
    assert analysis.order.gains[0] > 0


@pytest.mark.parametrize(("name", "pp", "microbatches"), [("1f1b", 4, 8), ("gpipe", 3, 4), ("zb-h1", 3, 6)])
@pytest.mark.parametrize("on_stream", [False, True])
def test_nothing_is_named_where_each_receive_comes_right_before_its_reader(
    name: str, pp: int, microbatches: int, *, on_stream: bool
) -> None:
    plan = build(name, pp, microbatches)
    if on_stream:
        analysis = analysed(run_on_streams(plan, cost, 10), events_launched_ahead, pause=50_000)
    else:
        analysis = analysed(run_on_paper(plan, cost, 10))
    early = analysis.report.early_receives
    assert (early.held_ns, early.gain_ns, early.pairs, early.ranks) == (0, 0, (), ())
    assert analysis.order is None
    assert not [one for one in analysis.report.findings if one.evidence.get("reason") == EARLY_RECEIVES]


def posted_ahead(run: PaperRun, rank: int, pipeline: Sequence[int], step: int = 0, at: int = 0) -> list[Event]:
    """Calls that only post; a rank waits for what an op reads, if that has not come, right before it."""
    events = [marked(OpMark(done.action, step), at + done.start, at + done.end) for done in run.computes(rank)]
    transfers = {done.action.key: done for done in run.transfers(rank)}
    for group in groups_of(run.transfers(rank)):
        links = tuple(Transfer(done.action, pipeline[peer_of(run.plan, done.action)], BYTES) for done in group)
        events.append(marked(P2PMark(links, Axis.PP, step), at + group[0].start, at + group[0].start + 5))
    for done in run.computes(rank):
        needed = Kind.RECV_F if done.action.kind is Kind.F else Kind.RECV_B
        received = transfers.get((needed, done.action.stage, done.action.microbatch))
        if received is not None:
            link = Transfer(received.action, pipeline[peer_of(run.plan, received.action)], BYTES)
            events.append(marked(WaitMark(link, step), at + min(received.end, done.start) - 2, at + done.start))
    return events


def test_receives_that_are_posted_early_and_hold_up_nothing_are_not_named() -> None:
    """As over gloo, which matches messages by rank and tag: the rank goes on, and each message comes when it is sent."""
    run = run_on_streams(with_torch_messages(build("interleaved-1f1b", 3, 3)), cost, 10)
    early = analysed(run, posted_ahead).report.early_receives
    assert (early.reason, early.pairs, early.gain_ns) == (None, (), 0)


def test_the_order_of_traces_and_events_changes_nothing() -> None:
    recording = record(EARLY, cost, steps=STEPS)
    reports = [analyse(recording.traces(shuffle=shuffle)).report.early_receives for shuffle in (None, random.Random(3))]
    assert reports[0] == reports[1]


def test_without_the_trace_of_a_rank_no_gain_is_known() -> None:
    traces = record(EARLY, cost, steps=STEPS).traces()
    early = analyse(traces[:1], num_ranks=2).report.early_receives
    assert not early.gain_ns
    assert not early.pairs


def test_an_order_that_differs_from_step_to_step_is_not_repaired() -> None:
    """In every other step rank 1 posts two sends the other way round: what is held up is known, and no order is."""
    other = replace(EARLY, ranks=(EARLY.ranks[0], _swapped(EARLY.ranks[1], "3F1", "3B0")))
    runs = [run_on_paper(plan, cost) for plan in (EARLY, other)]

    def events(_: PaperRun, rank: int, pipeline: Sequence[int], step: int, at: int) -> list[Event]:
        return host_events(runs[step % 2], rank, pipeline, step, at)

    recording = Recording(Job(EARLY, 1, STEPS), max(runs, key=lambda run: run.end), events)
    early = analyse(recording.traces()).report.early_receives
    assert early.pairs
    assert early.gain_ns is None
    assert early.gain_reason == OTHER_ORDERS


def _swapped(row: Sequence[Action], *cells: str) -> tuple[Action, ...]:
    """The row with a send behind one op put behind the next one."""
    places = [index for index, action in enumerate(row) if str(action) == "3SEND_B0"]
    moved = [action for index, action in enumerate(row) if index not in places]
    moved.insert(next(index for index, action in enumerate(moved) if str(action) == "3SEND_B1"), row[places[0]])
    return tuple(moved)


def test_kernels_that_were_not_recorded_are_a_reason() -> None:
    run = run_on_streams(with_torch_messages(build("interleaved-1f1b", 3, 3)), cost, 10)

    def without_kernels(*args: object) -> list[Event]:
        return [event for event in events_launched_ahead(*args) if event.stream < 0]

    early = analysed(run, without_kernels, pause=50_000).report.early_receives
    assert early.reason == NOT_RECORDED


def test_the_order_that_was_repaired_has_no_better() -> None:
    order = analysed(run_on_paper(EARLY, cost)).order
    again = analysed(run_on_paper(order.repaired, cost))
    assert again.order is None
    assert again.report.early_receives.gain_reason in (None, NO_BETTER)


@pytest.mark.parametrize(("name", "pp", "microbatches"), [("interleaved-1f1b", 3, 3), ("zbv", 3, 6)])
def test_no_repaired_order_can_deadlock_where_torchs_deferred_one_does(name: str, pp: int, microbatches: int) -> None:
    plan: Plan = build(name, pp, microbatches)
    early = with_torch_messages(plan)
    analysis = analysed(run_on_streams(early, cost, 10), events_launched_ahead, pause=50_000)
    for one_at_a_time in (False, True):
        run_blocking(to_rows(analysis.order.repaired), one_at_a_time)
    with pytest.raises(StuckError):
        run_blocking(to_rows(with_torch_messages(plan, deferred=True)), one_at_a_time=True)
