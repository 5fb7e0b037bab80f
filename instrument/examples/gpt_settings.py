"""The arguments of the GPT example, checked against each other and the machine before any process group is made."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from instrument.context.shard import KeyExchange
from instrument.context.shard import Layout as ContextLayout
from instrument.data.text import Documents, Lengths, TextData
from instrument.examples.expert_arguments import read_experts
from instrument.examples.faults import check_faults
from instrument.examples.gpt_arguments import (
    DEFAULT_BUCKET_MB,
    DEFAULT_MICROBATCHES,
    DEFAULT_PREFETCH,
    DTYPES,
)
from instrument.examples.gpt_checks import (
    OF_EQUAL_LAYERS,
    check_axes,
    check_balance,
    check_clipping,
    check_encoder,
    check_graphs,
    check_numbers,
    check_recompute,
    leave_out,
)
from instrument.expert.forced import check_routes
from instrument.mesh import MeshShape, fit_shape, read_order
from instrument.models.gpt_config import GptConfig, Recompute, RecomputeMethod, RecomputeModule
from instrument.models.gpt_pipeline import Wiring, check_zero
from instrument.models.layer_times import read_layer_times
from instrument.models.parallel import ParallelOptions, check_parallel
from instrument.models.rank_form import RankForm
from instrument.optim.gradient_sync import Reduce
from instrument.optim.main_parameters import Zero
from instrument.pipeline.balance import LayerTimes, balance
from instrument.pipeline.megatron_calls import Calls, require_progress
from instrument.pipeline.order import arrange, require_total_order
from instrument.pipeline.partition import Layout, partition
from instrument.pipeline.transport import Mode
from instrument.route import Route
from instrument.shared_gpus import let_nccl_share_gpus
from pptrace.errors import UsageError
from pptrace.schedule.lower import lower
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import SCHEDULES, build
from pptrace.schedule.text import read_csv
from pptrace.schedule.validate import validate
from pptrace.sizes.expert_options import check_layers


@dataclass(frozen=True, slots=True)
class RankInfo:
    """This process's rank and world size, from torchrun's environment variables."""

    rank: int
    world: int
    local_rank: int
    local_world: int

    @classmethod
    def from_environment(cls) -> RankInfo:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        if "RANK" not in os.environ:
            return cls(0, 1, 0, 1)
        missing = [name for name in names if name not in os.environ]
        if missing:
            raise UsageError(f"RANK is set and {missing[0]} is not; start with `pptrace run` or torchrun")
        return cls(*(int(os.environ[name]) for name in names))


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a run, checked against each other. ``preset`` is a line that says what --like sets, if it is given."""

    shape: MeshShape
    plan: Plan
    model: GptConfig
    layer_partition: tuple[range, ...]
    data: TextData
    backend: str
    wiring: Wiring
    preset: str = ""


