"""Bytes that a microbatch of the GPT runtime keeps between its forward and its backward, predicted from the run's facts.

Korthikanti et al. (arXiv 2205.05198, section 4) count s·b·h·(34 + 5·a·s/h) bytes for a layer with 16-bit values that stores its
scores; this runtime's attention is fused and stores a log-sum-exp for each row instead, so the tensors are counted one by one,
as ``instrument/models/activations.py`` lists them. Tests hold both against what autograd saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from instrument.models.volume.gpt_facts import GptFacts

_INDEX_BYTES = 8
_MASK_BYTES = 1


@dataclass(frozen=True, slots=True)
class ActivationSizes:
    """A rank's share of a microbatch. ``on_device``: norms keep statistics of 32 bits."""

    facts: GptFacts
    tp: int
    cp: int
    on_device: bool

    @property
    def held(self) -> int:
        """Tokens that attention and MLP see: b·s / cp."""
        return self.facts.microbatch_size * self.facts.sequence // self.cp

    @property
    def between(self) -> int:
        """Tokens of activations between the layers: with SP a shard of :attr:`held`."""
        return self.held // self.tp if self.facts.sequence_parallel else self.held

    def layer(self, recompute: str, of_experts: int | None = None) -> int:
        """Bytes of one layer; ``recompute`` is none, selective (the attention) or full (all but the input).

        ``of_experts`` is what experts in place of its MLP keep.
        """
        facts = self.facts
        one = self.between * facts.hidden * facts.item_bytes
        if recompute == "full":
            return one + (of_experts or 0)
        wide = self.held * 4 * facts.hidden // self.tp * facts.item_bytes
        mlp = 2 * wide if of_experts is None else of_experts  # output of its first linear layer and of its GELU
        # input, attention residual; two norms; two masks
        return 2 * one + 2 * self._norm() + self._attention(recompute) + mlp + 2 * self._mask()

    def embedding(self) -> int:
        """Bytes that the embedding keeps, without the batch's tokens."""
        return self.held // self.facts.microbatch_size * _INDEX_BYTES + self._local_indices() + self._mask()

    def head(self) -> int:
        """Bytes that the final norm, the projection and the cross-entropy keep, without the batch's targets."""
        facts = self.facts
        softmax = self.held * facts.vocabulary // self.tp * facts.sum_bytes
        total_weight = facts.sum_bytes if self.tp == 1 else 0
        one = self.between * facts.hidden * facts.item_bytes
        return one + self._norm() + softmax + self._local_indices() + total_weight

    def stage(self, of_experts: Sequence[int | None], is_first: bool, is_last: bool, recompute: str) -> int:
        """Bytes of one microbatch of a stage of the model, by what the experts of its layers keep, None of one with an MLP."""
        ends = (self.embedding() if is_first else 0) + (self.head() if is_last else 0)
        return sum(self.layer(recompute, each) for each in of_experts) + ends

    def weight_work(self, of_experts: Sequence[int | None], is_first: bool, is_last: bool) -> int:
        """Bytes of one microbatch of a stage of the model that its W reads, which its I leaves; by what W reads of the experts of
        its layers, None of one with an MLP.

        Of each linear layer its input and its output's gradient, however the forward ran; norms are done with I.
        """
        ends = (self._embedding_work() if is_first else 0) + (self._head_work() if is_last else 0)
        return sum(self._layer_work(each) for each in of_experts) + ends

    def _layer_work(self, of_experts: int | None) -> int:
        facts, head = self.facts, self.facts.head_dim * self.facts.item_bytes
        query, kv = self._heads()
        attention = self.whole + self.held * (query + 2 * kv) * head + self.held * query * head + self.row_gradient
        if of_experts is not None:
            return attention + of_experts
        wide = self.held * 4 * facts.hidden // self.tp * facts.item_bytes
        return attention + self.whole + 2 * wide + self.row_gradient

    def _embedding_work(self) -> int:
        """The gradients of tokens and of positions, which a sum over sequences makes, and the indices of both."""
        facts, length = self.facts, self.held // self.facts.microbatch_size
        positions = self.between // facts.microbatch_size * facts.hidden * facts.item_bytes + length * _INDEX_BYTES
        return positions + self.whole + (self.held * _INDEX_BYTES if self.tp > 1 else 0)

    def _head_work(self) -> int:
        return self.whole + self.held * self.facts.vocabulary // self.tp * self.facts.item_bytes

    @property
    def whole(self) -> int:
        """Bytes of the input of a column-parallel layer, which with SP I has gathered: b·s·h / cp."""
        return self.held * self.facts.hidden * self.facts.item_bytes

    @property
    def row_gradient(self) -> int:
        """Bytes of the output gradient of a row-parallel layer; with SP its bias reads the shard, its weight all of it."""
        is_cut = self.facts.sequence_parallel and self.tp > 1
        return self.whole + (self.whole // self.tp if is_cut else 0)

    def _heads(self) -> tuple[int, int]:
        """(query heads, key and value heads) of this rank."""
        facts = self.facts
        return facts.heads // self.tp, facts.kv_heads // self.tp if facts.kv_heads % self.tp == 0 else 1

    def _norm(self) -> int:
        """Mean and reciprocal deviation of each token, and the output, which the linear layer after it reads."""
        facts = self.facts
        statistic = max(4, facts.item_bytes) if self.on_device else facts.item_bytes
        return self.between * (2 * statistic + facts.hidden * facts.item_bytes)

    def _attention(self, recompute: str) -> int:
        """q, k and v, the output and the log-sum-exp; with Ulysses the output also as it was exchanged."""
        facts = self.facts
        query, kv = self._heads()
        is_exchanged = facts.ulysses > 1 and recompute != "selective"
        if is_exchanged and kv % facts.ulysses:
            kv = facts.ulysses
        token = facts.head_dim * facts.item_bytes
        kept = self.held * (2 * query + 2 * kv) * token
        if recompute == "selective":
            return kept
        return kept + self.held * query * (facts.sum_bytes + (token if is_exchanged else 0))

    def _mask(self) -> int:
        return self.between * self.facts.hidden * _MASK_BYTES if self.facts.dropout else 0

    def _local_indices(self) -> int:
        """Indices into this rank's part of the vocabulary, and which tokens are outside of it."""
        return self.held * (_INDEX_BYTES + _MASK_BYTES) if self.tp > 1 else 0
