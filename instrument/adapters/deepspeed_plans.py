"""Actions of DeepSpeed's pipeline schedules, instruction by instruction: which microbatch a buffer holds, and the plan.

Source: ``deepspeed/runtime/pipe/{schedule,engine,dualpipev}.py`` of DeepSpeed 0.16 to 0.19. Instructions name a buffer, which
is filled by a receive (on the first stage by the loader, where nothing is received by the forward) with the next microbatch.
DualPipeV's instructions have a phase: phase 1 is the second chunk of a rank, on the way back to the first rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pptrace.errors import PptraceError
from pptrace.schedule import registry
from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.plan import Plan
from pptrace.schedule.replay import replay
from pptrace.schedule.text import from_rows, to_rows

KINDS = {
    "ForwardPass": Kind.F,
    "BackwardPass": Kind.B,
    "SendActivation": Kind.SEND_F,
    "RecvActivation": Kind.RECV_F,
    "SendGrad": Kind.SEND_B,
    "RecvGrad": Kind.RECV_B,
}
LOAD = "LoadMicroBatch"
_SCHEDULES = "deepspeed.runtime.pipe.schedule"


@dataclass(slots=True)
class Buffers:
    """The buffers of one rank during a pass."""

    pp: int
    pp_rank: int
    _microbatches: dict[int, int] = field(default_factory=dict)
    _fresh: set[int] = field(default_factory=set)
    """Filled, and not used by a forward yet."""
    _num_filled: dict[int, int] = field(default_factory=dict)

    def action(self, instruction: str, arguments: Mapping[str, Any]) -> Action | None:
        """Action of an instruction; None where it is neither compute nor a message."""
        buffer, phase = arguments.get("buffer_id"), arguments.get("phase") or 0
        kind = KINDS.get(instruction)
        if not isinstance(buffer, int) or (kind is None and instruction != LOAD):
            return None
        fills = kind is Kind.RECV_F or (kind in (None, Kind.F) and buffer not in self._fresh)
        if fills:
            self._microbatches[buffer] = self._num_filled.get(phase, 0)
            self._num_filled[phase] = self._microbatches[buffer] + 1
            self._fresh.add(buffer)
        if kind is Kind.F:
            self._fresh.discard(buffer)
        if kind is None or buffer not in self._microbatches:
            return None
        stage = self.pp_rank if phase == 0 else 2 * self.pp - 1 - self.pp_rank
        return Action(kind, stage, self._microbatches[buffer], phase)

    def peer(self, action: Action) -> int:
        """The pipeline rank at a message's other end."""
        ahead = action.kind in (Kind.SEND_F, Kind.RECV_B)
        return self.pp_rank + (1 if ahead == (action.chunk == 0) else -1)


def plan_of(schedule: Any) -> Plan | None:
    """The plan of a schedule object; None where it is a user's, whose instructions cannot be read ahead."""
    if type(schedule).__module__ != _SCHEDULES:
        return None
    pp, num_microbatches = int(schedule.stages), int(schedule.micro_batches)
    rows = [
        _row(type(schedule)(micro_batches=num_microbatches, stages=pp, stage_id=rank), pp, rank) for rank in range(pp)
    ]
    try:
        known = registry.build("1f1b", pp, num_microbatches, 1)
        if rows == to_rows(known):
            return known
        plan = from_rows(rows, "custom")
        return None if replay(plan).blocked else plan
    except PptraceError:
        return None


def _row(schedule: Any, pp: int, rank: int) -> list[str]:
    buffers = Buffers(pp, rank)
    actions = (
        buffers.action(type(command).__name__, command.kwargs) for commands in schedule.steps() for command in commands
    )
    return [str(action) for action in actions if action is not None and action.kind.is_compute]
