"""Functions that the ranks of the pool run: training on meshes of every mix of axes, compared with one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

from instrument.context.shard import KeyExchange, Layout
from instrument.data.text import Batch, Documents, Lengths, TextData
from instrument.examples.gpt_arguments import DTYPES
from instrument.expert import router as router_module
from instrument.expert.bias import biased_routers, update_biases
from instrument.expert.noise import TokenIds
from instrument.expert.router import Router
from instrument.graphed import GraphedStage
from instrument.mesh import Mesh, MeshShape, make_mesh, read_order
from instrument.models.feed import make_feed
from instrument.models.gpt import GptStage, cross_entropy
from instrument.models.gpt_config import GptConfig, Recompute, RecomputeMethod, RecomputeModule
from instrument.models.gpt_pipeline import GptPipeline, Wiring, make_gpt_runtime
from instrument.models.parallel import Parallel, ParallelOptions
from instrument.offload import OffloadingStage
from instrument.optim.adamw import AdamW
from instrument.optim.buckets import BUCKET_BYTES
from instrument.optim.clipping import ClippedOptimizer, OptimizerSync, make_clipped_optimizer
from instrument.optim.control_channel import ControlChannel
from instrument.optim.gradient_sync import Reduce
from instrument.optim.main_parameters import Zero, make_adamw
from instrument.pipeline.partition import partition
from instrument.pipeline.runtime import PipelineRuntime
from instrument.recorder import Recorder
from instrument.route import Route
from instrument.sequence.dropout import MicrobatchKey
from instrument.shared_gpus import let_nccl_share_gpus
from pptrace.marks import Axis
from pptrace.schedule.lower import lower
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import build
from pptrace.sizes.expert_options import Dispatcher, ExpertOptions
from pptrace.sizes.gpt_facts import GptFacts
from pptrace.sizes.transformer import Volume
from tests.instrument.models.cases.call_watch import CallWatch
from tests.support.gpt_runs import facts_of_model
from tests.support.graph_imitation import capturing_on
from tests.support.pool import on_one_rank

MICROBATCH_SIZE, SEQUENCE = 1, 16
HIDDEN, HEADS = 16, 4
STEPS, LEARNING_RATE = 2, 1e-2  # AdamW's first update forgets the gradient's size; its second depends on both gradients
CPU = torch.device("cpu")
SIZES = [(pp, tp, cp, dp) for pp, tp, cp, dp in product((1, 2), (1, 2, 4), (1, 2, 4), (1, 2)) if pp * tp * cp * dp <= 8]
"""(pp, tp, cp, dp) of every mix within eight processes."""


@dataclass(frozen=True, slots=True)
class Mix:
    """One mesh, and how its ranks work together."""

    pp: int = 1
    tp: int = 1
    cp: int = 1
    dp: int = 1
    sequence: bool = False
    overlap: bool = False
    ulysses: int = 1
    layout: Layout = Layout.BALANCED
    exchange: KeyExchange = KeyExchange.P2P
    schedule: str = "1f1b"
    kv_heads: int | None = None
    tied: bool = True
    recompute: Recompute = Recompute.NONE
    modules: tuple[RecomputeModule, ...] = (RecomputeModule.CORE_ATTN,)
    num_layers: int | None = None  # of each stage that recompute fully, method block
    dropout: float = 0.0
    host_staged: bool = False
    nccl: bool = False  # where there is a GPU, which ranks may share
    ahead: int = 0
    bucket_bytes: int = BUCKET_BYTES
    zero: int = 0
    bfloat16: bool = False
    clip: float | None = None  # the largest norm of the gradient
    sync: OptimizerSync = OptimizerSync.SYNCHRONOUS
    order: str = "tp-cp-dp-pp"
    ep: int = 1
    etp: int = 1
    experts: ExpertOptions | None = None
    steps: int = STEPS
    vocabulary: int = 256
    split: tuple[int, ...] | None = None
    reduce: Reduce = Reduce.OVERLAP
    overlaps_gathers: bool = False
    scatters: bool = False
    offloads: bool = False
    graphs: bool = False
    sent_dtype: str | None = None
    shortest: int | None = None  # lengths of microbatches vary from it up, and messages tell their shapes
    encoder: tuple[int, int] | None = None  # its layers, of all, and the tokens that it reads
    packed: int | None = None  # the tokens of the shortest document that sequences are packed of

    @property
    def lengths(self) -> Lengths | None:
        return None if self.shortest is None else Lengths(self.shortest, SEQUENCE, self.shortest, seed=3)

    @property
    def world(self) -> int:
        return self.pp * self.tp * self.cp * self.dp

    @property
    def layers(self) -> int:
        """Two chunks on each of two ranks; without a pipeline two are enough to stand one behind the other."""
        return 4 if self.pp > 1 else 2

    @property
    def microbatches(self) -> int:
        """Twice as many as there are ranks, so that 1F1B has a steady phase; without a pipeline two to add up."""
        return 2 * self.pp if self.pp > 1 else 2

    @property
    def shape(self) -> MeshShape:
        return MeshShape(self.pp, self.dp, self.cp, self.tp, read_order(self.order), self.ep, self.etp)

    @property
    def config(self) -> GptConfig:
        return GptConfig(
            self.layers,
            HIDDEN,
            HEADS,
            SEQUENCE,
            self.tied,
            torch.bfloat16 if self.bfloat16 else torch.float64,
            recompute=self.recompute,
            kv_heads=self.kv_heads,
            dropout=self.dropout,
            experts=self.experts,
            vocabulary=self.vocabulary,
            recompute_method=RecomputeMethod.BLOCK if self.num_layers else RecomputeMethod.UNIFORM,
            recompute_num_layers=self.num_layers or 1,
            recompute_modules=self.modules,
            encoder_layers=self.encoder[0] if self.encoder else 0,
            encoder_sequence=self.encoder[1] if self.encoder else None,
        )

    @property
    def data(self) -> TextData:
        source = self.encoder[1] if self.encoder else 0
        documents = None if self.packed is None else Documents(self.packed, SEQUENCE, seed=3)
        return TextData(self.microbatches, MICROBATCH_SIZE, SEQUENCE, 0, self.lengths, source, documents)

    @property
    def cut(self) -> tuple[range, ...]:
        return partition(self.layers, self.plan.chain_length, self.split)

    @property
    def plan(self) -> Plan:
        return lower(build(self.schedule, self.pp, self.microbatches))

    @property
    def options(self) -> ParallelOptions:
        return ParallelOptions(self.sequence, self.overlap, self.ulysses, self.layout, self.exchange)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of one rank: the largest error of its losses and of its parameters, how many parameters it has, calls to
    process groups without their mark, and what the marks count.
    """

    loss_error: float
    parameter_error: float
    losses: tuple[float, ...]
    num_parameters: int
    unmarked: tuple[str, ...]
    volumes: tuple[Volume, ...]  # by step
    weights: int  # bytes of its parameters
    experts: Mapping[str, object] | None  # its counts of routes, as a trace has them
    turns: int  # all-to-alls of experts that were started while another one was on its way


