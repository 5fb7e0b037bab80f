"""Hooks of activation checkpointing: a range for each recompute, and the same gradients to the last bit."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn

from instrument.adapters.hooks import Hooks
from instrument.adapters.recompute import MEGATRON, watch_function, watch_torch
from instrument.recompute import MarkedContexts
from pptrace.marks import SpanKind, SpanMark
from tests.adapters.heard import HeardSession


def gradients(checkpointed: Callable[[nn.Module, Tensor], Tensor]) -> list[Tensor]:
    """Of three layers with dropout, each recomputed."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Dropout(0.5)) for _ in range(3)]
    x = torch.randn(4, 6, requires_grad=True)
    output = x
    for layer in layers:
        output = checkpointed(layer, output)
    output.sum().backward()
    return [x.grad, *(parameter.grad for layer in layers for parameter in layer.parameters())]


def by_torch(**more: Any) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda layer, x: torch_checkpoint.checkpoint(layer, x, **more)


INSIDE: list[str] = []


def noting() -> tuple[Any, Any]:
    """Contexts of a script."""

    @contextmanager
    def noted(what: str) -> Iterator[None]:
        INSIDE.append(what)
        yield

    return noted("forward"), noted("again")


WAYS = {
    "reentrant": by_torch(use_reentrant=True),
    "not reentrant": by_torch(use_reentrant=False),
    "contexts of the script": by_torch(use_reentrant=False, context_fn=noting),
    "debug": by_torch(use_reentrant=False, debug=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_each_recompute_has_a_range_and_gradients_stay_exact(hooks: Hooks, way: str) -> None:
    INSIDE.clear()
    without, session = gradients(WAYS[way]), HeardSession(num_steps=7)
    inside = INSIDE.copy()
    watch_torch(torch_checkpoint, hooks, session)
    with_hooks = gradients(WAYS[way])
    assert all(torch.equal(one, other) for one, other in zip(without, with_hooks, strict=True))
    expected = [] if way == "debug" else [SpanMark(SpanKind.RECOMPUTE, 7)] * 3  # torch's debug mode takes no contexts
    assert session.recorder.marks == expected
    assert not session.recorder.open
    assert inside * 2 == INSIDE
    hooks.remove()
    gradients(WAYS[way])
    assert session.recorder.marks == expected


def test_a_runtime_with_ranges_of_its_own_has_them_once(hooks: Hooks) -> None:
    session = HeardSession()
    watch_torch(torch_checkpoint, hooks, session)
    session.recorder.step = 3
    gradients(by_torch(use_reentrant=False, context_fn=MarkedContexts(session.recorder)))
    assert session.recorder.marks == [SpanMark(SpanKind.RECOMPUTE, 3)] * 3


def test_a_recompute_that_raises_ends_its_range_and_is_not_hidden(hooks: Hooks) -> None:
    session, runs = HeardSession(), []
    watch_torch(torch_checkpoint, hooks, session)

    def fails_again(x: Tensor) -> Tensor:
        runs.append(x)
        if len(runs) > 1:
            raise FloatingPointError("again")
        return x.exp()

    for reentrant in (True, False):
        runs.clear()
        output = torch_checkpoint.checkpoint(fails_again, torch.ones(2, requires_grad=True), use_reentrant=reentrant)
        with pytest.raises(FloatingPointError, match="again"):
            output.sum().backward()
    assert len(session.recorder.marks) == 2
    assert not session.recorder.open


def test_megatrons_checkpoint_function_has_ranges(hooks: Hooks, monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip(MEGATRON)
    monkeypatch.setattr(module, "_get_all_rng_states", lambda: ())
    monkeypatch.setattr(module, "_set_all_rng_states", lambda: None)
    session = HeardSession()
    watch_function(module, hooks, session)
    layer = nn.Linear(3, 3)
    output = module.checkpoint(layer, False, torch.ones(2, 3, requires_grad=True))
    output.sum().backward()
    assert session.recorder.marks == [SpanMark(SpanKind.RECOMPUTE, 0)]
    assert layer.weight.grad is not None


def test_another_torch_is_refused(hooks: Hooks) -> None:
    with pytest.raises(AttributeError, match="CheckpointFunction"):
        watch_torch(ModuleType("checkpoint"), hooks, HeardSession())
    assert importlib.import_module("torch.utils.checkpoint") is torch_checkpoint
