"""Progress of a pass of Megatron-LM: the op and the message that it runs next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from instrument.adapters.megatron_plans import PassShape, Work
from pptrace.schedule.actions import Action, Kind


@dataclass(slots=True)
class Run:
    """The pass that runs now, as far as it has come."""

    shape: PassShape
    rank: int
    models: Sequence[Any]
    forward: Action | None = None
    backward: Action | None = None
    """The ops that began last."""
    num_begun: dict[Kind, int] = field(default_factory=lambda: {Kind.F: 0, Kind.B: 0})
    num_received: dict[Kind, int] = field(default_factory=lambda: {Kind.RECV_F: 0, Kind.RECV_B: 0})
    of_output: dict[int, Work] = field(default_factory=dict)
    """Work of each forward by id of its first output; the schedule keeps that tensor until the backward."""

    def action(self, kind: Kind, work: Work) -> Action:
        chunk, microbatch = work
        return Action(kind, chunk * self.shape.pp + self.rank, microbatch, chunk)

    def begin_forward(self, model: Any, microbatch: int | None) -> Action:
        count = self.num_begun[Kind.F]
        self.num_begun[Kind.F] += 1
        chunk = next((index for index, known in enumerate(self.models) if known is model), None)
        if chunk is None or microbatch is None:
            planned = self.shape.forwards[count]
            chunk, microbatch = planned[0] if chunk is None else chunk, planned[1]
        self.forward = self.action(Kind.F, (chunk, microbatch))
        return self.forward

    def forward_gave(self, forward: Action, output: Any) -> None:
        tensor = _first_tensor(output)
        if tensor is not None and forward.microbatch is not None:
            self.of_output[id(tensor)] = (forward.chunk, forward.microbatch)

    def begin_backward(self, output: Any) -> Action:
        count = self.num_begun[Kind.B]
        self.num_begun[Kind.B] += 1
        work = self.of_output.pop(id(_first_tensor(output)), None) or self.shape.backwards[count]
        self.backward = self.action(Kind.B, work)
        return self.backward

    def message(self, kind: Kind) -> Action | None:
        """Action of a message that is about to be posted; None where no op needs it."""
        if kind.is_send:
            op = self.forward if kind is Kind.SEND_F else self.backward
            return None if op is None else Action(kind, op.stage, op.microbatch, op.chunk)
        if self.shape.num_chunks == 1:  # the next one, however many tensors it consists of
            microbatch = self.num_begun[Kind.F if kind is Kind.RECV_F else Kind.B]
            return self.action(kind, (0, microbatch)) if microbatch < self.shape.num_microbatches else None
        order = self.shape.received(kind, self.rank)
        count = self.num_received[kind]
        self.num_received[kind] += 1
        return self.action(kind, order[count]) if count < len(order) else None


def _first_tensor(value: Any) -> torch.Tensor | None:
    """The first tensor of an output, which may be one, or a list, or (of ``forward_step``) a pair with a number of tokens."""
    while isinstance(value, list | tuple) and value:
        value = value[0]
    return value if isinstance(value, torch.Tensor) else None
