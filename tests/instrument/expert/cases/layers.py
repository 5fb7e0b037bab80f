"""Functions that the ranks of the pool run: the layer with experts on several ranks, beside a dense reference of all tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from instrument.backward_split.split import attach
from instrument.collectives import AxisGroup
from instrument.expert.groups import ExpertGroups, alone
from instrument.expert.layer import ExpertLayer, RoutesOfForward
from instrument.expert.router import choose, weights_of
from instrument.models.parallel import alone as whole_layers
from instrument.recorder import Recorder
from pptrace.marks import AwaitMark, Axis, CollectiveMark, parse_mark
from pptrace.sizes.expert_options import ExpertOptions
from tests.instrument.cases.collectives import Listening, heard

HIDDEN = 6


@dataclass(frozen=True, slots=True)
class Tokens:
    """Sequences of one rank, and the gate, which decide the routes: ``to_expert`` sends all first choices there; the rank
    ``idle`` has no tokens.
    """

    options: ExpertOptions
    num: int = 5
    to_expert: int | None = None
    equal: bool = False
    idle: int | None = None


def make_layer(tokens: Tokens, groups: ExpertGroups | None = None) -> ExpertLayer:
    layer = ExpertLayer(HIDDEN, tokens.options, whole_layers().region, groups, dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        layer.router.weight.copy_(_drawn(generator, tokens.options.num, HIDDEN))
        if tokens.equal:
            layer.router.weight.zero_()
        if tokens.to_expert is not None:  # the first feature of each token is large
            layer.router.weight[:, 0] = 0
            layer.router.weight[tokens.to_expert, 0] = 100
    layer.draw_experts(3, 0.5)
    return layer


def inputs_of(tokens: Tokens, rank: int) -> Tensor:
    x = _drawn(torch.Generator().manual_seed(10 + rank), 2, 0 if rank == tokens.idle else tokens.num, HIDDEN)
    x[..., 0] = 1
    return x.requires_grad_()


def dense(layer: ExpertLayer, x: Tensor) -> Tensor:
    """Every token through every expert, of which its own count."""
    logits = F.linear(x, layer.router.weight)
    chosen = choose(logits, layer.options)
    weights = weights_of(logits, chosen, layer.options)
    total = torch.zeros_like(x)
    for expert in layer.inner.experts:
        parameters = [
            part[expert] for part in (layer.inner.weight, layer.inner.bias, layer.outer.weight, layer.outer.bias)
        ]
        output = F.linear(F.gelu(F.linear(x, *parameters[:2])), *parameters[2:])
        total = total + ((chosen == expert) * weights).sum(-1, keepdim=True) * output
    return total


def _drawn(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class Seen:
    """Largest errors of outputs, gradients of tokens, of the gate and of this rank's experts; the rows of its experts; the routes
    of its tokens to each expert; marks; whether all experts ran at once.
    """

    errors: tuple[float, ...]
    rows_of_expert: tuple[int, ...]
    counts: tuple[int, ...]
    marks: tuple[CollectiveMark, ...]
    at_once: bool


def compare(cases: list[Tokens], split: bool, etp: int = 1, is_dense: bool = True) -> list[Seen]:
    """Each case on all ranks of the world, forward and backward; ``split``: weights' gradients come later; ``etp`` neighbours
    share each expert; without ``is_dense`` nothing is compared with all tokens through all experts.
    """
    recorder = Listening()
    if etp == 1:
        group = AxisGroup(dist.group.WORLD, Axis.EP, recorder)
        groups = ExpertGroups(group, AxisGroup(None, Axis.CP, Recorder()))
        return [_compare(tokens, groups, split, is_dense) for tokens in cases]
    world, rank = dist.get_world_size(), dist.get_rank()
    pairs = [list(range(first, first + etp)) for first in range(0, world, etp)]
    lines = [list(range(first, world, etp)) for first in range(etp)]
    own = []
    for axis, members in ((Axis.EP, lines), (Axis.ETP, pairs)):
        made = [dist.new_group(ranks, backend="gloo") for ranks in members]
        own.append(AxisGroup(next(g for g, m in zip(made, members, strict=True) if rank in m), axis, recorder))
    groups = ExpertGroups(own[0], AxisGroup(None, Axis.CP, Recorder()), etp=own[1])
    return [_compare(tokens, groups, split, is_dense) for tokens in cases]


def _compare(tokens: Tokens, groups: ExpertGroups, split: bool, is_dense: bool) -> Seen:
    group = groups.ep
    layer, whole = make_layer(tokens, groups), make_layer(tokens, alone())
    x = inputs_of(tokens, dist.get_rank())
    queue = attach(layer) if split else None
    fired: list[object] = []
    for parameter in layer.parameters():
        parameter.register_post_accumulate_grad_hook(fired.append)
    kept = RoutesOfForward()

    def both_ways() -> Tensor:
        output = layer(x, kept)
        upstream = torch.cos(output.detach())
        if queue is None:
            output.backward(upstream)
            return output
        with queue.collecting() as work:
            output.backward(upstream)
        assert len(work) == 3  # the gate's, and those of the experts' two layers
        for each in work:
            each.run()
        return output

    output, marks = heard(group.recorder, both_ways)
    at_once = any("GroupedExperts" in name for name in graph_names(output))
    assert split or {id(parameter) for parameter in fired} == {id(parameter) for parameter in layer.parameters()}
    dispatch = kept.routes.dispatch
    known = tuple(mark for mark in marks if isinstance(mark, CollectiveMark))
    errors = _errors(layer, whole, tokens, (output, x)) if is_dense else ()
    return Seen(tuple(errors), tuple(dispatch.rows_of_expert), tuple(dispatch.counts.tolist()), known, at_once)


def graph_names(output: Tensor) -> set[str]:
    """The names of all functions in the graph of a tensor."""
    seen, waiting = set(), [output.grad_fn]
    while waiting:
        function = waiting.pop()
        if function is not None and function not in seen:
            seen.add(function)
            waiting.extend(following for following, _ in function.next_functions)
    return {function.name() for function in seen}


def overlapped_order(tokens: Tokens) -> list[str]:
    """In the order in which they come: starts of all-to-alls of rows and waits for them, and what is computed meanwhile."""
    recorder = Listening()
    groups = ExpertGroups(AxisGroup(dist.group.WORLD, Axis.EP, recorder), AxisGroup(None, Axis.CP, Recorder()))
    layer, x = make_layer(tokens, groups), inputs_of(tokens, dist.get_rank())
    names = recorder.names
    layer.shared.inner.register_forward_hook(lambda *_: names.append("shared, first half"))
    layer.shared.outer.register_forward_hook(lambda *_: names.append("shared, second half"))
    layer.shared.inner.weight.register_hook(lambda _: names.append("back through its first half"))
    layer.shared.outer.weight.register_hook(lambda _: names.append("back through its second half"))
    layer.inner.weight.register_post_accumulate_grad_hook(lambda _: names.append("weights"))
    layer(x).sum().backward()
    order = []
    for name in names:
        mark = parse_mark(name)
        if isinstance(mark, AwaitMark):
            order.append("wait")
        elif not isinstance(mark, CollectiveMark):
            order.append(name)
        elif mark.handle is not None:
            order.append("start")
    return order


def _errors(layer: ExpertLayer, whole: ExpertLayer, tokens: Tokens, ours: tuple[Tensor, Tensor]) -> list[float]:
    """The largest errors of this rank's output and gradients, ``ours`` being output and input."""
    (output, x), me, etp = ours, dist.get_rank(), layer.groups.etp
    errors = [0.0]
    gates = [torch.zeros_like(whole.router.weight)]
    for rank in range(dist.get_world_size()):
        y = inputs_of(tokens, rank)
        expected = dense(whole, y)
        expected.backward(torch.cos(expected.detach()))
        gates.append(whole.router.weight.grad.clone())
        if rank == me:
            errors += [_largest(output, expected), _largest(x.grad, y.grad)]
            errors.append(_largest(layer.router.weight.grad, gates[-1] - gates[-2]))
    held = slice(layer.inner.experts.start, layer.inner.experts.stop)
    width = layer.inner.weight.shape[1]
    part = slice(etp.rank * width, (etp.rank + 1) * width)
    errors += [
        _largest(layer.inner.weight.grad, whole.inner.weight.grad[held, part]),
        _largest(layer.inner.bias.grad, whole.inner.bias.grad[held, part]),
        _largest(layer.outer.weight.grad, whole.outer.weight.grad[held, :, part]),
        _largest(layer.outer.bias.grad, whole.outer.bias.grad[held]),
    ]
    return errors


def _largest(ours: Tensor | None, theirs: Tensor | None) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).detach().abs().max()) if ours.numel() else 0.0
