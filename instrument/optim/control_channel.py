"""Control messages of single numbers between the ranks of a pipeline, separate from its activations."""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from instrument.mesh import Mesh, make_groups
from instrument.recorder import Recorder
from pptrace.marks import Axis, Collective, Link


class ControlChannel:
    """Sends host numbers (float64) over separate gloo groups.

    On a separate group a control message never comes between two activations, which a backend without tags pairs by
    their order; over gloo it never waits for a device. Every rank of the world makes one at the same time.

    Args:
        mesh: of this rank.
        recorder: writes the ranges.
        sharded: replicas count parts of their gradients (ZeRO) or experts, so that sums go over them as well.
    """

    def __init__(self, mesh: Mesh, recorder: Recorder, sharded: bool = False) -> None:
        self._mesh = mesh
        self._group = _make_group(mesh, Axis.PP)
        stage_axes = {Axis.TP: mesh.shape.tp, mesh.replicas: mesh.shape.dp * mesh.shape.cp if sharded else 1}
        self._stage_groups = [(axis, _make_group(mesh, axis)) for axis, size in stage_axes.items() if size > 1]
        self._recorder = recorder
        self._sending: deque[tuple[dist.Work, Tensor, int]] = deque()

    @property
    def pp_rank(self) -> int:
        return self._mesh.pp_rank

    @property
    def size(self) -> int:
        return self._mesh.shape.pp

    def post(self, value: float, pp_rank: int, step: int) -> None:
        """Send a number; :meth:`complete_sends` waits for it."""
        message = _message(value)
        handle = self._recorder.new_handle()
        link = Link(True, self._mesh.global_rank(pp_rank), message.nbytes)
        with self._recorder.exchange((link,), Axis.PP, step, handle):
            work = self._group.send([message], pp_rank, 0)
        self._sending.append((work, message, handle))

    def receive(self, pp_rank: int, step: int) -> float:
        """Receive a number, waiting for it."""
        message = _message(0.0)
        link = Link(False, self._mesh.global_rank(pp_rank), message.nbytes)
        with self._recorder.exchange((link,), Axis.PP, step):
            self._group.recv([message], pp_rank, 0).wait()
        return message.item()

    def complete_sends(self, step: int) -> None:
        """Wait for every number that has been posted: until its receiver receives it."""
        while self._sending:
            work, _, handle = self._sending.popleft()
            with self._recorder.awaiting(Axis.PP, step, handle):
                work.wait()

    def sum(self, value: float, step: int) -> float:
        """Sum over all ranks that count gradients of one model: a barrier."""
        value = self.sum_of_stage(value, step)
        return value if self.size == 1 else self._sum(value, Axis.PP, self._group, step)

    def sum_of_stage(self, value: float, step: int) -> float:
        """Sum over the ranks that count gradients of the same stages."""
        for axis, group in self._stage_groups:
            value = self._sum(value, axis, group, step)
        return value

    def _sum(self, value: float, axis: Axis, group: dist.ProcessGroup, step: int) -> float:
        total = _message(value)
        with self._recorder.collective(Collective.ALL_REDUCE, axis, group.size(), total.nbytes, step):
            dist.all_reduce(total, group=group)
        return total.item()


def _message(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


def _make_group(mesh: Mesh, axis: Axis) -> dist.ProcessGroup:
    group = make_groups(mesh.shape.groups_of(axis), "gloo", f"mesh_{axis}_control")
    assert group is not None  # every rank is in one group of each axis
    return group
