"""Activation memory of a rank's microbatch between forward and backward: the papers' formulas, and this model's tensors.

The formulas (:func:`paper_layer_bytes`) are of a model with 16-bit values, dropout masks of one byte, and an attention that
stores its scores, its softmax and the mask of its dropout: the 5·a·s²·b. This model differs. Its attention is one fused kernel
or the ring, which save q, k, v, the output and a log-sum-exp for each row and compute the scores again; attention weights are
not dropped; values have any dtype. So :func:`layer_tensors` lists what a layer saves for its backward, tensor by
tensor. With 16 bits and dropout its s·b·h terms are those of the paper; beyond them it has the statistics of the norms and the
log-sum-exp.

The lists are those of CPUs, where tests compare them with what autograd saves. On a GPU norms keep float32 statistics, and
fused kernels may pad and save the state of a random generator, which is not counted here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend

from instrument.context.kernels import accumulation_dtype
from instrument.context.shard import ContextShape
from instrument.context.ulysses import ulysses_kv_heads
from instrument.mesh import MeshShape
from instrument.models.gpt import VOCABULARY, GptConfig, Recompute
from instrument.models.parallel import ParallelOptions
from instrument.pipeline.outstanding import recomputed_cells
from instrument.pipeline.p2p import Cell
from instrument.tensor.heads import share_heads
from pptrace.schedule.actions import Kind, iter_halves
from pptrace.schedule.plan import Plan

PAPER = "arXiv 2205.05198"
FUSED = "scaled_dot_product_attention"


@dataclass(frozen=True, slots=True)
class RankForm:
    """Sizes of one rank's share of a microbatch; ``sequence``: activations between layers are sharded over tp (Megatron SP)."""

    config: GptConfig
    microbatch_size: int
    tp: int = 1
    context: ContextShape = ContextShape()  # noqa: RUF009 — frozen
    sequence: bool = False

    @classmethod
    def of(cls, config: GptConfig, microbatch_size: int, shape: MeshShape, options: ParallelOptions) -> RankForm:
        """The form of any rank of a mesh: all ranks have equal shares of a layer.

        Raises:
            UsageError: ``options.ulysses`` does not divide cp.
        """
        return cls(config, microbatch_size, shape.tp, options.context(shape.cp), options.sequence)

    @property
    def held(self) -> int:
        """Tokens of a microbatch that this rank's attention and MLP see: b·s / cp."""
        return self.microbatch_size * self.config.sequence // self.context.size

    @property
    def between(self) -> int:
        """Tokens of the activations between the layers: with SP a shard of :attr:`held`."""
        return self.held // self.tp if self.sequence else self.held

    @property
    def attention(self) -> str:
        """The attention that runs, in words."""
        if self.context.size == 1:
            return FUSED
        if self.context.ulysses == 1:
            return "ring attention"
        return "Ulysses with " + (FUSED if self.context.ring == 1 else "ring attention")


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """One tensor that is saved for backward."""

    name: str
    elements: int
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.itemsize


def fused_kernel(form: RankForm, device: torch.device) -> SDPBackend | None:
    """The kernel that torch chooses for the rank's fused attention; None where the ring runs instead."""
    if form.context.ring > 1:
        return None
    config, ulysses = form.config, form.context.ulysses
    share = share_heads(config.heads, config.num_kv_heads, 0, form.tp)
    heads = len(share.query) // ulysses
    kv_heads = ulysses_kv_heads(len(share.query), len(share.kv), ulysses) // ulysses
    rows = (config.sequence, config.head_dim)
    q, k = (
        torch.empty(form.microbatch_size, number, *rows, dtype=config.dtype, device=device, requires_grad=True)
        for number in (heads, kv_heads)
    )
    chosen = torch._fused_sdp_choice(q, k, k, is_causal=True, enable_gqa=heads != kv_heads)
    return SDPBackend(chosen)


def total_bytes(tensors: Sequence[SavedTensor]) -> int:
    return sum(tensor.bytes for tensor in tensors)


