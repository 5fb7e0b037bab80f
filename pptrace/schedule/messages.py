"""The messages of a pipeline: activations go to the next stage, gradients of activations to the previous one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from pptrace.errors import ScheduleError
from pptrace.schedule.actions import Action, Key, Kind
from pptrace.schedule.plan import Plan


class Direction(StrEnum):
    """The direction of a message, by what it carries."""

    FORWARD = "F"  # an activation, to the next stage
    BACKWARD = "B"  # the gradient of one, to the previous stage

    @property
    def producers(self) -> tuple[Kind, ...]:
        """The kinds of ops whose output, and whose input, goes this way."""
        return (Kind.F,) if self is Direction.FORWARD else (Kind.B, Kind.I)


_ENDS = {
    Direction.FORWARD: (Kind.SEND_F, Kind.RECV_F),
    Direction.BACKWARD: (Kind.SEND_B, Kind.RECV_B),
}
_DIRECTION = {kind: direction for direction, kinds in _ENDS.items() for kind in kinds}
_PRODUCED = {kind: direction for direction in Direction for kind in direction.producers}


@dataclass(frozen=True, slots=True)
class Message:
    """The output of a stage for a neighbouring one, of one microbatch, whether or not they are on one rank."""

    direction: Direction
    source_stage: int
    target_stage: int
    microbatch: int | None

    @property
    def send(self) -> Key:
        """The action that sends it."""
        return (_ENDS[self.direction][0], self.source_stage, self.microbatch)

    @property
    def recv(self) -> Key:
        """The action that receives it."""
        return (_ENDS[self.direction][1], self.target_stage, self.microbatch)

    def other_end(self, action: Action) -> Key:
        """The receive of its send, and the send of its receive."""
        return self.recv if action.kind.is_send else self.send


def message_of(plan: Plan, action: Action) -> Message:
    """The message of which a send or receive is one end.

    Raises:
        ScheduleError: the action is no P2P action, or leads out of the pipeline.
    """
    direction = _DIRECTION.get(action.kind)
    if direction is not None:
        message = _message(plan, direction, action, sends=action.kind.is_send)
        if message is not None:
            return message
    raise ScheduleError(f"{plan.name}: {action} has no peer in a pipeline of {plan.num_stages} stages")


def message_of_op(plan: Plan, op: Action, *, sends: bool) -> Message | None:
    """The message with the output of an F, B or I (``sends``), or the one that it reads; None where there is none, as of a W."""
    direction = _PRODUCED.get(op.kind)
    return None if direction is None else _message(plan, direction, op, sends=sends)


def crosses_ranks(plan: Plan, message: Message) -> bool:
    """Return whether the two stages are on different ranks, so that the message has to be sent."""
    return plan.placement[message.source_stage] != plan.placement[message.target_stage]


def messages_of_rank(plan: Plan, rank: int, sends: bool) -> Iterator[tuple[Action, Message]]:
    """The (op, message) pairs that a rank sends to or receives from other ranks, in the order of its ops."""
    for action in plan.compute_actions(rank):
        for half in action.halves:
            message = message_of_op(plan, half, sends=sends)
            if message is not None and crosses_ranks(plan, message):
                yield half, message


def peer_of(plan: Plan, action: Action) -> int:
    """The pipeline rank at the other end of a send or receive.

    Raises:
        ScheduleError: the action is no P2P action, or leads out of the pipeline.
    """
    message = message_of(plan, action)
    return plan.placement[message.target_stage if action.kind.is_send else message.source_stage]


def _message(plan: Plan, direction: Direction, action: Action, *, sends: bool) -> Message | None:
    to_next = (direction is Direction.FORWARD) == sends
    other = plan.next_stage(action.stage) if to_next else plan.previous_stage(action.stage)
    if other is None:
        return None
    ends = (action.stage, other) if sends else (other, action.stage)
    return Message(direction, *ends, action.microbatch)