def facts_of(mix: Mix, steps: int) -> GptFacts:
    """Facts that the training script would give of a mix."""
    return facts_of_model(
        mix.config,
        MICROBATCH_SIZE,
        layers_per_stage=tuple(map(len, mix.cut)),
        sequence_parallel=mix.sequence,
        overlap=mix.overlap,
        ulysses=mix.ulysses,
        cp_comm_type=str(mix.exchange),
        shortest_sequence=mix.shortest,
        zero=mix.zero,
        bucket_bytes=mix.bucket_bytes,
        clip_grad=mix.clip or 0.0,
        optimizer_sync=mix.sync.value,
        steps=steps,
        shortest_document=mix.packed,
        scatter_gather=mix.scatters,
        sent_dtype=mix.sent_dtype,
    )


def train_mixes(mixes: Sequence[Mix]) -> list[Outcome]:
    """Train every mix (all of one mesh shape)."""
    mesh = mesh_of(mixes[0])
    return [_train(mix, mesh) for mix in mixes]


def device_of(mix: Mix) -> torch.device:
    """Of this rank: a GPU, which ranks may share, where there is one and messages go through host memory or by NCCL."""
    if not (mix.host_staged or mix.nccl) or not torch.cuda.is_available():
        return CPU
    return torch.device("cuda", dist.get_rank() % torch.cuda.device_count())


def mesh_of(mix: Mix) -> Mesh:
    device = device_of(mix)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    by = ("cuda", "nccl") if mix.nccl and device.type == "cuda" else ("cpu", "gloo")
    if by[1] == "nccl" and torch.cuda.device_count() < mix.world:
        let_nccl_share_gpus(dist.get_rank(), one_node=True)
    return make_mesh(mix.shape, *by, mix.plan.num_chains > 1, mix.experts is not None)


