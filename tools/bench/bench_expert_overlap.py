"""A step of DualPipe with experts, with what travels overlapped and without: the ratio of step times.

    python tools/bench/bench_expert_overlap.py [--compute-ms 6] [--link-ms 4] [--rounds 8]

Four processes: two stages, each on two ranks that share its experts. With ``--compute-ms`` attention and experts of each layer
sleep that long in forward and twice that in backward, as a device computes while its host has time; without, all is computed
on the cores that gloo needs as well. ``--link-ms`` is the least time that an all-to-all of rows takes. Values, plan and processes
are the same in both; they take turns, and a ratio compares neighbours in time. Losses of both are compared first.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from instrument.collectives import Pending
from instrument.data.text import TextData
from instrument.expert import exchange, layer, mlp
from instrument.mesh import Mesh, MeshShape, make_mesh
from instrument.models.feed import BatchFeed, make_feed
from instrument.models.gpt import Block, GptStage
from instrument.models.gpt_config import GptConfig
from instrument.models.gpt_pipeline import GptPipeline, Wiring, make_gpt_runtime
from instrument.models.parallel import ParallelOptions, make_parallel
from instrument.pipeline.partition import partition
from instrument.pipeline.runtime import PipelineRuntime
from instrument.recorder import Recorder
from pptrace.memory import keep_freed_memory
from pptrace.schedule.lower import lower
from pptrace.schedule.registry import build
from pptrace.sizes.expert_options import ExpertOptions

WORLD, LAYERS, MICROBATCHES, SIZE, SEQUENCE = 4, 4, 8, 2, 128
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Setting:
    compute_ms: float
    link_ms: float
    hidden: int
    rounds: int
    schedule: str


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, backwards: int) -> Tensor:
        ctx.seconds = seconds * backwards
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None, None


class Sleeping(nn.Module):
    def __init__(self, module: nn.Module, seconds: float, backwards: int) -> None:
        super().__init__()
        self.module, self.seconds, self.backwards = module, seconds, backwards

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = _Sleep.apply(self.module(x), self.seconds, self.backwards)
        return output


def sleeping(stage: GptStage, seconds: float) -> GptStage:
    """The stage, whose layers sleep behind their attention."""
    for block in stage.blocks.values():
        assert isinstance(block, Block)
        block.attention_out = Sleeping(block.attention_out, seconds, 2)
    return stage


def sleeping_experts(seconds: float) -> None:
    """Let experts sleep in forward, as long in backward, and as long for their weights, whenever these are computed."""
    run, of, gradient = mlp.run_experts, mlp._Gradients.of, mlp.ExpertWork.gradient
    patched: Any = mlp

    def slow_run(*arguments: Any) -> Tensor:
        output: Tensor = _Sleep.apply(run(*arguments), seconds, 1)
        return output

    def slow_of(part: Any) -> mlp._Gradients:
        time.sleep(seconds)
        return of(part)

    def slow_gradient(self: mlp.ExpertWork) -> Any:
        time.sleep(seconds / 2)  # of one of two layers
        return gradient(self)

    layer_module: Any = layer
    layer_module.run_experts = slow_run
    patched._Gradients.of = slow_of
    patched.ExpertWork.gradient = slow_gradient


def slow_link(seconds: float) -> None:
    """Let no all-to-all of rows end before so long after its start."""
    run, start = exchange.Exchange.run, exchange.Exchange.start

    def slow_run(self: exchange.Exchange, rows: Tensor) -> Tensor:
        ends = time.perf_counter() + seconds
        arrived = run(self, rows)
        time.sleep(max(0.0, ends - time.perf_counter()))
        return arrived

    class Slow:
        def __init__(self, pending: Pending[Tensor]) -> None:
            self.pending, self.ends = pending, time.perf_counter() + seconds

        def wait(self) -> Tensor:
            arrived = self.pending.wait()
            time.sleep(max(0.0, self.ends - time.perf_counter()))
            return arrived

    patched: Any = exchange.Exchange
    patched.run = slow_run
    patched.start = lambda self, rows: Slow(start(self, rows))


def runtime_of(setting: Setting, mesh: Mesh, overlap: bool) -> tuple[PipelineRuntime, BatchFeed]:
    plan = lower(build(setting.schedule, mesh.shape.pp, MICROBATCHES))
    experts = ExpertOptions(8, 2, width=2 * setting.hidden, shared_width=setting.hidden, overlap=overlap)
    config = GptConfig(LAYERS, setting.hidden, 4, SEQUENCE, experts=experts)
    recorder = Recorder()
    parallel = make_parallel(mesh, ParallelOptions(), recorder)

    def wrap(stage: GptStage) -> nn.Module:
        return sleeping(stage, 1e-3 * setting.compute_ms) if setting.compute_ms else stage

    gpt = GptPipeline(plan, config, partition(LAYERS, plan.chain_length), SIZE, wrap)
    runtime = make_gpt_runtime(mesh, gpt, Wiring(CPU, prefetch_depth=2), recorder, parallel)
    data = TextData(MICROBATCHES, SIZE, SEQUENCE)
    return runtime, make_feed(data, mesh, plan, parallel, CPU, (SIZE, SEQUENCE))


def step(runtime: PipelineRuntime, feed: BatchFeed, number: int) -> tuple[float, float | None]:
    """Seconds from a barrier to a barrier, and the loss where this rank has it."""
    batch = feed.batch(number)
    dist.barrier()
    start = time.perf_counter()
    loss = runtime.run(batch, number).loss
    dist.barrier()
    taken = time.perf_counter() - start
    for parameter in runtime.program.parameters():
        parameter.grad = None
    return taken, None if loss is None else float(loss)


def work(rank: int, port: int, setting: Setting, answers: SimpleQueue[tuple[list[float], list[float]]]) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    if setting.link_ms:
        slow_link(1e-3 * setting.link_ms)
    if setting.compute_ms:
        sleeping_experts(1e-3 * setting.compute_ms)
    mesh = make_mesh(MeshShape(2, 2, ep=2), "cpu", "gloo", setting.schedule == "dualpipe", True)
    sides = [runtime_of(setting, mesh, overlap) for overlap in (True, False)]
    losses = [step(*side, 0)[1] for side in sides]  # warms up
    assert losses[0] is None or abs(losses[0] - (losses[1] or 0)) < 1e-5, losses
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(1, setting.rounds + 1):
        for index in (0, 1) if turn % 2 else (1, 0):
            seconds[index].append(step(*sides[index], turn)[0])
    if rank == 0:
        answers.put(seconds)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description="step time with and without overlap of what experts send")
    parser.add_argument("--compute-ms", type=float, default=0.0, help="sleep in place of computing; 0: compute")
    parser.add_argument("--link-ms", type=float, default=0.0, help="least time of an all-to-all of rows")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--schedule", default="dualpipe")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each side")
    options = parser.parse_args()
    setting = Setting(options.compute_ms, options.link_ms, options.hidden, options.rounds, options.schedule)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answers = mp.get_context("spawn").SimpleQueue()
    mp.spawn(work, (store.port, setting, answers), nprocs=WORLD)
    overlapped, plain = answers.get()
    ratios = sorted(a / b for a, b in zip(overlapped, plain, strict=True))
    print(
        f"{setting.schedule} h={setting.hidden} compute {setting.compute_ms:g} ms, link {setting.link_ms:g} ms: "
        f"overlapped {statistics.median(overlapped) * 1e3:7.1f} ms   without {statistics.median(plain) * 1e3:7.1f} ms   "
        f"ratio {statistics.median(ratios):.3f} (middle half {ratios[len(ratios) // 4]:.3f}–{ratios[-1 - len(ratios) // 4]:.3f})"
    )


if __name__ == "__main__":
    main()
