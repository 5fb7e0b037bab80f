"""Passes of a pipeline without backwards: the plan's forwards in their order, without gradients and dropout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from instrument.expert.pieces import Tape
from instrument.expert_counts import ExpertCounts
from instrument.pipeline.microbatch_buffers import MicrobatchBuffers, Tensors
from instrument.recorder import Recorder
from pptrace.schedule.actions import Kind
from pptrace.schedule.cell import Cell
from pptrace.schedule.lower import lower
from pptrace.schedule.plan import Plan


def forwards_of(plan: Plan) -> Plan:
    """The forwards of a plan, each rank's in its order, with the sends and receives that they need."""
    rows = tuple(tuple(half for action in row for half in action.halves if half.kind is Kind.F) for row in plan.ranks)
    return lower(replace(plan, name=f"forwards of {plan.name}", ranks=rows))


class ForwardBuffers(MicrobatchBuffers):
    """Inputs and outputs of microbatches that have no backward: no graph is kept."""

    def put_input(self, cell: Cell, received: Tensors) -> None:
        self._inputs[cell] = received

    def put_forward(self, cell: Cell, inputs: Tensors, outputs: Tensors, tape: Tape | None = None) -> None:
        """Keep nothing: no backward will ask for it."""


@contextmanager
def evaluating(stages: Iterable[nn.Module], recorder: Recorder) -> Iterator[None]:
    """Compute without gradients and dropout, and count no routes of experts: predictions are of the steps that train."""
    modules, counts = nn.ModuleList(stages), recorder.expert_counts
    recorder.expert_counts = ExpertCounts()
    modules.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        modules.train()
        recorder.expert_counts = counts
