"""Train a small byte-level GPT on a pipeline of processes.

    pptrace run -n 4 instrument/examples/train_gpt.py --schedule 1f1b
    pptrace run -n 4 instrument/examples/train_gpt.py --schedule my_plan.csv   (torch's CSV, with sends or without)
    torchrun --nproc-per-node 4 instrument/examples/train_gpt.py --pp 2
    python instrument/examples/train_gpt.py                                  (one process, one stage)

Prints step, loss, step time, tokens per second and MFU on the first rank of the last stage. A mistake in the arguments is
one line and exit code 2, before any process group is made.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from instrument import session
from instrument.context.shard import Layout, imbalance_line
from instrument.data.text import Batch
from instrument.examples.faults import install_faults, make_experts_sleep
from instrument.examples.gpt_arguments import make_parser
from instrument.examples.gpt_settings import RankInfo, Settings, balanced_partition, resolve_settings
from instrument.examples.memory_lines import memory_lines
from instrument.examples.progress import Progress, Work
from instrument.mesh import Mesh, make_mesh
from instrument.models.feed import BatchFeed, make_feed
from instrument.models.flops import StepFlops, count_full, step_flops
from instrument.models.gpt import HEAD, GptStage
from instrument.models.gpt_pipeline import GptPipeline, make_gpt_runtime
from instrument.models.layer_times import share_layer_times, write_layer_times
from instrument.models.parallel import Parallel, make_parallel
from instrument.models.peaks import TERA, Peak, device_peak
from instrument.models.rank_form import RankForm, fused_kernel
from instrument.models.sleeping import SleepingStage
from instrument.offload import OffloadingStage
from instrument.optim.adamw import AdamW
from instrument.optim.clipping import ClippedOptimizer, OptimizerSync, make_clipped_optimizer
from instrument.optim.control_channel import ControlChannel
from instrument.optim.main_parameters import make_adamw
from instrument.pipeline.handlers import skipped_kinds
from instrument.pipeline.runtime import PipelineRuntime
from pptrace.errors import PptraceError
from pptrace.marks import SpanKind
from pptrace.sizes.gpt_facts import GptFacts
from pptrace.sizes.predicted import predicted_facts, routes_of
from pptrace.sizes.step import StepVolume

REFUSAL_S = 30.0


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        options = make_parser().parse_args(arguments)
        rank_info = RankInfo.from_environment()
        settings = resolve_settings(options, rank_info)
    except PptraceError as err:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(REFUSAL_S)  # the first rank that ends has the others stopped: let it be rank 0, which prints why
            return 2
        print(f"train_gpt: {err}", file=sys.stderr)
        return 2
    if settings.wiring.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # ranks on one machine share its cores
    _join(settings)
    train(settings, options)
    dist.destroy_process_group()  # not after an error: it could wait for ranks that wait for this one
    return 0


def train(settings: Settings, options: argparse.Namespace) -> None:
    """Run the training loop, in a process group that exists."""
    observer = session.current()
    mirrored = settings.plan.num_chains > 1
    has_experts = settings.model.experts is not None
    mesh = make_mesh(settings.shape, _mesh_device(settings), _group_backend(settings), mirrored, has_experts)
    wiring = settings.wiring
    parallel = make_parallel(mesh, wiring.parallel, observer.recorder, wiring.route, options.seed)
    if options.balance:
        settings = _balanced(settings, options, mesh, parallel)
    if options.sleep_rows:
        make_experts_sleep(1e-3 * options.sleep_rows)
    install_faults(options.fault, mesh, settings.plan)
    runtime = _make_runtime(settings, mesh, options, observer, parallel)
    rows = (options.microbatch_size, options.seq)
    reads_tokens = runtime.program.reads_tokens
    feed = make_feed(settings.data, mesh, settings.plan, parallel, wiring.device, rows, reads_tokens)
    optimizer = make_adamw(runtime.program.parameters(), runtime.gradients.main, options.lr)
    clipped = _make_clipped(runtime, optimizer, mesh, options) if options.clip_grad else None
    _describe_run(observer, settings, mesh, options)
    reports = mesh.rank == settings.shape.rank_of(settings.plan.placement[-1], 0, 0, 0)
    peak = _peak(settings, options) if reports else None
    work_of = partial(_work, settings, options, peak)
    progress = Progress(work_of)
    if reports:
        if settings.preset:
            print(settings.preset, flush=True)
        print(work_of(0).heading(), flush=True)
        if parallel.context.layout is Layout.CONTIGUOUS and parallel.context.ring > 1:
            print(imbalance_line(options.seq, parallel.context), flush=True)
        if skipped := skipped_kinds(settings.plan):
            print(
                f"{', '.join(skipped)} of the plan are passed over: sharding and gradient sums need no actions here",
                flush=True,
            )
    for step in observer.steps(options.steps):
        progress.begin(settings.wiring.device)
        batch = _load(feed, observer, step)
        result = runtime.run(batch, step, clipped)
        if clipped is None:
            runtime.optimize(optimizer, step)
        else:
            clipped.optimize(step)
        if reports and result.loss is not None:
            progress.add(step, result.loss)
        if options.eval_interval is not None and (step + 1) % options.eval_interval == 0:
            progress.finish()
            _evaluate(runtime, feed, observer, step, options, reports)
    if clipped is not None:
        clipped.finish(options.steps - 1)
    runtime.gradients.complete_parameters()
    progress.finish()
    if options.memory:
        batch = _load(feed, observer, options.steps)
        print(memory_lines(runtime, batch, options.steps, settings, mesh, _gpt_facts(settings, options)), flush=True)


def _describe_run(observer: session.Session, settings: Settings, mesh: Mesh, options: argparse.Namespace) -> None:
    """Record mesh, plan, model and predictions in the trace."""
    shape, facts, on_device = mesh.shape, _gpt_facts(settings, options), settings.wiring.device.type == "cuda"
    sizes = {"vpp": settings.plan.num_chunks, **{str(axis): size for axis, size in shape.sizes.items()}}
    if settings.model.experts is not None:
        sizes |= {"ep": shape.ep, "etp": shape.etp}

    def predict(counts: Mapping[str, Any] | None, steps: range) -> dict[str, object]:
        volume = StepVolume(facts, shape, settings.plan, routes_of(mesh.rank, counts), settings.data.length_of)
        return predicted_facts(volume, mesh.rank, steps, on_device=on_device)

    observer.describe(
        mesh=sizes | {"order": "-".join(shape.order)},
        plan=settings.plan,
        pp_ranks=mesh.pp_ranks,
        model={"layers": options.layers, **facts.as_json(), **_sleeps(options)},
        predict=predict,
    )


def _balanced(settings: Settings, options: argparse.Namespace, mesh: Mesh, parallel: Parallel) -> Settings:
    """The settings with layers partitioned by times that are measured now, equal on every rank."""
    device = settings.wiring.device
    times = share_layer_times(settings.model, options.microbatch_size, device, mesh, parallel)
    if options.save_layer_times is not None and mesh.rank == 0:
        write_layer_times(Path(options.save_layer_times), times, _form(settings, options), options.overlap)
    return replace(settings, layer_partition=balanced_partition(times, settings.plan))


def _form(settings: Settings, options: argparse.Namespace) -> RankForm:
    return RankForm.of(settings.model, options.microbatch_size, settings.shape, settings.wiring.parallel)


def _work(settings: Settings, options: argparse.Namespace, peak: Peak | None, step: int) -> Work:
    """The work of a step of all pipelines."""
    plan, num_unrecomputed, num_full = settings.plan, options.recompute_microbatches_beyond, 0
    if num_unrecomputed is not None:
        num_full = count_full(plan, settings.layer_partition, options.microbatch_size, num_unrecomputed)
    dp = settings.shape.dp
    of_replicas = [settings.data.attended(step, dp_rank) for dp_rank in range(dp)]
    numbers = Counter(length for lengths in of_replicas for length in lengths)
    tokens = options.microbatch_size * sum(length * number for length, number in numbers.items())
    facts = _gpt_facts(settings, options)
    flops = [
        _flops(replace(facts, sequence=length), number * options.microbatch_size, num_full * dp, settings.shape.tp)
        for length, number in numbers.items()
    ]
    together = StepFlops(sum(part.model for part in flops), sum(part.hardware for part in flops))
    return Work(tokens, together, settings.shape.world, peak)


def _flops(facts: GptFacts, sequences: int, num_full: int, tp: int) -> StepFlops:
    """FLOPs of some sequences, of which layers recompute ``num_full`` fully."""
    if facts.recompute == "full" and facts.recompute_method == "block":
        num_layers = sum(min(facts.recompute_num_layers, layers) for layers in facts.layers_per_stage)
        num_full, facts = sequences * num_layers, replace(facts, recompute="none")
    return step_flops(facts, sequences, num_full, tp)


def _peak(settings: Settings, options: argparse.Namespace) -> Peak | None:
    if options.peak_tflops is not None:
        return Peak(options.peak_tflops * TERA, "--peak-tflops")
    return device_peak(settings.wiring.device, settings.model.dtype, RankInfo.from_environment().local_world)


def _kernel(settings: Settings, options: argparse.Namespace) -> str | None:
    """The kernel of the rank's fused attention, in lower case; None where the ring runs instead."""
    kernel = fused_kernel(_form(settings, options), settings.wiring.device)
    return None if kernel is None else kernel.name.removesuffix("_ATTENTION").lower()


