"""The order in which a rank posts its transfers, and their grouping.

Why no order made here can deadlock: a lowered plan has one total order of all computes and transfers, of which every
rank's list is a part (:mod:`pptrace.schedule.lower`). Posting never blocks, a receive is never posted later than its
position in that order, and a rank waits for a transfer at its position or after it. So every wait is for an entry that
is earlier in the total order, and the earliest unfinished entry can always run.
"""

from __future__ import annotations

from dataclasses import dataclass

from instrument.pipeline.instruction import Instruction, Posted
from instrument.pipeline.megatron_calls import Calls, megatron_calls
from pptrace.errors import ScheduleError, UsageError
from pptrace.schedule.actions import Action
from pptrace.schedule.messages import message_of, peer_of
from pptrace.schedule.plan import Plan


@dataclass(frozen=True, slots=True)
class Posting:
    """Times at which transfers are posted and awaited, relative to the plan.

    ``prefetch_depth`` is the prefetch depth: a receive is posted this many compute actions before its position in the plan and
    awaited by the action that reads it, and a send is awaited when so many more groups with sends have been posted
    (Megatron-LM's ``overlap_p2p_comm``). 0: each group is posted and awaited at its position. ``blocking``: one
    transfer at a time, in the plan's total order. ``tagged``: messages of two ranks may overtake each other (gloo);
    without tags (NCCL) every rank keeps the plan's order of transfers. ``even_odd``: of one call even ranks post what goes to
    or comes from the next rank first, odd ranks what concerns the previous one. ``calls``: which transfers have one call.
    ``synchronised``: the host waits for the GPU after each call that is awaited (Megatron-LM's ``batch_p2p_sync``).
    """

    prefetch_depth: int = 0
    blocking: bool = False
    tagged: bool = True
    even_odd: bool = False
    calls: Calls = Calls.PLAN
    synchronised: bool = False

    def __post_init__(self) -> None:
        if self.prefetch_depth < 0:
            raise UsageError(f"receives are posted {self.prefetch_depth} compute actions ahead; expected 0 or more")
        if self.prefetch_depth and self.blocking:
            raise UsageError("one blocking call at a time leaves nothing to post ahead; use a prefetch depth of 0")
        if self.calls is not Calls.PLAN and (self.prefetch_depth or self.blocking):
            raise UsageError(
                f"{self.calls} calls are posted when Megatron-LM posts them: neither --prefetch nor --p2p-mode blocking goes "
                "with them"
            )


def arrange(plan: Plan, rank: int, posting: Posting) -> tuple[Instruction, ...]:
    """The rank's instructions, posted as ``posting`` says; the compute actions keep their order.

    Raises:
        ScheduleError: the plan's transfers cannot be made one at a time.
    """
    if posting.calls is not Calls.PLAN:
        if not posting.tagged and plan.pp == 2 and plan.num_chunks > 1 and not posting.calls.overlaps:
            raise ScheduleError(
                f"{plan.name}: with two ranks a call of {posting.calls} has two sends to one rank, which NCCL takes for each "
                "other; use overlap, as Megatron-LM asks for, or three ranks"
            )
        return megatron_calls(plan, rank, posting.calls, posting.even_odd)
    instructions = tuple(plan.instructions(rank))
    if posting.blocking:
        require_total_order(plan)
        return tuple((action,) for instruction in instructions for action in instruction)
    if posting.prefetch_depth:
        arranged = prefetch_receives(instructions, posting.prefetch_depth, posting.tagged)
        instructions = tuple(Posted(group) if group[0].kind.is_p2p else group for group in arranged)
    if posting.even_odd:
        instructions = tuple(_even_odd(plan, rank, group) for group in instructions)
    return instructions


def _even_odd(plan: Plan, rank: int, group: Instruction) -> Instruction:
    """The transfers of a call, those of the neighbour that is served first before the others.

    With even ranks beginning at their next rank and odd ranks at their previous one, the first unbatched calls, in which NCCL
    makes a communicator for the pair and both sides must be present, do not wait in a ring. Transfers of one neighbour keep
    their order, which is the same at the other end.
    """
    if not group[0].kind.is_p2p:
        return group
    following = (rank + 1) % plan.pp
    return type(group)(sorted(group, key=lambda action: (peer_of(plan, action) == following) == bool(rank % 2)))


def prefetch_receives(instructions: tuple[Instruction, ...], depth: int, tagged: bool) -> tuple[Instruction, ...]:
    """Move every receive before the ``depth`` compute actions that precede it; sends stay.

    Without tags a receive moves only if it is in a group of receives, and past no other transfer.
    """
    arranged: list[list[Action]] = []
    for instruction in instructions:
        if not instruction[0].kind.is_p2p:
            arranged.append(list(instruction))
            continue
        receives = [action for action in instruction if action.kind.is_recv]
        others = [action for action in instruction if not action.kind.is_recv]
        if not receives or (others and not tagged):
            arranged.append(list(instruction))
            continue
        if others:
            arranged.append(others)
        index = _insertion_index(arranged, depth, tagged)
        if tagged and index > 0 and arranged[index - 1][0].kind.is_p2p:
            arranged[index - 1].extend(receives)
        else:
            arranged.insert(index, receives)
    return tuple(map(tuple, arranged))


def _insertion_index(arranged: list[list[Action]], depth: int, tagged: bool) -> int:
    """The index at which to insert so that ``depth`` compute actions (or all that exist) follow."""
    index = len(arranged)
    while index > 0:
        kind = arranged[index - 1][0].kind
        if kind.is_p2p:
            if not tagged:
                break
        elif depth == 0:
            break
        else:
            depth -= kind.is_compute
        index -= 1
    # Behind the transfers there, if there are any: their sends have been waiting for longer.
    return index + 1 if index < len(arranged) and arranged[index][0].kind.is_p2p else index


def require_total_order(plan: Plan) -> None:
    """Refuse a plan whose transfers, one blocking call at a time in the order of each rank's list, would deadlock.

    Raises:
        ScheduleError: naming the call in which a rank is stuck.
    """
    rows = [[action for action in row if action.kind.is_p2p] for row in plan.ranks]
    position = [0] * plan.pp
    ready = list(range(plan.pp))
    while ready:
        rank = ready.pop()
        if position[rank] == len(rows[rank]):
            continue
        action = rows[rank][position[rank]]
        peer, message = peer_of(plan, action), message_of(plan, action)
        other = rows[peer][position[peer]] if position[peer] < len(rows[peer]) else None
        if other is not None and other.key == message.other_end(action):
            position[rank] += 1
            position[peer] += 1
            ready += [rank, peer]
    for rank, row in enumerate(rows):
        if position[rank] < len(row):
            raise ScheduleError(
                f"{plan.name}: deadlock with one blocking call at a time: rank {rank} is stuck in {row[position[rank]]}; "
                "use another P2P mode, or lower the plan's compute actions anew"
            )
