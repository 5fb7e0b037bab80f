"""Attention over a sequence cut over ranks gives what attention over the whole sequence gives, and moves what it says."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from instrument.context.shard import ContextShape, KeyExchange, Layout
from instrument.route import Route
from pptrace.marks import AwaitMark, Axis, CollectiveMark, ExchangeMark, Mark
from pptrace.sizes.context import causal_scores
from pptrace.sizes.transformer import AttentionSizes, Calls, Volume, attention_volume, total
from tests.instrument.context.cases.attention import (
    HEAD_DIM,
    HEADS,
    MICROBATCH,
    ContextCase,
    errors,
    marks_of,
    num_scores,
    order_of_work,
)
from tests.support.extent import ALL
from tests.support.pool import Pool

TOLERANCE = 1e-12
RINGS = tuple(ContextShape(ring, 1, layout) for ring in (2, 4) for layout in Layout)
GATHERED = tuple(replace(ring, exchange=KeyExchange.ALL_GATHER) for ring in (*RINGS, ContextShape(2, 2)))
SHAPES = (*RINGS, *GATHERED, ContextShape(1, 2), ContextShape(1, 4), *(ContextShape(2, 2, layout) for layout in Layout))


def by_size(cases: list[ContextCase]) -> list[list[ContextCase]]:
    """Those of as many ranks together."""
    sizes = sorted({case.shape.size for case in cases})
    return [[case for case in cases if case.shape.size == size] for size in sizes]


def check(pool: Pool, cases: list[ContextCase], tolerance: float = TOLERANCE, pp: int = 1) -> None:
    for chosen in by_size(cases):
        size = chosen[0].shape.size
        for rank, row in enumerate(pool.run(errors, chosen, pp, world=size * pp)):
            for case, result in zip(chosen, row, strict=True):
                assert len(result) == 4, (case, rank)
                assert max(result) < tolerance, (case, rank, result)


WAYS: list[dict[str, Any]] = [
    {"kv_heads": 1},
    {"kv_heads": 4, "causal": False},
    {"kv_heads": 2, "again": True},
    {"rows_apart": True},
    {"kv_heads": 2, "route": Route.HOST_STAGED},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_outputs_and_gradients_are_those_of_one_process(pool: Pool, way: dict[str, Any]) -> None:
    """Also where backward runs the attention again, rows are not contiguous, or messages go through host memory."""
    check(pool, [ContextCase(shape, **way) for shape in SHAPES])


def test_the_shortest_and_uneven_sequences_are_exact(pool: Pool) -> None:
    ways = product(SHAPES, (True, False))
    check(pool, [ContextCase(shape, causal, 2, positions=shape.divisor) for shape, causal in ways])
    uneven = (ContextShape(4, 1, Layout.CONTIGUOUS), ContextShape(1, 4))
    check(pool, [ContextCase(shape, positions=12) for shape in uneven])


def test_attention_without_flash_kernels_is_the_same(pool: Pool) -> None:
    check(pool, [ContextCase(shape, causal, 2, exact=True) for shape in RINGS for causal in (True, False)])


def test_each_pipeline_rank_has_context_groups_of_its_own(pool: Pool) -> None:
    check(pool, [ContextCase(ContextShape(2)), ContextCase(ContextShape(1, 2))], pp=2)


def test_one_rank_needs_no_groups(pool: Pool) -> None:
    check(pool, [ContextCase(ContextShape()), ContextCase(ContextShape(), causal=False, kv_heads=1)])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_smaller_dtypes_stay_near_float64(pool: Pool, dtype: torch.dtype, tolerance: float) -> None:
    check(pool, [ContextCase(shape, kv_heads=2, dtype=dtype) for shape in SHAPES], tolerance)


@pytest.mark.parametrize("ring", [2, 4])
def test_balanced_ranks_compute_equally_many_scores_and_none_twice(pool: Pool, ring: int) -> None:
    case = ContextCase(ContextShape(ring))
    contiguous = replace(case, shape=ContextShape(ring, 1, Layout.CONTIGUOUS))
    gathered = replace(case, shape=ContextShape(ring, exchange=KeyExchange.ALL_GATHER))
    results = pool.run(num_scores, [case, contiguous, replace(case, causal=False), gathered], world=ring)
    assert [row[3] for row in results] == [row[0] for row in results]
    triangle = case.sequence * (case.sequence + 1) // 2
    assert [row[0] for row in results] == [[triangle // ring] * 2] * ring
    assert [sum(row[1][way] for row in results) for way in (0, 1)] == [triangle] * 2
    assert results[0][1] < results[-1][1]
    assert [row[2] for row in results] == [[case.sequence**2 // ring] * 2] * ring
    scores = causal_scores(case.sequence, ring, balanced=False)
    assert [row[1] for row in results] == [[of_rank] * 2 for of_rank in scores]


def test_exchanges_are_posted_before_the_computation_that_hides_them(pool: Pool) -> None:
    assert pool.run(order_of_work, ContextCase(ContextShape(2)), world=2) == [("xcwc", "xcwcxccw")] * 2
    gathered = pool.run(order_of_work, ContextCase(ContextShape(2, exchange=KeyExchange.ALL_GATHER)), world=2)
    assert gathered == [("xcwc", "xcwcxccw")] * 2  # keys, and keys and sums of gradients
    results = pool.run(order_of_work, ContextCase(ContextShape(4)), world=4)
    assert results == [("xcwxcwxcwc", "xcwxcxwxcwxwcwxccw")] * 4


def volume(marks: list[Mark]) -> Volume:
    """Calls and bytes of all-to-alls and messages."""
    assert all(mark.axis is Axis.CP for mark in marks if isinstance(mark, CollectiveMark | ExchangeMark | AwaitMark))
    to_all = [{("cp", str(mark.kind)): Calls(1, mark.bytes)} for mark in marks if isinstance(mark, CollectiveMark)]
    links = [link for mark in marks if isinstance(mark, ExchangeMark) for link in mark.links]
    return total([*to_all, *({("cp", "send" if link.sends else "recv"): Calls(1, link.bytes)} for link in links)])


@pytest.mark.parametrize(
    ("dtype", "kv_heads"),
    list(product((torch.float64, torch.bfloat16), (4, 2, 1)))
    if ALL
    else [(torch.float64, 4), (torch.bfloat16, 2), (torch.float64, 1)],
)
def test_predicted_bytes_are_the_marked_bytes(pool: Pool, dtype: torch.dtype, kv_heads: int) -> None:
    shapes = (ContextShape(2), ContextShape(4), ContextShape(1, 2), ContextShape(1, 4), ContextShape(2, 2), *GATHERED)
    every = [ContextCase(shape, causal, kv_heads, dtype=dtype) for shape, causal in product(shapes, (True, False))]
    for cases in by_size(every):
        for rank in pool.run(marks_of, cases, world=cases[0].shape.size):
            for case, (forward, backward) in zip(cases, rank, strict=True):
                ways = (case.shape.ring, case.shape.ulysses, case.shape in GATHERED)
                sizes = (MICROBATCH, case.sequence, HEADS, kv_heads, HEAD_DIM, dtype.itemsize, *ways)
                predicted = attention_volume(AttentionSizes(*sizes))
                assert predicted.forward == volume(forward), case
                assert predicted.backward == volume(backward), case


def test_marks_name_the_neighbours_and_are_awaited_once(pool: Pool) -> None:
    for rank, ((forward, backward),) in enumerate(pool.run(marks_of, [ContextCase(ContextShape(2, 2))])):
        exchanges = [mark for mark in forward + backward if isinstance(mark, ExchangeMark)]
        assert {link.peer for mark in exchanges for link in mark.links} == {(rank + 2) % 4}
        awaited = [mark.handle for mark in forward + backward if isinstance(mark, AwaitMark)]
        assert sorted(awaited) == sorted(mark.handle for mark in exchanges if mark.handle is not None)
        assert len(exchanges) == 3  # k and v, again in backward, and their gradients
        collectives = [mark for mark in forward + backward if isinstance(mark, CollectiveMark)]
        assert [mark.size for mark in collectives] == [2] * 4
