"""Validation of plans: every dependency met, every send paired with one receive, no deadlock when sends block."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from pptrace.errors import ScheduleError
from pptrace.schedule.actions import Action, Key, Kind
from pptrace.schedule.drawing import draw
from pptrace.schedule.lower import lower
from pptrace.schedule.messages import message_of, peer_of
from pptrace.schedule.needs import needs_of
from pptrace.schedule.plan import Plan
from pptrace.schedule.replay import Blocked, replay
from pptrace.schedule.text import read_csv


def read_sound_csv(path: Path) -> Plan:
    """A plan from a CSV file of torch's, checked.

    Raises:
        ScheduleError: as :func:`pptrace.schedule.text.read_csv` and :func:`validate`; the message begins with the path.
    """
    plan = read_csv(path)
    validate(replace(plan, name=str(path)))
    return plan


def validate(plan: Plan) -> None:
    """Check a plan, lowered or not; a plan without sends and receives is lowered and checked in that form as well.

    Raises:
        ScheduleError: what is wrong, in one line; its ``grid`` is the plan drawn with the wrong cells marked.
    """
    _require_placement(plan)
    _require_unique(plan)
    _require_complete(plan)
    _require_runnable(plan)
    lowered = lower(plan)
    _require_pairs(lowered)
    _require_inputs_received(lowered)
    _require_no_deadlock(lowered)
    _require_message_order(lowered)


def _require_placement(plan: Plan) -> None:
    """Require that every action is on the rank that owns its stage, and of a microbatch that exists."""
    for action, (rank, index) in _placed_halves(plan):
        if not 0 <= action.stage < plan.num_stages:
            problem = f"rank {rank} has {action}; expected a stage from 0 to {plan.num_stages - 1}"
        elif plan.placement[action.stage] != rank:
            problem = (
                f"rank {rank} has {action}, but stage {action.stage} belongs to rank {plan.placement[action.stage]}"
            )
        elif action.microbatch is not None and action.microbatch not in (passing := plan.microbatches_of(action.stage)):
            problem = f"rank {rank} has {action}; expected a microbatch from {passing[0]} to {passing[-1]}"
        else:
            continue
        raise _error(plan, problem, [(rank, index)])


def _require_unique(plan: Plan) -> None:
    """Require that no compute action and no transfer comes twice; parameters may be gathered and freed any number of times."""
    counts = Counter(half.key for half, _ in _placed_halves(plan) if half.microbatch is not None)
    for action, (rank, index) in _placed_halves(plan):
        if counts[action.key] > 1:
            raise _error(plan, f"rank {rank} has {action} {counts[action.key]} times; expected once", [(rank, index)])


def _require_complete(plan: Plan) -> None:
    """Require that each stage runs each microbatch of its chain forward, and backward once: as B, or as I and W."""
    present = plan.by_key
    for stage in range(plan.num_stages):
        for mb in plan.microbatches_of(stage):
            has = {kind for kind in (Kind.F, Kind.B, Kind.I, Kind.W) if (kind, stage, mb) in present}
            if has not in ({Kind.F, Kind.B}, {Kind.F, Kind.I, Kind.W}):
                present_text = ", ".join(sorted(has)) or "nothing"
                cells = [at for half, at in _placed_halves(plan) if (half.stage, half.microbatch) == (stage, mb)]
                message = f"stage {stage}, microbatch {mb} has {present_text}; expected F and B, or F, I and W"
                raise _error(plan, message, cells)


def _require_runnable(plan: Plan) -> None:
    """The compute actions can run in their order when messages take no time and never block."""
    compute = plan.compute_only()
    blocked = replay(compute).blocked
    if not blocked:
        return
    waits = {entry.rank: (*_producer(compute, entry), entry) for entry in blocked}
    cycle = _find_cycle({rank: other for rank, (_, other, _) in waits.items()})
    steps = [waits[rank][2] for rank in cycle]
    description = "; ".join(
        f"rank {step.rank} waits at {compute.ranks[step.rank][step.index]} for {_key_text(waits[step.rank][0])} "
        f"on rank {waits[step.rank][1]}"
        for step in steps
    )
    raise _error(compute, f"deadlock: {description}", [(step.rank, step.index) for step in steps])


def _producer(plan: Plan, entry: Blocked) -> tuple[Key, int]:
    """The action that ``entry`` waits for, of a split backward its I, and the rank that runs it."""
    kind, stage, mb = entry.needs
    for candidate in (kind, Kind.I if kind is Kind.B else kind):
        if producer := plan.by_key.get((candidate, stage, mb)):
            return (candidate, stage, mb), producer[0]
    raise ScheduleError(
        f"{plan.name}: {plan.ranks[entry.rank][entry.index]} needs {_key_text(entry.needs)}, which no rank runs"
    )


def _find_cycle(waits_for: dict[int, int]) -> list[int]:
    """A cycle of a map in which every rank waits for one other."""
    rank = next(iter(waits_for))
    seen: list[int] = []
    while rank not in seen:
        seen.append(rank)
        rank = waits_for[rank]
    return seen[seen.index(rank) :]


def _require_pairs(plan: Plan) -> None:
    """Require that every send has its receive at the other end, and the other way round."""
    present = {action.key for row in plan.ranks for action in row if action.kind.is_p2p}
    for rank, row in enumerate(plan.ranks):
        for index, action in enumerate(row):
            if action.kind.is_p2p and (other := message_of(plan, action).other_end(action)) not in present:
                verb, missing = ("sends", "receives") if action.kind.is_send else ("waits for", "sends")
                peer = peer_of(plan, action)
                message = (
                    f"rank {rank} {verb} {action}, but rank {peer} never {missing} it ({_key_text(other)} is missing)"
                )
                raise _error(plan, message, [(rank, index)])


def _require_message_order(plan: Plan) -> None:
    """Messages from one rank to another are received in the order in which they are sent (NCCL has no tags)."""
    sent: dict[tuple[int, int], list[Key]] = {}
    received: dict[tuple[int, int], list[Key]] = {}
    for rank, row in enumerate(plan.ranks):
        for action in row:
            if action.kind.is_send:
                sent.setdefault((rank, peer_of(plan, action)), []).append(action.key)
            elif action.kind.is_recv:
                received.setdefault((peer_of(plan, action), rank), []).append(
                    message_of(plan, action).other_end(action)
                )
    for (source, target), keys in sent.items():
        for first, second in zip(keys, received[source, target], strict=True):
            if first != second:
                message = (
                    f"rank {source} sends {_key_text(first)} to rank {target}, which expects {_key_text(second)} first; "
                    "messages between two ranks must be received in the order in which they are sent"
                )
                raise _error(plan, message, [(source, [a.key for a in plan.ranks[source]].index(first))])


def _require_inputs_received(plan: Plan) -> None:
    """Require that on every rank receives come before the compute that reads them and sends after the one that makes them."""
    for rank, row in enumerate(plan.ranks):
        done: set[Key] = set()
        for index, action in enumerate(row):
            for half in action.halves:
                for needed in _local_needs(plan, rank, half):
                    if done.isdisjoint(needed):
                        message = f"rank {rank}: {action} comes before {_key_text(needed[0])}"
                        raise _error(plan, message, [(rank, index)])
            done.update(half.key for half in action.halves)


def _local_needs(plan: Plan, rank: int, action: Action) -> Iterator[tuple[Key, ...]]:
    """Dependencies of a simple action on the same rank: for each, the keys of which any one satisfies it."""
    mb = action.microbatch
    if action.kind is Kind.SEND_F:
        yield ((Kind.F, action.stage, mb),)
    elif action.kind is Kind.SEND_B:
        yield ((Kind.B, action.stage, mb), (Kind.I, action.stage, mb))
    for need in needs_of(plan, action):
        kind, stage, _ = need[0]
        if plan.placement[stage] == rank:
            yield need
        else:
            local_stage = stage + 1 if kind is Kind.F else stage - 1
            yield ((Kind.RECV_F if kind is Kind.F else Kind.RECV_B, local_stage, mb),)


def _require_no_deadlock(plan: Plan) -> None:
    """Run the plan with sends that block until they are received; groups post all their transfers at once."""
    to_run = [deque(plan.instructions(rank)) for rank in range(plan.pp)]
    posted: set[Key] = set()
    met: set[Key] = set()
    ready = list(range(plan.pp))
    while ready:
        rank = ready.pop()
        while to_run[rank]:
            current = to_run[rank][0]
            if current[0].kind.is_p2p:
                for action in current:
                    posted.add(action.key)
                    other = message_of(plan, action).other_end(action)
                    if other in posted and other not in met:
                        met.update((action.key, other))
                        ready.append(peer_of(plan, action))
                if not all(action.key in met for action in current):
                    break
            to_run[rank].popleft()
    pending = {rank: next(a for a in left[0] if a.key not in met) for rank, left in enumerate(to_run) if left}
    if pending:
        cycle = _find_cycle({rank: peer_of(plan, action) for rank, action in pending.items()})
        description = "; ".join(
            f"rank {rank} blocks in {pending[rank]} to rank {peer_of(plan, pending[rank])}" for rank in cycle
        )
        cells = [(rank, plan.ranks[rank].index(pending[rank])) for rank in cycle]
        raise _error(plan, f"deadlock: {description}", cells)


def _placed_halves(plan: Plan) -> Iterator[tuple[Action, tuple[int, int]]]:
    """(simple action, (its rank, the index in its row)) of all."""
    for rank, row in enumerate(plan.ranks):
        for index, action in enumerate(row):
            for half in action.halves:
                yield half, (rank, index)


def _key_text(key: Key) -> str:
    return str(Action(*key))


def _error(plan: Plan, message: str, cells: list[tuple[int, int]]) -> ScheduleError:
    return ScheduleError(f"{plan.name}: {message}", draw(plan, cells))
