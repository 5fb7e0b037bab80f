"""The experts of a model: how many, which layers have them, and how a token is routed to them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction

from pptrace.errors import UsageError


class Scoring(StrEnum):
    """The choice of experts from the router's logits z, and what weight each chosen one has."""

    SOFTMAX_AFTER = "softmax-after"  # largest z; softmax over the chosen logits (Megatron-LM's default)
    SOFTMAX_BEFORE = "softmax-before"  # largest p = softmax(z); p itself (Switch, arXiv 2101.03961)
    RENORMALISED = "renormalised"  # largest p; p over the sum of the chosen (GShard, arXiv 2006.16668)
    SIGMOID = (
        "sigmoid"  # largest sigmoid(z) + bias; sigmoid(z) over the sum of the chosen (DeepSeek-V3, arXiv 2412.19437)
    )


class SecondChoice(StrEnum):
    """The second of two experts of a token, and whether its route is taken."""

    BEST = "best"  # that of the second largest score
    SAMPLED = "sampled"  # the largest of the others' logits + Gumbel noise (DeepSpeed, fairseq)
    RANDOM = "random"  # the second largest; taken with a probability of twice its share of both weights (GShard)


class Dispatcher(StrEnum):
    """The way of tokens to experts on other ranks."""

    ALL_TO_ALL = "all-to-all"  # each to the ranks of its experts (:mod:`instrument.expert.dispatch`)
    PADDED = "padded"  # equally many rows to each expert, of which some are zeros (:mod:`instrument.expert.padded`)
    ALL_GATHER = "all-gather"  # all to all ranks, and back by a reduce-scatter (:mod:`instrument.expert.all_gather`)


class DropOrder(StrEnum):
    """The order in which routes are taken where an expert takes a limited number of them."""

    CHOICES = (
        "choices"  # all first choices in the order of the tokens, then all second ones, … (GShard, arXiv 2006.16668)
    )
    WEIGHTS = "weights"  # by falling weight; of equal ones the earlier token


class Forced(StrEnum):
    """Routes that are given instead of chosen, for measurements; weights and gradients stay the router's."""

    NONE = "none"
    BALANCED = "balanced"  # experts in turn: as many tokens for each as can be
    HOT = "hot"  # expert 0 for every token, and the others in turn
    RANDOM = "random"  # drawn for each token, all experts alike
    BIASED = "biased"  # drawn for each token, expert e with weight 1/(1 + e)
    REPLAYED = "replayed"  # those of a table (:func:`instrument.expert.forced.read_routes`)


class Shared(StrEnum):
    """The way in which an MLP that all tokens go through is joined with their experts."""

    ADDED = "added"  # y + MLP(x) (DeepSeekMoE, arXiv 2401.06066)
    GATED = "gated"  # y + σ(x·w)·MLP(x) (Qwen2-MoE)
    RESIDUAL = "residual"  # c₀·y + c₁·MLP(x), c = softmax(x·Wᵀ + b) (PR-MoE, arXiv 2201.05596)

    @property
    def num_coefficients(self) -> int:
        """Coefficients of a token that weigh the MLP."""
        return {Shared.ADDED: 0, Shared.GATED: 1, Shared.RESIDUAL: 2}[self]