def _load(feed: BatchFeed, observer: session.Session, step: int) -> Batch:
    with observer.recorder.span(SpanKind.DATA, step):
        return feed.batch(step)


def _evaluate(
    runtime: PipelineRuntime,
    feed: BatchFeed,
    observer: session.Session,
    step: int,
    options: argparse.Namespace,
    reports: bool,
) -> None:
    """Run the forwards of some batches that no step has, and print their mean loss on the rank that reports."""
    began, losses = time.perf_counter(), []
    for index in range(options.eval_iters or 1):
        with observer.recorder.span(SpanKind.EVAL, step):
            batch = feed.batch(options.steps + 1 + index)
        losses.append(runtime.evaluate(batch, step))
    known = [float(loss) for loss in losses if loss is not None]
    if reports and known:
        duration_ms = 1e3 * (time.perf_counter() - began)
        print(f"evaluation    loss {sum(known) / len(known):7.4f}   {duration_ms:8.1f} ms", flush=True)


def _make_runtime(
    settings: Settings, mesh: Mesh, options: argparse.Namespace, observer: session.Session, parallel: Parallel
) -> PipelineRuntime:
    def wrap(gpt_stage: GptStage) -> torch.nn.Module:
        stage = OffloadingStage(gpt_stage, observer.recorder) if options.offload_activations else gpt_stage
        if not (options.sleep_forward or options.sleep_backward):
            return stage

        longest = settings.model.source_length if gpt_stage.reads_source else options.seq
        length = longest // mesh.shape.cp if gpt_stage.embedding is not None else parallel.activation_length(longest)

        def sleeping(module: torch.nn.Module, times: float, part: str) -> SleepingStage:
            unit_s, weight_ms = 1e-3 * times, options.sleep_weight
            weight_s = None if weight_ms is None else weight_ms * unit_s
            return SleepingStage(
                module, options.sleep_forward * unit_s, options.sleep_backward * unit_s, weight_s, part, length
            )

        layers = sleeping(stage, len(gpt_stage.blocks) if options.sleep_per_layer else 1, "layers")
        has_head = gpt_stage.head is not None
        return sleeping(layers, options.sleep_head, HEAD) if has_head and options.sleep_head else layers

    gpt = GptPipeline(
        settings.plan,
        settings.model,
        settings.layer_partition,
        options.microbatch_size,
        wrap,
        options.recompute_microbatches_beyond,
        options.cuda_graphs,
    )
    return make_gpt_runtime(mesh, gpt, settings.wiring, observer.recorder, parallel)


