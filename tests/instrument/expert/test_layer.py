"""The layer with experts, alone and on several ranks, against all tokens through all experts (float64)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from instrument.expert.groups import alone
from instrument.expert.layer import RoutesOfForward
from pptrace.marks import Axis, Collective, CollectiveMark
from pptrace.sizes.expert_options import Dispatcher, ExpertOptions, Scoring, Shared
from pptrace.sizes.experts import ExpertCall, ExpertSizes
from tests.instrument.expert.cases.layers import (
    HIDDEN,
    Seen,
    Tokens,
    compare,
    dense,
    inputs_of,
    make_layer,
    overlapped_order,
)
from tests.support.expert_calls import expert_calls
from tests.support.extent import ALL
from tests.support.pool import Pool

TOLERANCE = 1e-12
OPTIONS = ExpertOptions(8, 2, width=5)
SWITCH = replace(OPTIONS, top_k=1, scoring=Scoring.SOFTMAX_BEFORE)
CASES = [
    Tokens(OPTIONS),
    Tokens(SWITCH),
    Tokens(replace(OPTIONS, top_k=8)),
    Tokens(replace(OPTIONS, num=4), num=1),
    Tokens(OPTIONS, equal=True),  # ties: all to experts 0 and 1
    Tokens(SWITCH, to_expert=6),  # all to one expert: the other ranks have no rows
    Tokens(OPTIONS, num=0),  # no rank has any tokens
]
GATHERED = [replace(tokens, options=replace(tokens.options, dispatcher=Dispatcher.ALL_GATHER)) for tokens in CASES]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("size", [2, 4] if ALL else [4])
def test_ranks_that_share_experts_give_what_one_with_all_of_them_does(pool: Pool, size: int, split: bool) -> None:
    outcomes = pool.run(compare, CASES, split, world=size)
    for index, tokens in enumerate(CASES):
        seen = [row[index] for row in outcomes]
        assert not any(each.at_once for each in seen)
        assert sum(sum(each.rows_of_expert) for each in seen) == size * 2 * tokens.num * tokens.options.top_k
    all_to_one = [row[CASES.index(Tokens(SWITCH, to_expert=6))] for row in outcomes]
    held = 8 // size
    assert all_to_one[6 // held].rows_of_expert[6 % held] == size * 2 * 5
    assert sum(sum(each.rows_of_expert) for each in all_to_one) == size * 2 * 5
    check_marks([row[0].marks for row in outcomes], size)
    check_outcomes(outcomes, CASES)


def test_tokens_that_are_gathered_give_the_same(pool: Pool) -> None:
    outcomes = pool.run(compare, GATHERED, False, world=2)
    for index, tokens in enumerate(GATHERED):
        seen = [row[index] for row in outcomes]
        assert sum(sum(each.rows_of_expert) for each in seen) == 2 * 2 * tokens.num * tokens.options.top_k
    check_outcomes(outcomes, GATHERED)
    rows, weights = 2 * 2 * 5 * HIDDEN * 8, 2 * 2 * 5 * 2 * 8
    gathers, scatters = Collective.ALL_GATHER, Collective.REDUCE_SCATTER
    for mark in outcomes[0][0].marks:
        assert mark.uneven is None
    assert [(mark.kind, mark.bytes) for mark in outcomes[0][0].marks] == [
        (gathers, weights),  # the routes, 64 bits each
        (gathers, rows),
        (gathers, weights),
        (scatters, rows),
        (gathers, rows),
        (scatters, weights),
        (scatters, rows),
    ]


PADDED = [replace(tokens, options=replace(tokens.options, dispatcher=Dispatcher.PADDED)) for tokens in CASES]
OVERLAPPED = [
    replace(tokens, options=replace(tokens.options, overlap=True, width=4))
    for tokens in (CASES[0], CASES[5], PADDED[0])
]
IDLE = [replace(tokens, idle=1) for tokens in (CASES[0], PADDED[0], OVERLAPPED[0])]


def check_outcomes(outcomes: list[list[Seen]], cases: list[Tokens], etp: int = 1) -> None:
    """Values are exact, and every call of every rank carries the bytes that the formulas predict from the routes."""
    ep = len(outcomes) // etp
    for index, tokens in enumerate(cases):
        for each in (row[index] for row in outcomes):
            assert max(each.errors) < TOLERANCE, (tokens, each)
        options = tokens.options
        kept = np.array([row[index].counts for row in outcomes])
        num_tokens = 2 * tokens.num
        sizes = ExpertSizes(ep, etp, options.num, options.top_k, HIDDEN, num_tokens, 8, 8, int(kept.max(initial=0)))
        for rank, row in enumerate(outcomes):
            seen = [
                ExpertCall(mark.axis, mark.kind, mark.bytes, 0 if mark.uneven is None else mark.uneven.received_bytes)
                for mark in row[index].marks
            ]
            assert sorted(seen) == sorted(expert_calls(options.dispatcher, sizes, kept, rank)), (tokens, rank)


def test_padded_buffers_and_overlapped_journeys_give_the_same(pool: Pool) -> None:
    outcomes = pool.run(compare, PADDED + OVERLAPPED + IDLE, False, world=2)
    check_outcomes(outcomes, PADDED + OVERLAPPED + IDLE)
    slots = [max(max(row[index].counts) for row in outcomes) for index in range(len(PADDED))]
    for index, tokens in enumerate(PADDED):
        first, *rows = outcomes[0][index].marks
        assert (first.kind, first.bytes) == (Collective.ALL_REDUCE, 8)  # the largest number of routes to an expert
        num_bytes = tokens.options.num * slots[index] * HIDDEN * 8
        assert [(mark.kind, mark.bytes, mark.uneven) for mark in rows] == [(Collective.ALL_TO_ALL, num_bytes, None)] * 4
        assert set(outcomes[0][index].rows_of_expert) == {2 * slots[index]}


@pytest.mark.parametrize("split", [False, True])
def test_ranks_that_share_each_expert_give_the_same(pool: Pool, split: bool) -> None:
    """Two by two: of uneven rows, of equal slots, and of all tokens everywhere."""
    cases = [replace(tokens, options=replace(tokens.options, width=6)) for tokens in (*CASES, *PADDED, *GATHERED)]
    cases += [] if split else OVERLAPPED
    outcomes = pool.run(compare, cases, split, 2, world=4)
    check_outcomes(outcomes, cases, etp=2)
    along = [mark for mark in outcomes[0][0].marks if mark.axis is Axis.ETP]
    counts, there, back, there_again, back_again = along  # backward gathers gradients as forward does rows
    assert (counts.kind, counts.bytes) == (Collective.ALL_GATHER, 2 * 8 * 8)  # of both ranks: 4 experts from 2 ranks
    for mark in (there, there_again):  # this rank's rows to both, all rows from both
        assert mark.uneven.received_bytes == sum(mark.uneven.received_rows) * HIDDEN * 8
        assert len(set(mark.uneven.sent_rows)) == 1
    for mark in (back, back_again):
        assert mark.uneven.sent_rows == there.uneven.received_rows
    assert sum(outcomes[0][0].rows_of_expert) == sum(there.uneven.received_rows)


@pytest.mark.parametrize("split", [False, True])
def test_all_experts_at_once_give_the_same(pool: Pool, split: bool) -> None:
    """With every dispatcher, experts and ranks without rows, weights' gradients later, and ranks that share each expert."""
    cases = CASES + PADDED if split else GATHERED + OVERLAPPED + IDLE
    cases = [replace(tokens, options=replace(tokens.options, width=6, grouped=True)) for tokens in cases]
    for etp in (1, 2) if ALL else (2 if split else 1,):
        for index, seen in enumerate(zip(*pool.run(compare, cases, split, etp, world=4), strict=True)):
            assert max(error for each in seen for error in each.errors) < TOLERANCE, (etp, cases[index], seen)
            assert all(each.at_once for each in seen)


