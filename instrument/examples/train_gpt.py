"""Train a small byte-level GPT on a pipeline of processes.

    pptrace run -n 4 instrument/examples/train_gpt.py --schedule 1f1b
    torchrun --nproc-per-node 4 instrument/examples/train_gpt.py --pp 2
    python instrument/examples/train_gpt.py                                  (one process, one stage)

Prints step, loss, step time and tokens per second on the first rank of the last stage. A mistake in the arguments is
one line and exit code 2, before any process group is made.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from instrument import session
from instrument.data.text import Batch, TextData
from instrument.mesh import Mesh, MeshShape, fit_shape, make_mesh
from instrument.models.gpt import GptConfig, GptStage
from instrument.models.gpt_pipeline import Wiring, make_gpt_runtime
from instrument.models.sleeping import SleepingStage
from instrument.pipeline.partition import partition
from instrument.pipeline.runtime import PipelineRuntime
from instrument.pipeline.transport import Mode, Route
from pptrace.errors import PptraceError, UsageError
from pptrace.marks import SpanKind
from pptrace.schedule.lower import lower
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import build
from pptrace.schedule.validate import validate

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
BACKENDS = ("auto", "gloo", "nccl", "host-staged")


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


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        place = Place.from_environment()
        settings = _settle(options, place)
    except PptraceError as err:
        if os.environ.get("RANK", "0") == "0":
            print(f"train_gpt: {err}", file=sys.stderr)
        return 2
    if settings.wiring.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # ranks on one machine share its cores
    _join(settings)
    train(settings, options)
    dist.destroy_process_group()  # not after an error: it could wait for ranks that wait for this one
    return 0


def train(settings: Settings, options: argparse.Namespace) -> None:
    """The training loop; the process group exists."""
    observer = session.current()
    mesh = make_mesh(settings.shape, _mesh_device(settings), _group_backend(settings))
    runtime = _make_runtime(settings, mesh, options, observer)
    optimizer = torch.optim.AdamW(runtime.parameters(), lr=options.lr)
    observer.describe(
        mesh={"pp": mesh.shape.pp, "vpp": settings.plan.num_chunks, "tp": mesh.shape.tp, "cp": mesh.shape.cp}
        | {"dp": mesh.shape.dp},
        plan=settings.plan,
        pp_ranks=mesh.pp_ranks,
        model=_describe_model(settings, options),
    )
    last_stage_rank = settings.plan.placement[-1]
    reports = mesh.rank == settings.shape.rank_of(last_stage_rank, 0, 0, 0)
    tokens = options.microbatches * options.microbatch_size * options.seq * mesh.shape.dp
    progress = Progress(tokens)
    for step in observer.steps(options.steps):
        started = time.perf_counter()
        batch = _load(settings, mesh, observer, step)
        result = runtime.run(batch, step)
        runtime.optimize(optimizer, step)
        if reports and result.loss is not None:
            progress.add(step, result.loss, started)
    progress.finish()


class Progress:
    """Prints one line per step. On a GPU a step's line is printed during the next step, so that reading the loss waits
    for nothing that is still to run."""

    def __init__(self, tokens_per_step: int) -> None:
        self._tokens = tokens_per_step
        self._waiting: tuple[int, Tensor, float, torch.cuda.Event | None] | None = None

    def add(self, step: int, loss: Tensor, started: float) -> None:
        if not loss.is_cuda:
            self._print(step, float(loss), time.perf_counter() - started)
            return
        self.finish()
        host = torch.empty_like(loss, device="cpu", pin_memory=True).copy_(loss, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        self._waiting = (step, host, started, copied)

    def finish(self) -> None:
        """Print the step that waits, if one does."""
        if self._waiting is None:
            return
        step, loss, started, copied = self._waiting
        self._waiting = None
        if copied is not None:
            copied.synchronize()
        self._print(step, float(loss), time.perf_counter() - started)

    def _print(self, step: int, loss: float, seconds: float) -> None:
        print(
            f"step {step:4d}   loss {loss:7.4f}   {seconds * 1e3:8.1f} ms   {self._tokens / seconds:10,.0f} tokens/s",
            flush=True,
        )


def _load(settings: Settings, mesh: Mesh, observer: session.Session, step: int) -> Batch:
    with observer.recorder.span(SpanKind.DATA, step):
        return settings.data.batch(step, mesh.dp_rank).to(settings.wiring.device)


def _make_runtime(
    settings: Settings, mesh: Mesh, options: argparse.Namespace, observer: session.Session
) -> PipelineRuntime:
    def wrap(stage: GptStage) -> torch.nn.Module:
        if not (options.sleep_forward or options.sleep_backward):
            return stage
        return SleepingStage(stage, options.sleep_forward / 1e3, options.sleep_backward / 1e3)

    return make_gpt_runtime(
        mesh,
        settings.plan,
        settings.model,
        settings.cut,
        options.microbatch_size,
        settings.wiring,
        observer.recorder,
        wrap,
    )


def _settle(options: argparse.Namespace, place: Place) -> Settings:
    """Check all arguments against each other and against the machine. Makes no process group."""
    if options.steps < 1:
        raise UsageError(f"--steps is {options.steps}; expected at least 1")
    if min(options.sleep_forward, options.sleep_backward) < 0:
        raise UsageError("--sleep-forward and --sleep-backward take milliseconds from 0 up")
    shape = fit_shape(place.world, options.pp, options.dp)
    plan = build(options.schedule, pp=shape.pp, num_microbatches=options.microbatches, num_chunks=options.chunks)
    cut = partition(options.layers, plan.num_stages, _read_split(options.split))
    model = GptConfig(
        options.layers, options.hidden, options.heads, options.seq, options.tied, DTYPES[options.dtype], options.seed
    )
    data = TextData(options.microbatches, options.microbatch_size, options.seq, options.seed)
    lowered = lower(plan)
    validate(lowered)
    backend = _choose_backend(options.backend, place)
    device = torch.device("cpu")
    if backend != "gloo":
        device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
    route = Route.HOST_STAGED if backend == "host-staged" else Route.DIRECT
    wiring = Wiring(device, Mode(options.p2p_mode), route, options.negotiate)
    return Settings(shape, lowered, model, cut, data, backend, wiring)


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


def _describe_model(settings: Settings, options: argparse.Namespace) -> dict[str, object]:
    return {
        "name": "gpt",
        "layers": options.layers,
        "hidden": options.hidden,
        "heads": options.heads,
        "sequence": options.seq,
        "microbatch_size": options.microbatch_size,
        "dtype": options.dtype,
        "tied": options.tied,
        "layers_per_stage": [len(layers) for layers in settings.cut],
        "sleep_forward_ms": options.sleep_forward,
        "sleep_backward_ms": options.sleep_backward,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train_gpt.py",
        description="Train a small byte-level GPT on a pipeline of processes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--pp", type=int, help="pipeline ranks; left out: all ranks that --dp leaves")
    add("--dp", type=int, help="data-parallel replicas; left out: all ranks that --pp leaves")
    add("--schedule", default="1f1b", help="name of a schedule (pptrace schedule list)")
    add("--chunks", type=int, help="stages per rank; left out: the schedule's own")
    add("--microbatches", type=int, default=8, help="microbatches per step and pipeline")
    add("--microbatch-size", type=int, default=2, help="sequences per microbatch")
    add("--seq", type=int, default=64, help="bytes per sequence")
    add("--layers", type=int, default=8, help="transformer layers")
    add("--hidden", type=int, default=96, help="hidden size")
    add("--heads", type=int, default=4, help="attention heads")
    add("--steps", type=int, default=10, help="training steps")
    add("--lr", type=float, default=3e-3, help="learning rate of AdamW")
    add("--tied", action="store_true", help="one weight for embedding and head")
    add("--split", metavar="N,N,…", help="layers of each stage; left out: even")
    add("--dtype", choices=DTYPES, default="float32", help="of parameters and activations")
    add("--seed", type=int, default=0, help="of parameters and data")
    add("--p2p-mode", choices=[mode.value for mode in Mode], default=Mode.BATCHED.value, help="how messages are posted")
    add("--negotiate", action="store_true", help="send the shape before every message")
    add("--backend", choices=BACKENDS, default="auto", help="auto: by the GPUs that are there")
    add("--sleep-forward", type=float, default=0.0, metavar="MS", help="sleep in every forward besides computing")
    add("--sleep-backward", type=float, default=0.0, metavar="MS", help="sleep in every backward besides computing")
    return parser


if __name__ == "__main__":
    sys.exit(main())
