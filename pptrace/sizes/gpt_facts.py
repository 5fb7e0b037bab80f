"""Sizes and options of the GPT that determine its communication and its memory, and the parameters of a stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import prod

from pptrace.sizes.expert_options import ExpertOptions
from pptrace.sizes.form import OF_OUR_GPT, LayerNumbers, ModelForm, Norms, QkNorm

FULLY = ("full", "inside")
"""Recompute of layers that run again as a whole."""
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}


def padded_vocabulary(vocabulary: int, multiple: int, tp: int) -> int:
    """Rows of embedding and head of all ranks of tp: the least multiple of ``multiple`` · tp with a row for each token id.

    Source: Megatron-LM's ``--make-vocab-size-divisible-by``, whose default is 128.
    """
    rows = multiple * tp
    return -(-vocabulary // rows) * rows


def passed_lengths(layers_done: int, layers: int, encoder_layers: int, sequence: int, source: int) -> tuple[int, ...]:
    """Tokens of a sequence in each tensor that a stage passes on, when so many layers of the model are done.

    Within an encoder and at its end one of ``source`` tokens; within the decoder one of ``sequence``, and what the encoder has
    made as long as layers follow that read it. Source: ``get_tensor_shapes`` of Megatron-LM 0.12, of ``encoder_and_decoder``.
    """
    if not encoder_layers or layers_done == layers:
        return (sequence,)
    return (source,) if layers_done <= encoder_layers else (sequence, source)


def modules_of(recompute: str) -> tuple[str, ...]:
    """The modules of a layer that run again, of what :meth:`GptFacts.recompute_of` has of it."""
    return ("core_attn",) if recompute == "selective" else tuple(recompute.split(","))


@dataclass(frozen=True, slots=True)
class GptFacts:
    """A model and how it is trained.

    ``clip_grad`` is the largest norm of the gradient, 0 for none; ``steps`` how many the run has.
    ``recompute_method`` and ``recompute_num_layers`` are of full recompute, ``recompute_modules`` of selective one.
    ``recompute_microbatches_beyond`` is None where all microbatches recompute as ``recompute`` says, ``experts`` where no layer
    has any. ``attention_kernel`` is that of the fused attention, None where the ring runs instead. ``sleeps``: stages sleep,
    and compute the halves of overlapped pairs one after the other. ``vocabulary`` is the number of token ids, for which a rank of
    tp has :meth:`vocabulary_rows`. ``cp_comm_type`` is how keys reach ranks of cp that exchange no heads: ``p2p`` or
    ``all_gather``. ``shortest_sequence`` is None where all sequences have ``sequence`` tokens, else what a microbatch of the
    shortest ones has. ``num_positions`` are the rows of learned positions, None for as many as ``sequence``. The first
    ``encoder_layers`` are an encoder's, of ``encoder_sequence`` tokens (None: as many as ``sequence``), 0: there is none.
    ``shortest_document`` is what the shortest document of a sequence has that is packed of several, None where none is.
    ``scatter_gather``: each rank of tp sends a part of an activation along the pipeline, which the receivers gather.
    ``sent_dtype`` is that of these messages, None: ``dtype``. ``offloads``: activations wait on the host.
    ``graphs``: stages are captured as CUDA graphs.
    """

    hidden: int
    heads: int
    kv_heads: int
    sequence: int
    microbatch_size: int
    vocabulary: int
    dtype: str
    tied: bool
    layers_per_stage: tuple[int, ...]
    sequence_parallel: bool
    overlap: bool
    ulysses: int
    recompute: str
    recompute_microbatches_beyond: int | None
    zero: int
    bucket_bytes: int
    clip_grad: float
    optimizer_sync: str
    steps: int
    experts: ExpertOptions | None = None
    form: ModelForm = OF_OUR_GPT
    dropout: float = 0.0
    attention_kernel: str | None = None
    sleeps: bool = False
    vocabulary_multiple: int = 1
    recompute_method: str = "uniform"
    recompute_num_layers: int = 1
    recompute_modules: tuple[str, ...] = ("core_attn",)
    cp_comm_type: str = "p2p"
    shortest_sequence: int | None = None
    num_positions: int | None = None
    encoder_layers: int = 0
    encoder_sequence: int | None = None
    shortest_document: int | None = None
    scatter_gather: bool = False
    sent_dtype: str | None = None
    offloads: bool = False
    graphs: bool = False

    def as_json(self) -> dict[str, object]:
        """The ``model`` object of a trace's facts; options of experts by names that begin with ``experts``."""
        facts = asdict(self)
        del facts["sleeps"], facts["form"], facts["num_positions"]
        experts = facts.pop("experts") or {}
        named = {"experts" if name == "num" else f"experts_{name}": value for name, value in experts.items()}
        return {"name": "gpt", **facts, **named}

    def vocabulary_rows(self, tp: int) -> int:
        """Rows of embedding and head on one rank of tp."""
        return padded_vocabulary(self.vocabulary, self.vocabulary_multiple, tp) // tp

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def sum_bytes(self) -> int:
        """Bytes of a gradient, a loss or a logit in the cross-entropy: 32 bits at least."""
        return max(4, self.item_bytes)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one gradient."""
        return self.sum_bytes if self.form.gradient_bytes is None else self.form.gradient_bytes

    @property
    def mlp_width(self) -> int:
        """Width of the MLP's inner layer."""
        return 4 * self.hidden if self.form.width is None else self.form.width

    @property
    def head_dim(self) -> int:
        """Numbers of a head's query, or key."""
        return self.hidden // self.heads if self.form.head_dim is None else self.form.head_dim

    @property
    def value_dim(self) -> int:
        """Numbers of a head's value."""
        return self.head_dim if self.form.value_dim is None else self.form.value_dim

    @property
    def source_length(self) -> int:
        """Tokens of a sequence that the encoder reads."""
        return (self.num_positions or self.sequence) if self.encoder_sequence is None else self.encoder_sequence

    def passed_lengths(self, stage: int) -> tuple[int, ...]:
        """Tokens of a sequence in each tensor that a stage of the model passes on."""
        done, layers = self.layers_of(stage).stop, sum(self.layers_per_stage)
        return passed_lengths(done, layers, self.encoder_layers, self.sequence, self.source_length)

    def layers_of(self, stage: int) -> range:
        """The layers of a stage of the model."""
        first = sum(self.layers_per_stage[:stage])
        return range(first, first + self.layers_per_stage[stage])

    def recompute_of(self, stage: int, *, fully: bool = False) -> tuple[str, ...]:
        """Recompute of each layer of a stage of the model: none, full, inside (of layers that recompute as one, all but the
        first), selective (the attention) or the names of its modules.

        ``fully``: of a microbatch that recomputes so whatever the options say.
        """
        num_layers, number = self.layers_per_stage[stage], self.recompute_num_layers
        if self.recompute == "selective" and not fully:
            names = ",".join(self.recompute_modules)
            return ("selective" if names == "core_attn" else names,) * num_layers
        if fully or self.recompute == "none":
            return ("full" if fully else "none",) * num_layers
        if self.recompute_method == "block":
            return tuple("full" if layer < number else "none" for layer in range(num_layers))
        return tuple("inside" if layer % number else "full" for layer in range(num_layers))

    def experts_of(self, layer: int) -> int:
        """The experts of a layer, 0 of one with an MLP."""
        if self.experts is None or layer in self.form.dense_layers or not self.experts.in_layer(layer):
            return 0
        return self.experts.of_layer(layer).num

    def bytes_of_each(self, parameter: Parameter) -> int:
        """Bytes of one number of a parameter."""
        return self.sum_bytes if parameter.is_wide else self.item_bytes

    @property
    def expert_width(self) -> int:
        """Width of each expert's inner layer."""
        width = None if self.experts is None else self.experts.width
        return self.mlp_width if width is None else width


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter as a rank of tp holds it.

    ``summed`` numbers of its gradient are summed over tp once per step, because each rank sees only a part of what the
    parameter acts on: all of them with SP, of copied KV heads the rows of all KV heads. ``is_embedding`` is the matrix
    that a tied model has at both ends. ``is_expert``: its replicas are those of experts. ``is_wide``: it has 32 bits at least,
    as a router has.
    """

    shape: tuple[int, ...]
    summed: int = 0
    is_embedding: bool = False
    is_expert: bool = False
    is_wide: bool = False

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def local_numel(self, rank: int, size: int) -> int:
        """Elements of one of ``size`` replicas where whole rows are shared out (``torch.chunk``)."""
        return len(range(self.shape[0])[self._share(size) * rank :][: self._share(size)]) * prod(self.shape[1:])

    def padded_numel(self, size: int) -> int:
        """Elements of the equal shares of ``size`` replicas together."""
        return self._share(size) * size * prod(self.shape[1:])

    def _share(self, size: int) -> int:
        return -(-self.shape[0] // size)


@dataclass(frozen=True, slots=True)
class StageParameters:
    """Parameters of one stage of the model, in the order of its modules; ``layers`` one by one, and what is before and after
    them.
    """

    before: tuple[Parameter, ...]
    layers: tuple[tuple[Parameter, ...], ...]
    after: tuple[Parameter, ...]

    def __iter__(self) -> Iterator[Parameter]:
        yield from self.before
        for layer in self.layers:
            yield from layer
        yield from self.after


def stage_parameters(facts: GptFacts, stage: int, tp: int, ep: int = 1, etp: int = 1) -> StageParameters:
    """Parameters of a stage of the model on one rank of tp, ep and etp. A tied embedding stands at both ends here."""
    hidden, shards = facts.hidden, facts.sequence_parallel and tp > 1
    if facts.form.numbers is not None:
        return _given_parameters(facts, facts.form.numbers, stage, tp)
    rows = facts.vocabulary_rows(tp)
    num_positions = facts.sequence if facts.num_positions is None else facts.num_positions

    def embedding(num_positions: int) -> tuple[Parameter, ...]:
        positions = (_whole((num_positions, hidden), shards),) if facts.form.has_positions else ()
        return (Parameter((rows, hidden), is_embedding=True), *positions)

    is_first, is_last = stage == 0, stage == len(facts.layers_per_stage) - 1
    attention, mlp = _attention_parameters(facts, tp, shards), _mlp_parameters(facts, facts.mlp_width // tp, shards)
    first = facts.encoder_layers
    cross = _cross_parameters(facts, tp, shards)
    layers = [
        (
            *attention,
            *(_expert_parameters(facts, num, tp, ep, etp) if num else mlp),
            *(cross if 0 < first <= layer else ()),
        )
        for layer, num in zip(facts.layers_of(stage), map(facts.experts_of, facts.layers_of(stage)), strict=True)
    ]
    return StageParameters(
        embedding(facts.source_length if first else num_positions) if is_first else (),
        tuple(layers),
        (
            *((*_norm(facts, shards), Parameter((rows, hidden), is_embedding=True)) if is_last else ()),
            *(_norm(facts, shards) if first - 1 in facts.layers_of(stage) else ()),
            *(embedding(num_positions) if first and first in facts.layers_of(stage) else ()),
        ),
    )


def _given_parameters(facts: GptFacts, numbers: LayerNumbers, stage: int, tp: int) -> StageParameters:
    """Parameters of a stage whose layers are known by their numbers, in equal parts on all ranks of tp."""
    last = len(facts.layers_per_stage) - 1
    layer = (Parameter((-(-numbers.parameters // tp),)),)
    return StageParameters(
        (Parameter((-(-numbers.embedding_parameters // tp),), is_embedding=True),) if stage == 0 else (),
        (layer,) * facts.layers_per_stage[stage],
        (Parameter((-(-numbers.head_parameters // tp),), is_embedding=True),) if stage == last else (),
    )


def _whole(shape: tuple[int, ...], shards_sequence: bool) -> Parameter:
    """A parameter that every rank of tp holds."""
    return Parameter(shape, summed=prod(shape) if shards_sequence else 0)


def _norm(facts: GptFacts, shards: bool) -> tuple[Parameter, ...]:
    return (_whole((facts.hidden,), shards),) * (2 if facts.form.has_layer_norm else 1)


def _attention_parameters(facts: GptFacts, tp: int, shards: bool) -> tuple[Parameter, ...]:
    """Parameters of a layer but for its MLP or experts."""
    form, heads = facts.form, facts.heads // tp
    norms = _norm(facts, shards) * (2 if form.norms is Norms.BOTH else 1)
    return (
        *norms,
        *(_head_parameters(facts, tp, heads) if form.latent is None else _latent_parameters(facts, tp, shards)),
        *_qk_norm_parameters(facts, tp),
        *((Parameter((heads,)),) if form.has_sinks else ()),
        *_output_parameters(facts, tp, shards),
        *norms,
    )


def _cross_parameters(facts: GptFacts, tp: int, shards: bool) -> tuple[Parameter, ...]:
    """Parameters of the attention over what an encoder has made, behind the MLP of each layer of the decoder."""
    rows = facts.hidden // tp
    query = (Parameter((rows, facts.hidden)), *((Parameter((rows,)),) if facts.form.has_qkv_biases else ()))
    return (*_norm(facts, shards), *query, *_head_parameters(facts, tp, 0), *_output_parameters(facts, tp, shards))


def _head_parameters(facts: GptFacts, tp: int, query_heads: int) -> tuple[Parameter, ...]:
    """The projection to so many queries and to this rank's keys and values, of which copies are summed."""
    hidden, of_kv = facts.hidden, facts.head_dim + facts.value_dim
    is_copied = facts.kv_heads % tp != 0
    kv_heads = 1 if is_copied else facts.kv_heads // tp
    rows = query_heads * facts.head_dim + kv_heads * of_kv
    copied = facts.kv_heads * of_kv if is_copied else 0  # rows of all key heads and all value heads
    biases = (Parameter((rows,), summed=copied),) if facts.form.has_qkv_biases else ()
    return (Parameter((rows, hidden), summed=copied * hidden), *biases)


