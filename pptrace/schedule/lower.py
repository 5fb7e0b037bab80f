"""Adds sends and receives to a plan of compute actions, so that no order of blocking calls can deadlock.

Every transfer gets a position in one total order of all computes and transfers: that of a replay in which F, I and W take
one tick and B two. A message is transferred as late as possible without delaying the replay: when its reader starts, but before
its sender's next action. So on the sending rank the send directly follows its producer, and on the receiving rank the
receive comes before the first action that starts at or after that tick. Since every rank's list is a part of the same
total order, the earliest unfinished entry can always run: a blocking send and its receive always meet. Messages between
two ranks are received in the order in which they are sent, so one channel without tags is enough.

For 1F1B this gives Megatron-LM's order with its fused pairs: a send-forward and the receive-backward after it are
adjacent, and adjacent transfers are one group that is posted together (:meth:`pptrace.schedule.plan.Plan.instructions`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from operator import itemgetter

from pptrace.errors import ScheduleError
from pptrace.schedule.actions import Action
from pptrace.schedule.messages import Message, crosses_ranks, message_of_op
from pptrace.schedule.plan import Plan
from pptrace.schedule.replay import Duration, Replay, replay, unit_cost


def lower(plan: Plan, duration: Duration = unit_cost) -> Plan:
    """Add sends and receives to a plan; the compute actions and their order are unchanged.

    A plan that has sends and receives already is returned unchanged. ``duration`` is what actions take in the replay.

    Raises:
        ScheduleError: the compute actions alone cannot run to the end.
    """
    if plan.has_comms:
        return plan
    timeline = replay(plan, duration)  # a message that is too early or too late makes a rank wait
    if timeline.blocked:
        stuck = timeline.blocked[0]
        raise ScheduleError(
            f"{plan.name}: cannot add sends and receives: rank {stuck.rank} never gets past its action "
            f"{plan.ranks[stuck.rank][stuck.index]} (validate the plan first)"
        )
    transfers = sorted(
        _transfers(plan, timeline), key=lambda one: (one[0], one[1].stage, one[1].kind, one[1].microbatch or 0)
    )
    transfers_by_rank: list[list[tuple[int, Action]]] = [[] for _ in plan.ranks]
    for tick, *ends in transfers:
        for end in ends:
            transfers_by_rank[plan.placement[end.stage]].append((tick, end))
    rows = []
    for row, of_rank in zip(timeline.ranks, transfers_by_rank, strict=True):
        computes = [(timed.start, timed.action) for timed in row]  # of one tick the transfers come first
        rows.append(tuple(action for _, action in sorted([*of_rank, *computes], key=itemgetter(0))))
    return replace(plan, ranks=tuple(rows))


def _transfers(plan: Plan, timeline: Replay) -> Iterator[tuple[int, Action, Action]]:
    """(the tick at which they happen, the send, its receive) of every output that another rank reads."""
    start_of = {half.key: timed.start for row in timeline.ranks for timed in row for half in timed.action.halves}
    for row in timeline.ranks:
        following = [*(timed.start for timed in row), timeline.makespan][1:]
        for timed, next_start in zip(row, following, strict=True):
            for half in timed.action.halves:
                message = message_of_op(plan, half, sends=True)
                if message is None or not crosses_ranks(plan, message):
                    continue
                reader = _reader_of(plan, half, message)
                send = replace(half, kind=message.send[0])
                yield min(next_start, start_of[reader.key]), send, Action(*message.recv, reader.chunk, reader.phase)


def _reader_of(plan: Plan, producer: Action, message: Message) -> Action:
    """The action that reads what ``producer`` sends."""
    stage = message.target_stage
    for kind in message.direction.producers:
        if reader := plan.by_key.get((kind, stage, producer.microbatch)):
            return reader[1]
    raise ScheduleError(f"{plan.name}: nobody reads the output of {producer}: stage {stage} has no such microbatch")