def check_marks(marks: list[tuple[CollectiveMark, ...]], size: int) -> None:
    """Counts, rows there and back, and both mirrored; what one rank sends to another is what that one gets from it."""
    for calls in zip(*marks, strict=True):
        assert {mark.kind for mark in calls} == {Collective.ALL_TO_ALL}
        uneven = [mark.uneven for mark in calls]
        if calls[0].uneven is None:
            assert {mark.bytes for mark in calls} == {8 * 8}
            continue
        for rank, (mark, of_rank) in enumerate(zip(calls, uneven, strict=True)):
            assert mark.bytes == sum(of_rank.sent_rows) * HIDDEN * 8
            assert of_rank.received_bytes == sum(of_rank.received_rows) * HIDDEN * 8
            sent_here = [other.sent_rows[rank] for other in uneven if other is not None]
            assert of_rank.received_rows == tuple(sent_here)
    for of_rank_marks in marks:
        counts, there, back, back_again, there_again = of_rank_marks
        assert counts.uneven is None
        assert there.uneven.sent_rows == back.uneven.received_rows == back_again.uneven.sent_rows
        assert there.uneven.received_rows == back.uneven.sent_rows == back_again.uneven.received_rows
        assert there_again.uneven.sent_rows == there.uneven.received_rows
        assert sum(there.uneven.sent_rows) == 2 * 5 * 2


