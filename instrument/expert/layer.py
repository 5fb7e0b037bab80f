"""Experts in place of a layer's MLP: y_t = Σ_j w_tj · FFN_e(t,j)(x_t), and a shared MLP beside them.

The tokens that a rank routes are its own: with sequence parallelism its shard; without, the ranks of tp, which all hold the same
tokens, take a part of each sequence, and gather what comes back. So no token is routed twice, and the experts' ranks are
those of dp, cp and tp together (parallel folding, arXiv 2504.14960).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd import Function

from instrument.collectives import AxisGroup
from instrument.expert.all_gather import make_gathered
from instrument.expert.capacity import DropOrder, capacity_of, keep_within
from instrument.expert.dispatch import TokenDispatch, make_dispatch
from instrument.expert.groups import ExpertGroups, alone
from instrument.expert.linear import ExpertLinear
from instrument.expert.losses import count_routes, load_balancing_loss, with_loss, z_loss
from instrument.expert.options import Dispatcher, ExpertOptions, Forced
from instrument.expert.router import Router, forced_routes, probabilities_of, weights_of
from instrument.expert.unit import SequenceParts
from instrument.seeds import mix
from instrument.sequence.overlap import SEQUENCE_DIM
from instrument.sequence.shards import local_part
from instrument.tensor.linear import ColumnParallelLinear, RowParallelLinear
from instrument.tensor.region import Region


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """Decisions of a forward: the experts of each token, how the rows travel, and how many routes of each sequence an expert has
    (None without a loss that needs them).
    """

    chosen: Tensor  # (sequences, tokens, k)
    dispatch: TokenDispatch
    counts: Tensor | None  # (sequences, experts)


class RoutesOfForward:
    """Keeps the decisions of one forward, so that a recomputation follows them and exchanges no counts."""

    __slots__ = ("routes",)

    def __init__(self) -> None:
        self.routes: Routes | None = None


class ExpertLayer(nn.Module):
    """(microbatch, sequence / cp, hidden) in and out, with sequence parallelism this rank's shard of that.

    Args:
        hidden: of a token.
        options: of the model's experts.
        region: the ranks of tp.
        groups: the ranks that share experts and sequences; None: this rank alone.
        bias: of the experts' linear layers.
        dtype: of the parameters, of the router's 32 bits at least.

    ``layer`` is its number in the model, under which its routes are counted.
    """

    def __init__(
        self,
        hidden: int,
        options: ExpertOptions,
        region: Region,
        groups: ExpertGroups | None = None,
        bias: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.options = options
        self.region = region
        self.groups = groups = groups or alone()
        self.layer = 0
        width = options.width or 4 * hidden
        num_held = options.num // groups.ep.size
        held = range(groups.ep.rank * num_held, (groups.ep.rank + 1) * num_held)
        self.router = Router(hidden, options, region.group.size > 1, dtype)
        self.inner = ExpertLinear(held, hidden, width, bias, dtype)
        self.outer = ExpertLinear(held, width, hidden, bias, dtype)
        self.shared_in = self.shared_out = None
        if options.shared_width:
            self.shared_in = ColumnParallelLinear(hidden, options.shared_width, region, bias, dtype)
            self.shared_out = RowParallelLinear(options.shared_width, hidden, region, bias, dtype)

    def forward(self, x: Tensor, kept: RoutesOfForward | None = None) -> Tensor:
        """``kept`` is filled by a forward; one that has it filled follows its decisions."""
        group, shares_tokens = self.region.group, self.region.group.size > 1 and not self.region.sequence
        tokens = _take_part(x, group) if shares_tokens else x
        output = self._routed(tokens, kept or RoutesOfForward())
        if shares_tokens:
            output = _gather_parts(output, group)
        if self.shared_in is None or self.shared_out is None:
            return output
        shared: Tensor = self.shared_out(F.gelu(self.shared_in(x)))
        return output + shared

    def take(self, whole: ExpertLayer) -> None:
        """Copy this rank's part of the whole layer's values."""
        self.router.load_state_dict(whole.router.state_dict())
        self.inner.take(whole.inner)
        self.outer.take(whole.outer)
        for ours, theirs in ((self.shared_in, whole.shared_in), (self.shared_out, whole.shared_out)):
            if ours is not None and theirs is not None:
                ours.take(theirs.weight, theirs.bias)

    @torch.no_grad()
    def draw_experts(self, seed: int, std: float) -> None:
        """Draw the weights of each expert from a generator of its own; biases are 0."""
        for index, expert in enumerate(self.inner.experts):
            generator = torch.Generator().manual_seed(mix(seed, expert))
            for layer in (self.inner, self.outer):
                layer.weight[index].normal_(std=std, generator=generator)
                if layer.bias is not None:
                    layer.bias[index].zero_()

    def _routed(self, x: Tensor, kept: RoutesOfForward) -> Tensor:
        logits = self.router(x)
        routes = kept.routes = kept.routes or self._route(logits.detach())
        weights = self._with_losses(weights_of(logits, routes.chosen, self.options), logits, routes)
        output = routes.dispatch.run(x.flatten(0, 1), weights.flatten(0, 1), self._compute)
        return output.view(x.shape)

    def _compute(self, rows: Tensor, rows_of_expert: Sequence[int]) -> Tensor:
        parts: Sequence[Tensor] = torch.split(rows, list(rows_of_expert))
        return torch.cat(list(self.outer([F.gelu(part) for part in self.inner(parts)])))

    def _route(self, logits: Tensor) -> Routes:
        options, parts = self.options, self._parts
        chosen = self._choose(logits)
        counts, routed = None, chosen
        if options.capacity_factor is not None:
            whole = parts.whole(chosen)
            counts = count_routes(whole, options.num)
            is_by_weight = options.drop_order is DropOrder.WEIGHTS
            weights = parts.whole(weights_of(logits, chosen, options)) if is_by_weight else None
            capacity = capacity_of(options.capacity_factor, whole.shape[1], options.top_k, options.num)
            is_kept = parts.part(keep_within(whole, capacity, options.num, weights))
            routed = chosen.masked_fill(~is_kept, options.num)
        elif options.aux_loss:
            counts = parts.sum(count_routes(chosen, options.num))
        make = make_dispatch if options.dispatcher is Dispatcher.ALL_TO_ALL else make_gathered
        dispatch = make(routed.flatten(0, 1), options.num, self.groups.ep)
        self._record(chosen, routed, dispatch)
        return Routes(chosen, dispatch, counts)

    def _record(self, chosen: Tensor, routed: Tensor, dispatch: TokenDispatch) -> None:
        """Count the routes of a forward, while a profiler records."""
        recorder = self.groups.ep.recorder
        if recorder.listening:
            held = (self.inner.experts[0], dispatch.rows_of_expert)
            recorder.expert_counts.add(recorder.step, self.layer, chosen, routed, self.options.num, held)

    def _choose(self, logits: Tensor) -> Tensor:
        if self.options.forced is Forced.NONE:
            return self.router.choose(logits, self.options)
        positions = self._parts.positions(logits.shape[1], logits.device)
        return forced_routes(positions, self.options).expand(logits.shape[0], -1, -1).contiguous()

    @property
    def _parts(self) -> SequenceParts:
        return SequenceParts(self.region.group, self.groups.cp, self.groups.context)

    def _with_losses(self, weights: Tensor, logits: Tensor, routes: Routes) -> Tensor:
        length = logits.shape[1] * self._parts.size
        if routes.counts is not None and self.options.aux_loss:
            probabilities = probabilities_of(logits, self.options)
            loss = load_balancing_loss(probabilities, routes.counts, length, self.options)
            weights = with_loss(weights, loss, self.groups.loss_weight)
        if self.options.z_loss:
            weights = with_loss(weights, z_loss(logits, length, self.options), self.groups.loss_weight)
        return weights


def _take_part(x: Tensor, group: AxisGroup) -> Tensor:
    """This rank's part of each sequence, which all ranks hold; an all-gather of the gradients in backward."""
    part: Tensor = _TakePart.apply(x, group)  # type: ignore[no-untyped-call]
    return part


def _gather_parts(part: Tensor, group: AxisGroup) -> Tensor:
    """The whole sequences of which the ranks hold parts, by an all-gather; this rank's part of the gradient in backward."""
    whole: Tensor = _GatherParts.apply(part, group)  # type: ignore[no-untyped-call]
    return whole


class _TakePart(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup) -> Tensor:
        ctx.group = group
        return local_part(x, SEQUENCE_DIM, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_gather(gradients[0], SEQUENCE_DIM), None


class _GatherParts(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: AxisGroup) -> Tensor:
        ctx.group = group
        return group.all_gather(part, SEQUENCE_DIM)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return local_part(gradients[0], SEQUENCE_DIM, ctx.group), None
