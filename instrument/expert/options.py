"""The experts of a model: how many, which layers have them, and how a token is routed to them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from instrument.expert.capacity import DropOrder
from pptrace.errors import UsageError


class Scoring(StrEnum):
    """The choice of experts from the router's logits z, and what weight each chosen one has."""

    SOFTMAX_AFTER = "softmax-after"  # largest z; softmax over the chosen logits (Megatron-LM's default)
    SOFTMAX_BEFORE = "softmax-before"  # largest p = softmax(z); p itself (Switch, arXiv 2101.03961)
    RENORMALISED = "renormalised"  # largest p; p over the sum of the chosen (GShard, arXiv 2006.16668)
    SIGMOID = (
        "sigmoid"  # largest sigmoid(z) + bias; sigmoid(z) over the sum of the chosen (DeepSeek-V3, arXiv 2412.19437)
    )


class Dispatcher(StrEnum):
    """The way of tokens to experts on other ranks."""

    ALL_TO_ALL = "all-to-all"  # each to the ranks of its experts (:mod:`instrument.expert.dispatch`)
    ALL_GATHER = "all-gather"  # all to all ranks, and back by a reduce-scatter (:mod:`instrument.expert.all_gather`)


class Forced(StrEnum):
    """Routes that are given instead of chosen, for measurements; weights and gradients stay the router's."""

    NONE = "none"
    BALANCED = "balanced"  # experts in turn: as many tokens for each as can be
    HOT = "hot"  # expert 0 for every token, and the others in turn


@dataclass(frozen=True, slots=True)
class ExpertOptions:
    """Experts in place of the MLP of every ``every``-th layer, the first included.

    Args:
        num: experts of a layer, on all ranks together.
        top_k: experts of each token.
        every: distance of the layers that have experts.
        width: of each expert's inner layer; None: 4 · hidden, as the MLP's.
        shared_width: of an MLP that all tokens go through beside their experts; 0: none.
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

    def __post_init__(self) -> None:
        for name, least in (("num", 1), ("top_k", 1), ("every", 1), ("width", 1), ("shared_width", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"{name} of the experts is {value}; expected at least {least}")
        if self.top_k > self.num:
            raise UsageError(f"each token is routed to {self.top_k} experts and a layer has {self.num}; choose fewer")
        if self.top_k == 1 and self.scoring in (Scoring.SOFTMAX_AFTER, Scoring.RENORMALISED):
            raise UsageError(
                f"a softmax over the one expert of a token ({self.scoring}) is always 1, so that the router would not learn; "
                f"use {Scoring.SOFTMAX_BEFORE} or {Scoring.SIGMOID}, or more experts for each token"
            )
        if min(self.aux_loss, self.z_loss) < 0 or self.scale <= 0:
            raise UsageError("coefficients of the router's losses are 0 or more, and the scale of its weights above 0")
        if self.bias_rate and (self.scoring is not Scoring.SIGMOID or self.bias_rate < 0):
            raise UsageError(
                f"a bias is added to scores of {Scoring.SIGMOID} alone, at a rate above 0; found {self.scoring}, {self.bias_rate}"
            )
        if self.capacity_factor is not None and not 0 < self.capacity_factor < math.inf:
            raise UsageError(f"the capacity factor of the experts is {self.capacity_factor}; expected a number above 0")

    def in_layer(self, layer: int) -> bool:
        """Return whether a layer has experts."""
        return layer % self.every == 0


def check_experts(options: ExpertOptions, ep: int, tp: int, held: int) -> None:
    """Refuse experts that cannot be shared out, before any process group is made.

    Args:
        options: of the model.
        ep: ranks that share the experts of a layer.
        tp: ranks that share the tokens of a sequence, of which each has ``held``.
        held: tokens of a sequence before they are shared out over tp.

    Raises:
        UsageError: ``ep`` does not divide the experts, or tp the tokens.
    """
    if options.num % ep:
        raise UsageError(f"{options.num} experts do not divide among ep={ep} ranks; choose a multiple of {ep}")
    if held % tp:
        raise UsageError(
            f"{held} tokens of a sequence do not divide among tp={tp} ranks, which share them before the experts; choose a "
            f"multiple of {tp}"
        )
