"""Step time of our runtime against torch.distributed.pipelining: same schedule, model, batch, processes and backend.

    python tools/bench/bench_runtime.py [--schedule 1f1b zbv …] [--pp 2 4] [--launches 4] [--rounds 8] [--prefetch 0]

Both live in the same processes and take turns, a few steps each, in changing order; a round's ratio compares neighbours
in time. Which of the two is made first changes its speed by about 2 % (where its memory lies), so every other launch
makes the other one first. Prints medians over all rounds, and that of their ratios ours/theirs (target ≤ 1.0).
Gradients are compared first.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from multiprocessing.queues import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from instrument.data.text import Batch, TextData
from instrument.examples.gpt_arguments import DEFAULT_PREFETCH
from instrument.mesh import Mesh, fit_shape, make_mesh
from instrument.models.gpt import cross_entropy, make_stages
from instrument.models.gpt_config import GptConfig
from instrument.models.gpt_pipeline import GptPipeline, Wiring, make_gpt_runtime
from instrument.pipeline.partition import partition
from instrument.pipeline.transport import Mode
from instrument.recorder import Recorder
from pptrace.marks import Axis
from pptrace.schedule.lower import lower
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import build

CPU = torch.device("cpu")
SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MULTI = {
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "looped-bfs": ScheduleLoopedBFS,
    "interleaved-zb": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipe-v": ScheduleDualPipeV,
}


@dataclass(frozen=True, slots=True)
class Setting:
    schedule: str
    prefetch: int
    pp: int
    microbatches: int
    microbatch_size: int
    sequence: int
    layers: int
    hidden: int
    launches: int
    rounds: int
    steps: int

    @property
    def config(self) -> GptConfig:
        return GptConfig(self.layers, self.hidden, 4, self.sequence)

    @property
    def plan(self) -> Plan:
        return lower(build(self.schedule, self.pp, self.microbatches))


Step = Callable[[], None]
Seconds = dict[str, list[float]]
"""Side → seconds per step in every round."""


def ours(setting: Setting, mesh: Mesh, batch: Batch) -> tuple[Step, list[torch.nn.Parameter]]:
    plan = setting.plan
    cut = partition(setting.layers, plan.num_stages)
    wiring = Wiring(CPU, Mode.BATCHED, prefetch_depth=setting.prefetch)
    gpt = GptPipeline(plan, setting.config, cut, setting.microbatch_size)
    runtime = make_gpt_runtime(mesh, gpt, wiring, Recorder())

    def step() -> None:
        runtime.run(batch, 0)

    return step, list(runtime.program.parameters())


def theirs(setting: Setting, mesh: Mesh, batch: Batch) -> tuple[Step, list[torch.nn.Parameter]]:
    plan = setting.plan
    rank_stages = plan.stages_of(mesh.pp_rank)
    modules = make_stages(setting.config, partition(setting.layers, plan.num_stages), rank_stages)
    group = mesh.groups[Axis.PP]
    stages = [PipelineStage(modules[stage], stage, plan.num_stages, CPU, group=group) for stage in rank_stages]
    schedule: Any
    if setting.schedule in SINGLE:
        schedule = SINGLE[setting.schedule](stages[0], setting.microbatches, loss_fn=cross_entropy)
    else:
        schedule = MULTI[setting.schedule](stages, setting.microbatches, loss_fn=cross_entropy)
    inputs = (batch.tokens.flatten(0, 1),) if 0 in rank_stages else ()
    targets = batch.targets.flatten(0, 1) if plan.num_stages - 1 in rank_stages else None

    def step() -> None:
        losses: list[torch.Tensor] | None = None if targets is None else []
        schedule.step(*inputs, target=targets, losses=losses, return_outputs=False)

    return step, list(torch.nn.ModuleList(modules.values()).parameters())


def measure(step: Step, parameters: list[torch.nn.Parameter], steps: int) -> float:
    """Seconds per step, from a barrier to a barrier."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step()
        for parameter in parameters:
            parameter.grad = None
    dist.barrier()
    return (time.perf_counter() - start) / steps


def work(rank: int, port: int, setting: Setting, launch: int, answers: SimpleQueue[Seconds]) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=setting.pp)
    mesh = make_mesh(fit_shape(setting.pp), "cpu", "gloo")
    batch = TextData(setting.microbatches, setting.microbatch_size, setting.sequence).batch(0, 0)
    makers = {"ours": ours, "theirs": theirs}
    order = list(makers) if launch % 2 else list(makers)[::-1]
    sides = {name: makers[name](setting, mesh, batch) for name in order}
    for step, _ in sides.values():
        step()
    for one, other in zip(sides["ours"][1], sides["theirs"][1], strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    seconds: Seconds = {"ours": [], "theirs": []}
    for turn in range(setting.rounds + 1):
        for name in ("ours", "theirs") if turn % 2 else ("theirs", "ours"):
            taken = measure(*sides[name], setting.steps)
            if turn:  # the first round warms up
                seconds[name].append(taken)
    if rank == 0:
        answers.put(seconds)
    dist.destroy_process_group()


def compare(setting: Setting, launch: int) -> Seconds:
    """One launch of all ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answers = mp.get_context("spawn").SimpleQueue()
    mp.spawn(work, (store.port, setting, launch, answers), nprocs=setting.pp)
    return answers.get()


def report(setting: Setting, ours_s: list[float], others: list[float]) -> None:
    ratios = sorted(a / b for a, b in zip(ours_s, others, strict=True))
    ratio = statistics.median(ratios)
    spread = f"{ratios[len(ratios) // 4]:.3f}–{ratios[-1 - len(ratios) // 4]:.3f}"
    print(
        f"{setting.schedule:16} p={setting.pp} m={setting.microbatches}: ours {statistics.median(ours_s) * 1e3:7.1f} ms   "
        f"torch {statistics.median(others) * 1e3:7.1f} ms   ratio {ratio:.3f} (middle half {spread}; target ≤ 1.0): "
        f"{'met' if ratio <= 1 else 'MISSED'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="our runtime against torch's", formatter_class=argparse.HelpFormatter)
    parser.add_argument("--schedule", choices=[*SINGLE, *MULTI], nargs="+", default=["1f1b"])
    parser.add_argument("--prefetch", type=int, default=DEFAULT_PREFETCH, help="prefetch depth of ours")
    parser.add_argument("--pp", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--microbatch-size", type=int, default=2)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--launches", type=int, default=4, help="times to start the processes anew")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each side in a launch")
    parser.add_argument("--steps", type=int, default=3, help="steps in a row in each turn")
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for schedule, pp in product(options.schedule, options.pp):
        setting = Setting(
            schedule,
            options.prefetch,
            pp,
            options.microbatches,
            options.microbatch_size,
            options.seq,
            options.layers,
            options.hidden,
            options.launches,
            options.rounds,
            options.steps,
        )
        rounds = [compare(setting, launch) for launch in range(setting.launches)]
        report(setting, *([taken for seconds in rounds for taken in seconds[side]] for side in ("ours", "theirs")))


if __name__ == "__main__":
    main()
