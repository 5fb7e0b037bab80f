"""Main parameters: bfloat16 models with float32 updates, and the parts of the replicas."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from instrument.collectives import AxisGroup
from instrument.models.gpt import GptStage, cross_entropy
from instrument.models.gpt_config import GptConfig
from instrument.optim.adamw import AdamW
from instrument.optim.buckets import Bucket
from instrument.optim.main_parameters import Copies, MainAdamW, Shards, accumulate_in, main_parameters, make_adamw
from instrument.recorder import Recorder
from pptrace.marks import Axis
from tests.instrument.models.cases.mixes import (
    SEQUENCE,
    STEPS,
    Mix,
    mesh_of,
    of_one_process,
    reference,
    run_steps,
    runtime_of,
)
from tests.support.extent import ALL
from tests.support.pool import Pool


def test_small_gradients_add_up_in_more_bits() -> None:
    parameter = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    accumulate_in([parameter], torch.float32)
    for _ in range(64):
        (parameter * 1.0078125).sum().backward()
    assert parameter.grad.dtype == torch.float32
    assert float(parameter.grad) == 64 * 1.0078125  # in bfloat16 a sum of 64 has no place for the fraction


def test_updates_smaller_than_a_bit_of_the_parameter_are_not_lost() -> None:
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    accumulate_in([parameter], torch.float32)
    main = main_parameters([parameter], None)
    assert isinstance(main, Copies)
    optimizer = make_adamw([parameter], main, lr=1e-4)
    alone = nn.Parameter(torch.ones(4))
    expected = AdamW([alone], lr=1e-4)
    for _ in range(40):
        parameter.grad, alone.grad = torch.ones(4), torch.ones(4)
        optimizer.step()
        expected.step()
        optimizer.zero_grad()
    assert torch.equal(main.parameters[0], alone)
    assert torch.equal(parameter, alone.bfloat16())
    assert parameter.detach()[0].item() < 1
    assert parameter.grad is None
    assert main.parameters[0].grad is None


def test_a_step_taken_back_takes_the_model_back() -> None:
    parameter = nn.Parameter(torch.full((3,), 0.5, dtype=torch.bfloat16))
    accumulate_in([parameter], torch.float32)
    optimizer = MainAdamW(Copies([parameter]), lr=0.1)
    parameter.grad = torch.full((3,), 2.0)
    optimizer.scale_gradients(0.5)
    optimizer.step()
    assert parameter.detach()[0].item() != 0.5
    optimizer.roll_back()
    assert torch.equal(parameter, torch.full((3,), 0.5, dtype=torch.bfloat16))


def test_parameters_of_enough_bits_stand_for_themselves() -> None:
    stage = GptStage(GptConfig(1, 8, 2, 4), range(1))
    accumulate_in(stage.parameters(), torch.float32)
    assert main_parameters(stage.parameters(), None) is None
    assert type(make_adamw(stage.parameters(), None, 0.1)) is AdamW


def test_a_part_counts_the_rows_it_has() -> None:
    """One replica has the whole of a bucket: 6 numbers of which 4 count, and 3 of which none does."""
    parameters = [nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(3))]
    bucket = Bucket(parameters)
    shards = Shards([bucket], AxisGroup(None, Axis.DP, Recorder()), 1)
    for parameter in parameters:
        parameter.grad = torch.arange(1.0, parameter.numel() + 1).view_as(parameter)
    shards.finish(bucket, bucket.gradients())
    assert [part.tolist() for part in shards.counted({id(parameters[0]): 2})] == [[1, 2, 3, 4]]
    assert [part.tolist() for part in shards.counted({id(p): None for p in parameters})] == [
        [1, 2, 3, 4, 5, 6],
        [1, 2, 3],
    ]
    assert parameters[0].grad is None


@dataclass(frozen=True, slots=True)
class _Held:
    """State of a replica: numbers in its main parameters, in its model, and the losses it saw."""

    main: int
    model: int
    losses: tuple[float, ...]
    dtypes: tuple[str, ...]


def _train(mix: Mix) -> _Held:
    mesh = mesh_of(mix)
    runtime = runtime_of(mix, mesh, Recorder())
    losses = run_steps(mix, mesh, runtime, STEPS)
    main = runtime.gradients.main
    model = list(runtime.program.parameters())
    dtypes = {str(p.dtype) for p in main.parameters} | {str(p.dtype) for p in model}
    return _Held(
        sum(p.numel() for p in main.parameters), sum(p.numel() for p in model), tuple(losses), tuple(sorted(dtypes))
    )


@pytest.mark.parametrize("zero", [1, 2, 3] if ALL else [1, 3])
def test_replicas_hold_equal_parts(pool: Pool, zero: int) -> None:
    held = pool.run(_train, Mix(dp=4, zero=zero), world=4)
    whole = sum(p.numel() for p in GptStage(Mix(tied=False).config, range(Mix().layers)).parameters()) - 256 * 16
    for rank in held:
        assert whole / 4 <= rank.main <= whole / 4 + 4 * len(held)
    assert len({rank.losses for rank in held}) == 1


@pytest.mark.parametrize(
    ("mix", "zero"),
    [
        (Mix(pp=2, tp=2, sequence=True, schedule="zb-h1"), 0),
        (Mix(pp=2, dp=2, tied=False), 1),
        (Mix(tp=2, dp=2, sequence=True), 3),
    ],
)
def test_bfloat16_trains_as_float32_does_but_for_its_rounding(pool: Pool, mix: Mix, zero: int) -> None:
    mix = replace(mix, zero=zero, bfloat16=True)
    held = pool.run(_train, mix, world=4)
    _, expected = reference(of_one_process(mix))
    for rank in held:
        assert rank.dtypes == (("torch.float32",) if zero == 3 else ("torch.bfloat16", "torch.float32"))
        if rank.losses:
            assert rank.losses == pytest.approx(expected, rel=0.002)
    assert any(rank.losses for rank in held)


def test_a_bfloat16_loss_is_computed_in_more_bits() -> None:
    logits = torch.linspace(-3, 3, 256).repeat(4, SEQUENCE, 1).bfloat16()
    targets = torch.zeros(4, SEQUENCE, dtype=torch.int64)
    assert torch.equal(cross_entropy(logits, targets), cross_entropy(logits.float(), targets))
