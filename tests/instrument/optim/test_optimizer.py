"""AdamW is torch's, and its last step can be taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from instrument.optim.adamw import AdamW
from pptrace.errors import PptraceError, UsageError

SHAPES = ((3, 4), (5,), (2, 1, 3))


def make_parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in SHAPES]


def draw_gradients(parameters: Sequence[nn.Parameter], step: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters:
        parameter.grad = scale * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.grad.view(-1)[step % 2] = 0.0


def moments_of(optimizer: AdamW) -> list[tuple[Tensor, Tensor]]:
    return list(zip(optimizer._first_moments, optimizer._second_moments, strict=True))


def state_of(optimizer: AdamW) -> list[Tensor]:
    moments = [moment.clone() for pair in moments_of(optimizer) for moment in pair]
    return [parameter.detach().clone() for parameter in optimizer.parameters] + moments


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_steps_are_those_of_torchs_adamw_to_the_bit(dtype: torch.dtype) -> None:
    ours, theirs = make_parameters(dtype), make_parameters(dtype)
    optimizer = AdamW(ours, 1e-2, weight_decay=0.1)
    torchs = torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.1, foreach=True)
    for step in range(6):
        optimizer.lr = torchs.param_groups[0]["lr"] = 1e-2 / (1 + step)
        draw_gradients(ours, step)
        draw_gradients(theirs, step)
        optimizer.step()
        torchs.step()
        assert optimizer.num_steps == step + 1
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            state = torchs.state[other]
            assert torch.equal(one, other)
            assert torch.equal(moments_of(optimizer)[index][0], state["exp_avg"])
            assert torch.equal(moments_of(optimizer)[index][1], state["exp_avg_sq"])


@pytest.mark.parametrize("step_taken_back", [0, 1, 5])
def test_a_step_taken_back_leaves_parameters_and_moments_as_they_were(step_taken_back: int) -> None:
    optimizer = AdamW(make_parameters(), 1e-2, weight_decay=0.1)
    for step in range(step_taken_back):
        draw_gradients(optimizer.parameters, step)
        optimizer.step()
    before = state_of(optimizer)
    draw_gradients(optimizer.parameters, step_taken_back, scale=3.0)
    optimizer.step()
    assert max(float((old - new).abs().max()) for old, new in zip(before, state_of(optimizer), strict=True)) > 1e-3
    optimizer.lr = 17.0  # of the next step: the last one was made with another
    optimizer.roll_back()
    assert optimizer.num_steps == step_taken_back
    for old, new in zip(before, state_of(optimizer), strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=1e-12)


def test_a_second_moment_taken_back_is_never_negative() -> None:
    optimizer = AdamW(make_parameters(torch.float32), 1e-2)
    for step, scale in enumerate((1e-6, 1e3)):
        draw_gradients(optimizer.parameters, step, scale)
        optimizer.step()
    optimizer.roll_back()
    assert all(float(second.min()) >= 0 for _, second in moments_of(optimizer))
    draw_gradients(optimizer.parameters, 3, 0.0)
    optimizer.step()
    assert all(bool(parameter.isfinite().all()) for parameter in optimizer.parameters)


def test_training_goes_on_from_a_step_taken_back_as_if_it_had_not_been() -> None:
    twice, once = AdamW(make_parameters(), 1e-2), AdamW(make_parameters(), 1e-2)
    for step in range(8):
        draw_gradients(twice.parameters, step)
        draw_gradients(once.parameters, step)
        twice.step()
        twice.roll_back()
        twice.scale_gradients(0.25)
        twice.step()
        once.scale_gradients(0.25)
        once.step()
    for one, other in zip(twice.parameters, once.parameters, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_parameters_are_put_in_the_hands_of_an_optimizer_that_may_have_none() -> None:
    optimizer = AdamW([], 1e-2)
    optimizer.step()
    optimizer.roll_back()
    optimizer.scale_gradients(0.5)
    assert optimizer.num_steps == 0


def stepped(optimizer: AdamW) -> None:
    draw_gradients(optimizer.parameters, 0)
    optimizer.step()
    optimizer.roll_back()


@pytest.mark.parametrize("prepare", [lambda optimizer: draw_gradients(optimizer.parameters, 0), stepped])
def test_only_the_last_step_can_be_taken_back_and_once(prepare: Callable[[AdamW], None]) -> None:
    optimizer = AdamW(make_parameters(), 1e-2)
    prepare(optimizer)
    with pytest.raises(PptraceError, match="no step to take back"):
        optimizer.roll_back()


def test_a_parameter_without_a_gradient_is_told() -> None:
    with pytest.raises(PptraceError, match=r"a parameter of shape \(3, 4\) has no gradient"):
        AdamW(make_parameters(), 1e-2).step()


@pytest.mark.parametrize(
    ("betas", "lr", "decay"), [((0.0, 0.9), 1e-2, 0.0), ((0.9, 1.0), 1e-2, 0.0), ((0.9, 0.99), 10.0, 0.1)]
)
def test_settings_without_an_inverse_are_refused(betas: tuple[float, float], lr: float, decay: float) -> None:
    parameters = make_parameters()
    draw_gradients(parameters, 0)
    with pytest.raises(UsageError, match=r"take back|taken back"):
        AdamW(parameters, lr, betas, weight_decay=decay).step()