def _latent_parameters(facts: GptFacts, tp: int, shards: bool) -> tuple[Parameter, ...]:
    """The projections to what queries, and keys and values, are made of, which every rank of tp has, their norms, and those to
    this rank's heads.
    """
    latent, hidden, heads = facts.form.latent, facts.hidden, facts.heads // tp
    assert latent is not None
    queries: tuple[Parameter, ...] = (Parameter((heads * facts.head_dim, latent.query_rank or hidden)),)
    if latent.query_rank is not None:
        down = _whole((latent.query_rank, hidden), shards), _whole((latent.query_rank,), shards)
        queries = (*down, *queries)
    return (
        *queries,
        _whole((latent.kv_rank + latent.rotary, hidden), shards),
        _whole((latent.kv_rank,), shards),
        Parameter((heads * (facts.head_dim - latent.rotary + facts.value_dim), latent.kv_rank)),
    )


def _qk_norm_parameters(facts: GptFacts, tp: int) -> tuple[Parameter, ...]:
    """The weights of the norms of queries and keys, for which each rank of tp has some heads' part of the gradient."""
    match facts.form.qk_norm:
        case QkNorm.HEAD:
            return (Parameter((facts.head_dim,), summed=facts.head_dim if tp > 1 else 0),) * 2
        case QkNorm.ALL:
            return Parameter((facts.heads * facts.head_dim,)), Parameter((facts.kv_heads * facts.head_dim,))
    return ()


