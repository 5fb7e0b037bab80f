"""Distribution of batches to the ranks that read them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
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
    """Batches reach only the ranks that read them: tokens the first stage, targets the last; with an encoder the source the
    first, and tokens the one with the decoder's embedding.

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
    reads_source: bool = False

    def batch(self, step: int) -> Batch:
        """Make or receive this rank's part of one step; called by all ranks along tp."""
        group = self.parallel.region.group
        group.recorder.step = step
        wanted = (self.reads_tokens, self.reads_targets)
        none = torch.empty(0, dtype=torch.int64, device=self.device)
        documents = self.source.documents(step, self.mesh.dp_rank)
        if not any(wanted) and not self.reads_source:
            return Batch(none, none, documents=documents)
        whole = self.source.batch(step, self.mesh.dp_rank) if group.rank == 0 else None
        lengths = self.source.lengths(step, self.mesh.dp_rank)
        held = None if lengths is None else [length // self.parallel.context.size for length in lengths]
        *rows, sequence = self.shape
        source, tokens, targets = None, none, none
        if self.reads_source:
            parts = [] if whole is None or whole.source is None else [whole.source]
            source = self._broadcast(parts, (1, *rows, self.source.source_length))[0]
        if any(wanted):
            parts = []
            if whole is not None:
                read = [whole.tokens] * self.reads_tokens + [whole.targets] * self.reads_targets
                parts = [self._shard_sequence(part, whole.lengths) for part in read]
            received = iter(self._broadcast(parts, (sum(wanted), *rows, sequence // self.parallel.context.size)))
            tokens, targets = (next(received) if reads else none for reads in wanted)
        return Batch(tokens, targets, held, source, documents)

    def _broadcast(self, parts: Sequence[Tensor], size: tuple[int, ...]) -> Tensor:
        """Parts of a batch, (parts, microbatches, microbatch size, tokens), which the first rank along tp has."""
        group = self.parallel.region.group
        if group.rank:
            return group.broadcast(torch.empty(size, dtype=torch.int64, device=self.device), 0)
        stacked = torch.stack(list(parts))
        on_gpu = self.device.type == "cuda"
        return group.broadcast(stacked.pin_memory().to(self.device, non_blocking=True) if on_gpu else stacked, 0)

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
    source: TextData,
    mesh: Mesh,
    plan: Plan,
    parallel: Parallel,
    device: torch.device,
    rows: tuple[int, int],
    reads_tokens: Collection[int] = (),
) -> BatchFeed:
    """The feed of this rank, by the stages that the plan gives it; ``rows`` are microbatch size and whole sequence.
    ``reads_tokens`` are the stages of this rank with the embedding of a decoder that has an encoder.
    """
    stages, shape = plan.stages_of(mesh.pp_rank), (plan.num_microbatches, *rows)
    first = any(plan.previous_stage(stage) is None for stage in stages)
    last = any(plan.next_stage(stage) is None for stage in stages)
    if source.source_length:
        return BatchFeed(source, mesh, parallel, device, shape, bool(reads_tokens), last, first)
    return BatchFeed(source, mesh, parallel, device, shape, first, last)