def _make_clipped(
    runtime: PipelineRuntime, optimizer: AdamW, mesh: Mesh, options: argparse.Namespace
) -> ClippedOptimizer:
    return make_clipped_optimizer(
        OptimizerSync(options.optimizer_sync),
        optimizer,
        runtime.gradients.counted,
        options.clip_grad,
        ControlChannel(mesh, runtime.program.recorder, sharded=runtime.gradients.sharded),
        runtime.program.recorder,
    )


def _join(settings: Settings) -> None:
    backend, device = _group_backend(settings), settings.wiring.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group(backend, device_id=device if backend == "nccl" else None)
    else:
        dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)


def _group_backend(settings: Settings) -> str:
    return "nccl" if settings.backend == "nccl" else "gloo"


def _mesh_device(settings: Settings) -> str:
    return "cuda" if settings.backend == "nccl" else "cpu"


def _gpt_facts(settings: Settings, options: argparse.Namespace) -> GptFacts:
    return GptFacts(
        hidden=options.hidden,
        heads=options.heads,
        kv_heads=settings.model.num_kv_heads,
        sequence=options.seq,
        microbatch_size=options.microbatch_size,
        vocabulary=options.vocabulary,
        dtype=options.dtype,
        tied=options.tied,
        layers_per_stage=tuple(map(len, settings.layer_partition)),
        sequence_parallel=options.sequence_parallel,
        overlap=options.overlap,
        ulysses=options.ulysses,
        cp_comm_type=options.cp_comm_type,
        shortest_sequence=options.variable_seq_lengths,
        recompute=options.recompute,
        recompute_microbatches_beyond=options.recompute_microbatches_beyond,
        zero=int(settings.wiring.zero),
        bucket_bytes=settings.wiring.bucket_bytes,
        clip_grad=options.clip_grad,
        optimizer_sync=options.optimizer_sync,
        steps=options.steps,
        experts=settings.model.experts,
        dropout=options.dropout,
        attention_kernel=_kernel(settings, options),
        sleeps=bool(options.sleep_forward or options.sleep_backward),
        vocabulary_multiple=options.make_vocab_size_divisible_by,
        recompute_method=str(settings.model.recompute_method),
        recompute_num_layers=settings.model.recompute_num_layers,
        recompute_modules=tuple(map(str, settings.model.recompute_modules)),
        encoder_layers=settings.model.encoder_layers,
        encoder_sequence=settings.model.encoder_sequence,
        shortest_document=options.packed,
        scatter_gather=options.scatter_gather_tensors,
        sent_dtype=options.pipeline_dtype,
        offloads=options.offload_activations,
        graphs=options.cuda_graphs,
    )


def _sleeps(options: argparse.Namespace) -> dict[str, object]:
    return {
        "sleep_forward_ms": options.sleep_forward,
        "sleep_backward_ms": options.sleep_backward,
        "sleep_weight_ms": options.sleep_backward / 2 if options.sleep_weight is None else options.sleep_weight,
        "sleep_per_layer": options.sleep_per_layer,
        "sleep_head_layers": options.sleep_head,
    }


if __name__ == "__main__":
    sys.exit(main())
