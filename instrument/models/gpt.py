"""A byte-level GPT that can be partitioned into stages between any two layers.

Pre-norm transformer blocks with causal scaled-dot-product attention and a GELU MLP, learned positions, a final norm and
a head, whose weight may be the embedding's (tied). Every part draws its initial values from a separate generator,
seeded by its index in the model, so that any partition over stages and ranks has the same parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial, reduce

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from instrument.collectives import AxisGroup
from instrument.expert.layer import ExpertLayer, RoutesOfForward
from instrument.expert.noise import ForwardKey
from instrument.expert.pieces import Pieces, Tape
from instrument.models.cross_attention import CrossAttention
from instrument.models.gpt_config import GptConfig, Recompute, RecomputeMethod, RecomputeModule
from instrument.models.parallel import Parallel, alone
from instrument.recompute import MarkedContexts
from instrument.recorder import Recorder
from instrument.seeds import mix
from instrument.sequence.dropout import MicrobatchKey, dropout
from instrument.sequence.partial import LayerNorm, PositionEmbedding
from instrument.tensor.cross_entropy import vocab_parallel_cross_entropy
from instrument.tensor.embedding import VocabParallelEmbedding
from instrument.tensor.heads import share_heads
from instrument.tensor.linear import ColumnParallelLinear, QkvParallelLinear, RowParallelLinear

HEAD = "head and loss"
"""The name of the range of the head, and of the loss behind it."""
_STD = 0.02
"""Standard deviation of initial weights."""


class Embedding(nn.Module):
    """(microbatch, sequence / cp) token ids → (microbatch, sequence / cp, hidden), or with SP this rank's shard of that."""

    def __init__(
        self, config: GptConfig, parallel: Parallel | None = None, num_positions: int | None = None, site: int = 0
    ) -> None:
        """``num_positions``: None for as many as ``config.sequence``; ``site`` tells masks of two embeddings from each other."""
        super().__init__()
        self.parallel = parallel = parallel or alone()
        self.dropout = config.dropout
        self._site = site
        rows = config.padded_vocabulary(parallel.region.group.size)
        self.tokens = VocabParallelEmbedding(rows, config.hidden, parallel.region, config.dtype)
        self.positions = PositionEmbedding(
            num_positions or config.sequence, config.hidden, parallel.region.shards_sequence, config.dtype
        )

    def forward(self, tokens: Tensor, microbatch_key: MicrobatchKey = MicrobatchKey()) -> Tensor:  # noqa: B008
        position_ids = self.parallel.positions(tokens.shape[1], tokens.device, microbatch_key.documents)
        hidden: Tensor = self.tokens(tokens) + self.positions(position_ids)
        return _drop(hidden, self.dropout * self.training, self.parallel, microbatch_key, layer=-1, site=self._site)

    def take(self, whole: Embedding) -> None:
        """Copy this rank's part of the whole embedding's values."""
        self.tokens.take(_padded(whole.tokens.weight, self.tokens))
        self.positions.weight.data.copy_(whole.positions.weight)


_TensorParallel = ColumnParallelLinear | RowParallelLinear


