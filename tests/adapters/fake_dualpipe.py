"""Modules of the shape of DeepSeek's DualPipe and DualPipe-V, without models: they post messages and compute nothing."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from instrument.adapters.dualpipe import MODULES
from pptrace.schedule import registry
from pptrace.schedule.actions import Kind

COUNTS = [f"current_{what}chunk_id" for what in ("f_", "b_", "send_f_", "send_b_", "recv_f_", "recv_b_")]


def module_of(name: str, without: str = "") -> ModuleType:
    """The module ``name`` with its class, which runs the catalogue's order; ``without`` one of its methods."""
    kind, schedule = MODULES[name]
    module = ModuleType(name)
    members = {key: value for key, value in vars(Pipeline).items() if key not in (without, "__dict__", "__weakref__")}
    setattr(module, kind, type(kind, (), {**members, "schedule": schedule}))
    return module


class Pipeline:
    schedule: str

    def __init__(
        self, modules: object = None, batch_dim: int = 0, process_group: object = None, rank_mapping: Any = None
    ) -> None:
        self.group = dist.group.WORLD
        self.num_ranks = dist.get_world_size()
        self.mapping = rank_mapping or list(range(self.num_ranks))
        self.rank = self.mapping[dist.get_rank()]
        self.comm_ops: list[dist.P2POp] = []
        if self.schedule == "dualpipe":
            self.is_in_second_half = self.rank >= self.num_ranks // 2

    def step(self, *inputs: object, num_chunks: int = 0) -> str:
        self.forward_only = not torch.is_grad_enabled()
        vars(self).update({name: [0, 0] for name in COUNTS})
        for action in registry.build(self.schedule, self.num_ranks, num_chunks, 2).compute_actions(self.rank):
            phases = [half.chunk ^ int(getattr(self, "is_in_second_half", False)) for half in action.halves]
            if action.parts:
                self._forward_backward_chunk(*phases)
            elif action.kind is Kind.F:
                self._forward_chunk(*phases)
            elif action.kind is Kind.W:
                self._weight_chunk()
            else:
                self._backward_chunk(*phases, enable_zb=action.kind is Kind.I)
        self._commit_and_wait_comm()
        return "loss"

    def _forward_chunk(self, phase: int) -> None:
        self._recv_forward(phase)
        self._commit_and_wait_comm()
        self._forward_compute_chunk(phase)
        self._send_forward(phase)

    def _backward_chunk(self, phase: int, enable_zb: bool = False) -> None:
        self._recv_backward(phase)
        self._commit_and_wait_comm()
        self._backward_compute_chunk(phase, enable_zb)
        self._send_backward(phase)

    def _forward_backward_chunk(self, phase0: int, phase1: int) -> None:
        self._recv_forward(phase0)
        self._recv_backward(phase1)
        self._commit_and_wait_comm()
        self._forward_backward_compute_chunk(phase0, phase1)
        self._send_forward(phase0)
        self._send_backward(phase1)

    def _weight_chunk(self) -> None:
        if not self.forward_only:
            self._commit_and_wait_comm()

    def _forward_compute_chunk(self, phase: int) -> None:
        self._count("f_", phase)

    def _backward_compute_chunk(self, phase: int, enable_zb: bool = False) -> None:
        if not self.forward_only:
            self._count("b_", phase)

    def _forward_backward_compute_chunk(self, phase0: int, phase1: int) -> None:
        self._forward_compute_chunk(phase0)
        self._backward_compute_chunk(phase1)

    def _send_forward(self, phase: int) -> None:
        self._post("send_f_", phase, ahead=True)

    def _recv_forward(self, phase: int) -> None:
        self._post("recv_f_", phase, ahead=False)

    def _send_backward(self, phase: int) -> None:
        if not self.forward_only:
            self._post("send_b_", phase, ahead=False)

    def _recv_backward(self, phase: int) -> None:
        if not self.forward_only:
            self._post("recv_b_", phase, ahead=True)

    def _count(self, what: str, phase: int) -> int:
        direction = phase ^ int(getattr(self, "is_in_second_half", False))
        getattr(self, f"current_{what}chunk_id")[direction] += 1
        return direction

    def _post(self, what: str, phase: int, ahead: bool) -> None:
        """Append a message of two tensors, unless the direction begins or ends here."""
        direction = phase ^ int(getattr(self, "is_in_second_half", False))
        peer = self.rank + (1 if ahead == (direction == 0) else -1)
        if 0 <= peer < self.num_ranks:
            self._count(what, phase)
            call = dist.isend if what.startswith("send") else dist.irecv
            self.comm_ops += [dist.P2POp(call, torch.zeros(size), self.mapping.index(peer)) for size in (3, 2)]

    def _commit_and_wait_comm(self) -> None:
        if self.comm_ops:
            for work in dist.batch_isend_irecv(self.comm_ops):
                work.wait()
        self.comm_ops = []
