"""Routes that experts with a capacity keep, against GShard's algorithm one route at a time; forced routes; parts of sequences."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from instrument.collectives import AxisGroup
from instrument.context.shard import ContextShape
from instrument.expert.capacity import keep_within
from instrument.expert.forced import forced_routes
from instrument.expert.noise import ForwardKey, TokenIds
from instrument.expert.unit import SequenceParts
from instrument.recorder import Recorder
from pptrace.marks import Axis
from pptrace.sizes.expert_options import ExpertOptions, Forced, Scoring


def taken_one_by_one(order: list[tuple[int, int]], chosen: Tensor, capacity: int) -> set[tuple[int, int]]:
    """The (token, choice) that experts with free slots take in an order."""
    used: dict[int, int] = {}
    kept = set()
    for token, choice in order:
        expert = int(chosen[token, choice])
        if used.get(expert, 0) < capacity:
            kept.add((token, choice))
        used[expert] = used.get(expert, 0) + 1
    return kept


@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 3), st.integers(0, 9), st.booleans())
def test_routes_are_kept_one_by_one_in_their_order(
    seed: int, tokens: int, top_k: int, capacity: int, ties: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(2, tokens, 4, generator=generator).argsort(-1)[..., :top_k]
    weights = torch.rand(2, tokens, top_k, generator=generator)
    if ties:
        weights = (weights * 3).round()
    by_choice = keep_within(chosen, capacity, 4)
    by_weight = keep_within(chosen, capacity, 4, weights)
    for sequence in range(2):
        order = [(token, choice) for choice in range(top_k) for token in range(tokens)]
        by_weights = sorted(order, key=lambda route: (-float(weights[sequence][route]), route))
        for kept, routes in ((by_choice, order), (by_weight, by_weights)):
            taken = taken_one_by_one(routes, chosen[sequence], capacity)
            assert set(map(tuple, kept[sequence].nonzero().tolist())) == taken


def test_a_capacity_is_that_of_the_factor_as_it_is_written() -> None:
    """Of floats, 1.1 · 100 / 10 is more than 11, and 1e308 · 2 is infinite."""
    for factor, length, capacity in ((1.0, 6, 3), (1.0, 10, 5), (9.0, 6, 6), (0.01, 6, 1), (1e308, 6, 6)):
        assert ExpertOptions(4, 2, capacity_factor=factor).capacity(length) == capacity
    assert ExpertOptions(10, 1, scoring=Scoring.SIGMOID, capacity_factor=1.1).capacity(100) == 11
    assert ExpertOptions(4, 2).capacity(6) is None


def test_forced_routes_are_even_or_all_to_one_expert() -> None:
    for top_k in (1, 2, 3):
        balanced = ExpertOptions(6, top_k, forced=Forced.BALANCED, scoring="sigmoid")
        routes = forced_routes(TokenIds(ForwardKey(), torch.arange(1), torch.arange(12)), balanced)
        assert routes.shape == (1, 12, top_k)
        assert torch.bincount(routes.flatten(), minlength=6).tolist() == [2 * top_k] * 6
        hot = ExpertOptions(6, top_k, forced=Forced.HOT, scoring="sigmoid")
        routes = forced_routes(TokenIds(ForwardKey(), torch.arange(1), torch.arange(10)), hot)
        counts = torch.bincount(routes.flatten(), minlength=6).tolist()
        assert counts[0] == 10
        assert counts[1:] == [2 * (top_k - 1)] * 5
    assert all(len(set(token)) == len(token) for token in routes[0].tolist())  # no expert twice


class _Ranks(AxisGroup):
    """One of several ranks along an axis whose parts are all known here."""

    def __init__(self, axis: Axis, rank: int, size: int) -> None:
        super().__init__(None, axis, Recorder())
        self.rank, self.size = rank, size


def test_each_rank_knows_where_its_tokens_stand_in_their_sequences() -> None:
    context = ContextShape(ring=2)
    seen: list[int] = []
    for cp_rank in range(2):
        for tp_rank in range(2):
            parts = SequenceParts(_Ranks(Axis.TP, tp_rank, 2), _Ranks(Axis.CP, cp_rank, 2), context)
            seen += (positions := parts.positions(2, torch.device("cpu")).tolist())
            whole = torch.arange(16).view(2, 8)
            assert parts.part(whole).tolist() == [positions, [8 + position for position in positions]]
    assert seen == [0, 1, 6, 7, 2, 3, 4, 5]  # two chunks for each context rank, one from either end
