"""Random numbers of tokens, choices that depend on them, and routes that are given (float64)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from instrument.expert.forced import check_routes, forced_routes
from instrument.expert.noise import ForwardKey, TokenIds, Use
from instrument.expert.router import choose, jittered, keep_second
from pptrace.errors import UsageError
from pptrace.sizes.expert_options import ExpertOptions, Forced, SecondChoice

KEY = ForwardKey(seed=3, layer=1, step=2)
MANY = TokenIds(KEY, torch.arange(40), torch.arange(500))
"""20,000 tokens."""


def test_numbers_are_those_of_splitmix64() -> None:
    """Against the generator's definition in Python's unbounded integers, one number at a time."""
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def mixed(state: int) -> int:
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        return state ^ (state >> 31)

    start = 4
    for number in (KEY.seed, KEY.layer, KEY.step, Use.JITTER):
        start = mixed((start + number + golden) & mask)
    start >>= 1
    sequence, position, index = 7, 11, 2
    state = mixed(mixed((start + (sequence + 1) * golden) & mask))
    for number in (position + 1, index + 1):
        state = mixed((state + number * golden) & mask)
    ids = TokenIds(KEY, torch.tensor([0, sequence]), torch.tensor([position]))
    assert ids.uniform(Use.JITTER, 3)[1, 0, index].item() == (state >> 11) / 2**53


def test_numbers_belong_to_tokens_and_uses() -> None:
    whole = MANY.uniform(Use.ROUTES, 3)
    part = TokenIds(KEY, torch.tensor([5, 39]), torch.tensor([499, 0])).uniform(Use.ROUTES, 3)
    assert torch.equal(part, whole[[5, 39]][:, [499, 0]])
    others = [replace(KEY, seed=4), replace(KEY, layer=0), replace(KEY, step=3)]
    for other in [TokenIds(key, MANY.sequences, MANY.positions).uniform(Use.ROUTES, 3) for key in others]:
        assert abs(torch.corrcoef(torch.stack((other.flatten(), whole.flatten())))[0, 1]) < 0.02
    assert abs(torch.corrcoef(torch.stack((MANY.uniform(Use.JITTER, 3).flatten(), whole.flatten())))[0, 1]) < 0.02
    assert abs(torch.corrcoef(whole.flatten(0, 1).T) - torch.eye(3)).max() < 0.03
    even = (torch.arange(60000) + 0.5) / 60000
    assert (whole.flatten().sort().values - even).abs().max() < 0.01  # Kolmogorov and Smirnov


def test_jitter_is_a_factor_around_one() -> None:
    x = torch.full((40, 500, 4), 2.0, dtype=torch.float64)
    factors = jittered(x, 0.25, MANY) / 2
    assert 0.75 <= factors.min() < 0.7502
    assert 1.2498 < factors.max() < 1.25
    assert factors.mean().item() == pytest.approx(1, abs=2e-3)


def test_a_sampled_second_choice_follows_the_softmax_of_the_others() -> None:
    logits = torch.tensor([2.0, 0.0, 1.0, -1.0], dtype=torch.float64).expand(40, 500, 4)
    chosen = choose(logits, ExpertOptions(4, second=SecondChoice.SAMPLED), tokens=MANY)
    assert (chosen[..., 0] == 0).all()
    counts = torch.bincount(chosen[..., 1].flatten(), minlength=4) / 20000
    expected = logits[0, 0, 1:].softmax(-1)
    assert counts[0] == 0
    assert (counts[1:] - expected).abs().max() < 0.01


def test_a_random_second_route_is_kept_twice_as_often_as_its_share() -> None:
    weights = torch.tensor([0.6, 0.2], dtype=torch.float64).expand(40, 500, 2)
    kept = keep_second(weights, MANY)
    assert kept[..., 0].all()
    assert kept[..., 1].double().mean().item() == pytest.approx(0.5, abs=0.01)
    assert keep_second(torch.tensor([[[0.5, 0.5]]]), TokenIds(KEY, torch.arange(1), torch.arange(1))).all()


def test_groups_limit_the_experts_of_a_token() -> None:
    """The two groups with the largest sum of their two best, and the four best experts of these."""
    options = ExpertOptions(12, 4, num_groups=4, groups_per_token=2)
    logits = torch.randn(64, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for scores, chosen in zip(logits.tolist(), choose(logits, options).tolist(), strict=True):
        groups = [sorted(scores[first : first + 3])[-2:] for first in range(0, 12, 3)]
        best = sorted(range(4), key=lambda group: -sum(groups[group]))[:2]
        inside = [expert for expert in range(12) if expert // 3 in best]
        assert chosen == sorted(inside, key=lambda expert: -scores[expert])[:4]
    ties = choose(torch.zeros(1, 12), options)
    assert ties.tolist() == [[0, 1, 2, 3]]


def test_drawn_routes_are_even_or_biased_and_name_no_expert_twice() -> None:
    for forced, weights in ((Forced.RANDOM, [1.0] * 4), (Forced.BIASED, [1, 1 / 2, 1 / 3, 1 / 4])):
        one = forced_routes(MANY, ExpertOptions(4, 1, forced=forced, scoring="sigmoid"))
        shares = torch.bincount(one.flatten(), minlength=4) / 20000
        assert (shares - torch.tensor(weights) / sum(weights)).abs().max() < 0.01
        two = forced_routes(MANY, ExpertOptions(4, 2, forced=forced))
        assert (two[..., 0] != two[..., 1]).all()


def test_replayed_routes_are_those_of_the_table(tmp_path: Path) -> None:
    table = np.random.default_rng(1).random((2, 2, 3, 8, 4)).argsort()[..., :2]
    np.save(tmp_path / "routes.npy", table)
    options = ExpertOptions(4, every=2, forced=Forced.REPLAYED, routes=str(tmp_path / "routes.npy"))
    ids = TokenIds(replace(KEY, step=5, layer=2), torch.tensor([1, 4]), torch.tensor([7, 2]))
    assert forced_routes(ids, options).tolist() == table[1, 1][[1, 1]][:, [7, 2]].tolist()
    check_routes(options, layers=4, sequence=8)
    for layers, sequence, text in ((5, 8, "2 layers with experts, 8 positions"), (4, 9, "the model has 2, 9 and 2")):
        with pytest.raises(UsageError, match=text):
            check_routes(options, layers, sequence)
    with pytest.raises(UsageError, match=r"layer 0 to experts 0 to 3; the layer has 0 to 2"):
        check_routes(replace(options, num=3), 4, 8)
    table[1, 1, 2, 3] = 1  # of a capacity, a rank would have room for each of its tokens once
    np.save(tmp_path / "twice.npy", table)
    with pytest.raises(UsageError, match="routes a token to an expert twice"):
        check_routes(replace(options, routes=str(tmp_path / "twice.npy")), 4, 8)


def test_tables_that_cannot_be_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.npy").write_text("no array")
    (tmp_path / "empty.npy").touch()
    np.save(tmp_path / "flat.npy", np.zeros(3))
    table = np.zeros((1, 2, 1, 8, 1), dtype=np.int64)
    np.save(tmp_path / "wide.npy", table + 2**32)
    with (tmp_path / "several.npy").open("wb") as file:
        np.savez(file, table)
    with (tmp_path / "huge.npy").open("wb") as file:
        header = {"descr": "<i8", "fortran_order": False, "shape": (2**30, 2**29, 1, 8, 1)}
        np.lib.format.write_array_header_1_0(file, header)
    for name, text in (
        *((name, "cannot be read") for name in ("none", "text", "empty", "several", "huge")),
        ("flat", r"shape \(3,\) of float64"),
        ("wide", "to experts 4294967296 to 4294967296, which no layer has"),
    ):
        options = ExpertOptions(4, forced=Forced.REPLAYED, routes=str(tmp_path / f"{name}.npy"))
        with pytest.raises(UsageError, match=text):
            check_routes(options, 2, 8)