class Block(nn.Module):
    """One transformer layer; (microbatch, sequence / cp, hidden) in and out, with SP this rank's shard of that.

    One of a decoder that has an encoder attends over ``memory`` too, which that has made: (microbatch, source, hidden).
    """

    def __init__(self, config: GptConfig, parallel: Parallel | None = None, layer: int = 0) -> None:
        super().__init__()
        self.parallel = parallel = parallel or alone()
        region, hidden, dtype = parallel.region, config.hidden, config.dtype
        share = share_heads(config.heads, config.num_kv_heads, region.group.rank, region.group.size)
        self.layer = layer
        self.dropout = config.dropout
        self.recompute = config.recompute
        self._modules_again = config.recompute_modules if config.recompute is Recompute.SELECTIVE else ()
        self.recorder = region.group.recorder
        self.attention_norm = LayerNorm(hidden, region.shards_sequence, dtype)
        self.qkv = QkvParallelLinear(hidden, config.head_dim, share, region, dtype=dtype)
        self.attention_out = RowParallelLinear(hidden, hidden, region, dtype=dtype)
        self.mlp_norm = LayerNorm(hidden, region.shards_sequence, dtype)
        self.experts = None
        if config.experts is not None and config.has_experts(layer):
            self.experts = ExpertLayer(hidden, config.experts.of_layer(layer), region, parallel.experts, dtype=dtype)
            self.experts.layer = layer
        else:
            self.mlp_in = ColumnParallelLinear(hidden, 4 * hidden, region, dtype=dtype)
            self.mlp_out = RowParallelLinear(4 * hidden, hidden, region, dtype=dtype)
        self.causal, self.cross = not config.is_encoder(layer), None
        if 0 < config.encoder_layers <= layer:
            self.cross = CrossAttention(hidden, config.head_dim, share, parallel, dtype)

    def forward(
        self,
        x: Tensor,
        microbatch_key: MicrobatchKey = MicrobatchKey(),  # noqa: B008
        recompute: bool = False,
        memory: Tensor | None = None,
    ) -> Tensor:
        """``recompute``: fully, this time, whatever ``config.recompute`` is."""
        if recompute or self.recompute is Recompute.FULL:
            return recomputed_together([self], x, microbatch_key, memory)
        return self.prepared(microbatch_key, memory)(x)

    def prepared(self, microbatch_key: MicrobatchKey, memory: Tensor | None) -> Callable[[Tensor], Tensor]:
        """The forward of a microbatch, which may run several times: experts then follow the routes of the first one."""
        routes = self._routes(microbatch_key)
        return lambda x: self._compute(x, microbatch_key, routes, memory)

    def in_pieces(self, x: Tensor, tape: Tape, microbatch_key: MicrobatchKey, recompute: bool) -> Pieces[Tensor]:
        """:meth:`forward` that pauses while tokens travel to experts; in one piece where all of it is recomputed."""
        if not isinstance(self.experts, ExpertLayer) or recompute or self.recompute is Recompute.FULL:
            output: Tensor = self(x, microbatch_key, recompute)
            return output
        attended = self._attended(x, microbatch_key, None)
        routes = self._routes(microbatch_key)
        output, residual = yield from self.experts.in_pieces(self.mlp_norm(attended), routes, tape, attended)
        return residual + self._drop(output, microbatch_key, 1)

    def take(self, whole: Block) -> None:
        """Copy this rank's part of the whole layer's values."""
        for name in ("attention_norm", "mlp_norm"):
            getattr(self, name).load_state_dict(getattr(whole, name).state_dict())
        pairs: list[tuple[_TensorParallel, _TensorParallel]] = [
            (self.qkv, whole.qkv),
            (self.attention_out, whole.attention_out),
        ]
        if self.experts is not None and whole.experts is not None:
            self.experts.take(whole.experts)
        else:
            pairs += [(self.mlp_in, whole.mlp_in), (self.mlp_out, whole.mlp_out)]
        for layer, source in pairs:
            layer.take(source.weight, source.bias)
        if isinstance(self.cross, CrossAttention) and whole.cross is not None:
            self.cross.take(whole.cross)

    def _compute(
        self, x: Tensor, microbatch_key: MicrobatchKey, routes: RoutesOfForward, memory: Tensor | None
    ) -> Tensor:
        x = self._attended(x, microbatch_key, memory)
        return x + self._drop(self._transform(self.mlp_norm(x), routes), microbatch_key, 1)

    def _attended(self, x: Tensor, microbatch_key: MicrobatchKey, memory: Tensor | None) -> Tensor:
        qkv = self.qkv(self.attention_norm(x))
        attend = partial(self._attend, documents=microbatch_key.documents)
        attended = self._again(RecomputeModule.CORE_ATTN, attend, qkv)
        x = x + self._drop(self.attention_out(attended), microbatch_key, 0)
        if self.cross is None or memory is None:
            return x
        q, k, v = self.cross.project(x, memory)
        attended = self._again(RecomputeModule.CORE_ATTN, partial(self.cross.attend, k=k, v=v), q)
        return x + self._drop(self.cross.out(attended), microbatch_key, 2)

    def _transform(self, x: Tensor, routes: RoutesOfForward) -> Tensor:
        """The MLP, or the experts in its place."""
        if isinstance(self.experts, ExpertLayer):
            return self.experts.forward(x, routes)
        return self._again(RecomputeModule.MLP, lambda x: self.mlp_out(F.gelu(self.mlp_in(x))), x)

    def _again(self, module: RecomputeModule, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Compute a module, which backward runs again if it is one of those that selective recompute has."""
        return _checkpointed(function, x, self.recorder) if module in self._modules_again else function(x)

    def _routes(self, key: MicrobatchKey) -> RoutesOfForward:
        return RoutesOfForward(ForwardKey(self.parallel.seeds.seed, self.layer, key.step, key.microbatch))

    def _attend(self, qkv: Tensor, documents: Sequence[int] | None) -> Tensor:
        return self.parallel.attend(*self.qkv.heads(qkv), self.causal, documents).transpose(1, 2).flatten(2)

    def _drop(self, x: Tensor, microbatch_key: MicrobatchKey, site: int) -> Tensor:
        return _drop(x, self.dropout * self.training, self.parallel, microbatch_key, self.layer, site)


def recomputed_together(
    blocks: Sequence[Block], x: Tensor, microbatch_key: MicrobatchKey, memory: Tensor | None = None
) -> Tensor:
    """Run layers one after another, saving the input of the first: backward runs all of them again."""
    forwards = [block.prepared(microbatch_key, memory) for block in blocks]
    return _checkpointed(lambda x: reduce(lambda x, forward: forward(x), forwards, x), x, blocks[0].recorder)


class Head(nn.Module):
    """(microbatch, sequence / cp, hidden), with SP a shard of that → logits (microbatch, sequence / cp, rows / tp)."""

    def __init__(self, config: GptConfig, parallel: Parallel | None = None) -> None:
        super().__init__()
        region = (parallel or alone()).region
        self.norm = LayerNorm(config.hidden, region.shards_sequence, config.dtype)
        rows = config.padded_vocabulary(region.group.size)
        self.projection = ColumnParallelLinear(config.hidden, rows, region, bias=False, dtype=config.dtype)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.projection(self.norm(x))
        return logits

    def take(self, whole: Head) -> None:
        """Copy this rank's part of the whole head's values."""
        self.norm.load_state_dict(whole.norm.state_dict())
        self.projection.take(_padded(whole.projection.weight, self.projection))


class GptStage(nn.Module):
    """A consecutive part of the model's layers; parameter names are the same in every partition.

    The first stage takes token ids, the last returns logits; between stages travel the activations of :class:`Block`.
    Of an encoder with its decoder the first stage takes the tokens of the source; the one with the decoder's first layer takes
    what the encoder has made of them, and ``decoder_tokens``; stages behind it pass on two tensors, their activations and what
    the encoder has made, as long as layers follow that read it.
    Without ``parallel`` the rank has whole layers. ``ends``: the stage has the embedding, it has the head; left out, these go
    with the first and the last layer. ``before_part`` is called with the embedding, each layer and the head before it runs
    forward (of a forward in pieces with all of them first).
    """

    def __init__(
        self,
        config: GptConfig,
        layers: Sequence[int],
        parallel: Parallel | None = None,
        ends: tuple[bool, bool] | None = None,
    ) -> None:
        super().__init__()
        self.parallel = parallel = parallel or alone(config.seed)
        has_embedding, has_head = ends or (0 in layers, config.layers - 1 in layers)
        self.embedding = _source_embedding(config, parallel) if has_embedding else None
        self.blocks = nn.ModuleDict({str(layer): Block(config, parallel, layer) for layer in layers})
        self.encoder_norm = self.decoder_embedding = None
        first = min(layers, default=0 if has_embedding else config.layers)
        self.reads_source = bool(config.encoder_layers) and first <= config.encoder_layers
        self._passes_memory = (
            any(layer >= config.encoder_layers for layer in layers) and config.layers - 1 not in layers
        )
        self.before_part: Callable[[nn.Module], None] = _nothing
        self._num_together = 1
        if config.recompute is Recompute.FULL and config.recompute_method is RecomputeMethod.UNIFORM:
            self._num_together = config.recompute_num_layers
        elif config.recompute is Recompute.FULL:
            for block in list(self.blocks.values())[config.recompute_num_layers :]:
                block.recompute = Recompute.NONE  # type: ignore[assignment]
        self.head = Head(config, parallel) if has_head else None
        if config.encoder_layers - 1 in layers:
            self.encoder_norm = LayerNorm(config.hidden, parallel.region.shards_sequence, config.dtype)
        if config.encoder_layers and config.encoder_layers in layers:
            self.decoder_embedding = Embedding(config, parallel, site=1)
        self._initialise(config)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        decoder_tokens: Tensor | None = None,
        microbatch_key: MicrobatchKey = MicrobatchKey(),  # noqa: B008
        recompute: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Run the stage. With ``recompute`` every layer saves its input alone; embedding and head save their tensors anyway."""
        recorder = self.parallel.region.group.recorder
        x = self._embedded(self.embedding, x, microbatch_key)
        for is_encoder, blocks in self._parts():
            if not is_encoder and self.decoder_embedding is not None:
                assert decoder_tokens is not None
                memory, x = x, self._embedded(self.decoder_embedding, decoder_tokens, microbatch_key)
            with recorder.part("layers"):
                for together in self._together(blocks):
                    for block in together:
                        self.before_part(block)
                    x = (
                        recomputed_together(together, x, microbatch_key, memory)
                        if len(together) > 1
                        else together[0](x, microbatch_key, recompute, memory)
                    )
                if is_encoder and self.encoder_norm is not None:
                    self.before_part(self.encoder_norm)
                    x = self.encoder_norm(x)
        if self.head is None:
            return (x, memory) if self._passes_memory and memory is not None else x
        with recorder.part(HEAD):
            self.before_part(self.head)
            logits: Tensor = self.head(x)
        return logits

    def _embedded(self, embedding: Embedding | None, x: Tensor, microbatch_key: MicrobatchKey) -> Tensor:
        """The activations of tokens; ``x`` itself where the stage has no embedding for it."""
        if embedding is None:
            return x
        with self.parallel.region.group.recorder.part("embedding"):
            self.before_part(embedding)
            embedded: Tensor = embedding(x, microbatch_key)
        return embedded

    def _parts(self) -> Iterator[tuple[bool, list[Block]]]:
        """The layers of each part of the model that the stage has any of, with whether that is the encoder; of a stage without
        any an empty decoder.
        """
        blocks = [block for block in self.blocks.values() if isinstance(block, Block)]
        encoder, decoder = ([block for block in blocks if block.causal is causal] for causal in (False, True))
        if encoder:
            yield True, encoder
        if decoder or not encoder:
            yield False, decoder

    def _together(self, blocks: Sequence[Block]) -> Iterator[Sequence[Block]]:
        """The layers, those in one list that recompute as one."""
        yield from (blocks[at : at + self._num_together] for at in range(0, len(blocks), self._num_together))

    def in_pieces(
        self,
        x: Tensor,
        tape: Tape,
        microbatch_key: MicrobatchKey = MicrobatchKey(),  # noqa: B008
        recompute: bool = False,
    ) -> Pieces[Tensor]:
        """:meth:`forward` that pauses while tokens travel to experts."""
        for part in self.children():
            self.before_part(part)
        if self.embedding is not None:
            x = self.embedding(x, microbatch_key)
        ((_, layers),) = self._parts()  # no layers with experts have an encoder
        for blocks in self._together(layers):
            if len(blocks) > 1:
                x = recomputed_together(blocks, x, microbatch_key)
            else:
                x = yield from blocks[0].in_pieces(x, tape, microbatch_key, recompute)
        return x if self.head is None else self.head(x)

    def _initialise(self, config: GptConfig) -> None:
        """Draw every part whole and copy this rank's share of it, so that any mesh begins with the same model."""
        if self.embedding is not None:
            self.embedding.take(drawn_embedding(config))
        for layer, block in self.blocks.items():
            assert isinstance(block, Block)
            whole = Block(config, layer=int(layer))
            _draw(whole, config, part=1 + int(layer))
            block.take(whole)
        if self.head is not None:
            head = Head(replace(config, vocabulary_multiple=1))
            _draw(head, config, part=1 + config.layers)
            if config.tied:  # the values of the embedding, wherever that is
                head.projection.weight = drawn_embedding(config).tokens.weight
            self.head.take(head)
        if self.decoder_embedding is not None:
            embedding = Embedding(replace(config, vocabulary_multiple=1))
            _draw(embedding, config, part=2 + config.layers)
            self.decoder_embedding.take(embedding)


def _source_embedding(config: GptConfig, parallel: Parallel | None = None) -> Embedding:
    """The embedding of what the first stage reads: of the encoder's tokens, where there is one."""
    return Embedding(config, parallel, config.source_length if config.encoder_layers else config.sequence)


def _nothing(_part: nn.Module) -> None:
    """Do nothing before a part of a stage runs."""


def drawn_embedding(config: GptConfig) -> Embedding:
    """The whole embedding with its initial values, without rows for more than the vocabulary."""
    embedding = _source_embedding(replace(config, vocabulary_multiple=1))
    _draw(embedding, config, part=0)
    return embedding


def make_stages(
    config: GptConfig, layer_partition: Sequence[Sequence[int]], stages: Sequence[int], parallel: Parallel | None = None
) -> dict[int, GptStage]:
    """Make the modules of one rank's stages.

    A tied embedding whose two ends are both among them is one parameter; otherwise each end has a copy, and the owner
    sums their gradients (:mod:`instrument.optim.gradient_sync`).
    """
    last = len(layer_partition) - 1
    made = {stage: GptStage(config, layer_partition[stage], parallel, (stage == 0, stage == last)) for stage in stages}
    if config.tied and 0 in made and last in made:
        embedding, head = made[0].embedding, made[last].head
        assert embedding is not None
        assert head is not None
        head.projection.weight = embedding.tokens.weight
    return made


def tied_weight(stages: dict[int, GptStage]) -> nn.Parameter | None:
    """This rank's copy of a tied embedding whose other end is on another rank, or None."""
    ends = [
        weight
        for stage in stages.values()
        for name, weight in stage.named_parameters()
        if name in ("embedding.tokens.weight", "head.projection.weight")
    ]
    return ends[0] if len(ends) == 1 else None


def _drop(
    x: Tensor, probability: float, parallel: Parallel, microbatch_key: MicrobatchKey, layer: int, site: int
) -> Tensor:
    """Dropout with the mask of this layer, site, microbatch and rank."""
    if probability == 0:
        return x
    seed = parallel.seeds.of(microbatch_key, layer + 1, site, parallel.region.shards_sequence)
    return dropout(x, probability, seed)


def _checkpointed(function: Callable[[Tensor], Tensor], x: Tensor, recorder: Recorder) -> Tensor:
    """Compute ``function(x)``, saving only x: backward runs it again, in a range. Nothing in a block draws random numbers."""
    contexts = MarkedContexts(recorder)
    output: Tensor = checkpoint(function, x, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
    return output


def cross_entropy(
    logits: Tensor, targets: Tensor, group: AxisGroup | None = None, vocabulary: int | None = None
) -> Tensor:
    """Mean over this rank's tokens of a microbatch; logits (…, rows / tp) of the ranks of ``group``, targets (…) ids.

    Logits beyond ``vocabulary`` ids are left out; None: there are none.
    """
    if group is None or group.size == 1:
        logits = logits[..., :vocabulary].to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())
    return vocab_parallel_cross_entropy(logits, targets, group, vocabulary).mean()


def _padded(weight: Tensor, part: VocabParallelEmbedding | ColumnParallelLinear) -> Tensor:
    """A weight with a row for each token id, with as many rows as all ranks of tp have: the others are 0."""
    return F.pad(weight, (0, 0, 0, len(part.weight) * part.region.group.size - len(weight)))


def _draw(module: nn.Module, config: GptConfig, part: int) -> None:
    """Draw initial values, seeded by the part's index, of experts by their ids too: GPT-2's, without its depth scaling."""
    generator = torch.Generator().manual_seed(mix(config.seed, part))
    for layer in module.modules():
        if isinstance(layer, nn.LayerNorm):
            nn.init.ones_(layer.weight)
            nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.Linear | nn.Embedding):
            nn.init.normal_(layer.weight, std=_STD, generator=generator)
            if isinstance(layer, nn.Linear) and layer.bias is not None:
                nn.init.zeros_(layer.bias)
        elif isinstance(layer, ExpertLayer):
            layer.draw_experts(mix(config.seed, part), _STD)