def resolve_settings(options: argparse.Namespace, rank_info: RankInfo) -> Settings:
    """Check all arguments against each other and against the machine. Makes no process group."""
    check_numbers(options)
    check_clipping(options)
    order = read_order(options.order)
    shape = fit_shape(rank_info.world, options.pp, options.dp, options.cp, options.tp, order, options.ep, options.etp)
    model = _make_model(options)
    check_axes(options, shape.pp)
    layout, exchange = ContextLayout(options.cp_layout), KeyExchange(options.cp_comm_type)
    parallel = ParallelOptions(options.sequence_parallel, options.overlap, options.ulysses, layout, exchange)
    check_parallel(shape, parallel, model.sequence, model.heads, model.num_kv_heads, model.experts)
    if model.encoder_layers:
        check_encoder(options, shape)
        check_parallel(shape, parallel, model.source_length, model.heads, model.num_kv_heads)
    if model.experts is not None:
        check_layers(model.experts, model.layers, model.hidden, shape.etp)
        check_routes(model.experts, model.layers, model.sequence)
    _apply_global_batch(options, shape.dp)
    plan = _read_plan(options, shape.pp)
    validate(plan)
    plan = lower(plan)
    preset = _apply_preset(options, plan)
    layer_partition = _partition_layers(options, plan, RankForm.of(model, options.microbatch_size, shape, parallel))
    check_recompute(options)
    is_sleeping = bool(options.sleep_forward or options.sleep_backward or options.sleep_rows)
    check_faults(options.fault, rank_info.world, plan, is_sleeping=is_sleeping)
    if options.peak_tflops is not None and not 0 < options.peak_tflops < math.inf:
        raise UsageError(f"--peak-tflops is {options.peak_tflops}; expected a rank's peak in TFLOP/s, more than 0")
    lengths, documents = _lengths(options, shape, parallel), _documents(options, shape)
    source = model.source_length if model.encoder_layers else 0
    data = TextData(
        plan.num_microbatches, options.microbatch_size, options.seq, options.seed, lengths, source, documents
    )
    backend = _choose_backend(options.backend, rank_info)
    wiring = _make_wiring(options, backend, rank_info, parallel)
    check_zero(wiring.zero, shape, plan, model)
    if wiring.mode is Mode.BLOCKING:
        require_total_order(plan)
    posting = wiring.posting(plan, tagged=backend != "nccl")
    if wiring.calls is not Calls.PLAN:
        require_progress(plan, [arrange(plan, rank, posting) for rank in range(plan.pp)])
    check_graphs(options, shape, plan, wiring.device)
    return Settings(shape, plan, model, layer_partition, data, backend, wiring, preset)


def _lengths(options: argparse.Namespace, shape: MeshShape, parallel: ParallelOptions) -> Lengths | None:
    """Lengths of sequences that every rank of a context- and sequence-parallel group has an equal part of; None: all alike."""
    shortest = options.variable_seq_lengths
    if shortest is None:
        return None
    multiple = math.lcm(parallel.context(shape.cp).divisor, shape.cp * (shape.tp if parallel.sequence else 1))
    if not 1 <= shortest <= options.seq or shortest % multiple:
        raise UsageError(
            f"--variable-seq-lengths is {shortest}; expected from 1 to --seq {options.seq}, and a multiple of "
            f"{multiple}, by which cp and sequence parallelism share tokens out"
        )
    if not options.negotiate:
        raise UsageError("--variable-seq-lengths: a rank learns from a message's shape how long it is; add --negotiate")
    leave_out(options, "--variable-seq-lengths", "is for one length of all", "experts", *OF_EQUAL_LAYERS)
    return Lengths(shortest, options.seq, multiple, options.seed)


def _documents(options: argparse.Namespace, shape: MeshShape) -> Documents | None:
    """The documents that sequences are packed of; None: they are of one each."""
    shortest = options.packed
    if shortest is None:
        return None
    if not 1 <= shortest <= options.seq:
        raise UsageError(
            f"--packed is {shortest}; expected documents of at least 1 token, and at most --seq {options.seq}"
        )
    if shape.cp > 1:
        raise UsageError(
            f"--packed with --cp {shape.cp}: ranks of cp share whole sequences, not documents; leave out one"
        )
    others = ("variable_seq_lengths", "encoder_layers", *OF_EQUAL_LAYERS)
    leave_out(options, "--packed", "is for sequences of one document each", *others)
    return Documents(shortest, options.seq, options.seed)


def _apply_preset(options: argparse.Namespace, plan: Plan) -> str:
    """Set what --like presets and no option gives; returns a line that says both, empty without --like."""
    if options.like is None:
        return ""
    calls = Calls(options.p2p_calls or (Calls.OVERLAP if plan.num_chunks > 1 else Calls.MEGATRON))
    preset = {
        "p2p_calls": calls.value,
        "p2p_mode": (Mode.EVEN_ODD if calls.overlaps else Mode.BATCHED).value,
        "p2p_sync": not calls.overlaps,
        "prefetch": 0,
    }
    given = [name for name in preset if getattr(options, name) is not None]
    vars(options).update({name: value for name, value in preset.items() if name not in given})

    def flags(names: Iterable[str]) -> str:
        return " ".join(_flag(name, getattr(options, name)) for name in names)

    line = f"--like {options.like}: {flags(name for name in preset if name not in given)}"
    return f"{line}; as given: {flags(given)}" if given else line


