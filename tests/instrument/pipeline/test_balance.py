"""Layers are shared out by time: as well as any cut can, wherever all cuts can be tried."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instrument.pipeline.balance import LayerTimes, balance, rank_loads
from instrument.pipeline.partition import partition
from pptrace.errors import UsageError
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import build
from tests.support.extent import ALL

PLANS = {
    f"{name} p={pp} v={chunks}": build(name, pp, microbatches, chunks)
    for name, pp, microbatches, chunks in (
        ("1f1b", 1, 2, 1),
        ("1f1b", 4, 2, 1),
        ("zbv", 2, 2, 2),
        ("zbv", 3, 2, 2),
        ("interleaved-1f1b", 2, 2, 2),
        ("interleaved-1f1b", 2, 2, 3),
        ("interleaved-1f1b", 3, 3, 2),
        ("dualpipe", 4, 8, 2),
    )
}
NS = st.integers(0, 30)


def heaviest(times: LayerTimes, plan: Plan, split: tuple[int, ...]) -> int:
    return max(rank_loads(times, plan, split))


def best_of_all(times: LayerTimes, plan: Plan) -> int:
    num_layers = len(times.layers_ns)
    cuts = combinations(range(1, num_layers), plan.chain_length - 1)
    splits = (tuple(end - start for start, end in pairwise((0, *cut, num_layers))) for cut in cuts)
    return min(heaviest(times, plan, split) for split in splits)


@given(st.sampled_from(sorted(PLANS)), st.lists(NS, min_size=6, max_size=11), NS, st.integers(0, 90))
@settings(max_examples=60, deadline=None)
def test_no_other_cut_has_a_lighter_heaviest_rank(name: str, layers: list[int], embedding: int, head: int) -> None:
    plan = PLANS[name]
    times = LayerTimes(embedding, tuple(layers), head)
    split = balance(times, plan)
    assert len(split) == plan.chain_length
    assert sum(split) == len(layers)
    assert min(split) >= 1
    assert heaviest(times, plan, split) == best_of_all(times, plan)


@given(
    st.sampled_from([("1f1b", 8, 1), ("zbv", 4, 2), ("interleaved-1f1b", 4, 3), ("dualpipe", 4, 2)]),
    st.integers(12, 40),
    st.integers(0, 700),
    st.integers(0, 700),
)
@settings(max_examples=20, deadline=None)
def test_equal_layers_are_given_to_whoever_has_least(
    shape: tuple[str, int, int], num_layers: int, embedding: int, head: int
) -> None:
    name, pp, chunks = shape
    plan = build(name, pp, 8, chunks)
    times = LayerTimes(embedding, (100,) * num_layers, head)
    # The first layers of all stages are theirs; each of the others goes to the ranks of the lightest stage in turn.
    if plan.num_chains > 1:
        loads = [rank_loads(times, plan, (1,) * plan.chain_length)[rank] for rank in range(pp // 2)]
    else:
        loads = list(rank_loads(times, plan, (1,) * plan.chain_length))
    for _ in range(num_layers - plan.chain_length):
        loads[loads.index(min(loads))] += 100
    assert heaviest(times, plan, balance(times, plan)) == max(loads)


@given(st.lists(st.integers(80, 120), min_size=32, max_size=48), st.integers(0, 500))
@settings(max_examples=10 if ALL else 2, deadline=None)
def test_a_large_cut_is_no_worse_than_even_shares_and_repeats(layers: list[int], head: int) -> None:
    plan = build("interleaved-1f1b", 8, 8, 2)
    times = LayerTimes(20, tuple(layers), head)
    split = balance(times, plan)
    even = tuple(len(part) for part in partition(len(layers), 16))
    assert heaviest(times, plan, split) <= heaviest(times, plan, even)
    assert balance(times, plan) == split  # every rank must come to the same cut


def test_the_loads_of_a_bidirectional_plan_count_both_copies() -> None:
    plan = PLANS["dualpipe p=4 v=2"]
    assert rank_loads(LayerTimes(1, (10, 20, 30, 40), 5), plan, (1, 1, 1, 1)) == (56, 50, 50, 56)


def test_times_that_cannot_be_are_one_line() -> None:
    with pytest.raises(UsageError, match="4 stages need at least 4 layers and the model has 3"):
        balance(LayerTimes(1, (1, 1, 1), 1), build("1f1b", 4, 2))
    with pytest.raises(UsageError, match="name no layer"):
        LayerTimes(1, (), 1)
    with pytest.raises(UsageError, match="has a negative time"):
        LayerTimes(1, (1, -1), 1)