def runtime_of(mix: Mix, mesh: Mesh, recorder: Recorder) -> PipelineRuntime:
    route = Route.HOST_STAGED if mix.host_staged else Route.DIRECT
    device, zero = device_of(mix), Zero(mix.zero)
    wiring = Wiring(
        device, route=route, negotiated=mix.shortest is not None, prefetch_depth=mix.ahead, parallel=mix.options,
        bucket_bytes=mix.bucket_bytes, zero=zero,
        reduce=mix.reduce, overlaps_gathers=mix.overlaps_gathers, scatters=mix.scatters,
        sent_dtype=DTYPES.get(mix.sent_dtype or ""),
    )  # fmt: skip
    gpt = GptPipeline(mix.plan, mix.config, mix.cut, MICROBATCH_SIZE, captures=mix.graphs)
    if mix.offloads:
        gpt = replace(gpt, wrap=lambda stage: OffloadingStage(stage, recorder))
    with capturing_on(device):
        return make_gpt_runtime(mesh, gpt, wiring, recorder)


def run_steps(mix: Mix, mesh: Mesh, runtime: PipelineRuntime, steps: int) -> list[float]:
    """Train; the losses, on ranks that have them."""
    rows, reads_tokens = (MICROBATCH_SIZE, SEQUENCE), runtime.program.reads_tokens
    feed = make_feed(mix.data, mesh, mix.plan, parallel_of(runtime), device_of(mix), rows, reads_tokens)
    optimizer = make_adamw(runtime.program.parameters(), runtime.gradients.main, LEARNING_RATE)
    clipped = None if mix.clip is None else _clipped(mix, mesh, runtime, optimizer, mix.clip)
    losses = []
    for step in range(steps):
        result = runtime.run(feed.batch(step), step, clipped)
        if clipped is None:
            runtime.optimize(optimizer, step)
        else:
            clipped.optimize(step)
        if result.loss is not None:
            losses.append(float(result.loss))
    if clipped is not None:
        clipped.finish(steps - 1)
    runtime.gradients.complete_parameters()
    return losses


def _clipped(mix: Mix, mesh: Mesh, runtime: PipelineRuntime, optimizer: AdamW, max_norm: float) -> ClippedOptimizer:
    channel = ControlChannel(mesh, runtime.program.recorder, sharded=runtime.gradients.sharded)
    counted = runtime.gradients.counted
    return make_clipped_optimizer(mix.sync, optimizer, counted, max_norm, channel, runtime.program.recorder)


def parallel_of(runtime: PipelineRuntime) -> Parallel:
    return next(stages_of(runtime)).parallel


def stages_of(runtime: PipelineRuntime) -> Iterator[GptStage]:
    for stage in runtime.program.stages.values():
        inner = stage.stage if isinstance(stage, OffloadingStage | GraphedStage) else stage
        yield inner


def _train(mix: Mix, mesh: Mesh) -> Outcome:
    watch = CallWatch()
    recorder = watch.recorder()
    runtime = runtime_of(mix, mesh, recorder)
    with watch.watching():
        losses = run_steps(mix, mesh, runtime, mix.steps)
    alone = of_one_process(mix)
    weights_of_one, expected = _expected(alone)
    whole = _whole(alone.config, mix.layers)
    whole.load_state_dict(weights_of_one)
    errors = [0.0]
    for stage in stages_of(runtime):
        errors += [
            float((ours - theirs).abs().sum()) for ours, theirs in _pairs(mix, mesh, stage, whole, parallel_of(runtime))
        ]
    loss_errors = [abs(loss - right) for loss, right in zip(losses, expected, strict=True)] if losses else [0.0]
    volumes = tuple(watch.volume(step) for step in range(mix.steps))
    parameters = len(list(runtime.program.parameters()))
    problems, turns = tuple(watch.problems), watch.concurrent(Axis.EP)
    weights = sum(parameter.nbytes for parameter in runtime.program.parameters())
    experts_counted = recorder.expert_counts.facts()
    return Outcome(
        max(loss_errors), max(errors), tuple(losses), parameters, problems, volumes, weights, experts_counted, turns
    )


@lru_cache(maxsize=4)
def _whole(config: GptConfig, layers: int) -> GptStage:
    """A model of all layers, of any parameters: making one takes as long as a step."""
    return GptStage(config, range(layers)).double()


def _pairs(mix: Mix, mesh: Mesh, stage: GptStage, whole: GptStage, parallel: Parallel) -> list[tuple[Tensor, Tensor]]:
    """Each parameter of a stage, and the part of the whole model's that it should be."""
    layers = [int(layer) for layer in stage.blocks]
    right = GptStage(mix.config, layers, parallel, (stage.embedding is not None, stage.head is not None))
    with torch.no_grad():
        if right.embedding is not None and whole.embedding is not None:
            right.embedding.take(whole.embedding)
        for layer, block in right.blocks.items():
            block.take(whole.blocks[layer])
        if right.head is not None and whole.head is not None:
            right.head.take(whole.head)
        if right.encoder_norm is not None and whole.encoder_norm is not None:
            right.encoder_norm.load_state_dict(whole.encoder_norm.state_dict())
        if right.decoder_embedding is not None and whole.decoder_embedding is not None:
            right.decoder_embedding.take(whole.decoder_embedding)
    trained, expected = (dict(each.named_parameters(remove_duplicate=False)) for each in (stage, right))
    return [_same_part(mesh, trained[name], expected[name].detach()) for name in expected]


