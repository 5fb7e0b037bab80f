"""Schedules of several chunks per rank in a loop: rank r owns the stages r, p+r, 2p+r, … (virtual pipeline parallelism, VPP).

Interleaved 1F1B takes the microbatches depth-first in groups of N; within a group all chunks run one after the other. Backward
uses the same table with the chunks reversed. The last group may be smaller than p, which Megatron-LM refuses: its microbatches
come back to the first rank later than their turn, and ranks wait for them, for each other for ever where it is too small. It is
sound if it and N together have at least 2(p−1) microbatches, if there are two chunks and it has one, and with the lean warmup.
Combined 1F1B runs each pair as one action, so that while the tokens of one travel to experts and back the other computes.

Interleaved zero bubble (ZB1P) splits the backward, with weight gradients r later on rank r, and takes the microbatches in
max(1, m // p) equal groups, as torch does, which therefore must divide m. Interleaved all-forward-all-backward is what older
versions of Megatron-LM ran with m = p; its order is sound for any last group, since all ranks have the same. Looped BFS is
breadth-first: each chunk runs all its microbatches before the next one starts; the backward takes both from last to first (the
paper draws the microbatches in order, torch runs them in reverse).

Sources: Narayanan et al. (arXiv 2104.04473) and Megatron-LM ``forward_backward_pipelining_with_interleaving``, ``combined_1f1b``,
``get_schedule_table``, before ``microbatch_group_size_per_vp_stage`` came with ``all_warmup_microbatches`` where m = p; Qi et al.
(arXiv 2401.10241); Lamy-Poirier (arXiv 2211.05953); torch.distributed.pipelining's ScheduleInterleaved1F1B,
ScheduleInterleavedZeroBubble and ScheduleLoopedBFS.
"""

from __future__ import annotations

from collections.abc import Iterator

from pptrace.errors import ShapeError
from pptrace.schedule.builders.one_chunk import (
    Virtual,
    one_forward_one_backward,
    one_forward_one_input_grad,
    overlapped_pairs,
)
from pptrace.schedule.plan import Plan, make_plan
from pptrace.schedule.shape import Shape, loop

ONE_F_ONE_B, AFAB, ZERO_BUBBLE, LOOPED_BFS = "interleaved-1f1b", "interleaved-afab", "interleaved-zb", "looped-bfs"
COMBINED = "combined-1f1b"


def schedule_table(num_microbatches: int, num_chunks: int, group_size: int) -> list[tuple[int, int]]:
    """(microbatch, chunk) of each virtual microbatch, in forward order (Megatron's ``get_schedule_table``)."""
    return [
        (microbatch, chunk)
        for first in range(0, num_microbatches, group_size)
        for chunk in range(num_chunks)
        for microbatch in range(first, min(first + group_size, num_microbatches))
    ]


def _orders(shape: Shape, group_size: int) -> Iterator[tuple[list[Virtual], list[Virtual]]]:
    """The forwards and the backwards of each rank, in order: those of the table, and the same with the chunks reversed."""
    table, last = schedule_table(shape.num_microbatches, shape.num_chunks, group_size), shape.num_chunks - 1
    for rank in range(shape.pp):
        stages = [loop(chunk, rank, shape.pp) for chunk in range(shape.num_chunks)]
        forwards = [(stages[chunk], mb, chunk) for mb, chunk in table]
        yield forwards, [(stages[last - chunk], mb, last - chunk) for mb, chunk in table]


def num_warmup_forwards(shape: Shape, rank: int) -> int:
    """Megatron's rule min(m·v, 2(p−r−1) + (v−1)·N); the lean variant has (p−r−1) + (v−1)·p."""
    behind = shape.pp - rank - 1
    if shape.lean:
        warmup = behind + (shape.num_chunks - 1) * shape.pp
    else:
        warmup = 2 * behind + (shape.num_chunks - 1) * (shape.group_size or shape.pp)
    return min(shape.num_microbatches * shape.num_chunks, warmup)


def build_1f1b(shape: Shape) -> Plan:
    _require_groups(ONE_F_ONE_B, shape, "1f1b")
    p, m, n = shape.pp, shape.num_microbatches, shape.group_size or shape.pp
    if shape.lean and n != p:
        raise ShapeError(f"{ONE_F_ONE_B}: the lean warmup is defined for group size p={p}, found {n}")
    least = max(1, 2 * (p - 1) - n)
    if 0 < m % n < least and not shape.lean and (shape.num_chunks, m % n) != (2, 1):
        raise ShapeError(
            f"{ONE_F_ONE_B}: {m} microbatches in groups of {n} leave a last group of {m % n}, in which ranks would wait for each "
            f"other; expected 0 or at least 2(p−1) − {n} = {least}: try m={m - m % n} or {m - m % n + least}"
        )
    return make_plan(
        ONE_F_ONE_B,
        (
            one_forward_one_backward(*orders, num_warmup_forwards(shape, rank))
            for rank, orders in enumerate(_orders(shape, n))
        ),
    )