def _output_parameters(facts: GptFacts, tp: int, shards: bool) -> tuple[Parameter, ...]:
    biases = (_whole((facts.hidden,), shards),) if facts.form.has_output_biases else ()
    return (Parameter((facts.hidden, facts.heads * facts.value_dim // tp)), *biases)


def _mlp_parameters(facts: GptFacts, width: int, shards: bool) -> tuple[Parameter, ...]:
    """Two or three linear layers, ``width`` of the inner one on this rank."""
    hidden, form = facts.hidden, facts.form
    inner = (Parameter((width, hidden)), *((Parameter((width,)),) if form.has_mlp_biases else ()))
    outer = (Parameter((hidden, width)), *((_whole((hidden,), shards),) if form.has_mlp_biases else ()))
    return inner * (form.num_matrices - 1) + outer


def _expert_parameters(facts: GptFacts, num: int, tp: int, ep: int, etp: int) -> tuple[Parameter, ...]:
    """The router, whose ranks of tp see different tokens each, this rank's experts, and a shared MLP with its coefficients."""
    hidden, held, width, options = facts.hidden, num // ep, facts.expert_width // etp, facts.experts
    assert options is not None
    form = facts.form
    inner, outer = ((held, width, hidden), (held, width)), ((held, hidden, width), (held, hidden))
    with_biases = 2 if form.has_mlp_biases else 1
    shapes = inner[:with_biases] * (form.num_matrices - 1) + outer[:with_biases]
    router = ((num, hidden), (num,)) if form.has_router_biases else ((num, hidden),)
    own = (
        *(Parameter(shape, summed=prod(shape) if tp > 1 else 0, is_wide=True) for shape in router),
        *(Parameter(shape, is_expert=True) for shape in shapes),
    )
    if not options.shared_width:
        return own
    shards, outputs = facts.sequence_parallel and tp > 1, options.shared.num_coefficients
    weights = (_whole((outputs, hidden), shards),) if outputs else ()
    biases = (_whole((outputs,), shards),) if options.shared == "residual" else ()
    return (*own, *_mlp_parameters(facts, options.shared_width // tp, shards), *weights, *biases)
