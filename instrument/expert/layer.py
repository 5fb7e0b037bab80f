"""Experts in place of a layer's MLP: y_t = Σ_j w_tj · FFN_e(t,j)(x_t), and a shared MLP besides them.

The tokens that a rank routes are its own: with sequence parallelism its shard; without, the ranks of tp, which all hold the same
tokens, take a part of each sequence, and gather what comes back. So no token is routed twice, and the experts' ranks are
those of dp, cp and tp together (parallel folding, arXiv 2504.14960).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from instrument.collectives import AxisGroup
from instrument.expert.all_gather import make_gathered
from instrument.expert.capacity import keep_within
from instrument.expert.dispatch import RowDispatch, TokenDispatch, make_dispatch
from instrument.expert.exchange import Journey
from instrument.expert.forced import forced_routes
from instrument.expert.groups import ExpertGroups, alone
from instrument.expert.linear import ExpertLinear, Held
from instrument.expert.losses import count_routes, load_balancing_loss, with_loss, z_loss
from instrument.expert.mlp import LateWeights, run_experts
from instrument.expert.noise import ForwardKey, TokenIds
from instrument.expert.padded import make_padded
from instrument.expert.pieces import Pieces, Tape
from instrument.expert.router import Router, jittered, keep_second, probabilities_of, weights_of
from instrument.expert.shared import SharedMlp
from instrument.expert.unit import SequenceParts
from instrument.linear_map import LinearMap
from instrument.seeds import mix
from instrument.sequence.overlap import SEQUENCE_DIM
from instrument.sequence.shards import local_part
from instrument.tensor.region import Region
from pptrace.sizes.expert_options import Dispatcher, DropOrder, ExpertOptions, Forced, SecondChoice


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """Decisions of a forward: the experts of each token, how the rows travel, and how many routes of each sequence an expert has
    (None without a loss that needs them).
    """

    chosen: Tensor  # (sequences, tokens, k)
    dispatch: TokenDispatch
    counts: Tensor | None  # (sequences, experts)


class RoutesOfForward:
    """Keeps the decisions of one forward, which ``key`` names: a recomputation follows them and exchanges no counts."""

    __slots__ = ("key", "routes")

    def __init__(self, key: ForwardKey = ForwardKey()) -> None:  # noqa: B008 — frozen
        self.key = key
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
        experts = range(groups.ep.rank * num_held, (groups.ep.rank + 1) * num_held)
        held = Held(experts, groups.etp.rank, groups.etp.size)
        self.router = Router(hidden, options, region.group.size > 1, dtype)
        self.inner = ExpertLinear(held, hidden, width, True, bias, dtype)
        self.outer = ExpertLinear(held, width, hidden, False, bias, dtype)
        self.shared = None
        if options.shared_width:
            self.shared = SharedMlp(hidden, options.shared_width, options.shared, region, bias, dtype)

    def forward(self, x: Tensor, kept: RoutesOfForward | None = None) -> Tensor:
        """``kept`` is filled by a forward; one that has it filled follows its decisions."""
        tokens, weights, dispatch = self._send(x, kept or RoutesOfForward())
        if self.options.overlap and self._travels and isinstance(dispatch, RowDispatch):
            return self._overlapped(x, tokens, weights, dispatch)
        return self._finished(x, tokens, weights, dispatch)

    def in_pieces(
        self, x: Tensor, kept: RoutesOfForward, tape: Tape, residual: Tensor
    ) -> Pieces[tuple[Tensor, Tensor]]:
        """:meth:`forward` with a pause while tokens travel, which cuts the graph there (:mod:`instrument.expert.pieces`).

        Args:
            residual: what is added to the output later: it crosses the cuts.

        Returns:
            The output, and ``residual`` behind the cuts.
        """
        tokens, weights, dispatch = self._send(x, kept)
        if not (self._travels and isinstance(dispatch, RowDispatch)):
            return self._finished(x, tokens, weights, dispatch), residual
        crossing = [residual, weights]
        if self.shared is not None:
            hidden, coefficients = self.shared.begin(x)
            crossing += [self.shared.end(hidden), *([] if coefficients is None else [coefficients])]
        rows, crossing = yield from tape.travel(dispatch.exchange, dispatch.leave(tokens), crossing)
        rows, _ = yield from tape.travel(dispatch.exchange.mirrored, dispatch.compute(rows, self._compute), [])
        residual, weights, *shared = crossing
        output = self._received(x, dispatch.combine(rows, weights))
        if self.shared is not None:
            output = self.shared.join(output, shared[0], shared[1] if len(shared) > 1 else None)
        return output, residual

    def take(self, whole: ExpertLayer) -> None:
        """Copy this rank's part of the whole layer's values."""
        self.router.load_state_dict(whole.router.state_dict())
        self.inner.take(whole.inner)
        self.outer.take(whole.outer)
        if self.shared is not None and whole.shared is not None:
            self.shared.take(whole.shared)

    @torch.no_grad()
    def draw_experts(self, seed: int, std: float) -> None:
        """Draw the weights of each expert from a generator of its own; biases are 0."""
        for index, expert in enumerate(self.inner.experts):
            generator = torch.Generator().manual_seed(mix(seed, expert))
            for layer in (self.inner, self.outer):
                layer.draw(index, std, generator)

    @property
    def _travels(self) -> bool:
        return self.groups.ep.size > 1

    @property
    def _shares_tokens(self) -> bool:
        """Return whether ranks of tp have the same tokens, of which each routes a part."""
        return self.region.group.size > 1 and not self.region.sequence

    def _send(self, x: Tensor, kept: RoutesOfForward) -> tuple[Tensor, Tensor, TokenDispatch]:
        """Tokens (n, h) of this rank, their weights (n, k), and how they come to their experts."""
        tokens = _take_part(x, self.region.group) if self._shares_tokens else x
        ids = self._ids(tokens, kept.key) if self.options.names_tokens else None
        logits = self.router(tokens if ids is None else jittered(tokens, self.options.jitter, ids))
        routes = kept.routes = kept.routes or self._route(logits.detach(), ids)
        weights = self._with_losses(weights_of(logits, routes.chosen, self.options), logits, routes)
        return tokens.flatten(0, 1), weights.flatten(0, 1), routes.dispatch

    def _ids(self, tokens: Tensor, key: ForwardKey) -> TokenIds:
        num, held = tokens.shape[:2]
        first = (self.groups.first_microbatch + key.microbatch) * num
        sequences = torch.arange(first, first + num, device=tokens.device)
        return TokenIds(key, sequences, self._parts.positions(held, tokens.device))

    def _received(self, x: Tensor, output: Tensor) -> Tensor:
        """The experts' output for this rank's tokens, in the shape of the layer's input ``x``."""
        if not self._shares_tokens:
            return output.view(x.shape)
        return _gather_parts(output.view(x.shape[0], -1, x.shape[2]), self.region.group)

    def _finished(self, x: Tensor, tokens: Tensor, weights: Tensor, dispatch: TokenDispatch) -> Tensor:
        """One thing after another."""
        output = self._received(x, dispatch.run(tokens, weights, self._compute))
        if self.shared is None:
            return output
        hidden, coefficients = self.shared.begin(x)
        return self.shared.join(output, self.shared.end(hidden), coefficients)

    def _overlapped(self, x: Tensor, tokens: Tensor, weights: Tensor, dispatch: RowDispatch) -> Tensor:
        """The shared MLP's two halves while tokens travel there and back; in backward the experts' weights on the way back."""
        journey = Journey(dispatch.leave(tokens), dispatch.exchange)
        late = LateWeights()
        aliases = late.aliases(self.inner, self.outer)
        begun = None if self.shared is None else self.shared.begin(x)

        def compute(rows: Tensor, rows_of_expert: Sequence[int]) -> Tensor:
            return run_experts(rows, rows_of_expert, self.inner, self.outer, self.options.grouped, late, aliases)

        journey = Journey(dispatch.compute(journey.arrive(), compute), dispatch.exchange.mirrored)
        shared = None if self.shared is None or begun is None else self.shared.end(begun[0])
        output = self._received(x, dispatch.combine(journey.arrive(), weights))
        if self.shared is None or begun is None or shared is None:
            return output
        return self.shared.join(output, shared, begun[1])

    def _compute(self, rows: Tensor, rows_of_expert: Sequence[int]) -> Tensor:
        return run_experts(rows, rows_of_expert, self.inner, self.outer, self.options.grouped)

    def _route(self, logits: Tensor, ids: TokenIds | None) -> Routes:
        options, parts = self.options, self._parts
        chosen = self._choose(logits, ids)
        counts, routed = None, chosen
        if options.second is SecondChoice.RANDOM and ids is not None:
            routed = chosen.masked_fill(~keep_second(weights_of(logits, chosen, options), ids), options.num)
        wanted = routed
        if (capacity := self._capacity(chosen.shape[1])) is not None:
            routed = self._within_capacity(logits, chosen, routed, capacity)
        if options.aux_loss:
            counts = parts.sum(count_routes(chosen, options.num))
        dispatch = self._dispatch(routed)
        self._record(wanted, routed, dispatch)
        return Routes(chosen, dispatch, counts)

    def _record(self, wanted: Tensor, routed: Tensor, dispatch: TokenDispatch) -> None:
        """Count the routes of a forward, where the recorder wants them."""
        recorder = self.groups.ep.recorder
        if recorder.counts_routes:
            held = (self.inner.experts[0], dispatch.rows_of_expert)
            received = dispatch.exchange.received if isinstance(dispatch, RowDispatch) else None
            arrived = None if received is None else sum(received)
            recorder.expert_counts.add(recorder.step, self.layer, wanted, routed, self.options.num, held, arrived)

    def _dispatch(self, routed: Tensor) -> TokenDispatch:
        options, routes = self.options, routed.flatten(0, 1)
        match options.dispatcher:
            case Dispatcher.ALL_TO_ALL:
                return make_dispatch(routes, options.num, self.groups)
            case Dispatcher.ALL_GATHER:
                return make_gathered(routes, options.num, self.groups)
            case Dispatcher.PADDED:
                return make_padded(routes, options.num, self.groups, self._slots(*routed.shape[:2]))

    def _slots(self, num: int, held: int) -> int | None:
        """Routes that an expert takes at most of ``num`` sequences, of each of which this rank has ``held`` tokens."""
        capacity = self._capacity(held)
        return None if capacity is None else num * min(held, capacity)

    def _capacity(self, held: int) -> int | None:
        return self.options.capacity(held * self._parts.size)

    def _within_capacity(self, logits: Tensor, chosen: Tensor, routed: Tensor, capacity: int) -> Tensor:
        """``routed``, without what experts of whole sequences have no room for."""
        options, parts = self.options, self._parts
        is_by_weight = options.drop_order is DropOrder.WEIGHTS
        weights = parts.whole(weights_of(logits, chosen, options)) if is_by_weight else None
        is_kept = parts.part(keep_within(parts.whole(routed), capacity, options.num + 1, weights))
        return routed.masked_fill(~is_kept, options.num)

    def _choose(self, logits: Tensor, ids: TokenIds | None) -> Tensor:
        if self.options.forced is Forced.NONE or ids is None:
            return self.router.choose(logits, self.options, ids)
        return forced_routes(ids, self.options)

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
    own = partial(local_part, dim=SEQUENCE_DIM, group=group)
    return _TakePart.of(x, own, partial(group.all_gather, dim=SEQUENCE_DIM))


def _gather_parts(part: Tensor, group: AxisGroup) -> Tensor:
    """The whole sequences of which the ranks hold parts, by an all-gather; this rank's part of the gradient in backward."""
    own = partial(local_part, dim=SEQUENCE_DIM, group=group)
    return _GatherParts.of(part, partial(group.all_gather, dim=SEQUENCE_DIM), own)


class _TakePart(LinearMap):
    """A part of each sequence, and the gradients of all parts."""


class _GatherParts(LinearMap):
    """All parts of each sequence, and the gradient of one."""
