"""Attention over gathered keys: all ranks get all keys and values at once, and send back what gradients they have of them.

Llama 3 (arXiv 2407.21783, section 3.3.2) and Megatron-LM's ``--cp-comm-type all_gather``. One all-gather in place of ring − 1
exchanges; a rank holds the keys of the whole sequence while an attention runs. Backward gathers them again, and the gradients
of all keys are summed by a reduce-scatter. What is computed, and kept, is what the ring has.
"""

from __future__ import annotations

from torch import Tensor

from instrument.collectives import Pending
from instrument.context.kernels import accumulation_dtype
from instrument.context.ring import RingAttention, RowGradients, TravellingKeys, add_part
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

    def send_gradients(self, following: TravellingKeys, plan: RingPlan, rows: RowGradients) -> Pending[Tensor] | None:
        """Compute the gradients of all keys, and start the reduce-scatter that sums them."""
        sums: Tensor | None = None
        for step in range(1, plan.ring):
            keys = following.take(step)
            if sums is None:
                sums = keys.new_zeros((plan.ring, *keys.shape), dtype=accumulation_dtype(keys.dtype))
            if remote := plan.remote(step):
                add_part(sums[plan.source(step)], remote.keys, rows.part(remote, keys))
        return None if sums is None else self.group.start_reduce_scatter(sums.flatten(0, 1))
