"""Bytes handed in by counted routes, compared with the calls that each dispatcher makes; counts of layers that differ."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from instrument.expert_counts import ExpertCounts
from pptrace.analysis.experts.counts import TokenSizes, expert_flops, handed_in, passes_of, read_counts, sizes_of_run
from pptrace.analysis.experts.exchanges import EXCHANGES
from pptrace.analysis.experts.loads import rank_loads
from pptrace.analysis.experts.turns import with_model_stages
from pptrace.analysis.experts.waits import Waits
from pptrace.axes import Axis
from pptrace.model.tables import Int64
from pptrace.sizes.expert_options import Dispatcher, ExpertOptions
from pptrace.sizes.experts import ExpertSizes
from pptrace.slices import Slice
from tests.support.expert_calls import expert_calls
from tests.support.gpt_runs import facts_of_run

EP, EXPERTS, TOP_K, TOKENS, HIDDEN = 2, 6, 2, 12, 32


def exchanges(forwards: int, again: bool = False) -> Slice:
    """Exchanges of so many forwards and backwards of a layer, which are recomputed ``again`` or not."""
    kinds = [(0, 0), (1, 0)] + [(0, 1)] * again
    columns = {name: np.zeros(len(kinds) * forwards, dtype=np.int64) for name in EXCHANGES}
    for name, values in zip(("backward", "again"), zip(*kinds, strict=True), strict=True):
        columns[name] = np.repeat(values, forwards)
    return Slice(columns)


def passes(forwards: int, again: bool = False) -> Int64 | None:
    """The passes of so many forwards of one that was counted, each with its backward."""
    own = exchanges(forwards, again)
    return passes_of(own, np.arange(len(own)) % forwards - (forwards > 1), 1)


def test_passes_of_forwards_with_two_backwards_are_not_known() -> None:
    twice = Slice({name: np.array(values) for name, values in (("backward", [0, 1, 1]), ("again", [0, 0, 0]))})
    assert passes_of(twice, np.zeros(3, dtype=np.int64), 1) is None
    assert passes(1).tolist() == [2]


@pytest.mark.parametrize("etp", [1, 2])
@pytest.mark.parametrize("dispatcher", ["all-to-all", "padded", "all-gather"])
def test_bytes_by_counts_are_those_of_the_calls_of_tokens(dispatcher: str, etp: int) -> None:
    rng = np.random.default_rng(etp)
    ranks, slots = EP * etp, 9
    kept = np.stack([np.bincount(rng.integers(0, EXPERTS, TOKENS * TOP_K), minlength=EXPERTS) for _ in range(ranks)])
    sizes = ExpertSizes(EP, etp, EXPERTS, TOP_K, HIDDEN, TOKENS, 4, 4, slots)
    held = EXPERTS // EP
    counts = {}
    for rank in range(ranks):
        first = rank // etp * held
        rows = (
            kept[:, first : first + held].sum(axis=0).tolist()
        )  # ranks that share experts compute the rows of all of them
        fact = {
            "num": EXPERTS,
            "top_k": TOP_K,
            "first": first,
            "forwards": [[0, 0, [ranks * slots] * held if dispatcher == "padded" else rows]],
            "chosen": [kept[rank].tolist()],
        }
        counts[rank] = read_counts(fact)
    known = {rank: of_rank for rank, of_rank in counts.items() if of_rank is not None}
    groups = tuple(tuple(range(first, ranks, etp)) for first in range(etp))
    of_run = TokenSizes(HIDDEN * 4, dispatcher, etp, TOKENS, ep_groups=groups)
    for rank in range(ranks):
        calls = [
            call
            for call in expert_calls(dispatcher, sizes, kept, rank)
            if call.axis is Axis.EP and call.bytes > TOKENS * HIDDEN  # not those of counts, routes and weights
        ]
        assert len(calls) == 4
        assert handed_in(passes(1), rank, known, of_run) == sum(call.bytes for call in calls)
        again = handed_in(passes(1, again=True), rank, known, of_run)
        assert again == 3 * sum(call.bytes for call in calls) // 2
    if (dispatcher, etp) == ("all-to-all", 2):  # what came along ep, only the others' counts tell
        assert handed_in(passes(1), 0, {0: known[0]}, of_run) is None


def test_other_models_and_ops_with_other_calls_have_no_prediction() -> None:
    fact = {"num": 1, "top_k": 1, "first": 0, "forwards": [[0, 0, [3]]], "chosen": [[3]]}
    counts = read_counts(fact)
    sizes, known = TokenSizes(8, "all-to-all", 1, row_flops=10), {0: counts}
    assert handed_in(passes(1), 0, known, sizes) == 8 * 2 * (3 + 3)
    assert handed_in(passes(2), 0, known, sizes) is None
    assert handed_in(passes(1), 0, known, None) is None
    assert handed_in(passes(1), 1, known, sizes) is None
    assert handed_in(passes(1), 0, known, TokenSizes(8, "by-hand", 1)) is None
    # a forward, another one where it is recomputed, and a backward of twice as much
    assert expert_flops(passes(1), counts, sizes) == 3 * 10 * 3
    assert expert_flops(passes(1, again=True), counts, sizes) == 4 * 10 * 3
    assert expert_flops(passes(2), counts, sizes) is None
    assert sizes_of_run([{"model": {"name": "other", "hidden": 3}, "mesh": {}}]) is None


def test_forwards_some_of_which_are_recomputed_hand_in_their_rows_as_often_as_they_run() -> None:
    """Two layers, two microbatches, of which the second is recomputed: layer by layer, each before its backward."""
    forwards = [(microbatch, layer, 0, 0) for microbatch in (0, 1) for layer in (0, 1)]
    backwards = [(0, 1, 1, 0), (0, 0, 1, 0), (1, 1, 0, 1), (1, 1, 1, 0), (1, 0, 0, 1), (1, 0, 1, 0)]
    columns = {name: np.zeros(10, dtype=np.int64) for name in EXCHANGES}
    for name, values in zip(
        ("microbatch", "layer", "backward", "again"), zip(*forwards, *backwards, strict=True), strict=True
    ):
        columns[name] = np.array(values)
    rows = {(0, 0): 3, (0, 1): 5, (1, 0): 7, (1, 1): 11}
    columns["rows"] = np.array(
        [rows[at] for at in zip(columns["microbatch"].tolist(), columns["layer"].tolist(), strict=True)]
    )
    columns["out_end_ns"] = columns["back_end_ns"] = np.arange(10)
    counted = [[0, layer, [rows[microbatch, layer]]] for microbatch, layer, _, _ in forwards]
    fact = {"num": 1, "top_k": 1, "first": 0, "forwards": counted, "chosen": [entry[2] for entry in counted]}
    counts = read_counts(fact)
    sizes = TokenSizes(8, "all-to-all", 1, row_flops=10)
    (load,) = rank_loads(Waits(with_model_stages(Slice(columns), None)), {0: counts}, sizes)
    assert load.predicted_bytes == 8 * 2 * (2 * (3 + 5) + 3 * (7 + 11))
    assert load.flops == 10 * (3 * (3 + 5) + 4 * (7 + 11))
    # of the second one no rows are kept; as it runs again a layer at a time is there
    assert load.in_flight_rows == 11


def test_the_sizes_of_a_run_are_those_of_its_facts() -> None:
    """Of 8 ranks, tp 2 · dp 4 in one stage, with ep 2 and etp 2: {0, 2}, {1, 3} and so on exchange tokens."""
    options = ExpertOptions(4, width=6, dispatcher=Dispatcher.PADDED)
    facts = facts_of_run(options, {"dp": 4, "tp": 2, "ep": 2, "etp": 2}, dtype="bfloat16")
    groups = ((0, 2), (1, 3), (4, 6), (5, 7))
    sharing = ((0, 1, 2, 3), (4, 5, 6, 7))
    expected = TokenSizes(2 * 32, "padded", 2, 2 * 16 // 2, 4 * 32 * 6 // 2, groups, sharing, (4,))
    assert sizes_of_run([facts]) == expected
    for ep in (None, 3):
        assert sizes_of_run([facts_of_run(options, {"dp": 4, "tp": 2, "ep": ep, "etp": 2})]) is None


def test_layers_with_different_numbers_of_experts_keep_their_own_counts() -> None:
    """A rank that is the second of two: of 2 experts it has the last one, of 4 the last two."""
    recorded = ExpertCounts()
    for layer, (num, routes) in enumerate(((2, [0, 1, 1]), (4, [3, 3, 0]))):
        chosen = torch.tensor(routes).unsqueeze(1)
        recorded.add(7, layer, chosen, chosen, num, (num // 2, [layer + 1] * (num // 2)))
    counts = read_counts(recorded.facts())
    assert counts.num.tolist() == [2, 4]
    assert (counts.first.tolist(), counts.held.tolist()) == ([1, 2], [1, 2])
    assert counts.chosen.tolist() == [[1, 2, 0, 0], [1, 0, 0, 2]]
    assert counts.rows.tolist() == [1, 4]
    assert counts.in_steps([8]).step.tolist() == []


def test_tokens_of_which_no_route_is_kept_are_counted() -> None:
    recorded, chosen = ExpertCounts(), torch.tensor([[0, 1], [1, 2], [2, 0]])
    for kept in ([[0, 3], [3, 3], [2, 0]], [[3, 3], [3, 3], [3, 3]]):
        recorded.add(0, 0, chosen, torch.tensor(kept), 3, (0, [1, 1, 1]))
    recorded.add(0, 0, chosen, chosen, 3, (0, [2, 2, 2]))
    facts = recorded.facts()
    counts, older = read_counts(facts), read_counts({**facts, "tokens": None})
    damaged = ([[3, 1], [3, 3]], [[3, 1], [3, 4], [3, 0]], [[3, 1], [3, 3], [3, -1]], [[3, 1], [3, 3], [3]])
    for tokens in damaged:
        assert read_counts({**facts, "tokens": tokens}).tokens.tolist() == [-1, -1, -1]
    assert (counts.tokens.tolist(), counts.dropped.tolist()) == ([3, 3, 3], [1, 3, 0])
    assert older.dropped.tolist() == [-1, -1, -1]
