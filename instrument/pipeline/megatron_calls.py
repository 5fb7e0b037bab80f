"""The sends and receives of Megatron-LM's two schedules, call by call.

1F1B receives before a warmup forward and sends after it, and fuses a send with the receive of the other direction in between.
Interleaved 1F1B makes one call after each forward (warmup), after each forward and backward (steady: up to four transfers,
``send_forward_backward_recv_forward_backward``), and after each backward (cooldown), which receives what the next iteration
reads. The rank that chunks come back to receives in the iteration in which the other end of the pipeline sends, which is
ahead of need where the microbatch group is larger than p. With overlap every steady forward and backward has a call of its
own, which is only posted; and with the overlap of warmup and flush as well all calls but the first are.

Source: Megatron-LM ``core/pipeline_parallel/schedules.py`` and ``p2p_communication.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from instrument.pipeline.instruction import Instruction, Posted
from pptrace.errors import ScheduleError
from pptrace.schedule.actions import Action, Kind, Phase
from pptrace.schedule.messages import message_of
from pptrace.schedule.plan import Plan


class Calls(StrEnum):
    """Which transfers are posted by one call."""

    PLAN = "plan"  # those between two actions of the plan
    MEGATRON = "megatron"  # Megatron-LM's, each awaited at once
    OVERLAP = "megatron-overlap"  # overlap_p2p_comm: those of the steady phase are only posted
    OVERLAP_ALL = "megatron-overlap-all"  # overlap_p2p_comm_warmup_flush too

    @property
    def overlaps(self) -> bool:
        """Return whether calls are posted and awaited by what reads them."""
        return self in (Calls.OVERLAP, Calls.OVERLAP_ALL)


def megatron_calls(plan: Plan, rank: int, calls: Calls, even_odd: bool) -> tuple[Instruction, ...]:
    """The instructions of a rank with Megatron-LM's calls; the compute actions keep their order.

    Args:
        plan: lowered, of 1F1B or interleaved 1F1B.
        even_odd: transfers of a call in the order of ``_p2p_ops``, else of ``_batched_p2p_ops``.

    Raises:
        ScheduleError: a plan of another form, 1F1B with overlap, or calls that would wait for each other for ever.
    """
    if any(len(instruction) > 1 and not instruction[0].kind.is_p2p for instruction in plan.instructions(rank)):
        raise _other_form(plan)
    interleaved = plan.num_chunks > 1
    if calls.overlaps and not interleaved:
        raise ScheduleError(
            f"{plan.name}: {calls} is for interleaved 1F1B; Megatron-LM refuses overlap_p2p_comm without chunks as well: "
            "use --p2p-calls megatron, or plan with --prefetch"
        )
    row = _Row(plan, rank)
    made = _interleaved(row, calls) if interleaved else _one_chunk(row)
    order = _EVEN_ODD[rank % 2] if even_odd else _BATCHED
    instructions = tuple(_ordered(instruction, order) for instruction in made if instruction)
    if sum(map(len, instructions)) != len(plan.ranks[rank]):
        raise ScheduleError(
            f"{plan.name}: a last microbatch group smaller than the {plan.pp} ranks leaves messages that no call of "
            "Megatron-LM's has, which refuses it as well; choose other --microbatches or --group-size, or --p2p-calls plan"
        )
    return instructions


def require_progress(plan: Plan, rows: Sequence[Sequence[Instruction]]) -> None:
    """Refuse instructions of all ranks that wait for each other for ever: a group until its other ends are posted.

    Raises:
        ScheduleError: naming the group in which a rank is stuck.
    """
    posted: set[tuple[Kind, int, int | None]] = set()
    position, progress = [0] * len(rows), True
    while progress:
        progress = False
        for rank, row in enumerate(rows):
            while position[rank] < len(row):
                instruction = row[position[rank]]
                before = len(posted)
                posted.update(action.key for action in instruction if action.kind.is_p2p)
                progress |= len(posted) > before
                if not all(other in posted for other in _awaited(plan, instruction)):
                    break
                position[rank] += 1
                progress = True
    for rank, row in enumerate(rows):
        if position[rank] < len(row):
            stuck = ", ".join(map(str, row[position[rank]]))
            raise ScheduleError(
                f"{plan.name}: deadlock with Megatron-LM's calls: rank {rank} is stuck in {stuck}; use --p2p-calls plan"
            )


def _awaited(plan: Plan, instruction: Instruction) -> Iterator[tuple[Kind, int, int | None]]:
    """The other ends that must be posted before an instruction is over."""
    if isinstance(instruction, Posted):
        return
    for action in instruction:
        if action.kind.is_p2p:
            yield message_of(plan, action).other_end(action)
            continue
        for half in action.halves:
            kind = Kind.RECV_F if half.kind is Kind.F else Kind.RECV_B
            if received := plan.by_key.get((kind, half.stage, half.microbatch)):
                yield message_of(plan, received[1]).other_end(received[1])


_BATCHED = (Kind.SEND_B, Kind.RECV_F, Kind.SEND_F, Kind.RECV_B)
_EVEN_ODD = (
    (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B),
    (Kind.RECV_F, Kind.SEND_F, Kind.RECV_B, Kind.SEND_B),
)


def _ordered(instruction: Instruction, order: tuple[Kind, ...]) -> Instruction:
    if not instruction[0].kind.is_p2p:
        return instruction
    return type(instruction)(sorted(instruction, key=lambda action: order.index(action.kind)))


def _other_form(plan: Plan) -> ScheduleError:
    return ScheduleError(
        f"{plan.name}: Megatron-LM's calls are those of 1f1b and interleaved-1f1b; use --p2p-calls plan"
    )


@dataclass(frozen=True)
class _Row:
    """The compute actions of a rank: ``num_warmup`` forwards, pairs, the other backwards; and its sends and receives."""

    plan: Plan
    rank: int

    @cached_property
    def forwards(self) -> list[Action]:
        return self._of(Kind.F, self.rank)

    @cached_property
    def backwards(self) -> list[Action]:
        return self._of(Kind.B, self.rank)

    @cached_property
    def num_warmup(self) -> int:
        """Number of forwards that precede the first pair.

        Raises:
            ScheduleError: the row is not that of 1F1B.
        """
        num_warmup = sum(action.phase is Phase.WARMUP for action in self.forwards)
        pairs = zip(self.forwards[num_warmup:], self.backwards, strict=False)
        expected = [*self.forwards[:num_warmup], *(action for pair in pairs for action in pair)]
        expected += self.backwards[len(self.forwards) - num_warmup :]
        if list(self.plan.compute_actions(self.rank)) != expected:
            raise _other_form(self.plan)
        return num_warmup

    def send(self, action: Action) -> Instruction:
        """The send of what an action computes, if another rank reads it."""
        return self._find(Kind.SEND_F if action.kind is Kind.F else Kind.SEND_B, action.stage, action.microbatch)

    def recv(self, action: Action) -> Instruction:
        """The receive of what an action reads, if another rank computes it."""
        return self._find(Kind.RECV_F if action.kind is Kind.F else Kind.RECV_B, action.stage, action.microbatch)

    def recv_with(self, kind: Kind, index: int) -> Instruction:
        """The receive in the iteration of the ``index``-th forward or backward: of what the next one reads or, on the rank
        that chunks come back to, of what the other end of the pipeline sends in that iteration.
        """
        forward, last = kind is Kind.F, self.plan.pp - 1
        own = self.forwards if forward else self.backwards
        if self.rank != (0 if forward else last):
            return self.recv(own[index + 1]) if index + 1 < len(own) else ()
        if index < last or index + 1 == len(own):
            return ()
        sender = self._of(kind, last if forward else 0)[index - last]
        stage = self.plan.next_stage(sender.stage) if forward else self.plan.previous_stage(sender.stage)
        return () if stage is None else self._find(Kind.RECV_F if forward else Kind.RECV_B, stage, sender.microbatch)

    def _of(self, kind: Kind, rank: int) -> list[Action]:
        return [action for action in self.plan.compute_actions(rank) if action.kind is kind]

    def _find(self, kind: Kind, stage: int, microbatch: int | None) -> Instruction:
        found = self.plan.by_key.get((kind, stage, microbatch))
        return () if found is None else (found[1],)


def _one_chunk(row: _Row) -> Iterator[Instruction]:
    """``forward_backward_pipelining_without_interleaving``."""
    forwards, backwards, num_warmup = row.forwards, row.backwards, row.num_warmup
    num_steady = len(forwards) - num_warmup
    for forward in forwards[:num_warmup]:
        yield from (row.recv(forward), (forward,), row.send(forward))
    if num_steady:
        yield row.recv(forwards[num_warmup])
    for index in range(num_steady):
        forward, backward = forwards[num_warmup + index], backwards[index]
        following = row.recv(forwards[num_warmup + index + 1]) if index + 1 < num_steady else ()
        yield from ((forward,), row.send(forward) + row.recv(backward))
        yield from ((backward,), row.send(backward) + following)
    for backward in backwards[num_steady:]:
        yield from (row.recv(backward), (backward,), row.send(backward))


def _interleaved(row: _Row, calls: Calls) -> Iterator[Instruction]:
    """``forward_backward_pipelining_with_interleaving``."""
    forwards, backwards, num_warmup = row.forwards, row.backwards, row.num_warmup
    num_steady = len(forwards) - num_warmup
    yield row.recv(forwards[0])
    for index, forward in enumerate(forwards[:num_warmup]):
        received = row.recv_with(Kind.F, index)
        first_gradient = row.recv(backwards[0]) if num_steady and index == num_warmup - 1 else ()
        if calls is Calls.MEGATRON:
            yield from ((forward,), row.send(forward) + received + first_gradient)
            continue
        yield from _single(row, forward, received, calls, ahead=row.rank > 0)
        yield Posted(first_gradient)
    for index in range(num_steady):
        forward, backward = forwards[num_warmup + index], backwards[index]
        of_forward = row.send(forward) + (row.recv_with(Kind.F, num_warmup + index) if index + 1 < num_steady else ())
        of_backward = row.send(backward) + row.recv_with(Kind.B, index)
        if calls is Calls.MEGATRON:
            yield from ((forward,), (backward,), of_forward + of_backward)
        else:
            yield from ((forward,), Posted(of_forward), (backward,), Posted(of_backward))
    if not num_steady:
        yield row.recv(backwards[0])
    for index in range(num_steady, len(backwards)):
        received = row.recv_with(Kind.B, index)
        yield from _single(row, backwards[index], received, calls, ahead=row.rank < row.plan.pp - 1)


def _single(row: _Row, action: Action, received: Instruction, calls: Calls, *, ahead: bool) -> Iterator[Instruction]:
    """An action of the warmup or cooldown, and its calls; ``ahead``: overlapped receives are posted before the action."""
    if calls is not Calls.OVERLAP_ALL:
        yield from ((action,), row.send(action) + received)
    elif ahead:
        yield from (Posted(received), (action,), Posted(row.send(action)))
    else:
        yield from ((action,), Posted(row.send(action) + received))
