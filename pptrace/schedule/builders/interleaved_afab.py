"""Interleaved, all forwards and then all backwards, depth-first: what older versions of Megatron-LM ran with m = p.

Both take the microbatches in groups of N, as interleaved 1F1B does, the backward with the chunks reversed. The order is sound
for any last group: all ranks have the same.

Source: Megatron-LM ``forward_backward_pipelining_with_interleaving`` before ``microbatch_group_size_per_vp_stage`` came, which
set ``all_warmup_microbatches`` where m = p.
"""

from __future__ import annotations

from pptrace.errors import ShapeError
from pptrace.schedule.actions import Action, Kind, Phase
from pptrace.schedule.builders.interleaved import require_groups, schedule_table
from pptrace.schedule.placement import loop
from pptrace.schedule.plan import Plan, make_plan
from pptrace.schedule.shape import Shape

NAME = "interleaved-afab"


def build(shape: Shape) -> Plan:
    """v·m forwards, then v·m backwards on every rank. The forwards are the warmup, the backwards the cooldown."""
    require_groups(NAME, shape, "gpipe")
    if shape.lean:
        raise ShapeError(f"{NAME}: the lean warmup belongs to interleaved-1f1b")
    table = schedule_table(shape.num_microbatches, shape.num_chunks, shape.group_size or shape.pp)
    return make_plan(NAME, (_rank_actions(shape, table, rank) for rank in range(shape.pp)))


def _rank_actions(shape: Shape, table: list[tuple[int, int]], rank: int) -> list[Action]:
    last = shape.num_chunks - 1
    return [Action(Kind.F, loop(chunk, rank, shape.pp), mb, chunk, Phase.WARMUP) for mb, chunk in table] + [
        Action(Kind.B, loop(last - chunk, rank, shape.pp), mb, last - chunk, Phase.COOLDOWN) for mb, chunk in table
    ]