def test_what_is_overlapped_runs_between_start_and_wait(pool: Pool) -> None:
    tokens = replace(CASES[0], options=replace(OPTIONS, overlap=True, shared_width=4))
    for order in pool.run(overlapped_order, tokens, world=2):
        assert order == [
            *("start", "shared, first half", "wait", "start", "shared, second half", "wait"),
            *("start", "back through its second half", "wait"),
            *("start", "back through its first half", "weights", "wait"),
        ]


def test_a_recomputation_follows_the_routes_of_its_forward() -> None:
    layer, x = make_layer(Tokens(OPTIONS)), inputs_of(Tokens(OPTIONS), 0)
    kept = RoutesOfForward()
    first = layer(x, kept).detach()
    routes = kept.routes
    with torch.no_grad():
        layer.router.weight.mul_(-1)  # another choice, if there were one
    again = layer(x, kept)
    assert kept.routes is routes
    assert not torch.equal(again, first)  # its weights are new ones
    assert not torch.allclose(again, dense(layer, x))


@pytest.mark.parametrize("how", Shared)
def test_a_shared_layer_is_added_or_joined_by_learned_coefficients(how: Shared) -> None:
    """σ(x·w) of the shared MLP, or both weighed by a softmax of two: against the formula, gradients too."""
    layer, x = make_layer(Tokens(replace(OPTIONS, shared_width=4, shared=how))), inputs_of(Tokens(OPTIONS), 0)
    with torch.no_grad():
        for part in layer.shared.parameters():
            part.normal_(generator=torch.Generator().manual_seed(4))
    shared = layer.shared.outer(F.gelu(layer.shared.inner(x)))
    weights = [layer.router.weight, x]
    if layer.shared.coefficient is not None:
        z = F.linear(x, layer.shared.coefficient.weight, layer.shared.coefficient.bias)
        weights.append(layer.shared.coefficient.weight)
    if how is Shared.ADDED:
        expected = dense(layer, x) + shared
    elif how is Shared.GATED:
        expected = dense(layer, x) + shared / (1 + (-z).exp())
    else:
        first = 1 / (1 + (z[..., 1:] - z[..., :1]).exp())
        expected = first * dense(layer, x) + (1 - first) * shared
    output = layer(x)
    assert torch.allclose(output, expected, rtol=0, atol=TOLERANCE)
    ours, theirs = (torch.autograd.grad(torch.cos(y).sum(), weights) for y in (output, expected))
    for gradient, right in zip(ours, theirs, strict=True):
        assert torch.allclose(gradient, right, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_the_losses_reach_gate_and_tokens_with_their_weight(weight: float) -> None:
    """α·E·Σ f·P and β·mean (log Σ exp z)², of each sequence, beside what the experts' weights give."""
    options = replace(OPTIONS, aux_loss=0.5, z_loss=0.25)
    groups = replace(alone(), loss_weight=weight)
    layer, whole = make_layer(Tokens(options), groups), make_layer(Tokens(options))
    x, y = inputs_of(Tokens(options), 0), inputs_of(Tokens(options), 0)
    output = layer(x)
    output.backward(torch.ones_like(output))
    logits = F.linear(y, whole.router.weight)
    chosen = logits.topk(2, -1).indices
    shares = F.one_hot(chosen, 8).double().sum((1, 2)) / (2 * 5)
    balance = 0.5 * 8 * (shares * logits.softmax(-1).mean(1)).sum(-1).mean()
    loss = dense(whole, y).sum() + weight * (balance + 0.25 * logits.logsumexp(-1).square().mean())
    loss.backward()
    for ours, theirs in ((layer.router.weight, whole.router.weight), (x, y)):
        assert torch.allclose(ours.grad, theirs.grad, rtol=0, atol=TOLERANCE)
