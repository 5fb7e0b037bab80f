"""Single numbers between the ranks of a pipeline, apart from its activations."""

from __future__ import annotations

from collections import deque
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor

from instrument.mesh import Mesh
from instrument.recorder import Recorder
from pptrace.marks import Axis, Collective, Link


class ControlChannel:
    """Host numbers (float64) over a gloo group of their own.

    On a group of its own a control message never stands between two activations, whose order a backend without tags
    pairs them by; over gloo it never waits for a device. Every rank of the world makes one at the same time.
    """

    def __init__(self, mesh: Mesh, recorder: Recorder) -> None:
        self._mesh = mesh
        self._group = _make_group(mesh)
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
        """Wait for a number."""
        message = _message(0.0)
        link = Link(False, self._mesh.global_rank(pp_rank), message.nbytes)
        with self._recorder.exchange((link,), Axis.PP, step):
            self._group.recv([message], pp_rank, 0).wait()
        return message.item()

    def complete_sends(self, step: int) -> None:
        """Wait for every number that has been posted: until its receiver asks for it."""
        while self._sending:
            work, _, handle = self._sending.popleft()
            with self._recorder.awaiting(Axis.PP, step, handle):
                work.wait()

    def sum(self, value: float, step: int) -> float:
        """The sum over all ranks of the pipeline: a barrier."""
        total = _message(value)
        with self._recorder.collective(Collective.ALL_REDUCE, Axis.PP, self.size, total.nbytes, step):
            dist.all_reduce(total, group=self._group)
        return total.item()


def _message(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


def _make_group(mesh: Mesh) -> dist.ProcessGroup:
    """Make the group of every pipeline of the world; this rank's own."""
    mine: dist.ProcessGroup | None = None
    for dp, cp, tp in product(range(mesh.shape.dp), range(mesh.shape.cp), range(mesh.shape.tp)):
        ranks = [mesh.shape.rank_of(pp_rank, dp, cp, tp) for pp_rank in range(mesh.shape.pp)]
        group = dist.new_group(ranks, backend="gloo", group_desc="mesh_pp_control")
        if mesh.rank in ranks:
            mine = group
    assert mine is not None  # every rank is in one pipeline
    return mine