def paper_layer_bytes(form: RankForm, recompute: Recompute) -> int:
    """Bytes of one transformer layer on one rank by the formulas of arXiv 2205.05198, section 4 and table 2.

    s sequence, b microbatch, h hidden, a heads, t tensor-parallel size; 16-bit values, masks of one byte, scores stored::

        one rank          s·b·h·(34 + 5·a·s/h)                      eq. 1
        tensor            s·b·h·(10 + 24/t + 5·a·s/(h·t))           eq. 2
        tensor, sequence  s·b·h/t·(34 + 5·a·s/h)                    eq. 4
        selective         the same without 5·a·s/h                  eq. 6
        full              2·s·b·h: the layer's input. With SP that is a shard: 2·s·b·h/t

    Context parallelism is not in the paper. It leaves a rank s/cp of the tokens, so all terms that are linear in s are
    divided by cp. So is the quadratic one, once and not twice: s/cp queries meet all s keys (or with Ulysses a/cp heads have all
    s × s scores). That is what scores would take if they were stored; ring attention stores none.

    The formulas know no KV heads: q, k and v are as wide as h each.
    """
    config, t = form.config, form.tp
    linear = form.held * config.hidden
    scores = 5 * config.heads * config.sequence * form.held // t
    if recompute is Recompute.FULL:
        return 2 * form.between * config.hidden
    total = 34 * linear // t if form.sequence else 10 * linear + 24 * linear // t
    return total if recompute is Recompute.SELECTIVE else total + scores


def layer_tensors(form: RankForm, recompute: Recompute) -> tuple[SavedTensor, ...]:
    """Tensors that one :class:`~instrument.models.gpt.Block` saves for backward, without parameters.

    A name is that of the module that makes the tensor; ``input`` is the layer's input, which for all layers but a stage's first
    is the output of the layer before. With SP a column-parallel layer saves its shard and gathers it again.
    """
    config, dtype = form.config, form.config.dtype
    layer_input = SavedTensor("input", form.between * config.hidden, dtype)
    if recompute is Recompute.FULL:
        return (layer_input,)
    wide = form.held * 4 * config.hidden // form.tp
    return (
        layer_input,
        *_norm_tensors(form, "attention_norm"),
        *_attention_tensors(form, recompute),
        *_mask(form, "attention_out.dropout"),
        SavedTensor("attention residual", form.between * config.hidden, dtype),
        *_norm_tensors(form, "mlp_norm"),
        SavedTensor("mlp_in", wide, dtype),
        SavedTensor("gelu", wide, dtype),
        *_mask(form, "mlp_out.dropout"),
    )