def _flag(name: str, value: object) -> str:
    option = name.replace("_", "-")
    return f"--{option if value else f'no-{option}'}" if isinstance(value, bool) else f"--{option} {value}"


def _partition_layers(options: argparse.Namespace, plan: Plan, form: RankForm) -> tuple[range, ...]:
    """The layers of every stage, by the options; with --balance a partition that is replaced once times are measured."""
    layout = Layout(
        options.split,
        options.count_embedding,
        options.count_loss,
        options.first_layers,
        options.last_layers,
    )
    check_balance(options, layout)
    layers, stages = options.layers, plan.chain_length
    split = None if layout == Layout() else layout.layers(layers, stages, plan.placement[:stages])
    layer_partition = partition(layers, stages, split)
    if options.layer_times is None:
        return layer_partition
    return balanced_partition(read_layer_times(Path(options.layer_times), form, options.overlap), plan)


def _make_wiring(options: argparse.Namespace, backend: str, rank_info: RankInfo, parallel: ParallelOptions) -> Wiring:
    device = torch.device("cpu")
    if backend != "gloo":
        device = torch.device("cuda", rank_info.local_rank % torch.cuda.device_count())
    route = Route.HOST_STAGED if backend == "host-staged" else Route.DIRECT
    mode, bucket_bytes = Mode(options.p2p_mode or Mode.BATCHED), _bucket_bytes(options.bucket_mb)
    calls = Calls(options.p2p_calls or Calls.PLAN)
    prefetch_depth = _prefetch_depth(options, mode, calls)
    if options.zero >= Zero.GRADIENTS and options.bucket_mb is not None:
        raise UsageError("--bucket-mb is for --zero 0 and 1; fully_shard gathers and reduces layer by layer")
    if options.zero >= Zero.GRADIENTS and options.grad_reduce is not None:
        raise UsageError("--grad-reduce is for --zero 0 and 1; fully_shard reduces each layer in its last backward")
    if options.zero >= Zero.GRADIENTS and options.offload_activations:
        raise UsageError(
            f"--offload-activations leaves parameters where they are, and with --zero {options.zero} they come and go; use "
            "--zero 1"
        )
    if options.zero != Zero.OPTIMIZER and options.overlap_param_gather:
        raise UsageError(
            f"--overlap-param-gather is for --zero 1, which gathers parameters, and that is {options.zero}"
        )
    sharding = (parallel, bucket_bytes, Zero(options.zero))
    when = (Reduce(options.grad_reduce or Reduce.OVERLAP), options.overlap_param_gather)
    sent = options.scatter_gather_tensors, DTYPES.get(options.pipeline_dtype or "")
    return Wiring(
        device, mode, route, options.negotiate, prefetch_depth, *sharding, calls, bool(options.p2p_sync), *when, *sent
    )


def balanced_partition(times: LayerTimes, plan: Plan) -> tuple[range, ...]:
    """Partition layers so that the heaviest rank of a plan has the least work."""
    return partition(len(times.layers_ns), plan.chain_length, balance(times, plan))


def _make_model(options: argparse.Namespace) -> GptConfig:
    return GptConfig(
        options.layers,
        options.hidden,
        options.heads,
        options.seq,
        options.tied,
        DTYPES[options.dtype],
        options.seed,
        Recompute(options.recompute),
        options.kv_heads,
        options.dropout,
        read_experts(options),
        options.vocabulary,
        options.make_vocab_size_divisible_by,
        RecomputeMethod(options.recompute_method or RecomputeMethod.UNIFORM),
        1 if options.recompute_num_layers is None else options.recompute_num_layers,
        _read_modules(options.recompute_modules),
        options.encoder_layers,
        options.encoder_seq,
    )


def _read_modules(text: str | None) -> tuple[RecomputeModule, ...]:
    names = RecomputeModule.CORE_ATTN if text is None else text
    try:
        return tuple(dict.fromkeys(map(RecomputeModule, names.split(","))))
    except ValueError:
        expected = ", ".join(RecomputeModule)
        raise UsageError(f"--recompute-modules is {text!r}; expected one or several of {expected}") from None


