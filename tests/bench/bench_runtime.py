"""Step time of our 1F1B against torch.distributed.pipelining's Schedule1F1B: same model, batch, processes and backend.

    python tests/bench/bench_runtime.py [--pp 2 4] [--rounds 15]

Both live in the same processes and take turns, a few steps each, in changing order; a round's ratio compares neighbours
in time. Prints medians, and the ratio ours/theirs of every round's pair (target ≤ 1.0). Gradients are compared first.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from instrument.data.text import Batch, TextData
from instrument.mesh import Mesh, fit_shape, make_mesh
from instrument.models.gpt import GptConfig, cross_entropy, make_stages
from instrument.models.gpt_pipeline import Wiring, make_gpt_runtime
from instrument.pipeline.partition import partition
from instrument.pipeline.transport import Mode
from instrument.recorder import Recorder
from pptrace.marks import Axis
from pptrace.schedule.lower import lower
from pptrace.schedule.registry import build

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Setting:
    pp: int
    microbatches: int
    microbatch_size: int
    sequence: int
    layers: int
    hidden: int
    rounds: int
    steps: int

    @property
    def config(self) -> GptConfig:
        return GptConfig(self.layers, self.hidden, 4, self.sequence)


Step = Callable[[], None]


def ours(setting: Setting, mesh: Mesh, batch: Batch) -> tuple[Step, list[torch.nn.Parameter]]:
    plan = lower(build("1f1b", setting.pp, setting.microbatches, 1))
    cut = partition(setting.layers, setting.pp)
    runtime = make_gpt_runtime(
        mesh, plan, setting.config, cut, setting.microbatch_size, Wiring(CPU, Mode.BATCHED), Recorder()
    )

    def step() -> None:
        runtime.run(batch, 0)

    return step, list(runtime.parameters())


def theirs(setting: Setting, mesh: Mesh, batch: Batch) -> tuple[Step, list[torch.nn.Parameter]]:
    rank = mesh.pp_rank
    module = make_stages(setting.config, partition(setting.layers, setting.pp), (rank,))[rank]
    stage = PipelineStage(module, rank, setting.pp, CPU, group=mesh.groups[Axis.PP])
    schedule = Schedule1F1B(stage, setting.microbatches, loss_fn=cross_entropy)
    tokens, targets = batch.tokens.flatten(0, 1), batch.targets.flatten(0, 1)

    def step() -> None:
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(tokens, return_outputs=False)
        elif rank == setting.pp - 1:
            schedule.step(target=targets, losses=losses, return_outputs=False)
        else:
            schedule.step(return_outputs=False)

    return step, list(module.parameters())


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


def work(rank: int, port: int, setting: Setting) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=setting.pp)
    mesh = make_mesh(fit_shape(setting.pp), "cpu", "gloo")
    batch = TextData(setting.microbatches, setting.microbatch_size, setting.sequence).batch(0, 0)
    sides = {"ours": ours(setting, mesh, batch), "theirs": theirs(setting, mesh, batch)}
    for step, _ in sides.values():
        step()
    for mine, other in zip(sides["ours"][1], sides["theirs"][1], strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    for turn in range(setting.rounds + 1):
        for name in ("ours", "theirs") if turn % 2 else ("theirs", "ours"):
            taken = measure(*sides[name], setting.steps)
            if turn:  # the first round warms up
                seconds[name].append(taken)
    if rank == 0:
        report(setting, seconds["ours"], seconds["theirs"])
    dist.destroy_process_group()


def report(setting: Setting, mine: list[float], others: list[float]) -> None:
    ratios = sorted(a / b for a, b in zip(mine, others, strict=True))
    ratio = statistics.median(ratios)
    spread = f"{ratios[len(ratios) // 4]:.3f}–{ratios[-1 - len(ratios) // 4]:.3f}"
    print(
        f"p={setting.pp} m={setting.microbatches}: ours {statistics.median(mine) * 1e3:7.1f} ms   "
        f"torch {statistics.median(others) * 1e3:7.1f} ms   ratio {ratio:.3f} (middle half {spread}; target ≤ 1.0): "
        f"{'met' if ratio <= 1 else 'MISSED'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="our 1F1B against torch's", formatter_class=argparse.HelpFormatter)
    parser.add_argument("--pp", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--microbatch-size", type=int, default=2)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=3, help="steps in a row in each turn")
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for pp in options.pp:
        setting = Setting(
            pp,
            options.microbatches,
            options.microbatch_size,
            options.seq,
            options.layers,
            options.hidden,
            options.rounds,
            options.steps,
        )
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        mp.spawn(work, (store.port, setting), nprocs=pp)


if __name__ == "__main__":
    main()
