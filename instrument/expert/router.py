"""The router: which experts a token goes to, and with which weights.

Logits, and so choice and weights, are computed with 32 bits at least. Of equal scores the lower expert is chosen:
``torch.topk`` prefers none, so that the choice is a stable sort.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from instrument.backward_split import split
from instrument.expert.options import ExpertOptions, Forced, Scoring
from instrument.sequence.partial import HasPartial, Partial


class Router(HasPartial, split.Linear):
    """The gate (experts, hidden), whole on every rank: z = x·Wᵀ; and its bias (:mod:`instrument.expert.bias`).

    Args:
        hidden: of a token.
        options: number of experts.
        sees_part: ranks of tp see different tokens each, so that their gradients are summed.
        dtype: of the model; the gate has 32 bits at least.
    """

    def __init__(self, hidden: int, options: ExpertOptions, sees_part: bool, dtype: torch.dtype | None = None) -> None:
        dtype = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        super().__init__(hidden, options.num, bias=False, dtype=dtype)
        self._sees_part = sees_part
        self.bias_rate = options.bias_rate
        self.expert_bias: Tensor
        self.counts: Tensor
        if self.bias_rate:
            self.register_buffer("expert_bias", torch.zeros(options.num, dtype=dtype))
            self.register_buffer("counts", torch.zeros(options.num, dtype=torch.int64), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        """(…, hidden) tokens → (…, experts) logits."""
        return super().forward(input.to(self.weight.dtype))

    def choose(self, logits: Tensor, options: ExpertOptions) -> Tensor:
        """The experts of tokens (…, experts), by their scores and the bias; counted where there is one."""
        if not self.bias_rate:
            return choose(logits, options)
        chosen = choose(logits, options, self.expert_bias)
        self.counts += torch.bincount(chosen.flatten(), minlength=options.num)
        return chosen

    def partial_gradients(self) -> Iterable[Partial]:
        return [Partial(self.weight)] if self._sees_part else []


def choose(logits: Tensor, options: ExpertOptions, bias: Tensor | None = None) -> Tensor:
    """The ``top_k`` experts of each token, the best first: (…, experts) logits → (…, k) int64.

    All ways of scoring but the sigmoid's bias keep the order of the logits, up to rounding that can make scores equal: the
    scores themselves are compared.

    Args:
        logits: of tokens.
        options: k and scoring.
        bias: (experts,) added to sigmoid scores, for the choice alone.
    """
    scores = scores_of(logits.detach(), options)
    if bias is not None:
        scores = scores + bias
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    return order[..., : options.top_k].contiguous()


def forced_routes(positions: Tensor, options: ExpertOptions) -> Tensor:
    """The routes of tokens at ``positions`` (n,) of a sequence that :class:`Forced` gives: (1, n, k) expert ids."""
    choices = torch.arange(options.top_k, device=positions.device)
    if options.forced is Forced.BALANCED:
        return ((positions.unsqueeze(1) * options.top_k + choices) % options.num).unsqueeze(0)
    others = max(1, options.num - 1)
    in_turn = 1 + (positions.unsqueeze(1) * (options.top_k - 1) + choices - 1) % others
    return in_turn.masked_fill(choices == 0, 0).unsqueeze(0)


def scores_of(logits: Tensor, options: ExpertOptions) -> Tensor:
    """The scores by which experts are chosen: z, p or σ(z), as :class:`Scoring` has them."""
    match options.scoring:
        case Scoring.SOFTMAX_AFTER:
            return logits
        case Scoring.SOFTMAX_BEFORE | Scoring.RENORMALISED:
            return logits.softmax(-1)
        case Scoring.SIGMOID:
            return logits.sigmoid()


def weights_of(logits: Tensor, chosen: Tensor, options: ExpertOptions) -> Tensor:
    """Weights (…, k) of the chosen experts (…, k) of tokens with logits (…, experts), as :class:`Scoring` has them."""
    weights = scores_of(logits, options).gather(-1, chosen)
    match options.scoring:
        case Scoring.SOFTMAX_AFTER:
            weights = weights.softmax(-1)
        case Scoring.RENORMALISED:
            weights = weights / weights.sum(-1, keepdim=True)
        case Scoring.SIGMOID if options.top_k > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * options.scale if options.scale != 1 else weights


def probabilities_of(logits: Tensor, options: ExpertOptions) -> Tensor:
    """The probabilities that the load-balancing loss counts: softmax(z), of sigmoids σ(z)/Σσ(z)."""
    if options.scoring is not Scoring.SIGMOID:
        return logits.softmax(-1)
    scores = logits.sigmoid()
    return scores / scores.sum(-1, keepdim=True)
