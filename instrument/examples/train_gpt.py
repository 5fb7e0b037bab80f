"""Train a small byte-level GPT on a pipeline of processes.

    pptrace run -n 4 instrument/examples/train_gpt.py --schedule 1f1b
    pptrace run -n 4 instrument/examples/train_gpt.py --schedule my_plan.csv   (torch's CSV, with sends or without)
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

import torch
import torch.distributed as dist
from torch import Tensor

from instrument import session
from instrument.data.text import Batch
from instrument.examples.gpt_settings import Place, Settings, make_parser, settle
from instrument.mesh import Mesh, make_mesh
from instrument.models.gpt import GptStage
from instrument.models.gpt_pipeline import make_gpt_runtime
from instrument.models.sleeping import SleepingStage
from instrument.pipeline.runtime import PipelineRuntime
from pptrace.errors import PptraceError
from pptrace.marks import SpanKind


def main(arguments: Sequence[str] | None = None) -> int:
    options = make_parser().parse_args(arguments)
    try:
        place = Place.from_environment()
        settings = settle(options, place)
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
    tokens = settings.plan.num_microbatches * options.microbatch_size * options.seq * mesh.shape.dp
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
        weight_s = None if options.sleep_weight is None else options.sleep_weight / 1e3
        return SleepingStage(stage, options.sleep_forward / 1e3, options.sleep_backward / 1e3, weight_s)

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
        "recompute": options.recompute,
        "layers_per_stage": [len(layers) for layers in settings.cut],
        "sleep_forward_ms": options.sleep_forward,
        "sleep_backward_ms": options.sleep_backward,
        "sleep_weight_ms": options.sleep_backward / 2 if options.sleep_weight is None else options.sleep_weight,
    }


if __name__ == "__main__":
    sys.exit(main())
