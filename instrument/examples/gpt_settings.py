"""The arguments of the GPT example, checked against each other and the machine before any process group is made."""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from instrument.data.text import TextData
from instrument.examples.gpt_arguments import DEFAULT_BUCKET_MB, DEFAULT_MICROBATCHES, DEFAULT_PREFETCH, DTYPES
from instrument.mesh import MeshShape, fit_shape, read_order
from instrument.models.activations import RankForm
from instrument.models.gpt import VOCABULARY, GptConfig, Recompute
from instrument.models.gpt_pipeline import Wiring, check_zero
from instrument.models.layer_times import read_layer_times
from instrument.models.parallel import ParallelOptions, check_parallel
from instrument.optim.adamw import WEIGHT_DECAY
from instrument.optim.clipping import OptimizerSync, require_norm
from instrument.optim.main_parameters import Zero
from instrument.pipeline.balance import LayerTimes, balance
from instrument.pipeline.order import Posting, require_total_order
from instrument.pipeline.partition import Layout, partition
from instrument.pipeline.transport import Mode
from instrument.route import Route
from pptrace.errors import UsageError
from pptrace.schedule.lower import lower
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import build
from pptrace.schedule.text import read_csv
from pptrace.schedule.validate import validate


@dataclass(frozen=True, slots=True)
class Place:
    """What the launcher says about this process (torchrun's environment variables)."""

    rank: int
    world: int
    local_rank: int
    local_world: int

    @classmethod
    def from_environment(cls) -> Place:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        if "RANK" not in os.environ:
            return cls(0, 1, 0, 1)
        missing = [name for name in names if name not in os.environ]
        if missing:
            raise UsageError(f"RANK is set and {missing[0]} is not; start with `pptrace run` or torchrun")
        return cls(*(int(os.environ[name]) for name in names))


@dataclass(frozen=True, slots=True)
class Settings:
    """A run whose parts fit together."""

    shape: MeshShape
    plan: Plan
    model: GptConfig
    cut: tuple[range, ...]
    data: TextData
    backend: str
    wiring: Wiring


def settle(options: argparse.Namespace, place: Place) -> Settings:
    """Check all arguments against each other and against the machine. Makes no process group."""
    for name, count in (("--steps", options.steps), ("--microbatch-size", options.microbatch_size)):
        if count < 1:
            raise UsageError(f"{name} is {count}; expected at least 1")
    if min(options.sleep_forward, options.sleep_backward) < 0:
        raise UsageError("--sleep-forward and --sleep-backward take milliseconds from 0 up")
    if options.sleep_weight is not None and not 0 <= options.sleep_weight <= options.sleep_backward:
        raise UsageError("--sleep-weight is a part of --sleep-backward: it takes milliseconds from 0 up to that")
    if not 0 < options.lr < 1 / WEIGHT_DECAY:
        raise UsageError(f"--lr is {options.lr}; expected more than 0 and less than {1 / WEIGHT_DECAY:g}")
    _check_clipping(options)
    order = read_order(options.order)
    shape = fit_shape(place.world, options.pp, options.dp, options.cp, options.tp, order)
    model = _make_model(options)
    _check_axes(options)
    parallel = ParallelOptions(options.sequence_parallel, options.overlap, options.ulysses)
    check_parallel(shape, parallel, model.sequence, model.heads, model.num_kv_heads)
    if VOCABULARY % shape.tp:
        raise UsageError(f"tp={shape.tp} does not divide the vocabulary of {VOCABULARY} bytes; choose a power of two")
    _take_global_batch(options, shape.dp)
    plan = _read_plan(options, shape.pp)
    validate(plan)
    plan = lower(plan)
    layout = Layout(
        _read_split(options.split),
        options.count_embedding,
        options.count_loss,
        options.first_layers,
        options.last_layers,
    )
    _check_balance(options, layout)
    cut = _cut(options.layers, plan.chain_length, layout)
    if options.layer_times is not None:
        form = RankForm.of(model, options.microbatch_size, shape, parallel)
        cut = balanced_cut(read_layer_times(Path(options.layer_times), form, parallel.overlap), plan)
    _check_recompute(options)
    if options.peak_tflops is not None and not 0 < options.peak_tflops < math.inf:
        raise UsageError(f"--peak-tflops is {options.peak_tflops}; expected a rank's peak in TFLOP/s, more than 0")
    data = TextData(plan.num_microbatches, options.microbatch_size, options.seq, options.seed)
    backend = _choose_backend(options.backend, place)
    device = torch.device("cpu")
    if backend != "gloo":
        device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
    route = Route.HOST_STAGED if backend == "host-staged" else Route.DIRECT
    mode, bucket_bytes = Mode(options.p2p_mode), _bucket_bytes(options.bucket_mb)
    ahead = _prefetch_depth(options, mode)
    if options.zero >= Zero.GRADIENTS and options.bucket_mb is not None:
        raise UsageError("--bucket-mb is for --zero 0 and 1; fully_shard gathers and reduces layer by layer")
    wiring = Wiring(device, mode, route, options.negotiate, ahead, parallel, bucket_bytes, Zero(options.zero))
    check_zero(wiring.zero, shape, plan, model)
    if wiring.mode is Mode.BLOCKING:
        require_total_order(plan)
    Posting(wiring.ahead, wiring.mode is Mode.BLOCKING)
    return Settings(shape, plan, model, cut, data, backend, wiring)


