"""Interleaved zero bubble (ZB1P): interleaved 1F1B with the backward split, weight gradients r later on rank r.

Microbatches are taken in max(1, m // p) equal groups, as torch does, which therefore must divide m.

Source: torch.distributed.pipelining.ScheduleInterleavedZeroBubble; ZB-H1 of Qi et al. (arXiv 2401.10241) over chunks.
"""

from __future__ import annotations

from pptrace.errors import ShapeError
from pptrace.schedule.actions import Action
from pptrace.schedule.builders.interleaved import schedule_table
from pptrace.schedule.builders.pairing import one_forward_one_input_grad
from pptrace.schedule.placement import loop
from pptrace.schedule.plan import Plan, make_plan
from pptrace.schedule.shape import Shape

NAME = "interleaved-zb"


def build(shape: Shape) -> Plan:
    group_size = _legal_group_size(shape)
    return make_plan(NAME, (_rank_actions(shape, rank, group_size) for rank in range(shape.pp)))


def _rank_actions(shape: Shape, rank: int, group_size: int) -> list[Action]:
    p, m, v = shape.pp, shape.num_microbatches, shape.num_chunks
    table = schedule_table(m, v, group_size)
    return one_forward_one_input_grad(
        forwards=[(loop(chunk, rank, p), mb, chunk) for mb, chunk in table],
        backwards=[(loop(v - 1 - chunk, rank, p), mb, v - 1 - chunk) for mb, chunk in table],
        num_warmup=min((v - 1) * group_size + p - rank - 1, m * v),
        weight_lag=rank,
    )


def _legal_group_size(shape: Shape) -> int:
    p, m = shape.pp, shape.num_microbatches
    num_groups = max(1, m // p)
    if shape.num_chunks < 2:
        raise ShapeError(f"{NAME}: {shape.num_chunks} chunk per rank; expected at least 2 (or use zb-h1)")
    if m % num_groups:
        raise ShapeError(
            f"{NAME}: {m} microbatches do not divide into m // p = {num_groups} equal groups; "
            f"try m={m - m % num_groups} or {m - m % p + p}"
        )
    if shape.group_size not in (None, m // num_groups):
        raise ShapeError(
            f"{NAME}: group size {shape.group_size} with p={p}, m={m}; "
            f"expected {m // num_groups}, which is m / max(1, m // p)"
        )
    if shape.lean:
        raise ShapeError(f"{NAME}: the lean warmup belongs to interleaved-1f1b")
    return m // num_groups
