"""Dropout masks depend on their place alone: the same again, whatever ran between, and in a recomputed forward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from torch import Tensor

from instrument.mesh import fit_shape, make_mesh
from instrument.models.gpt import GptStage
from instrument.models.gpt_config import GptConfig, Recompute
from instrument.models.parallel import ParallelOptions, make_parallel
from instrument.recorder import Recorder
from instrument.sequence.dropout import DropoutSeeds, MicrobatchKey, dropout
from pptrace.errors import UsageError
from tests.instrument.models.cases.mixes import Mix, mesh_of, run_steps, runtime_of
from tests.support.extent import ALL
from tests.support.pool import Pool

SEEDS = DropoutSeeds(seed=3, position=(0, 0), tp_rank=0)


def ones() -> Tensor:
    return torch.ones(50, 200, dtype=torch.float64)


def test_a_mask_is_the_same_again_and_another_seed_gives_another() -> None:
    first = dropout(ones(), 0.3, 11)
    torch.rand(7)
    assert torch.equal(first, dropout(ones(), 0.3, 11))
    assert not torch.equal(first, dropout(ones(), 0.3, 12))


def test_it_leaves_the_default_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    dropout(ones(), 0.3, 11)
    assert torch.equal(torch.rand(3), expected)


def test_the_share_of_zeros_and_the_scale_are_those_of_the_probability() -> None:
    dropped = dropout(ones(), 0.3, 11)
    assert set(dropped.unique().tolist()) == {0.0, 1 / 0.7}
    assert float((dropped == 0).double().mean()) == pytest.approx(0.3, abs=0.02)


def test_backward_has_the_mask_of_forward() -> None:
    x = ones().requires_grad_()
    dropped = dropout(x, 0.3, 11)
    dropped.sum().backward()
    assert torch.equal(x.grad, dropped.detach())


def test_every_place_has_a_seed_of_its_own() -> None:
    ranks = [DropoutSeeds(0, (dp, cp), tp) for dp, cp, tp in product(range(3), range(2), range(4))]
    indices = list(product(range(3), range(4), range(4), range(2)))
    seeds = {rank.of(MicrobatchKey(*index[:2]), *index[2:], sharded=True) for rank in ranks for index in indices}
    assert len(seeds) == len(ranks) * len(indices)


def test_ranks_of_tp_share_masks_of_what_they_all_hold_and_others_do_not() -> None:
    ranks = [DropoutSeeds(0, (dp,), tp) for dp in range(2) for tp in range(2)]
    seeds = [rank.of(MicrobatchKey(1, 2), 3, 0, sharded=False) for rank in ranks]
    assert seeds[0] == seeds[1]
    assert seeds[2] == seeds[3]
    assert seeds[0] != seeds[2]
    assert not set(seeds) & {rank.of(MicrobatchKey(1, 2), 3, 0, sharded=True) for rank in ranks}


def test_without_dropout_nothing_is_done() -> None:
    x = ones()
    assert dropout(x, 0.0, 1) is x


@pytest.mark.parametrize("probability", [-0.1, 1.0, float("nan")])
def test_a_probability_out_of_range_is_refused(probability: float) -> None:
    with pytest.raises(UsageError, match=rf"dropout probability {probability} is not in \[0, 1\)"):
        dropout(ones(), probability, 1)


@dataclass(frozen=True, slots=True)
class Masks:
    """Elements that one rank's layer zeroed between its parts, as bytes, each run the same layer anew; and gradients of its
    input.
    """

    place: tuple[int, int, int, int]
    runs: tuple[tuple[bytes, ...], ...]
    gradients: tuple[bytes, ...]


def masks_of(sizes: dict[str, int], options: ParallelOptions) -> Masks:
    """The masks of two runs of one layer without recompute, and of one that recomputes fully, backward included."""
    mesh = make_mesh(fit_shape(4, **sizes), "cpu", "gloo")
    parallel = make_parallel(mesh, options, Recorder(), seed=5)
    runs, gradients = [], []
    for recompute in (Recompute.NONE, Recompute.NONE, Recompute.FULL):
        torch.rand(mesh.rank + len(runs))  # what the default generator does must not matter
        model = GptConfig(2, 16, 2, 16, dtype=torch.float64, dropout=0.4, recompute=recompute, seed=5)
        stage = GptStage(model, [1], parallel)  # the same initial values each time; not the first stage
        stage.head = None
        x = torch.ones(2, parallel.activation_length(16), 16, dtype=torch.float64)
        x += torch.arange(16) / 10  # what a norm does not make zero
        x.requires_grad_()
        kept: list[bytes] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: (_note(t, kept), t)[1], lambda t: t):
            output = stage(x, microbatch_key=MicrobatchKey(3, 1))
        output.backward(torch.ones_like(output))
        runs.append((*kept, output.detach().numpy().tobytes()))
        gradients.append(x.grad.numpy().tobytes())
    return Masks(mesh.coordinates, tuple(runs), tuple(gradients))


def _note(tensor: Tensor, kept: list[bytes]) -> None:
    if tensor.dtype is torch.bool:
        kept.append(tensor.numpy().tobytes())


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"pp": 1, "dp": 2, "tp": 2}, ParallelOptions()),
        ({"pp": 1, "dp": 2, "tp": 2}, ParallelOptions(sequence=True, overlap=True)),
        ({"pp": 1, "cp": 2, "tp": 2}, ParallelOptions(sequence=True)),
        ({"pp": 1, "dp": 2, "cp": 2}, ParallelOptions()),
    ],
)
def test_masks_of_a_layer_are_those_of_the_rank(pool: Pool, sizes: dict[str, int], options: ParallelOptions) -> None:
    """In a re-run and recomputed the same; on all ranks of tp the same where they hold the same; everywhere else others."""
    ranks = pool.run(masks_of, sizes, options, timeout_s=300)
    owners: dict[bytes, set[tuple[int, ...]]] = {}
    for rank in ranks:
        first, again, recomputed = rank.runs
        assert first == again
        assert first[-1] == recomputed[-1], "the output of a layer that recomputes"
        assert len(set(rank.gradients)) == 1, "a recomputed forward has the masks of the first"
        assert len(first) == 3, "two masks and the output"
        assert first[0] != first[1]
        for mask in first[:2]:
            _, dp, cp, tp = rank.place
            owners.setdefault(mask, set()).add((dp, cp, tp) if options.sequence else (dp, cp))
    assert all(len(indices) == 1 for indices in owners.values()), "a mask on two places that hold different activations"
    replicated = sizes.get("tp", 1) if not options.sequence else 1
    assert len(owners) == 2 * len(ranks) // replicated


def losses_with_dropout(mixes: list[Mix]) -> list[list[float]]:
    """Of one training after the other in the same processes."""
    mesh = mesh_of(mixes[0])
    return [run_steps(mix, mesh, runtime_of(mix, mesh, Recorder()), 2) for mix in mixes]


@pytest.mark.parametrize("sequence", [False, True] if ALL else [True])
def test_training_with_dropout_again_gives_the_same_losses_to_the_bit(pool: Pool, sequence: bool) -> None:
    mix = Mix(pp=2, tp=2, sequence=sequence, dropout=0.2)
    others = (replace(mix, recompute=Recompute.FULL), replace(mix, schedule="zb-h1"), replace(mix, dropout=0.0))
    ranks = pool.run(losses_with_dropout, [mix, mix, *others], timeout_s=300)
    last = [losses for losses in ranks if losses[0]]
    assert len(last) == 2, "the tensor-parallel ranks of the last stage"
    assert last[0] == last[1]
    plain, again, full, split, none = last[0]
    assert len(plain) == 2
    assert plain == again
    assert plain == full, "recompute draws the same masks"
    assert split == pytest.approx(plain, rel=1e-9), "so does another schedule"
    assert plain[0] != none[0], "dropout does something"