def embedding_tensors(form: RankForm) -> tuple[SavedTensor, ...]:
    """Tensors that the embedding saves, without the batch's tokens: positions, and with tp which tokens are this rank's."""
    positions = SavedTensor("positions", form.held // form.microbatch_size, torch.int64)
    return (positions, *_local_indices(form, "tokens"), *_mask(form, "embedding.dropout"))


def head_tensors(form: RankForm) -> tuple[SavedTensor, ...]:
    """Tensors that the final norm, the projection and the cross-entropy save, without the batch's targets."""
    config, loss_dtype = form.config, accumulation_dtype(form.config.dtype)
    weight = (SavedTensor("loss.total_weight", 1, loss_dtype),) if form.tp == 1 else ()
    return (
        SavedTensor("input", form.between * config.hidden, config.dtype),
        *_norm_tensors(form, "norm"),
        SavedTensor("softmax", form.held * VOCABULARY // form.tp, loss_dtype),
        *_local_indices(form, "targets"),
        *weight,
    )


def _norm_tensors(form: RankForm, name: str) -> tuple[SavedTensor, ...]:
    """Statistics, and the output, which the linear layer after it reads; its input is another's output."""
    tokens, dtype = form.between, form.config.dtype
    statistics = (SavedTensor(f"{name}.mean", tokens, dtype), SavedTensor(f"{name}.rstd", tokens, dtype))
    return (*statistics, SavedTensor(name, tokens * form.config.hidden, dtype))


def _attention_tensors(form: RankForm, recompute: Recompute) -> tuple[SavedTensor, ...]:
    """Tensors that the attention saves; of Ulysses what its all-to-alls exchanged: q, k and v, and the output twice."""
    config, dtype = form.config, form.config.dtype
    share = share_heads(config.heads, config.num_kv_heads, 0, form.tp)
    query, kv = len(share.query), len(share.kv)
    attended = form.held * query * config.head_dim
    exchanged = form.context.ulysses > 1 and recompute is not Recompute.SELECTIVE
    if exchanged:
        kv = ulysses_kv_heads(query, kv, form.context.ulysses)
    qkv = SavedTensor("all-to-all(qkv)" if exchanged else "qkv", form.held * (query + 2 * kv) * config.head_dim, dtype)
    if recompute is Recompute.SELECTIVE:
        return (qkv, SavedTensor("attention", attended, dtype))
    log_sum_exp = SavedTensor("attention.log-sum-exp", form.held * query, accumulation_dtype(dtype))
    back = (SavedTensor("all-to-all(attention)", attended, dtype),) if exchanged else ()
    return (qkv, SavedTensor("attention", attended, dtype), log_sum_exp, *back)


def _mask(form: RankForm, name: str) -> tuple[SavedTensor, ...]:
    return (SavedTensor(name, form.between * form.config.hidden, torch.bool),) if form.config.dropout else ()


def _local_indices(form: RankForm, name: str) -> tuple[SavedTensor, ...]:
    """Indices into this rank's part of the vocabulary, and which tokens are outside of it."""
    if form.tp == 1:
        return ()
    return (SavedTensor(f"{name}.local", form.held, torch.int64), SavedTensor(f"{name}.foreign", form.held, torch.bool))


@dataclass(frozen=True, slots=True)
class RankActivations:
    """Peak bytes that forwards in flight save on one rank.

    ``layers_bytes`` and ``ends_bytes`` (embedding, head and loss) are this model's tensors, ``paper_bytes`` the paper's formula
    for the same layers. ``num_layers`` counts a layer once for each microbatch in flight.
    """

    layers_bytes: int = 0
    ends_bytes: int = 0
    paper_bytes: int = 0
    num_layers: int = 0

    def __add__(self, other: RankActivations) -> RankActivations:
        return self._changed(other, 1)

    def __sub__(self, other: RankActivations) -> RankActivations:
        return self._changed(other, -1)

    def _changed(self, other: RankActivations, sign: int) -> RankActivations:
        return RankActivations(
            self.layers_bytes + sign * other.layers_bytes,
            self.ends_bytes + sign * other.ends_bytes,
            self.paper_bytes + sign * other.paper_bytes,
            self.num_layers + sign * other.num_layers,
        )

    @property
    def bytes(self) -> int:
        return self.layers_bytes + self.ends_bytes


def stage_activations(
    form: RankForm, num_layers: int, first: bool, last: bool, recompute: Recompute
) -> RankActivations:
    """Activations of one microbatch of a stage; ``first`` has the embedding, ``last`` the head."""
    ends = (embedding_tensors(form) if first else ()) + (head_tensors(form) if last else ())
    layer = total_bytes(layer_tensors(form, recompute))
    paper = paper_layer_bytes(form, recompute)
    return RankActivations(num_layers * layer, total_bytes(ends), num_layers * paper, num_layers)


def rank_activations(
    form: RankForm,
    plan: Plan,
    layer_partition: Sequence[Sequence[int]],
    pp_rank: int,
    num_unrecomputed: int | None = None,
) -> RankActivations:
    """Peak activations along a pipeline rank's plan, of forwards whose B or I has not run; without what an I defers to its W.

    Args:
        form: the rank's share.
        plan: of the schedule.
        cut: layers of every stage of the model.
        pp_rank: of the rank.
        keep: outstanding microbatches that need not recompute fully (:func:`instrument.pipeline.outstanding.recomputed_cells`).
    """
    recomputed = frozenset[Cell]() if num_unrecomputed is None else recomputed_cells(plan, pp_rank, num_unrecomputed)
    held = most = RankActivations()
    for half in iter_halves(plan.ranks[pp_rank]):
        if half.kind not in (Kind.F, Kind.B, Kind.I) or half.microbatch is None:
            continue
        stage = plan.model_stage(half.stage)
        recompute = Recompute.FULL if Cell(half.stage, half.microbatch) in recomputed else form.config.recompute
        activations = stage_activations(
            form, len(layer_partition[stage]), stage == 0, stage == len(layer_partition) - 1, recompute
        )
        held = held + activations if half.kind is Kind.F else held - activations
        most = max(most, held, key=lambda activations: activations.bytes)
    return most
