"""Distribution of batches to the ranks that read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from instrument.context.shard import shard_sequence
from instrument.data.text import Batch, TextData
from instrument.mesh import Mesh
from instrument.models.parallel import Parallel
from pptrace.schedule.plan import Plan


@dataclass(frozen=True, slots=True, eq=False)
class BatchFeed:
    """Batches reach only the ranks that read them: tokens the first stage, targets the last.

    ``shape`` is (microbatches, microbatch size, whole sequence).

    In each group along tp only the first rank makes the batch, and broadcasts it; along cp each of these makes it whole
    and takes the positions that it holds. Source: Megatron-LM ``get_batch`` and
    ``get_batch_on_this_cp_rank``.
    """

    source: TextData
    mesh: Mesh
    parallel: Parallel
    device: torch.device
    shape: tuple[int, int, int]
    reads_tokens: bool
    reads_targets: bool

    def batch(self, step: int) -> Batch:
        """Make or receive this rank's part of one step; called by all ranks along tp."""
        group = self.parallel.region.group
        group.recorder.step = step
        wanted = (self.reads_tokens, self.reads_targets)
        none = torch.empty(0, dtype=torch.int64, device=self.device)
        if not any(wanted):
            return Batch(none, none)
        lengths = self.source.lengths(step, self.mesh.dp_rank)
        held = None if lengths is None else [length // self.parallel.context.size for length in lengths]
        received = iter(group.broadcast(self._make_batch(step) if group.rank == 0 else self._receive_buffer(), 0))
        tokens, targets = (next(received) if reads else none for reads in wanted)
        return Batch(tokens, targets, held)

    def _make_batch(self, step: int) -> Tensor:
        """Tokens, targets or both: (1 or 2, microbatches, microbatch size, sequence / cp)."""
        whole = self.source.batch(step, self.mesh.dp_rank)
        parts = [whole.tokens] * self.reads_tokens + [whole.targets] * self.reads_targets
        stacked = torch.stack([self._shard_sequence(part, whole.lengths) for part in parts])
        return stacked.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else stacked

    def _receive_buffer(self) -> Tensor:
        *rows, sequence = self.shape
        held = sequence // self.parallel.context.size
        size = (self.reads_tokens + self.reads_targets, *rows, held)
        return torch.empty(size, dtype=torch.int64, device=self.device)

    def _shard_sequence(self, part: Tensor, lengths: Sequence[int] | None) -> Tensor:
        """(microbatches, microbatch size, sequence / cp) of the whole; each shorter sequence is sharded, then padded."""
        context, cp_rank = self.parallel.context, self.parallel.cp_rank
        if lengths is None:
            return shard_sequence(part, context, cp_rank, dim=part.dim() - 1)
        held = part.new_zeros((*part.shape[:-1], part.shape[-1] // context.size))
        for row, microbatch, length in zip(held, part, lengths, strict=True):
            row[:, : length // context.size] = shard_sequence(microbatch[:, :length], context, cp_rank)
        return held


def make_feed(
    source: TextData, mesh: Mesh, plan: Plan, parallel: Parallel, device: torch.device, rows: tuple[int, int]
) -> BatchFeed:
    """The feed of this rank, by the stages that the plan gives it; ``rows`` are microbatch size and whole sequence."""
    stages = plan.stages_of(mesh.pp_rank)
    first = any(plan.previous_stage(stage) is None for stage in stages)
    last = any(plan.next_stage(stage) is None for stage in stages)
    return BatchFeed(source, mesh, parallel, device, (plan.num_microbatches, *rows), first, last)