def balanced_cut(times: LayerTimes, plan: Plan) -> tuple[range, ...]:
    """The layers of every stage such that the heaviest rank of a plan has least to do."""
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
    )


def _check_axes(options: argparse.Namespace) -> None:
    """Refuse what belongs to an axis that has one rank: it would change nothing."""
    for name, given in (("--sequence-parallel", options.sequence_parallel), ("--overlap", options.overlap)):
        if given and options.tp == 1:
            raise UsageError(
                f"{name} is for the ranks of tp, which is 1; give it 2 or more with --tp, or leave {name} out"
            )
    if options.ulysses > 1 and options.cp == 1:
        raise UsageError(
            f"--ulysses is {options.ulysses} and cp is 1; it says how many ranks of cp exchange heads: give --cp a multiple of "
            f"{options.ulysses}"
        )


def _bucket_bytes(given: float | None) -> int:
    mebibytes = DEFAULT_BUCKET_MB if given is None else given
    if not 2**-20 <= mebibytes < math.inf:
        raise UsageError(
            f"--bucket-mb is {mebibytes}; expected MiB of gradients a call, at least a byte and not infinite"
        )
    return int(mebibytes * 2**20)


def _check_balance(options: argparse.Namespace, layout: Layout) -> None:
    if options.balance and options.layer_times is not None:
        raise UsageError("--balance measures what --layer-times reads from a file; give one of the two")
    if (options.balance or options.layer_times is not None) and layout != Layout():
        raise UsageError("--balance and --layer-times share out the layers by time; leave out --split, counts and ends")
    if options.save_layer_times is not None and not options.balance:
        raise UsageError("--save-layer-times keeps what --balance measures; give both")
    if options.save_layer_times is not None and not Path(options.save_layer_times).resolve().parent.is_dir():
        raise UsageError(f"--save-layer-times is {options.save_layer_times}, whose folder does not exist; make it")


def _check_recompute(options: argparse.Namespace) -> None:
    keep = options.recompute_microbatches_beyond
    if keep is None:
        return
    if keep < 0:
        raise UsageError(f"--recompute-microbatches-beyond is {keep}; expected 0 or more outstanding microbatches")
    if options.recompute == Recompute.FULL:
        raise UsageError("--recompute full leaves no microbatch to spare; give none or selective for those within")


def _prefetch_depth(options: argparse.Namespace, mode: Mode) -> int:
    if options.prefetch is None:
        return 0 if options.negotiate or mode is Mode.BLOCKING else DEFAULT_PREFETCH
    if options.negotiate and options.prefetch:
        raise UsageError("--negotiate tells a shape only when its message comes; use --prefetch 0")
    depth: int = options.prefetch
    return depth


def _check_clipping(options: argparse.Namespace) -> None:
    if options.clip_grad:
        require_norm(options.clip_grad)
    elif options.optimizer_sync == OptimizerSync.POST_VALIDATION:
        raise UsageError("--optimizer-sync post-validation validates the gradient norm; give it one with --clip-grad")


def _read_plan(options: argparse.Namespace, pp: int) -> Plan:
    """The plan of a schedule's name, or of a file in torch's CSV, which says its own ranks, chunks and microbatches."""
    if not options.schedule.endswith(".csv"):
        microbatches = DEFAULT_MICROBATCHES if options.microbatches is None else options.microbatches
        return build(
            options.schedule, pp, microbatches, options.chunks, options.group_size, options.lean, options.memory_limit
        )
    if options.group_size or options.lean or options.memory_limit:
        raise UsageError(
            f"{options.schedule} is a whole plan; --group-size, --lean and --memory-limit shape named schedules"
        )
    plan = read_csv(Path(options.schedule))
    for option, given, found in (
        ("--pp", pp, plan.pp),
        ("--chunks", options.chunks, plan.num_chunks),
        ("--microbatches", options.microbatches, plan.num_microbatches),
    ):
        if given is not None and given != found:
            what = "ranks of each pipeline" if option == "--pp" else option
            raise UsageError(f"{options.schedule} has {found} where {what} is {given}; leave it out or choose {found}")
    return plan


def _take_global_batch(options: argparse.Namespace, dp: int) -> None:
    """--global-batch-size as microbatches of one pipeline."""
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


def _cut(layers: int, stages: int, layout: Layout) -> tuple[range, ...]:
    if stages > layers:
        raise UsageError(f"{stages} stages need at least {stages} layers and the model has {layers}")
    return partition(layers, stages, layout.layers(layers, stages))


def _choose_backend(wanted: str, place: Place) -> str:
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "auto":
        return "gloo" if devices == 0 else "nccl" if devices >= place.local_world else "host-staged"
    if wanted != "gloo" and devices == 0:
        raise UsageError(f"--backend {wanted} needs a GPU and this machine has none; use --backend gloo")
    if wanted == "nccl" and devices < place.local_world:
        raise UsageError(
            f"--backend nccl needs a GPU for each of {place.local_world} ranks and this machine has {devices}; "
            "use --backend host-staged"
        )
    return wanted


def _read_split(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--split is {text!r}; expected layers per stage, such as 3,2,2,1") from None
