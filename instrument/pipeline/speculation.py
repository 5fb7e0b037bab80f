"""Speculative prefix of a step: what each rank may run before its weights are validated.

The *speculative prefix* of a rank's instructions consists of forwards and their messages only, and it is closed under messages:
of each message the prefixes of all ranks hold both ends or none. So when all ranks have run their prefixes no message is
under way, and each may drop what it has computed and restart the step.

The last rank has no prefix: it has the whole state, from which the others' answer comes, before it can begin.
Used by :mod:`instrument.optim.clipping`.
"""

from __future__ import annotations

from collections.abc import Sequence

from instrument.pipeline.instruction import Instruction
from pptrace.schedule.actions import Kind
from pptrace.schedule.messages import Message, message_of, peer_of
from pptrace.schedule.plan import Plan

_REPEATABLE = frozenset({Kind.F, Kind.SEND_F, Kind.RECV_F, Kind.UNSHARD})
"""Kinds without side effects, whose results can be dropped."""


def prefix_lengths(plan: Plan, instructions: Sequence[Sequence[Instruction]]) -> tuple[int, ...]:
    """Number of instructions in each rank's speculative prefix: the longest prefixes that are closed under messages.

    Args:
        plan: whose messages they are.
        instructions: rank → all its instructions (:func:`instrument.pipeline.order.arrange`). Those posted together
            are cut together.
    """
    lengths = [_repeatable(row) for row in instructions[:-1]] + [0]
    while True:
        ends = [
            {message_of(plan, action) for group in row[:length] for action in group if action.kind.is_p2p}
            for row, length in zip(instructions, lengths, strict=True)
        ]
        closed = [_closed(plan, row[:length], ends) for row, length in zip(instructions, lengths, strict=True)]
        if closed == lengths:
            return tuple(closed)
        lengths = closed


def _repeatable(row: Sequence[Instruction]) -> int:
    """Number of instructions before the first that cannot be run again."""
    for index, group in enumerate(row):
        if any(action.kind not in _REPEATABLE for action in group):
            return index
    return len(row)


def _closed(plan: Plan, prefix: Sequence[Instruction], ends: Sequence[set[Message]]) -> int:
    """Number of instructions before the first with a message whose other end is in no prefix."""
    for index, group in enumerate(prefix):
        for action in group:
            if action.kind.is_p2p and message_of(plan, action) not in ends[peer_of(plan, action)]:
                return index
    return len(prefix)
