"""Attention over gathered keys: all ranks get all keys and values at once, and send back what gradients they have of them.

Llama 3 (arXiv 2407.21783, section 3.3.2) and Megatron-LM's ``--cp-comm-type all_gather``. One all-gather in place of ring − 1
exchanges; a rank holds the keys of the whole sequence while an attention runs. Backward gathers them again, and the gradients
of all keys are summed by a reduce-scatter. What is computed, and kept, is what the ring has.
"""

from __future__ import annotations

import torch
from torch import Tensor

from instrument.collectives import Pending
from instrument.context.kernels import Gradients, accumulation_dtype
from instrument.context.ring import RingAttention, RowGradients, add_part, zero_sum
from instrument.context.squares import RingPlan


class _GatheredKeys:
    """The keys of all ranks, which travel until they are first asked for."""

    def __init__(self, pending: Pending[Tensor], plan: RingPlan) -> None:
        self._pending, self._plan = pending, plan
        self._gathered: Tensor | None = None

    def take(self, step: int) -> Tensor:
        """(2, microbatch, KV heads, positions, head dim): keys and values of the rank whose turn is at a step."""
        if self._gathered is None:
            gathered = self._pending.wait()
            self._gathered = gathered.view(self._plan.ring, -1, *gathered.shape[1:])
        return self._gathered[self._plan.source(step)]


class GatherAttention(RingAttention):
    """Attention over the positions of all ranks of ``group``, as the ring's, over keys that are gathered."""

    def start_keys(self, keys: Tensor, plan: RingPlan) -> _GatheredKeys:
        """Start the all-gather."""
        return _GatheredKeys(self.group.start_all_gather(keys), plan)

    def gradients(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        """Gradients of this rank's q, k and v, from ``grad`` of its output; in their dtypes."""
        plan, rows = self.plan(q.shape[2]), RowGradients(grad, q, out, lse)
        local_keys = torch.stack((k, v)).contiguous()
        following = self.start_keys(local_keys, plan)
        local_sum = zero_sum(local_keys)
        for square in plan.local_early:
            rows.add(square, local_keys, local_sum)
        sums = local_keys.new_zeros((plan.ring, *local_keys.shape), dtype=accumulation_dtype(k.dtype))
        for step in range(1, plan.ring):
            keys = following.take(step)
            if remote := plan.remote(step):
                add_part(sums[plan.source(step)], remote.keys, rows.part(remote, keys))
        travelling = self.group.start_reduce_scatter(sums.flatten(0, 1))
        for square in plan.local_late:
            rows.add(square, local_keys, local_sum)
        local_sum += travelling.wait()
        return rows.grad_q.to(q.dtype), local_sum[0].to(k.dtype), local_sum[1].to(v.dtype)