def _same_part(mesh: Mesh, trained: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor and what it should be; of a sharded one this replica's rows."""
    if not isinstance(trained, DTensor):
        return trained.detach().cpu(), expected
    replicas = mesh.groups[mesh.replicas]
    rows = expected.chunk(replicas.size())[dist.get_rank(replicas) :][:1]
    return trained.to_local().detach().cpu(), rows[0] if rows else expected[:0]


def of_one_process(mix: Mix) -> Mix:
    """The part of a mix that matters to one process: it has all experts, and nothing travels."""
    experts = mix.experts and replace(mix.experts, dispatcher=Dispatcher.ALL_TO_ALL, overlap=False)
    names = ("pp", "dp", "tied", "kv_heads", "bfloat16", "clip", "steps", "vocabulary", "shortest", "encoder", "packed")
    return Mix(experts=experts, **{name: getattr(mix, name) for name in names})


@on_one_rank
def _expected(mix: Mix) -> tuple[dict[str, Tensor], tuple[float, ...]]:
    """Parameters and losses of :func:`reference` after its steps."""
    model, losses = reference(mix)
    return dict(model.state_dict()), losses


@lru_cache
def reference(mix: Mix) -> tuple[GptStage, tuple[float, ...]]:
    """The model after the same steps in one process, and its losses; all in float64, from the values of ``bfloat16``.

    Documents that sequences are packed of are sequences of their own here.
    """
    model = GptStage(mix.config, range(mix.layers)).double()
    if mix.tied:
        model.head.projection.weight = model.embedding.tokens.weight
    optimizer = torch.optim.AdamW(nn.ModuleList([model]).parameters(), lr=LEARNING_RATE)
    data = mix.data
    is_firm = [] if mix.experts is None else watch_choices(model)
    losses = []
    for step in range(mix.steps):
        batches = [data.batch(step, dp_rank) for dp_rank in range(mix.dp)]
        if mix.shortest is None and mix.packed is None:
            tokens, targets, *source = (
                torch.cat(parts).flatten(0, 1) for parts in zip(*(b.tensors for b in batches), strict=True)
            )
            key = {"microbatch_key": MicrobatchKey(step)} | ({"decoder_tokens": tokens} if source else {})
            loss = cross_entropy(model(*(source or [tokens]), **key), targets)
        else:
            every = [(batch, microbatch) for batch in batches for microbatch in range(mix.microbatches)]
            loss = torch.stack([_loss_of(model, batch, i, step) for batch, i in every]).mean()
        optimizer.zero_grad()
        loss.backward()
        if mix.clip is not None:
            clip_grad_norm_(model.parameters(), mix.clip)
        optimizer.step()
        update_biases(biased_routers([model]), ())
        losses.append(float(loss.detach()))
    assert all(is_firm), "rounding decides a choice of experts: take another seed"
    return model, tuple(losses)


def _loss_of(model: GptStage, batch: Batch, microbatch: int, step: int) -> Tensor:
    tokens = batch.tokens_of(microbatch)
    runs = tokens.split(tokens.shape[1] if batch.documents is None else list(batch.documents[microbatch]), 1)
    logits = torch.cat([model(run, microbatch_key=MicrobatchKey(step)) for run in runs], 1)
    return cross_entropy(logits, batch.targets_of(microbatch))


SMALLEST_GAP = 1e-9


def watch_choices(model: GptStage) -> list[bool]:
    """By choice of each router, whether it stays the same where logits change a little: meshes agree in choices that
    rounding does not decide.
    """
    is_firm: list[bool] = []

    def watch(router: Router) -> None:
        choose_once = router.choose

        def choose(logits: Tensor, options: ExpertOptions, tokens: TokenIds | None = None) -> Tensor:
            chosen = choose_once(logits, options, tokens)
            change = torch.empty_like(logits).uniform_(-1, 1, generator=torch.Generator().manual_seed(len(is_firm)))
            bias = router.expert_bias if router.bias_rate else None
            again = router_module.choose(logits + SMALLEST_GAP * change, options, bias, tokens)
            is_firm.append(torch.equal(chosen, again))
            return chosen

        router.choose = choose

    for module in model.modules():
        if isinstance(module, Router):
            watch(module)
    return is_firm
