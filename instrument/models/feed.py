"""Hands each rank the part of a batch that it works on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from instrument.context.shard import cut
from instrument.data.text import Batch
from instrument.mesh import Mesh
from instrument.models.parallel import Parallel
from pptrace.schedule.plan import Plan

Source = Callable[[int, int], Batch]
"""(step, dp rank) → the whole batch of one pipeline."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchFeed:
    """Batches reach only the ranks that read them: tokens the first stage, targets the last.

    ``shape`` is (microbatches, microbatch size, whole sequence).

    Of each group along tp the first rank alone makes the batch, and broadcasts it; along cp each of these makes it whole
    and keeps the positions that it holds. Source: Megatron-LM ``get_batch`` and
    ``get_batch_on_this_cp_rank``.
    """

    source: Source
    mesh: Mesh
    parallel: Parallel
    device: torch.device
    shape: tuple[int, int, int]
    reads_tokens: bool
    reads_targets: bool

    def batch(self, step: int) -> Batch:
        """This rank's part of one step; called by all ranks along tp."""
        group = self.parallel.region.group
        group.recorder.step = step
        wanted = (self.reads_tokens, self.reads_targets)
        none = torch.empty(0, dtype=torch.int64, device=self.device)
        if not any(wanted):
            return Batch(none, none)
        received = iter(group.broadcast(self._made(step) if group.rank == 0 else self._room(), 0))
        tokens, targets = (next(received) if reads else none for reads in wanted)
        return Batch(tokens, targets)

    def _made(self, step: int) -> Tensor:
        """(what is read, microbatches, microbatch size, sequence / cp)."""
        whole = self.source(step, self.mesh.dp_rank)
        parts = [whole.tokens] * self.reads_tokens + [whole.targets] * self.reads_targets
        stacked = torch.stack([self._cut(part) for part in parts])
        return stacked.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else stacked

    def _room(self) -> Tensor:
        *rows, sequence = self.shape
        held = sequence // self.parallel.context.size
        size = (self.reads_tokens + self.reads_targets, *rows, held)
        return torch.empty(size, dtype=torch.int64, device=self.device)

    def _cut(self, part: Tensor) -> Tensor:
        return cut(part, self.parallel.context, self.parallel.cp_rank, dim=part.dim() - 1)


def make_feed(
    source: Source, mesh: Mesh, plan: Plan, parallel: Parallel, device: torch.device, rows: tuple[int, int]
) -> BatchFeed:
    """The feed of this rank, by the stages that the plan gives it; ``rows`` are microbatch size and whole sequence."""
    stages = plan.stages_of(mesh.pp_rank)
    first = any(plan.previous_stage(stage) is None for stage in stages)
    last = any(plan.next_stage(stage) is None for stage in stages)
    return BatchFeed(source, mesh, parallel, device, (plan.num_microbatches, *rows), first, last)
