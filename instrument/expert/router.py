"""The router: which experts a token goes to, and with which weights.

Logits, and so choice and weights, are computed with 32 bits at least. Of equal scores the lower expert is chosen:
``torch.topk`` prefers none, so that the choice is a stable sort.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from instrument.backward_split import split
from instrument.expert.noise import TokenIds, Use
from instrument.expert_counts import counts_of
from instrument.sequence.partial import HasPartial
from pptrace.sizes.expert_options import ExpertOptions, Scoring, SecondChoice


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
        self.is_partial = sees_part
        self.bias_rate = options.bias_rate
        self.expert_bias: Tensor
        self.counts: Tensor
        if self.bias_rate:
            self.register_buffer("expert_bias", torch.zeros(options.num, dtype=dtype))
            self.register_buffer("counts", torch.zeros(options.num, dtype=torch.int64), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        """(…, hidden) tokens → (…, experts) logits."""
        return super().forward(input.to(self.weight.dtype))

    def choose(self, logits: Tensor, options: ExpertOptions, tokens: TokenIds | None = None) -> Tensor:
        """The experts of tokens (…, experts), by their scores and the bias; counted where there is one."""
        if not self.bias_rate:
            return choose(logits, options, None, tokens)
        chosen = choose(logits, options, self.expert_bias, tokens)
        self.counts += counts_of(chosen.flatten(), options.num)
        return chosen


def choose(
    logits: Tensor, options: ExpertOptions, bias: Tensor | None = None, tokens: TokenIds | None = None
) -> Tensor:
    """The ``top_k`` experts of each token, the best first: (…, experts) logits → (…, k) int64.

    All ways of scoring but the sigmoid's bias keep the order of the logits, up to rounding that can make scores equal: the
    scores themselves are compared.

    Args:
        logits: of tokens.
        options: k, scoring, groups and the second choice.
        bias: (experts,) added to sigmoid scores, for the choice alone.
        tokens: whose logits these are, where the second choice is sampled.
    """
    scores = scores_of(logits.detach(), options)
    if bias is not None:
        scores = scores + bias
    if options.num_groups > options.groups_per_token:
        scores = scores.masked_fill(~_in_best_groups(scores, options), -math.inf)
    order = _by_score(scores)
    if options.second is not SecondChoice.SAMPLED:
        return order[..., : options.top_k].contiguous()
    assert tokens is not None
    first = order[..., :1]
    drawn = logits.detach() + tokens.gumbel(Use.SECOND_CHOICE, options.num)
    return torch.cat((first, _by_score(drawn.scatter(-1, first, -math.inf))[..., :1]), -1)


def _by_score(scores: Tensor) -> Tensor:
    """The experts of each token by falling score, of equal ones the lower first."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices


def _in_best_groups(scores: Tensor, options: ExpertOptions) -> Tensor:
    """Return which experts are in a token's best groups, by the sum of each group's best scores (DeepSeek-V3;
    Megatron-LM ``group_limited_topk``).
    """
    grouped = scores.view(*scores.shape[:-1], options.num_groups, -1)
    num_best = options.top_k // options.groups_per_token
    sums = grouped.sort(dim=-1, descending=True, stable=True).values[..., :num_best].sum(-1)
    best = _by_score(sums)[..., : options.groups_per_token]
    is_best = torch.zeros_like(sums, dtype=torch.bool).scatter_(-1, best, True)
    return is_best.unsqueeze(-1).expand_as(grouped).flatten(-2)


def keep_second(weights: Tensor, tokens: TokenIds) -> Tensor:
    """Return which routes (…, 2) are taken where the second is at random: with probability 2·w₂/(w₁ + w₂) (GShard)."""
    share = weights[..., 1:] / weights.sum(-1, keepdim=True)
    is_kept = tokens.uniform(Use.KEEP_SECOND, 1) < 2 * share
    return torch.cat((torch.ones_like(is_kept), is_kept), -1)


def jittered(x: Tensor, jitter: float, tokens: TokenIds) -> Tensor:
    """Each number times one of [1 − jitter, 1 + jitter); x (sequences, tokens, hidden)."""
    if jitter == 0:
        return x
    factors = 1 + jitter * (2 * tokens.uniform(Use.JITTER, x.shape[-1]) - 1)
    return x * factors.to(x.dtype)


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
