"""Parallel layers compute what torch's plain modules compute (float64, 1e-12), with the communication of the formulas."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product

import pytest

from instrument.route import Route
from instrument.tensor.heads import HeadShare, share_heads
from pptrace.errors import UsageError
from pptrace.marks import Collective, CollectiveMark, ExchangeMark, Mark
from tests.instrument.tensor.cases.layers import (
    BATCH,
    HIDDEN,
    NUM_BYTES,
    SEQUENCE,
    VOCABULARY,
    Outcome,
    Variant,
    column,
    cross_entropy,
    embedding,
    order_of_column,
    order_of_row,
    refusals,
    row,
)
from tests.support.pool import Pool

TOLERANCE = 1e-12
REDUCE, GATHER, SCATTER = Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER
TOKEN_BYTES = BATCH * SEQUENCE * 8

LAYERS = [Variant(sequence, overlap, split) for sequence, overlap, split in product((False, True), repeat=3)]
LAYERS += [Variant(sequence, True, route=Route.HOST_STAGED) for sequence in (False, True)]


def check(pool: Pool, case: Callable[..., list[Outcome]], variants: list[Variant], size: int) -> list[list[Outcome]]:
    """The outcomes by variant and rank."""
    ranks = pool.run(case, variants, world=size)
    by_variant = [list(outcomes) for outcomes in zip(*ranks, strict=True)]
    for variant, outcomes in zip(variants, by_variant, strict=True):
        for rank, outcome in enumerate(outcomes):
            wrong = {name: error for name, error in outcome.errors.items() if not error < TOLERANCE}
            assert not wrong, (variant, rank, wrong)
            assert outcome.weights == [], (variant, rank)
    return by_variant


def collectives(marks: Iterable[Mark]) -> list[tuple[Collective, int]]:
    return [(mark.kind, mark.bytes) for mark in marks if isinstance(mark, CollectiveMark)]


def exchanges(marks: Iterable[Mark]) -> list[int]:
    """The bytes of each exchange that this rank sends and also receives."""
    sent = [sum(x.bytes for x in mark.links if x.sends) for mark in marks if isinstance(mark, ExchangeMark)]
    received = [sum(x.bytes for x in mark.links if not x.sends) for mark in marks if isinstance(mark, ExchangeMark)]
    assert sent == received
    return sent


@pytest.mark.parametrize("size", [2, 4])
def test_a_column_parallel_layer_is_exact_and_communicates_as_megatrons(pool: Pool, size: int) -> None:
    for variant, outcomes in zip(LAYERS, check(pool, column, LAYERS, size), strict=True):
        for outcome in outcomes:
            ring = [NUM_BYTES // size] * (size - 1) if variant.sequence and variant.overlap else []
            forward = [(GATHER, NUM_BYTES)] if variant.sequence and not variant.overlap else []
            backward = [(GATHER, NUM_BYTES), (SCATTER, NUM_BYTES)] if variant.sequence else [(REDUCE, NUM_BYTES)]
            assert (collectives(outcome.forward), exchanges(outcome.forward)) == (forward, ring)
            assert (collectives(outcome.backward), exchanges(outcome.backward)) == (backward, [])
            assert outcome.sync == []


@pytest.mark.parametrize("size", [2, 4])
def test_a_row_parallel_layer_is_exact_and_communicates_as_megatrons(pool: Pool, size: int) -> None:
    for variant, outcomes in zip(LAYERS, check(pool, row, LAYERS, size), strict=True):
        for outcome in outcomes:
            chunked = variant.sequence and variant.overlap
            ring = [NUM_BYTES // size] * (size - 1) if chunked else []
            forward = [(SCATTER, NUM_BYTES)] if variant.sequence else [(REDUCE, NUM_BYTES)]
            backward = [(GATHER, NUM_BYTES)] if variant.sequence else []
            assert (collectives(outcome.forward), exchanges(outcome.forward)) == ([] if chunked else forward, ring)
            assert (collectives(outcome.backward), exchanges(outcome.backward)) == ([] if chunked else backward, ring)
            assert collectives(outcome.sync) == ([(REDUCE, HIDDEN * 8)] if variant.sequence else [])


def test_gemms_run_between_the_posting_of_a_call_and_the_wait_for_it(pool: Pool) -> None:
    forward, backward = pool.run(order_of_column, world=4)[0]
    # Post the next step of the ring, multiply the chunk at hand, wait.
    assert forward == [*["exchange", "GEMM", "await"] * 3, "GEMM"]
    # The input on its way beside the input gradient, whose sum beside the weight gradient.
    assert backward == ["all_gather", "GEMM", "reduce_scatter", "await", "GEMM", "await"]
    forward, backward = pool.run(order_of_row, world=4)[0]
    # Multiply a chunk and send it to its owner, while the next is multiplied.
    assert forward == [*["GEMM", "exchange"] * 3, "GEMM", *["await"] * 3]
    assert backward == [*["exchange", "GEMM", "await"] * 3, "GEMM", "GEMM"]


@pytest.mark.parametrize("size", [2, 4])
def test_an_embedding_cut_by_its_vocabulary_is_exact_and_communicates_as_megatrons(pool: Pool, size: int) -> None:
    for variant, outcomes in zip(LAYERS, check(pool, embedding, LAYERS, size), strict=True):
        for outcome in outcomes:
            forward = [(SCATTER, NUM_BYTES)] if variant.sequence else [(REDUCE, NUM_BYTES)]
            assert (collectives(outcome.forward), exchanges(outcome.forward)) == (forward, [])
            assert collectives(outcome.backward) == ([(GATHER, NUM_BYTES)] if variant.sequence else [])


@pytest.mark.parametrize("size", [2, 4])
def test_cross_entropy_of_cut_logits_is_exact_and_communicates_a_few_numbers_per_token(pool: Pool, size: int) -> None:
    for errors, marks in pool.run(cross_entropy, world=size):
        assert max(errors.values()) < 500 * TOLERANCE  # of losses up to some 2000
        assert collectives(marks) == [(REDUCE, TOKEN_BYTES), (REDUCE, 2 * TOKEN_BYTES)]
        assert 3 * TOKEN_BYTES < VOCABULARY * TOKEN_BYTES


def test_what_does_not_divide_is_refused_with_the_numbers(pool: Pool) -> None:
    refused, other = pool.run(refusals, world=2)
    assert refused == other
    assert refused == {
        "column": "UsageError: 7 outputs of a column-parallel layer do not divide among 2 tensor-parallel ranks; "
        "choose a multiple of 2",
        "row": "UsageError: 7 inputs of a row-parallel layer do not divide among 2 tensor-parallel ranks; "
        "choose a multiple of 2",
        "embedding": "UsageError: 7 tokens of the vocabulary do not divide among 2 tensor-parallel ranks; "
        "choose a multiple of 2",
    } | dict.fromkeys(
        ("sequence of row", "sequence of embedding"),
        "UsageError: sequence parallelism cuts a sequence of 7 into 2 shards, one for each rank of tp; "
        "choose a multiple of 2",
    )


def test_heads_are_shared_out_with_the_kv_heads_that_they_attend_to() -> None:
    for heads, kv_heads, size in product((1, 2, 4, 6, 8, 12), (1, 2, 3, 4, 8), (1, 2, 3, 4, 8)):
        if heads % kv_heads or heads % size or (kv_heads % size and size % kv_heads):
            with pytest.raises(UsageError, match=r"^\d+ (attention|KV) heads .*; choose "):
                share_heads(heads, kv_heads, 0, size)
            continue
        shares = [share_heads(heads, kv_heads, rank, size) for rank in range(size)]
        assert [head for share in shares for head in share.query] == list(range(heads))
        for share in shares:
            assert set(share.kv) == {head // (heads // kv_heads) for head in share.query}
            # Within the rank too, equal consecutive groups of query heads attend to one KV head each.
            group = len(share.query) // len(share.kv)
            assert [share.kv[i // group] for i in range(len(share.query))] == [
                head // (heads // kv_heads) for head in share.query
            ]
            assert sum(share.kv == other.kv for other in shares) == share.copies


def test_the_rows_of_a_fused_weight_are_those_of_the_ranks_heads() -> None:
    share = share_heads(4, 2, rank=1, size=2)
    assert share == HeadShare(range(2, 4), range(1, 2), 4, 2, copies=1)
    assert share.rows(3) == (range(6, 12), range(15, 18), range(21, 24))
    copied = share_heads(4, 1, rank=1, size=2)
    assert copied.rows(3) == (range(6, 12), range(12, 15), range(15, 18))
    assert copied.copies == 2
