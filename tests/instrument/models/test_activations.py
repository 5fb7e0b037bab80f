"""The activations that a layer keeps: the papers' numbers, and ours against what autograd saves, to the byte."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from instrument.backward_split.split import attach
from instrument.context.shard import ContextShape
from instrument.mesh import MeshShape, fit_shape, make_mesh
from instrument.models.gpt import Block, Embedding, Head, cross_entropy
from instrument.models.gpt_config import GptConfig, Recompute
from instrument.models.parallel import Parallel, ParallelOptions, alone, make_parallel
from instrument.models.rank_form import FUSED, RankForm, fused_kernel
from instrument.recorder import Recorder
from pptrace.schedule.registry import build
from pptrace.sizes.activations import ActivationSizes
from pptrace.sizes.memory import MemoryPrediction
from pptrace.sizes.step import StepVolume
from tests.support.extent import ALL
from tests.support.gpt_runs import facts_of_model
from tests.support.pool import Pool

MICROBATCH, SEQUENCE, HIDDEN, HEADS = 3, 16, 32, 8
CPU = torch.device("cpu")
FLASH = "aten._scaled_dot_product_flash_attention_for_cpu.default"

Storages = Counter[int]
"""Number of distinct storages by bytes."""


def config(**given: Any) -> GptConfig:
    return GptConfig(2, HIDDEN, HEADS, SEQUENCE, **{"dtype": torch.float64, **given})


@dataclass(frozen=True, slots=True)
class Saved:
    """Storages that autograd kept of the forwards of one layer, the embedding, and the head with its loss; and which
    attention ran.
    """

    layer: Storages
    embedding: Storages
    head: Storages
    attentions: frozenset[str]


class Attentions(TorchDispatchMode):
    """The attention kernels that run while it is on, and softmaxes, of which a fused attention has none."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(word in str(func) for word in ("attention", "softmax")):
            self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def saved_by(forward: Callable[[], Tensor], module: nn.Module, exempt: tuple[Tensor, ...] = ()) -> Storages:
    """Distinct storages that are neither parameters nor ``exempt``."""
    known = {tensor.untyped_storage()._cdata for tensor in (*module.parameters(), *exempt)}
    result: dict[int, tuple[Any, int]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()  # held on to, so that no other gets its identity
        if storage._cdata not in known:
            result.setdefault(storage._cdata, (storage, storage.nbytes()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return Counter(num_bytes for _, num_bytes in result.values())


def save(model: GptConfig, parallel: Parallel, is_recomputed: bool = False, splits: bool = False) -> Saved:
    block, embedding, head = Block(model, parallel), Embedding(model, parallel), Head(model, parallel)
    if splits:
        for part in (block, embedding, head):
            attach(part)
    held = SEQUENCE // parallel.context.size
    tokens, targets = torch.randint(256, (2, MICROBATCH, held))
    x = torch.randn(MICROBATCH, parallel.activation_length(SEQUENCE), HIDDEN, dtype=model.dtype).requires_grad_()
    with Attentions() as seen:
        layer = saved_by(lambda: block(x, recompute=is_recomputed), block)
    return Saved(
        layer,
        saved_by(lambda: embedding(tokens), embedding, (tokens,)),
        saved_by(lambda: cross_entropy(head(x), targets, parallel.region.group, model.vocabulary), head, (targets,)),
        frozenset(seen.names),
    )


def check(saved: Saved, form: RankForm, recompute: Recompute) -> None:
    case, sizes = (form, recompute), sizes_of(form)
    assert saved.layer == Counter(sizes.layer_tensors(recompute).values()), case
    assert saved.embedding == Counter(sizes.embedding_tensors().values()), case
    assert saved.head == Counter(sizes.head_tensors().values()), case
    assert saved.attentions == {FLASH}, case
    assert sizes.layer(recompute) == bytes_of(saved.layer), case
    assert sizes.ends(True, True) == bytes_of(saved.embedding) + bytes_of(saved.head), case


def sizes_of(form: RankForm) -> ActivationSizes:
    """The same share by the facts of a run."""
    cut = {"sequence_parallel": form.sequence, "ulysses": form.context.ulysses}
    facts = facts_of_model(form.config, form.microbatch_size, **cut)
    return ActivationSizes(facts, form.tp, form.context.size, on_device=False)


def bytes_of(kept: Storages) -> int:
    return sum(num_bytes * count for num_bytes, count in kept.items())


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recompute", Recompute)
def test_one_rank_keeps_what_is_predicted(recompute: Recompute, dtype: torch.dtype, splits: bool) -> None:
    for kv_heads, dropout in product((None, 2, 1), (0.0, 0.1)):
        model = config(recompute=recompute, dtype=dtype, kv_heads=kv_heads, dropout=dropout)
        check(save(model, alone(), splits=splits), RankForm(model, MICROBATCH), recompute)


def test_a_layer_told_to_recompute_keeps_its_input() -> None:
    for recompute in Recompute:
        model = config(recompute=recompute)
        check(save(model, alone(), is_recomputed=True), RankForm(model, MICROBATCH), Recompute.FULL)


@dataclass(frozen=True, slots=True)
class Way:
    """Sharing of layers by four ranks; dp takes what tp and cp leave."""

    tp: int = 1
    cp: int = 1
    options: ParallelOptions = ParallelOptions()  # noqa: RUF009 — frozen
    kv_heads: int | None = None


MODELS = [
    {"recompute": recompute, "dtype": dtype, "dropout": dropout}
    for recompute in Recompute
    for dtype, dropout in ((torch.float64, 0.0), (torch.bfloat16, 0.1))
]
MODELS.append({"vocabulary": 301, "vocabulary_multiple": 3})
SHARDS, OVERLAPPED = ParallelOptions(sequence=True), ParallelOptions(sequence=True, overlap=True)
WAYS = {
    "tensor": Way(tp=2),
    "tensor, overlapped": Way(tp=2, options=ParallelOptions(overlap=True)),
    "sequence": Way(tp=2, options=SHARDS),
    "sequence, overlapped": Way(tp=2, options=OVERLAPPED),
    "tensor over all ranks, with copied KV heads": Way(tp=4, kv_heads=2),
    "sequence over all ranks, with one KV head": Way(tp=4, options=SHARDS, kv_heads=1),
    "ring": Way(cp=2),
    "ring of grouped queries": Way(cp=4, kv_heads=2),
    "Ulysses": Way(cp=2, options=ParallelOptions(ulysses=2)),
    "Ulysses with repeated KV heads": Way(cp=4, options=ParallelOptions(ulysses=4), kv_heads=2),
    "ring of Ulysses": Way(cp=4, options=ParallelOptions(ulysses=2)),
    "ring in a sequence-parallel region": Way(tp=2, cp=2, options=SHARDS),
    "Ulysses in a sequence-parallel region": Way(tp=2, cp=2, options=ParallelOptions(True, True, 2), kv_heads=4),
}


def save_way(way: Way, models: list[dict[str, Any]]) -> list[Saved]:
    """Storages that this rank keeps of each model."""
    mesh = make_mesh(fit_shape(dist.get_world_size(), pp=1, cp=way.cp, tp=way.tp), "cpu", "gloo")
    parallel = make_parallel(mesh, way.options, Recorder())
    return [save(config(kv_heads=way.kv_heads, **model), parallel) for model in models]


@pytest.mark.parametrize("name", WAYS)
def test_ranks_of_every_way_of_parallelism_keep_what_is_predicted(pool: Pool, name: str) -> None:
    """Of every model, or by default of two that take turns."""
    way, turn = WAYS[name], 2 * list(WAYS).index(name)
    models = MODELS if ALL else [MODELS[index % len(MODELS)] for index in (turn, turn + 1)]
    shape = fit_shape(4, pp=1, cp=way.cp, tp=way.tp)
    for row in pool.run(save_way, way, models, timeout_s=300):
        for model, saved in zip(models, row, strict=True):
            form = RankForm.of(config(kv_heads=way.kv_heads, **model), MICROBATCH, shape, way.options)
            check(saved, form, form.config.recompute)


def test_an_attention_that_is_not_fused_keeps_scores_and_is_known_by_its_kernel() -> None:
    form = RankForm(config(), MICROBATCH)
    assert fused_kernel(form, CPU) == SDPBackend.FLASH_ATTENTION
    with sdpa_kernel(SDPBackend.MATH):
        assert fused_kernel(form, CPU) == SDPBackend.MATH
        kept = save(form.config, alone()).layer
    assert bytes_of(kept) > sizes_of(form).layer("none")
    assert fused_kernel(replace(form, context=ContextShape(ring=2)), CPU) is None


def test_the_attention_is_named() -> None:
    shapes = (ContextShape(), ContextShape(2), ContextShape(1, 2), ContextShape(2, 2))
    names = [RankForm(config(), MICROBATCH, context=shape).attention for shape in shapes]
    assert names == [FUSED, "ring attention", f"Ulysses with {FUSED}", "Ulysses with ring attention"]


GPT3 = GptConfig(96, 12288, 96, 2048, dtype=torch.bfloat16, dropout=0.1)
MT_NLG = GptConfig(105, 20480, 128, 2048, dtype=torch.bfloat16, dropout=0.1)


@pytest.mark.parametrize(("model", "scores"), [(GPT3, 80), (MT_NLG, 64)])
def test_the_formulas_give_the_papers_own_numbers(model: GptConfig, scores: int) -> None:
    """Section 5: 5·a·s/h is 80 for GPT-3 and 64 for MT-NLG, so selective recompute saves 70 % and 65 %."""
    b, t = 1, 8
    sbh = model.sequence * b * model.hidden
    alone_form, tensor = RankForm(model, b), RankForm(model, b, tp=t)
    sequence = RankForm(model, b, tp=t, sequence=True)
    assert sizes_of(alone_form).paper_layer(Recompute.NONE) == sbh * (34 + scores)
    assert sizes_of(tensor).paper_layer(Recompute.NONE) == sbh * (10 + 24 // t + scores // t)
    assert sizes_of(sequence).paper_layer(Recompute.NONE) == sbh * (34 + scores) // t
    assert sizes_of(tensor).paper_layer(Recompute.SELECTIVE) == sbh * (10 + 24 // t)
    assert sizes_of(sequence).paper_layer(Recompute.SELECTIVE) == sbh * 34 // t
    assert sizes_of(alone_form).paper_layer(Recompute.FULL) == sizes_of(tensor).paper_layer(Recompute.FULL) == 2 * sbh
    assert sizes_of(sequence).paper_layer(Recompute.FULL) == 2 * sbh // t
    saved = 1 - sizes_of(sequence).paper_layer(Recompute.SELECTIVE) / sizes_of(sequence).paper_layer(Recompute.NONE)
    assert saved == pytest.approx({80: 0.70, 64: 0.65}[scores], abs=0.005)


@pytest.mark.parametrize("recompute", Recompute)
def test_context_ranks_divide_every_term_once(recompute: Recompute) -> None:
    for tp, sequence in ((1, False), (8, False), (8, True)):
        whole = RankForm(GPT3, 1, tp, sequence=sequence)
        for context in (ContextShape(ring=4), ContextShape(ulysses=4), ContextShape(2, 2)):
            share = replace(whole, context=context)
            assert sizes_of(share).paper_layer(recompute) * 4 == sizes_of(whole).paper_layer(recompute)


def test_with_16_bits_and_dropout_our_layer_is_the_papers_but_for_statistics() -> None:
    """Its 34·s·b·h, or what of them a rank has; scores are not kept, and the log-sum-exp and the norms' statistics are."""
    for tp, sequence in ((1, False), (8, False), (8, True)):
        form = RankForm(GPT3, 2, tp, sequence=sequence)
        statistics = 4 * 2 * form.between
        log_sum_exp = 4 * form.held * GPT3.heads // tp
        ours = sizes_of(form).layer(Recompute.NONE)
        assert ours == sizes_of(form).paper_layer(Recompute.SELECTIVE) + statistics + log_sum_exp
        assert sizes_of(form).layer(Recompute.SELECTIVE) == ours - log_sum_exp
        assert sizes_of(form).layer(Recompute.FULL) == sizes_of(form).paper_layer(Recompute.FULL)


@pytest.mark.parametrize(
    ("schedule", "microbatches", "layers", "keep", "expected"),
    [
        ("1f1b", 4, (3, 2), None, [(0, False)] * 2),
        ("1f1b", 4, (3, 2), 1, [(0, False), (0, True)]),  # microbatches beyond those that are kept keep inputs
        ("1f1b", 4, (3, 2), 0, [(0, True)] * 2),
        ("zbv", 1, (1, 1, 1, 1), None, [(0, False), (3, False)]),  # both ends
    ],
)
def test_a_rank_keeps_the_microbatches_that_its_plan_has_in_flight(
    schedule: str, microbatches: int, layers: tuple[int, ...], keep: int | None, expected: list[tuple[int, bool]]
) -> None:
    run = replace(
        sizes_of(RankForm(config(), MICROBATCH)).facts, layers_per_stage=layers, recompute_microbatches_beyond=keep
    )
    prediction = MemoryPrediction(StepVolume(run, MeshShape(2), build(schedule, 2, microbatches)), on_device=False)
    assert sorted(prediction.forwards_at_peak(0)) == expected
    kept = [
        prediction.sizes.stage([None] * layers[stage], stage == 0, stage == 3, ["full" if again else "none"] * 3)
        for stage, again in expected
    ]
    assert prediction.of_rank(0).activations == sum(kept)