@dataclass(frozen=True, slots=True)
class ExpertOptions:
    """Experts in place of the MLP of every ``every``-th layer, the first included.

    Args:
        num: experts of a layer, on all ranks together.
        top_k: experts of each token.
        every: distance of the layers that have experts.
        width: of each expert's inner layer; None: 4 · hidden, as the MLP's.
        shared_width: of an MLP that all tokens go through besides their experts; 0: none.
        scoring: choice and weights.
        scale: factor of all weights.
        aux_loss: coefficient of the load-balancing loss, which is that of each sequence (:mod:`instrument.expert.losses`).
        z_loss: coefficient of the router's z loss.
        capacity_factor: of the routes of a sequence that an expert takes at most (:mod:`instrument.expert.capacity`); None:
            all are taken.
        drop_order: which it takes first.
        dispatcher: how tokens travel.
        forced: routes for measurements.
        bias_rate: change of the bias of each expert after a step, which balances them without a loss
            (:mod:`instrument.expert.bias`); 0: no bias.
        jitter: the router sees each number of a token times one of [1 − jitter, 1 + jitter); 0: as it is.
        second: how the second of two experts is chosen.
        num_groups: of consecutive experts; a token goes to experts of ``groups_per_token`` of them (DeepSeek-V2's limit).
        groups_per_token: those whose top_k / groups_per_token best scores have the largest sum.
        routes: file of routes to be replayed.
        pyramid: number of experts of each layer that has some, in place of ``num``, which is the largest of them.
        shared: what is made of the shared MLP.
        overlap: compute while tokens travel: the shared MLP, weights' gradients, the other half of an overlapped pair.
        grouped: multiply the rows of all experts of a rank at once (:mod:`instrument.expert.grouped`), not one expert's after
            another's.

    Raises:
        UsageError: sizes or coefficients that no router can have.
    """

    num: int
    top_k: int = 2
    every: int = 1
    width: int | None = None
    shared_width: int = 0
    scoring: Scoring = Scoring.SOFTMAX_AFTER
    scale: float = 1.0
    aux_loss: float = 0.0
    z_loss: float = 0.0
    capacity_factor: float | None = None
    drop_order: DropOrder = DropOrder.CHOICES
    dispatcher: Dispatcher = Dispatcher.ALL_TO_ALL
    forced: Forced = Forced.NONE
    bias_rate: float = 0.0
    jitter: float = 0.0
    second: SecondChoice = SecondChoice.BEST
    num_groups: int = 1
    groups_per_token: int = 1
    routes: str | None = None
    pyramid: tuple[int, ...] = ()
    shared: Shared = Shared.ADDED
    overlap: bool = False
    grouped: bool = False

    def __post_init__(self) -> None:
        for value, least, name in (
            (self.num, 1, "the number of experts in a layer"),
            (self.top_k, 1, "the number of experts of a token"),
            (self.every, 1, "the distance of layers with experts"),
            (self.width, 1, "the width of an expert"),
            (self.shared_width, 0, "the width of the shared MLP"),
            (self.num_groups, 1, "the number of groups of experts"),
            (self.groups_per_token, 1, "the number of groups of a token"),
        ):
            if value is not None and value < least:
                raise UsageError(f"{name} is {value}; expected at least {least}")
        fewest = min(self.pyramid, default=self.num)
        if self.top_k > fewest:
            raise UsageError(f"each token is routed to {self.top_k} experts and a layer has {fewest}; choose fewer")
        if not (0 <= self.aux_loss < math.inf and 0 <= self.z_loss < math.inf and 0 < self.scale < math.inf):
            raise UsageError(
                f"the coefficients of the router's losses are {self.aux_loss} and {self.z_loss}, and the scale of its weights is "
                f"{self.scale}; expected numbers from 0 up, and one above 0"
            )
        if self.capacity_factor is not None and not 0 < self.capacity_factor < math.inf:
            raise UsageError(f"the capacity factor of the experts is {self.capacity_factor}; expected a number above 0")
        if self.shared is not Shared.ADDED and not self.shared_width:
            raise UsageError(f"a shared MLP that is {self.shared} needs a width; give it one, or leave that out")
        self._check_scoring()
        self._check_choice()

    def _check_scoring(self) -> None:
        if self.top_k == 1 and self.scoring in (Scoring.SOFTMAX_AFTER, Scoring.RENORMALISED):
            raise UsageError(
                f"a softmax over the one expert of a token ({self.scoring}) is always 1, so that the router would not learn; "
                f"use {Scoring.SOFTMAX_BEFORE} or {Scoring.SIGMOID}, or more experts for each token"
            )
        if self.bias_rate and (self.scoring is not Scoring.SIGMOID or not 0 < self.bias_rate < math.inf):
            raise UsageError(
                f"a bias is added to scores of {Scoring.SIGMOID} alone, at a rate above 0; found {self.scoring}, {self.bias_rate}"
            )
        if not 0 <= self.jitter < 1:
            raise UsageError(
                f"the jitter of what the router sees is {self.jitter}; expected 0 or more, and less than 1"
            )

    def _check_choice(self) -> None:
        is_forced = self.forced is not Forced.NONE
        if (self.forced is Forced.REPLAYED) is not (self.routes is not None):
            raise UsageError("routes are replayed from a file of them: give both or neither")
        if self.second is not SecondChoice.BEST and (
            self.top_k != 2 or is_forced or self.num_groups > 1 or self.scoring is Scoring.SIGMOID
        ):
            raise UsageError(
                f"a second choice that is {self.second} is one of two experts, of a softmax, without groups and forced routes"
            )
        if self.num_groups == self.groups_per_token == 1:
            return
        sizes = [num // self.num_groups for num in self.pyramid or (self.num,) if num % self.num_groups == 0]
        in_each = self.top_k / self.groups_per_token
        if len(sizes) < max(1, len(self.pyramid)) or not 1 <= self.groups_per_token <= self.num_groups:
            raise UsageError(
                f"{self.num} experts do not go into {self.num_groups} groups, of which a token has {self.groups_per_token}; "
                "choose a divisor, and at most so many"
            )
        if not 1 <= in_each <= min(sizes) or in_each % 1:
            raise UsageError(
                f"{self.top_k} experts of a token do not go into {self.groups_per_token} groups of {min(sizes)}; choose equally "
                "many in each"
            )

    def in_layer(self, layer: int) -> bool:
        """Return whether a layer has experts."""
        return layer % self.every == 0

    def of_layer(self, layer: int) -> ExpertOptions:
        """The options of one layer that has experts: their number is its own."""
        return replace(self, num=self.pyramid[layer // self.every], pyramid=()) if self.pyramid else self

    def capacity(self, length: int) -> int | None:
        """Routes of a sequence of ``length`` tokens that an expert of a layer takes: ⌈factor · k·T/E⌉, at most T; None: all.

        The factor is the decimal number that it is written as: 1.1 · 100/10 is 11, where floats come to a little more.
        """
        if self.capacity_factor is None:
            return None
        return min(length, math.ceil(Fraction(str(self.capacity_factor)) * self.top_k * length / self.num))

    @property
    def names_tokens(self) -> bool:
        """Return whether the router has to know which tokens it sees."""
        return self.is_random or self.forced is not Forced.NONE

    @property
    def is_random(self) -> bool:
        """Return whether a forward depends on its step, microbatch and layer."""
        drawn = self.second is not SecondChoice.BEST or self.forced in (Forced.RANDOM, Forced.BIASED, Forced.REPLAYED)
        return drawn or self.jitter > 0


def check_experts(options: ExpertOptions, ep: int, tp: int, held: int) -> None:
    """Refuse experts that cannot be shared out, before any process group is made.

    Args:
        options: of the model.
        ep: ranks that share the experts of a layer.
        tp: ranks that share the tokens of a sequence, of which each has ``held``, and the shared MLP.
        held: tokens of a sequence before they are shared out over tp.

    Raises:
        UsageError: ``ep`` does not divide the experts, or tp the tokens or the shared MLP.
    """
    for num in options.pyramid or (options.num,):
        if num % ep:
            raise UsageError(f"{num} experts do not divide among ep={ep} ranks; choose a multiple of {ep}")
    if held % tp:
        raise UsageError(
            f"{held} tokens of a sequence do not divide among tp={tp} ranks, which share them before the experts; choose a "
            f"multiple of {tp}"
        )
    if options.shared_width % tp:
        raise UsageError(
            f"a shared MLP of width {options.shared_width} does not divide among tp={tp} ranks; choose a multiple of {tp}"
        )


def check_layers(options: ExpertOptions, layers: int, hidden: int, etp: int) -> None:
    """Refuse experts that do not fit the layers of a model or cannot be cut, before any process group is made.

    Args:
        options: of the model.
        layers: of the model, with experts or without.
        hidden: size of a token.
        etp: ranks that share each expert.

    Raises:
        UsageError: numbers of experts for more or fewer layers than have some, or a width that ``etp`` does not divide.
    """
    num_layers = sum(map(options.in_layer, range(layers)))
    if options.pyramid and len(options.pyramid) != num_layers:
        raise UsageError(
            f"{len(options.pyramid)} numbers of experts are given and {num_layers} layers have experts; give one for each, or one"
        )
    width = options.width or 4 * hidden
    if width % etp:
        raise UsageError(f"experts of width {width} do not divide among etp={etp} ranks; choose a multiple of {etp}")
