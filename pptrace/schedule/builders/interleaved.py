"""Interleaved 1F1B (virtual pipeline parallelism, VPP), depth-first as Megatron-LM runs it.

Rank r owns the stages r, p+r, 2p+r, … Microbatches are taken in groups of N; within a group all chunks run one after the
other. Backward uses the same table with the chunks reversed.

The last group may be smaller than p, which Megatron-LM refuses: its microbatches come back to the first rank later than their
turn, and ranks wait for them, for each other for ever where it is too small. It is sound if it and N together have at least
2(p−1) microbatches, if there are two chunks and it has one, and with the lean warmup.

Source: Narayanan et al. (arXiv 2104.04473); Megatron-LM ``forward_backward_pipelining_with_interleaving`` and
``get_schedule_table``.
"""

from __future__ import annotations

from collections.abc import Sequence

from pptrace.errors import ShapeError
from pptrace.schedule.actions import Action
from pptrace.schedule.builders.pairing import one_forward_one_backward
from pptrace.schedule.placement import loop
from pptrace.schedule.plan import Plan, make_plan
from pptrace.schedule.shape import Shape

NAME = "interleaved-1f1b"


def schedule_table(num_microbatches: int, num_chunks: int, group_size: int) -> list[tuple[int, int]]:
    """(microbatch, chunk) of each virtual microbatch, in forward order (Megatron's ``get_schedule_table``)."""
    return [
        (microbatch, chunk)
        for first in range(0, num_microbatches, group_size)
        for chunk in range(num_chunks)
        for microbatch in range(first, min(first + group_size, num_microbatches))
    ]


def num_warmup_forwards(shape: Shape, rank: int) -> int:
    """Megatron's rule min(m·v, 2(p−r−1) + (v−1)·N); the lean variant has (p−r−1) + (v−1)·p."""
    behind = shape.pp - rank - 1
    if shape.lean:
        warmup = behind + (shape.num_chunks - 1) * shape.pp
    else:
        warmup = 2 * behind + (shape.num_chunks - 1) * (shape.group_size or shape.pp)
    return min(shape.num_microbatches * shape.num_chunks, warmup)


def build(shape: Shape) -> Plan:
    _require_legal(shape)
    table = schedule_table(shape.num_microbatches, shape.num_chunks, shape.group_size or shape.pp)
    return make_plan(NAME, (_rank_actions(shape, table, rank) for rank in range(shape.pp)))


def _rank_actions(shape: Shape, table: Sequence[tuple[int, int]], rank: int) -> list[Action]:
    stages = [loop(chunk, rank, shape.pp) for chunk in range(shape.num_chunks)]
    last = shape.num_chunks - 1
    return one_forward_one_backward(
        forwards=[(stages[chunk], mb, chunk) for mb, chunk in table],
        backwards=[(stages[last - chunk], mb, last - chunk) for mb, chunk in table],
        num_warmup=num_warmup_forwards(shape, rank),
    )


def _require_legal(shape: Shape) -> None:
    require_groups(NAME, shape, "1f1b")
    p, m, n = shape.pp, shape.num_microbatches, shape.group_size or shape.pp
    if shape.lean and n != p:
        raise ShapeError(f"{NAME}: the lean warmup is defined for group size p={p}, found {n}")
    least = max(1, 2 * (p - 1) - n)
    if 0 < m % n < least and not shape.lean and (shape.num_chunks, m % n) != (2, 1):
        raise ShapeError(
            f"{NAME}: {m} microbatches in groups of {n} leave a last group of {m % n}, in which ranks would wait for each "
            f"other; expected 0 or at least 2(p−1) − {n} = {least}: try m={m - m % n} or {m - m % n + least}"
        )


def require_groups(name: str, shape: Shape, without_chunks: str) -> None:
    """Refuse one chunk, for which there is the schedule ``without_chunks``, and groups of fewer than p or more than m.

    Raises:
        ShapeError: one of these.
    """
    p, m, n = shape.pp, shape.num_microbatches, shape.group_size or shape.pp
    if shape.num_chunks < 2:
        raise ShapeError(f"{name}: {shape.num_chunks} chunk per rank; expected at least 2 (or use {without_chunks})")
    if not p <= n <= m:
        raise ShapeError(f"{name}: group size {n} with p={p}, m={m}; expected p ≤ group size ≤ m")
