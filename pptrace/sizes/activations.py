"""Bytes that a microbatch of the GPT keeps on a rank between its forward and its backward: the papers' formulas, and this model's
tensors.

The formulas (:meth:`ActivationSizes.paper_layer`) are of a model with 16-bit values, dropout masks of one byte, and an attention
that stores its scores, its softmax and the mask of its dropout: the 5·a·s²·b. This model differs. Its attention is one fused
kernel or the ring, which save q, k, v, the output and a log-sum-exp for each row and compute the scores again; attention weights
are not dropped; values have any dtype. So :meth:`ActivationSizes.layer_tensors` lists what a layer saves for its backward, tensor
by tensor. With 16 bits and dropout its s·b·h terms are those of the paper; beyond them it has the statistics of the norms and the
log-sum-exp. A name is that of the module that makes the tensor.

Tests hold the lists against what autograd saves on CPUs. On a GPU fused kernels may pad and save the state of a random generator,
which is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pptrace.sizes.form import Norms, QkNorm
from pptrace.sizes.gpt_facts import FULLY, GptFacts, modules_of

PAPER = "arXiv 2205.05198"
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
        """Bytes of one layer; ``of_experts`` is what experts in place of its MLP keep."""
        form = self.facts.form
        if form.numbers is not None:
            return self._between_bytes if recompute == "full" else self._share(form.numbers.activations)
        if form.scores_stored:
            return self.paper_layer(recompute)
        tensors = self.layer_tensors(recompute, has_mlp=of_experts is None)
        return sum(tensors.values()) + (of_experts or 0)

    def layer_tensors(self, recompute: str, *, has_mlp: bool = True) -> Mapping[str, int]:
        """Bytes of each tensor of a layer; ``recompute`` is as :meth:`GptFacts.recompute_of` has it.

        ``input`` is the layer's, which for all layers but a stage's first is the output of the layer before. With SP a
        column-parallel layer saves its shard and gathers it again.
        """
        if recompute in FULLY:
            return {"input": self._between_bytes} if recompute == "full" else {}
        keeps_mlp = has_mlp and "mlp" not in modules_of(recompute)
        return {
            "input": self._between_bytes,
            **self._before("attention"),
            **self._attention(recompute),
            **self._after("attention"),
            **self._mask("attention_out.dropout"),
            "attention residual": self._between_bytes,
            **self._before("mlp"),
            **(dict.fromkeys(self.facts.form.inner_tensors, self._wide) if keeps_mlp else {}),
            **self._after("mlp"),
            **self._mask("mlp_out.dropout"),
        }

    def embedding_tensors(self) -> Mapping[str, int]:
        """Bytes of each tensor of the embedding, without the batch's tokens: with tp which of them are this rank's too."""
        positions = self.held // self.facts.microbatch_size * _INDEX_BYTES
        learned = {"positions": positions} if self.facts.form.has_positions else {}
        return {**learned, **self._local_indices("tokens"), **self._mask("embedding.dropout")}

    def head_tensors(self) -> Mapping[str, int]:
        """Bytes of each tensor of the final norm, the projection and the cross-entropy, without the batch's targets."""
        facts = self.facts
        logits = facts.vocabulary if self.tp == 1 else facts.vocabulary_rows(self.tp)  # one rank leaves out the others
        capped = {"tanh": self.held * logits * facts.item_bytes} if facts.form.caps_logits else {}
        return {
            "input": self._between_bytes,
            **self._norm("norm"),
            **capped,
            "softmax": self.held * logits * facts.sum_bytes,
            **self._local_indices("targets"),
            **({"loss.total_weight": facts.sum_bytes} if self.tp == 1 else {}),
        }

    def ends(self, is_first: bool, is_last: bool) -> int:
        """Bytes of the embedding and of the head of a stage that has them."""
        if (numbers := self.facts.form.numbers) is not None:
            return self._share(numbers.head_activations) if is_last else 0
        embedding = sum(self.embedding_tensors().values()) if is_first else 0
        return embedding + (sum(self.head_tensors().values()) if is_last else 0)

    def stage(self, of_experts: Sequence[int | None], is_first: bool, is_last: bool, recompute: Sequence[str]) -> int:
        """Bytes of one microbatch of a stage of the model, by what the experts of its layers keep, None of one with an MLP, and
        what each layer recomputes.
        """
        return sum(map(self.layer, recompute, of_experts)) + self.ends(is_first, is_last)

    def paper_layer(self, recompute: str) -> int:
        """Bytes of one layer by the formulas of arXiv 2205.05198, section 4 and table 2.

        s sequence, b microbatch, h hidden, a heads, t tensor-parallel size; 16-bit values, masks of one byte, scores stored::

            one rank          s·b·h·(34 + 5·a·s/h)                      eq. 1
            tensor            s·b·h·(10 + 24/t + 5·a·s/(h·t))           eq. 2
            tensor, sequence  s·b·h/t·(34 + 5·a·s/h)                    eq. 4
            selective         the same without 5·a·s/h                  eq. 6
            mlp               without the 16·s·b·h/t of what GELU reads and makes
            full              2·s·b·h: the layer's input. With SP that is a shard: 2·s·b·h/t

        Context parallelism is not in the paper. It leaves a rank s/cp of the tokens, so all terms that are linear in s are
        divided by cp. So is the quadratic one, once and not twice: s/cp queries meet all s keys (or with Ulysses a/cp heads have
        all s × s scores). That is what scores would take if they were stored; ring attention stores none.

        The formulas know no KV heads: q, k and v are as wide as h each.
        """
        facts, t = self.facts, self.tp
        linear = self.held * facts.hidden
        if recompute in FULLY:
            return 2 * self.between * facts.hidden if recompute == "full" else 0
        modules = modules_of(recompute)
        without = 34 * linear // t if facts.sequence_parallel else 10 * linear + 24 * linear // t
        without -= 16 * linear // t if "mlp" in modules else 0
        return without if "core_attn" in modules else without + 5 * facts.heads * facts.sequence * self.held // t

    def weight_work(self, of_experts: Sequence[int | None], is_first: bool, is_last: bool) -> int:
        """Bytes of one microbatch of a stage of the model that its W reads, which its I leaves; by what W reads of the experts of
        its layers, None of one with an MLP.

        Of each linear layer its input and its output's gradient, however the forward ran; norms are done with I.
        """
        if self.facts.form.numbers is not None:
            ends = self.ends(is_first, is_last)
        else:
            head = self.whole + self.held * self.facts.vocabulary_rows(self.tp) * self.facts.item_bytes
            ends = self._embedding_work() * is_first + head * is_last
        return sum(self._layer_work(each) for each in of_experts) + ends

    def _layer_work(self, of_experts: int | None) -> int:
        facts = self.facts
        if facts.form.numbers is not None or facts.form.scores_stored:
            return self.layer("none")  # no more than that is known
        query, kv = self._heads()
        heads = (query + kv) * facts.head_dim + (query + kv) * facts.value_dim
        is_shard = facts.form.latent is not None and facts.form.latent.query_rank is not None
        read = self._between_bytes if is_shard else self.whole
        attention = read + self.held * heads * facts.item_bytes + self._latent_work() + self.row_gradient
        if of_experts is not None:
            return attention + of_experts
        return attention + self.whole + facts.form.num_matrices * self._wide + self.row_gradient

    def _latent_work(self) -> int:
        """Bytes of what the projections of latent attention read and of the gradients of what they make, but for those of its
        heads' queries, keys and values; the heads' keys have ``rotary`` numbers that no projection to heads makes.
        """
        latent = self.facts.form.latent
        if latent is None:
            return 0
        ranks = latent.kv_rank + (latent.query_rank or 0)
        made = self.between * (ranks + latent.rotary) - self.held * self._heads()[1] * latent.rotary
        return (self.held * ranks + made) * self.facts.item_bytes

    def _embedding_work(self) -> int:
        """The gradients of tokens and of positions, which a sum over sequences makes, and the indices of both."""
        facts, length = self.facts, self.held // self.facts.microbatch_size
        positions = self.between // facts.microbatch_size * facts.hidden * facts.item_bytes + length * _INDEX_BYTES
        positions *= facts.form.has_positions
        return positions + self.whole + (self.held * _INDEX_BYTES if self.tp > 1 else 0)

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
        """(query heads, key and value heads) of this rank; of latent attention there are as many."""
        facts = self.facts
        return facts.heads // self.tp, facts.kv_heads // self.tp if facts.kv_heads % self.tp == 0 else 1

    @property
    def _between_bytes(self) -> int:
        return self.between * self.facts.hidden * self.facts.item_bytes

    def _norm(self, name: str) -> Mapping[str, int]:
        """Statistics of each token, and the output, which the linear layer after it reads; its input is another's output."""
        return {**self._statistics(name), name: self._between_bytes}

    def _statistics(self, name: str, of_token: int = 1) -> Mapping[str, int]:
        """Statistics of a norm, so many of each token."""
        statistic = self.between * (max(4, self.facts.item_bytes) if self.on_device else self.facts.item_bytes)
        mean = {f"{name}.mean": statistic} if self.facts.form.has_layer_norm else {}
        return {**mean, f"{name}.rstd": statistic * of_token}

    def _before(self, part: str) -> Mapping[str, int]:
        """The norm before the attention or the MLP."""
        return {} if self.facts.form.norms is Norms.AFTER else self._norm(f"{part}_norm")

    def _after(self, part: str) -> Mapping[str, int]:
        """The norm of what the attention or the MLP makes, which nothing else keeps."""
        if self.facts.form.norms is Norms.BEFORE:
            return {}
        return {f"{part}_out": self._between_bytes, **self._statistics(f"{part}_post_norm")}

    @property
    def _wide(self) -> int:
        """Bytes of a tensor as wide as the MLP's inner layer."""
        return self.held * self.facts.mlp_width // self.tp * self.facts.item_bytes

    def _share(self, of_sequence: int) -> int:
        """Bytes of a rank's share of a microbatch, by those of a whole sequence."""
        return -(-of_sequence * self.held // (self.facts.sequence * self.tp))

    def _attention(self, recompute: str) -> Mapping[str, int]:
        """Tensors that the attention saves; of Ulysses what its all-to-alls exchanged: q, k and v, and the output twice."""
        facts = self.facts
        query, kv = self._heads()
        runs_again = "core_attn" in modules_of(recompute)
        is_exchanged = facts.ulysses > 1 and not runs_again
        tensors = {**self._latent(), **self._qk_norm(query, kv)}
        if is_exchanged and kv % facts.ulysses:
            kv = facts.ulysses
        item = self.held * facts.item_bytes
        made, out = (
            item * (query * facts.head_dim + kv * (facts.head_dim + facts.value_dim)),
            item * query * facts.value_dim,
        )
        tensors |= {"all-to-all(qkv)" if is_exchanged else "qkv": made, "attention": out}
        if runs_again:
            return tensors
        tensors["attention.log-sum-exp"] = self.held * query * facts.sum_bytes
        if facts.shortest_document is not None:  # the outputs of all documents, which are joined for the next layer
            tensors["attention.documents"] = out
        return tensors | ({"all-to-all(attention)": out} if is_exchanged else {})

    def _qk_norm(self, query: int, kv: int) -> Mapping[str, int]:
        """Queries and keys before their norms, and its statistics."""
        facts, heads = self.facts, query + kv
        if facts.form.qk_norm is QkNorm.NONE:
            return {}
        num_norms = 2 if facts.form.qk_norm is QkNorm.ALL else heads
        statistics = self.held * num_norms * (max(4, facts.item_bytes) if self.on_device else facts.item_bytes)
        return {"qk_norm.rstd": statistics, "qk": self.held * heads * facts.head_dim * facts.item_bytes}

    def _latent(self) -> Mapping[str, int]:
        """Tensors that queries, keys and values of latent attention are made of, before its norms and behind them."""
        latent = self.facts.form.latent
        if latent is None:
            return {}
        ranks, num_norms = latent.kv_rank + (latent.query_rank or 0), 2 if latent.query_rank else 1
        numbers = self.between * (2 * ranks + latent.rotary)
        return {"latent": numbers * self.facts.item_bytes, **self._statistics("latent_norm", num_norms)}

    def _mask(self, name: str) -> Mapping[str, int]:
        return {name: self.between * self.facts.hidden * _MASK_BYTES} if self.facts.dropout else {}

    def _local_indices(self, name: str) -> Mapping[str, int]:
        """Indices into this rank's part of the vocabulary, and which tokens are outside of it."""
        return (
            {f"{name}.local": self.held * _INDEX_BYTES, f"{name}.foreign": self.held * _MASK_BYTES}
            if self.tp > 1
            else {}
        )
