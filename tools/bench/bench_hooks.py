"""Cost of the hooks of ``pptrace run`` while nobody records: a training step with all of them, and with none.

    python tools/bench/bench_hooks.py [--ranks 2] [--rounds 12] [--launches 2]

Both sides take turns in the same processes, in changing order: the hooks are installed for one turn and taken out for the next.
A round's ratio compares neighbours in time. On a machine with other work a ratio is not exact to 0.5 %, so the hooked calls of
a step are counted too, and their number times the cost of one (medians over repeats, against the same call without its hook) is
set against the quickest step. Target: < 0.5 % of a step. Times and memory of all steps, which a session takes, are counted
apart, right behind a step: < 0.1 %.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from instrument.adapters.calls import Call
from instrument.adapters.install import Adapters
from instrument.launch.recording.optimizer_steps import MessageWatch, OptimizerSteps
from instrument.launch.recording.step_memory import StepMemory
from instrument.launch.recording.step_times import StepTimes
from instrument.recorder import Recorder
from instrument.session import Session

TARGET, TARGET_OF_TIMES = 0.005, 0.001
REPEATS = 15


@dataclass(frozen=True, slots=True)
class Measured:
    """Of rank 0: seconds per step with and without hooks by round, hooked calls per step, and what one of them, and the boundary
    of a step, cost in seconds.
    """

    hooked_s: list[float]
    bare_s: list[float]
    calls: int
    call_s: float
    boundary_s: float


class CountedCalls:
    """An observer that counts."""

    def __init__(self) -> None:
        self.count = 0

    def posted(self, call: Call) -> None:
        self.count += 1

    def returned(self, call: Call) -> None:
        """Only posted calls are counted."""

    waiting = completed = failed = returned


def make_step(hidden: int, layers: int, batch: int) -> Callable[[], None]:
    """A data-parallel step with gradient clipping across ranks, a logged loss and messages around the ring."""
    model = DistributedDataParallel(
        torch.nn.Sequential(*[torch.nn.Linear(hidden, hidden) for _ in range(layers)]), bucket_cap_mb=1
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    rank, world = dist.get_rank(), dist.get_world_size()
    sent, received = torch.zeros(256), torch.zeros(256)

    def step() -> None:
        loss = model(torch.randn(batch, hidden)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, sent, (rank + 1) % world), dist.P2POp(dist.irecv, received, (rank - 1) % world)]
        ):
            work.wait()
        dist.all_reduce(loss.detach())
        dist.all_reduce(torch.zeros(1), async_op=True).wait()
        optimizer.step()

    return step


def timed(step: Callable[[], None], count: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(count):
        step()
    dist.barrier()
    return (time.perf_counter() - start) / count


class Installed:
    """The hooks as ``pptrace run --profiler none`` installs them, for the body."""

    def __enter__(self) -> CountedCalls:
        session = Session(Recorder(lambda: False))
        self._steps = OptimizerSteps(session)
        counted = CountedCalls()
        self._adapters = Adapters(session, [MessageWatch(self._steps.look), counted])
        return counted

    def __exit__(self, *_: object) -> None:
        self._adapters.remove()
        self._steps.detach()


def cost_of_a_call() -> float:
    """Seconds that the hooks add to a call: a collective of one rank, which takes little else."""
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    value = torch.zeros(1)

    def calls() -> float:
        start = time.perf_counter()
        for _ in range(200):
            dist.all_reduce(value, group=alone)
        return (time.perf_counter() - start) / 200

    differences = []
    for _ in range(REPEATS):
        bare = calls()
        with Installed():
            hooked = calls()
        differences.append(hooked - bare)
    return max(0.0, statistics.median(differences))


def cost_of_boundary(step: Callable[[], None]) -> float:
    """Seconds that it takes to time a step and its memory, behind one that leaves the caches cold."""
    times, memory, costs = StepTimes(lambda: False), StepMemory(), []
    for number in range(2 * REPEATS):
        times.begin()
        memory.begin(number, is_recorded=False)
        step()
        start = time.perf_counter()
        times.end()
        memory.end(keep=False)
        times.begin()
        memory.begin(number, is_recorded=False)
        costs.append(time.perf_counter() - start)
    return statistics.median(costs)


def work(rank: int, port: int, options: argparse.Namespace, answers: SimpleQueue[Measured]) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    with Installed() as counted:  # torch hooks each class of optimizers once, for good: so also without our hooks
        step = make_step(options.hidden, options.layers, options.batch)
        step()
        counted.count = 0
        step()
        calls = counted.count
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(options.rounds + 1):
        for with_hooks in (turn % 2 == 0, turn % 2 == 1):
            if with_hooks:
                with Installed():
                    taken = timed(step, options.steps)
            else:
                taken = timed(step, options.steps)
            if turn:  # the first round warms up
                seconds[with_hooks].append(taken)
    cost, boundary = cost_of_a_call(), cost_of_boundary(step)
    if rank == 0:
        answers.put(Measured(seconds[True], seconds[False], calls, cost, boundary))
    dist.destroy_process_group()


def launch(options: argparse.Namespace) -> Measured:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answers = mp.get_context("spawn").SimpleQueue()
    mp.spawn(work, (store.port, options, answers), nprocs=options.ranks)
    return answers.get()


def report(launches: list[Measured]) -> None:
    ratios = sorted(a / b for one in launches for a, b in zip(one.hooked_s, one.bare_s, strict=True))
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    ratio = statistics.median(ratios)
    quickest_s = min(min(one.bare_s) for one in launches)
    noisy = ", within noise" if low < 1 + TARGET < high else ""
    print(f"step {quickest_s * 1e3:.1f} ms   hooks / none ratio {ratio:.4f} (middle half {low:.4f}–{high:.4f}){noisy}")
    one = launches[0]
    share = one.calls * one.call_s / quickest_s
    print(
        f"{one.calls} hooked calls a step at {one.call_s * 1e6:.2f} µs take {one.calls * one.call_s * 1e3:.3f} ms, a share of "
        f"{share:.3%} of the quickest step (target < {TARGET:.1%}): {'met' if share < TARGET else 'MISSED'}"
    )
    cost = statistics.median(one.boundary_s for one in launches)
    share, target = cost / quickest_s, TARGET_OF_TIMES
    met = "met" if share < target else "MISSED"
    print(
        f"to time a step and its memory takes {cost * 1e6:.1f} µs, {share:.4%} of the quickest (target < {target:.1%}): {met}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="cost of the hooks while nobody records")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--launches", type=int, default=2, help="times to start the processes anew")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each side in a launch")
    parser.add_argument("--steps", type=int, default=5, help="in a row in each turn")
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    report([launch(options) for _ in range(options.launches)])


if __name__ == "__main__":
    main()
