"""Forwards and backwards in pieces: gradients are those of one piece, and two of them take turns."""

from __future__ import annotations

import torch
from torch import Tensor

from instrument.collectives import AxisGroup
from instrument.expert.exchange import Exchange
from instrument.expert.pieces import Pieces, Tape, alternate, run_through
from instrument.recorder import Recorder
from pptrace.marks import Axis

ALONE = Exchange(AxisGroup(None, Axis.EP, Recorder()), [3], [3])


def whole(x: Tensor, weight: Tensor) -> Tensor:
    first = torch.sin(x @ weight)
    return (first * torch.tanh(first + x) @ weight + first).exp()


def in_pieces(x: Tensor, weight: Tensor, tape: Tape) -> Pieces[Tensor]:
    """The same, cut twice; ``first`` crosses both cuts, and what is no part of the loss one of them."""
    first = torch.sin(x @ weight)
    rows, (kept, crossed, _) = yield from tape.travel(ALONE, first + x, [first, first * 1, first * 2])
    rows, (kept,) = yield from tape.travel(ALONE, torch.tanh(rows), [kept])
    return (crossed * rows @ weight + kept).exp()


def drawn() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(3, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    return x.requires_grad_(), weight.requires_grad_()


def test_pieces_have_the_gradients_of_the_whole() -> None:
    x, weight = drawn()
    tape = Tape()
    output = run_through(in_pieces(x, weight, tape))
    assert len(tape.edges) == 4 + 2
    run_through(tape.backward(torch.autograd.graph.get_gradient_edge(output), torch.cos(output.detach())))
    y, same = drawn()
    expected = whole(y, same)
    expected.backward(torch.cos(expected.detach()))
    for ours, theirs in ((x.grad, y.grad), (weight.grad, same.grad)):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)
    assert tape.edges == []


def test_pieces_alternate_until_one_side_has_none_left() -> None:
    seen: list[str] = []

    def side(name: str, num: int) -> Pieces[str]:
        for index in range(num):
            seen.append(f"{name}{index}")
            yield
        return name

    assert alternate(side("f", 2), side("b", 4)) == ("f", "b")
    assert seen == ["f0", "b0", "f1", "b1", "b2", "b3"]