def _bucket_bytes(value: float | None) -> int:
    mebibytes = DEFAULT_BUCKET_MB if value is None else value
    if not 2**-20 <= mebibytes < math.inf:
        raise UsageError(
            f"--bucket-mb is {mebibytes}; expected MiB of gradients a call, at least a byte and not infinite"
        )
    return int(mebibytes * 2**20)


def _prefetch_depth(options: argparse.Namespace, mode: Mode, calls: Calls) -> int:
    if options.prefetch is None:
        return 0 if options.negotiate or mode is Mode.BLOCKING or calls is not Calls.PLAN else DEFAULT_PREFETCH
    if options.negotiate and options.prefetch:
        raise UsageError("--negotiate learns a shape only when its message comes; use --prefetch 0")
    depth: int = options.prefetch
    return depth


def _read_plan(options: argparse.Namespace, pp: int) -> Plan:
    """Build the plan of a named schedule, or read a file in torch's CSV, which determines ranks, chunks and microbatches."""
    if not options.schedule.endswith(".csv"):
        microbatches = DEFAULT_MICROBATCHES if options.microbatches is None else options.microbatches
        chunks = _chunks_of_split(options, pp) if options.chunks is None else options.chunks
        return build(options.schedule, pp, microbatches, chunks, options.group_size, options.lean, options.memory_limit)
    if options.group_size or options.lean or options.memory_limit:
        raise UsageError(
            f"{options.schedule} is a complete plan; --group-size, --lean and --memory-limit shape named schedules"
        )
    plan = read_csv(Path(options.schedule))
    for option, value, planned in (
        ("--pp", pp, plan.pp),
        ("--chunks", options.chunks, plan.num_chunks),
        ("--microbatches", options.microbatches, plan.num_microbatches),
    ):
        if value is not None and value != planned:
            what = "ranks of each pipeline" if option == "--pp" else option
            raise UsageError(
                f"{options.schedule} has {planned} where {what} is {value}; leave it out or choose {planned}"
            )
    return plan


def _chunks_of_split(options: argparse.Namespace, pp: int) -> int | None:
    """The stages of each rank where a split tells them to a schedule that takes any number, as a layout does in Megatron-LM."""
    if options.split is None or options.schedule not in SCHEDULES or not SCHEDULES[options.schedule].takes_any_chunks:
        return None
    chunks, rest = divmod(len(options.split), pp)
    return None if rest else chunks


def _apply_global_batch(options: argparse.Namespace, dp: int) -> None:
    """Convert --global-batch-size to --microbatches of one pipeline."""
    batch = options.global_batch_size
    if batch is None:
        return
    each = dp * options.microbatch_size
    if batch < 1 or batch % each:
        raise UsageError(
            f"--global-batch-size is {batch} sequences, which {dp} replicas with microbatches of {options.microbatch_size} do "
            f"not divide; choose a multiple of {each}"
        )
    if options.microbatches not in (None, batch // each):
        raise UsageError(
            f"--microbatches is {options.microbatches} and --global-batch-size {batch} makes {batch // each} of each "
            "replica's part; give one of the two"
        )
    options.microbatches = batch // each


def _choose_backend(wanted: str, rank_info: RankInfo) -> str:
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "auto":
        return "gloo" if devices == 0 else "nccl" if devices >= rank_info.local_world else "host-staged"
    if wanted != "gloo" and devices == 0:
        raise UsageError(f"--backend {wanted} needs a GPU and this machine has none; use --backend gloo")
    if wanted == "nccl" and devices < rank_info.local_world:
        raise UsageError(
            f"--backend nccl needs a GPU for each of {rank_info.local_world} ranks and this machine has {devices}; "
            "use --backend host-staged or nccl-shared"
        )
    if wanted == "nccl-shared":
        let_nccl_share_gpus(rank_info.rank, one_node=rank_info.local_world == rank_info.world)
        return "nccl"
    return wanted