def build_combined(shape: Shape) -> Plan:
    """One forward more in the warmup, so that the two of a pair are of microbatches that do not wait for each other."""
    if shape.pp > 1 or shape.num_chunks > 1:  # without a pipeline Megatron-LM combines too
        _require_groups(COMBINED, shape, "1f1b")
    _refuse_lean(COMBINED, shape)
    p, m, n = shape.pp, shape.num_microbatches, shape.group_size or shape.pp
    if 0 < m % n < p:
        raise ShapeError(
            f"{COMBINED}: {m} microbatches in groups of {n} leave a last group of {m % n}; expected 0 or at least p={p}: try "
            f"m={m - m % n} or {m - m % n + p}"
        )
    whole = m * shape.num_chunks
    return make_plan(
        COMBINED,
        (
            overlapped_pairs(*orders, min(num_warmup_forwards(shape, rank) + 1, whole))
            for rank, orders in enumerate(_orders(shape, n))
        ),
    )


def build_afab(shape: Shape) -> Plan:
    """v·m forwards, then v·m backwards on every rank. The forwards are the warmup, the backwards the cooldown."""
    _require_groups(AFAB, shape, "gpipe")
    _refuse_lean(AFAB, shape)
    orders = _orders(shape, shape.group_size or shape.pp)
    return make_plan(AFAB, (one_forward_one_backward(*of_rank, len(of_rank[0])) for of_rank in orders))


def build_zero_bubble(shape: Shape) -> Plan:
    p, m, v = shape.pp, shape.num_microbatches, shape.num_chunks
    num_groups = max(1, m // p)
    _require_chunks(ZERO_BUBBLE, shape, "zb-h1")
    if m % num_groups:
        raise ShapeError(
            f"{ZERO_BUBBLE}: {m} microbatches do not divide into m // p = {num_groups} equal groups; "
            f"try m={m - m % num_groups} or {m - m % p + p}"
        )
    group_size = m // num_groups
    if shape.group_size not in (None, group_size):
        raise ShapeError(
            f"{ZERO_BUBBLE}: group size {shape.group_size} with p={p}, m={m}; "
            f"expected {group_size}, which is m / max(1, m // p)"
        )
    _refuse_lean(ZERO_BUBBLE, shape)
    return make_plan(
        ZERO_BUBBLE,
        (
            one_forward_one_input_grad(*orders, min((v - 1) * group_size + p - rank - 1, m * v), rank)
            for rank, orders in enumerate(_orders(shape, group_size))
        ),
    )


def build_looped_bfs(shape: Shape) -> Plan:
    """m forwards per chunk, then m backwards per chunk. The forwards are the warmup, the backwards the cooldown."""
    m = shape.num_microbatches
    _require_chunks(LOOPED_BFS, shape, "gpipe")
    if shape.group_size not in (None, m):
        raise ShapeError(
            f"{LOOPED_BFS}: group size {shape.group_size} with m={m}; breadth-first has one group of all m={m}"
        )
    _refuse_lean(LOOPED_BFS, shape)
    forwards = (of_rank for of_rank, _ in _orders(shape, m))
    return make_plan(
        LOOPED_BFS, (one_forward_one_backward(of_rank, of_rank[::-1], len(of_rank)) for of_rank in forwards)
    )


def _require_chunks(name: str, shape: Shape, without_chunks: str) -> None:
    """Refuse one chunk, for which there is the schedule ``without_chunks``."""
    if shape.num_chunks < 2:
        raise ShapeError(f"{name}: {shape.num_chunks} chunk per rank; expected at least 2 (or use {without_chunks})")


def _require_groups(name: str, shape: Shape, without_chunks: str) -> None:
    """Refuse one chunk, and groups of fewer than p or more than m."""
    p, m, n = shape.pp, shape.num_microbatches, shape.group_size or shape.pp
    _require_chunks(name, shape, without_chunks)
    if not p <= n <= m:
        raise ShapeError(f"{name}: group size {n} with p={p}, m={m}; expected p ≤ group size ≤ m")


def _refuse_lean(name: str, shape: Shape) -> None:
    if shape.lean:
        raise ShapeError(f"{name}: the lean warmup belongs to interleaved-1f1b")
