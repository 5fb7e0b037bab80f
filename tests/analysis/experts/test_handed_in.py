"""Bytes handed in by counted routes, compared with the calls that each dispatcher makes; counts of layers that differ."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from instrument.expert_counts import ExpertCounts
from pptrace.analysis.experts.counts import read_counts
from pptrace.analysis.experts.exchanges import EXCHANGES
from pptrace.analysis.experts.handed_in import TokenSizes, handed_in, sizes_of_run
from pptrace.analysis.volume.experts import ExpertSizes, expert_calls
from pptrace.axes import Axis
from pptrace.slices import Slice

EP, EXPERTS, TOP_K, TOKENS, HIDDEN = 2, 6, 2, 12, 32


def exchanges(forwards: int, again: bool = False) -> Slice:
    """Exchanges of so many forwards and backwards of a layer, which are recomputed ``again`` or not."""
    kinds = [(0, 0), (1, 0)] + [(0, 1)] * again
    columns = {name: np.zeros(len(kinds) * forwards, dtype=np.int64) for name in EXCHANGES}
    for name, values in zip(("backward", "again"), zip(*kinds, strict=True), strict=True):
        columns[name] = np.repeat(values, forwards)
    return Slice(columns)


@pytest.mark.parametrize("etp", [1, 2])
@pytest.mark.parametrize("dispatcher", ["all-to-all", "padded", "all-gather"])
def test_bytes_by_counts_are_those_of_the_calls_of_tokens(dispatcher: str, etp: int) -> None:
    rng = np.random.default_rng(etp)
    ranks, slots = EP * etp, 9
    kept = np.stack([np.bincount(rng.integers(0, EXPERTS, TOKENS * TOP_K), minlength=EXPERTS) for _ in range(ranks)])
    sizes = ExpertSizes(EP, etp, EXPERTS, TOP_K, HIDDEN, TOKENS, 4, 4, slots)
    held = EXPERTS // EP
    for rank in range(ranks):
        if dispatcher == "padded":
            rows = [ranks * slots] * held
        else:  # those from the ranks at its place of each etp group
            first = rank // etp * held
            rows = kept[rank % etp :: etp, first : first + held].sum(axis=0).tolist()
        fact = {"num": EXPERTS, "top_k": TOP_K, "first": 0, "forwards": [[0, 0, rows]], "chosen": [kept[rank].tolist()]}
        calls = [
            call
            for call in expert_calls(dispatcher, sizes, kept, rank)
            if call.axis is Axis.EP and call.bytes > TOKENS * HIDDEN  # not those of counts, routes and weights
        ]
        predicted = handed_in(exchanges(1), read_counts(fact), TokenSizes(HIDDEN * 4, dispatcher, etp))
        assert len(calls) == 4
        assert predicted == sum(call.bytes for call in calls)
        again = handed_in(exchanges(1, again=True), read_counts(fact), TokenSizes(HIDDEN * 4, dispatcher, etp))
        assert again == 3 * sum(call.bytes for call in calls) // 2


def test_other_models_and_ops_with_other_calls_have_no_prediction() -> None:
    fact = {"num": 1, "top_k": 1, "first": 0, "forwards": [[0, 0, [3]]], "chosen": [[3]]}
    sizes, counts = TokenSizes(8, "all-to-all", 1), read_counts(fact)
    assert handed_in(exchanges(1), counts, sizes) == 8 * 2 * (3 + 3)
    assert handed_in(exchanges(2), counts, sizes) is None
    assert handed_in(exchanges(1), counts, None) is None
    assert handed_in(exchanges(1), counts, TokenSizes(8, "by-hand", 1)) is None
    assert sizes_of_run([{"model": {"name": "other", "hidden": 3}, "mesh": {}}]) is None
    model = {"name": "gpt", "hidden": 3, "dtype": "bfloat16", "experts_dispatcher": "padded"}
    assert sizes_of_run([{"model": model, "mesh": {"etp": 2}}]) == TokenSizes(6, "padded", 2)


def test_layers_with_different_numbers_of_experts_keep_their_own_counts() -> None:
    """A rank that is the second of two: of 2 experts it has the last one, of 4 the last two."""
    recorded = ExpertCounts()
    for layer, (num, routes) in enumerate(((2, [0, 1, 1]), (4, [3, 3, 0]))):
        chosen = torch.tensor(routes).unsqueeze(1)
        recorded.add(7, layer, chosen, chosen, num, (num // 2, [layer + 1] * (num // 2)))
    counts = read_counts(recorded.facts())
    assert counts is not None
    assert counts.num.tolist() == [2, 4]
    assert (counts.first.tolist(), counts.held.tolist()) == ([1, 2], [1, 2])
    assert counts.chosen.tolist() == [[1, 2, 0, 0], [1, 0, 0, 2]]
    assert counts.rows.tolist() == [1, 4]
    assert counts.in_steps([8]).step.tolist() == []
