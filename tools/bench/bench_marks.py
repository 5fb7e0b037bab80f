"""Cost of one range, with nobody listening and under PyTorch's profiler; and of all ranges of a training step.

    python tools/bench/bench_marks.py [--mesh 2x1 2x2] [--launches 2] [--rounds 12] [--device cuda] [--json FILE]

One range: medians over repeats, in ns per range, the loop's own cost taken off. Target with no listener: under 2000 ns.

A step (forward, backward and optimizer of the example's model, pp × tp ranks): the same runtime with its recorder,
with one whose methods return a null range without looking for a listener, and with its recorder under the launcher's
profiler. All three take turns in the same processes, in changing order; a round's ratio compares neighbours in time.
On a machine with other work a ratio is not exact to 1 %, so the ranges of a step are counted too, and the count times
the cost of each kind set against the quickest step: that is the whole cost of the marks, calls and all, and its target is < 1 %.
On a GPU the ranks share it, with their messages through host memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.profiler import ProfilerActivity, profile

from instrument.data.text import TextData
from instrument.launch.recording.profiler import TraceProfiler
from instrument.mesh import fit_shape, make_mesh
from instrument.models.gpt_config import GptConfig
from instrument.models.gpt_pipeline import GptPipeline, Wiring, make_gpt_runtime
from instrument.models.parallel import ParallelOptions
from instrument.pipeline.partition import partition
from instrument.recorder import Range, Recorder
from instrument.route import Route
from pptrace.marks import Axis, Collective, SpanKind, Transfer
from pptrace.schedule.actions import Action, Kind, Phase
from pptrace.schedule.lower import lower
from pptrace.schedule.registry import build

REPEATS = 15
TARGET_NS = 2000
TARGET_SHARE = 0.01
ACTION = Action(Kind.F, 2, 3, 1, Phase.STEADY)


@dataclass(frozen=True, slots=True)
class Carried:
    action: Action
    index: int | None = None

    def transfer(self) -> Transfer:
        return Transfer(self.action, 5, 4096)


PAIR = (Carried(Action(Kind.SEND_F, 2, 3)), Carried(Action(Kind.RECV_B, 2, 1)))


def op(recorder: Recorder, count: int) -> None:
    for _ in range(count):
        with recorder.op(ACTION, 7):
            pass


def p2p(recorder: Recorder, count: int) -> None:
    for _ in range(count):
        with recorder.p2p(PAIR, Axis.PP, 7):
            pass


def wait(recorder: Recorder, count: int) -> None:
    for _ in range(count):
        with recorder.wait(PAIR[0], 7):
            pass


def collective(recorder: Recorder, count: int) -> None:
    for _ in range(count):
        with recorder.collective(Collective.ALL_REDUCE, Axis.DP, 4, 1 << 20, 7):
            pass


def exchange(recorder: Recorder, count: int) -> None:
    for _ in range(count):
        with recorder.exchange((), Axis.CP, 7, recorder.new_handle()):
            pass


def awaiting(recorder: Recorder, count: int) -> None:
    for _ in range(count):
        with recorder.awaiting(Axis.CP, 7, 3):
            pass


def span(recorder: Recorder, count: int) -> None:
    for _ in range(count):
        with recorder.span(SpanKind.STEP, 7):
            pass


def empty(recorder: Recorder, count: int) -> None:
    for _ in range(count):
        pass


def median_ns(function: Callable[[Recorder, int], None], count: int) -> float:
    """Nanoseconds per call."""
    recorder = Recorder()
    samples = []
    for _ in range(REPEATS):
        start = time.perf_counter_ns()
        function(recorder, count)
        samples.append((time.perf_counter_ns() - start) / count)
    return statistics.median(samples)


KINDS = MappingProxyType({kind.__name__: kind for kind in (op, p2p, wait, collective, exchange, awaiting, span)})


class _Nothing:
    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


NOTHING = _Nothing()


class BareRecorder(Recorder):
    """Writes nothing, and does not look whether anybody listens."""

    __slots__ = ()

    @property
    def listening(self) -> bool:
        return False

    def op(self, action: Action, step: int) -> Range:
        return NOTHING

    def p2p(self, carried: Sequence[Any], axis: Axis, step: int) -> Range:
        return NOTHING

    def wait(self, carried: Any, step: int) -> Range:
        return NOTHING

    def new_handle(self) -> int:
        return 0

    def collective(
        self, kind: Collective, axis: Axis, size: int, num_bytes: int, step: int, handle: int | None = None
    ) -> Range:
        return NOTHING

    def exchange(self, links: Sequence[Any], axis: Axis, step: int, handle: int | None = None) -> Range:
        return NOTHING

    def awaiting(self, axis: Axis, step: int, handle: int) -> Range:
        return NOTHING

    def span(self, kind: SpanKind, step: int) -> Range:
        return NOTHING


def counting_recorder(counts: dict[str, int]) -> type[Recorder]:
    """Adds up the ranges of each kind in ``counts``."""

    def counted(name: str) -> Callable[..., Range]:
        def method(self: Recorder, *args: Any) -> Range:
            counts[name] = counts.get(name, 0) + 1
            opened: Range = getattr(Recorder, name)(self, *args)
            return opened

        return method

    return type("CountingRecorder", (Recorder,), {"__slots__": (), **{name: counted(name) for name in KINDS}})


@dataclass(frozen=True, slots=True)
class Setting:
    pp: int
    tp: int
    sequence_parallel: bool
    microbatches: int
    layers: int
    hidden: int
    sequence: int
    launches: int
    rounds: int
    steps: int
    device: str = "cpu"

    @property
    def label(self) -> str:
        return f"pp={self.pp} tp={self.tp}{' sp' if self.sequence_parallel else ''}"


@dataclass(frozen=True, slots=True)
class Measured:
    """Of rank 0: seconds per step of every side in every round, and how many ranges of each kind a step has."""

    seconds: dict[str, list[float]]
    counts: dict[str, int]

    def ratios(self, side: str, other: str) -> list[float]:
        return [a / b for a, b in zip(self.seconds[side], self.seconds[other], strict=True)]


def make_step(setting: Setting, recorder: Recorder) -> Callable[[], None]:
    """One training step of this rank."""
    mesh = make_mesh(fit_shape(setting.pp * setting.tp, setting.pp, tp=setting.tp), "cpu", "gloo")
    plan = lower(build("1f1b", setting.pp, setting.microbatches))
    config = GptConfig(setting.layers, setting.hidden, 4, setting.sequence)
    device = torch.device(setting.device)
    if device.type == "cuda":
        device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    route = Route.HOST_STAGED if device.type == "cuda" else Route.DIRECT
    wiring = Wiring(device, route=route, parallel=ParallelOptions(setting.sequence_parallel))
    cut = partition(setting.layers, plan.num_stages)
    runtime = make_gpt_runtime(mesh, GptPipeline(plan, config, cut, 2), wiring, recorder)
    optimizer = torch.optim.AdamW(runtime.program.parameters(), 1e-4)
    batch = TextData(setting.microbatches, 2, setting.sequence).batch(0, 0).to(device)

    def step() -> None:
        with recorder.span(SpanKind.STEP, 0):
            runtime.run(batch, 0)
            runtime.optimize(optimizer, 0)

    return step


def timed(step: Callable[[], None], steps: int) -> float:
    """Seconds per step, from a barrier to a barrier, with what the steps left to a GPU."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    dist.barrier()
    return (time.perf_counter() - start) / steps


def timed_profiled(step: Callable[[], None], steps: int) -> float:
    """The same while the launcher's profiler records; without its start and stop."""
    profiler = TraceProfiler(Path("never-written"))
    profiler.start()
    try:
        return timed(step, steps)
    finally:
        profiler.discard()


def work(rank: int, port: int, setting: Setting, answers: SimpleQueue[Measured]) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=setting.pp * setting.tp)
    recorder = Recorder()
    step = make_step(setting, recorder)
    counts: dict[str, int] = {}
    recorder.__class__ = counting_recorder(counts)
    step()
    # One runtime for all sides, whose recorder changes its class: nothing else differs, not even where memory lies.
    sides = {"marks": (Recorder, timed), "none": (BareRecorder, timed), "profiled": (Recorder, timed_profiled)}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    orders = list(permutations(sides))  # so that each side comes after each other one as often
    for turn in range(setting.rounds + 1):
        for name in orders[turn % len(orders)]:
            recorder.__class__, measure = sides[name]
            taken = measure(step, setting.steps)
            if turn:  # the first round warms up
                seconds[name].append(taken)
    if rank == 0:
        answers.put(Measured(seconds, counts))
    dist.destroy_process_group()


def launch(setting: Setting) -> Measured:
    """One launch of all ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answers = mp.get_context("spawn").SimpleQueue()
    mp.spawn(work, (store.port, setting, answers), nprocs=setting.pp * setting.tp)
    return answers.get()


def judged(ratio: float, low: float, high: float, target: float) -> str:
    """Against a target that the machine's noise, from ``low`` to ``high``, may hide."""
    if low < target < high:
        return f"{'met' if ratio < target else 'MISSED'}, within noise"
    return "met" if ratio < target else "MISSED"


def report_step(setting: Setting, launches: Sequence[Measured], cost_ns: dict[str, float]) -> dict[str, float]:
    """Print what the marks of a step cost, and give it back."""
    label, figures = setting.label, {}
    taken = [seconds for measured in launches for seconds in measured.seconds["marks"]]
    step_ms = statistics.median(taken) * 1e3
    for side, target in (("marks", 1 + TARGET_SHARE), ("profiled", None)):
        other = "none" if side == "marks" else "marks"
        ratios = sorted(ratio for measured in launches for ratio in measured.ratios(side, other))
        ratio = statistics.median(ratios)
        aim = "no target" if target is None else f"target < {target}"
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        figures[f"{side} / {other}"] = ratio
        verdict = "" if target is None else f": {judged(ratio, low, high, target)}"
        spread = f"{ratios[len(ratios) // 4]:.3f}–{ratios[-1 - len(ratios) // 4]:.3f}"
        print(
            f"{label}: step {step_ms:.1f} ms   {side} / {other} ratio {ratio:.3f} (middle half {spread}; {aim}){verdict}"
        )
    counts = launches[0].counts
    ranges_ms = sum(count * cost_ns[kind] for kind, count in counts.items()) / 1e6
    quickest_ms = min(taken) * 1e3  # other work makes steps longer, and a share of them would flatter
    share = ranges_ms / quickest_ms
    print(
        f"{label}: {sum(counts.values())} ranges a step take {ranges_ms:.3f} ms, of the quickest step's "
        f"{quickest_ms:.1f} ms a share of {share:.3%} (target < {TARGET_SHARE:.0%}): "
        f"{'met' if share < TARGET_SHARE else 'MISSED'}",
        flush=True,
    )
    return figures | {"step_ms": step_ms, "ranges": sum(counts.values()), "ranges_ms": ranges_ms, "share": share}


def report_ranges() -> dict[str, float]:
    """Print the cost of a range of every kind; the answers are those with no listener, in ns."""
    quiet = {name: median_ns(kind, 20_000) - median_ns(empty, 20_000) for name, kind in KINDS.items()}
    loud = {}
    for name, kind in KINDS.items():
        with profile(activities=[ProfilerActivity.CPU]):
            loud[name] = median_ns(kind, 500)
    print(f"{'range':<12}{'no listener':>14}{'profiled':>14}   ns per range, medians of {REPEATS}")
    for name in quiet:
        print(f"{name:<12}{quiet[name]:>14.0f}{loud[name]:>14.0f}")
    worst = max(quiet.values())
    print(f"worst with no listener: {worst:.0f} ns (target < {TARGET_NS}): {'met' if worst < TARGET_NS else 'MISSED'}")
    return quiet


def mesh_of(text: str) -> tuple[int, int]:
    pp, tp = text.split("x")
    return int(pp), int(tp)


def main() -> None:
    parser = argparse.ArgumentParser(description="cost of the marks")
    parser.add_argument("--mesh", type=mesh_of, nargs="+", default=[(2, 1), (2, 2)], metavar="PPxTP")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--launches", type=int, default=2, help="times to start the processes anew")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each side in a launch")
    parser.add_argument("--steps", type=int, default=3, help="in a row in each turn")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the model is")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    cost_ns = report_ranges()
    figures: dict[str, dict[str, float]] = {}
    for pp, tp in options.mesh:
        setting = Setting(
            pp,
            tp,
            options.sequence_parallel,
            options.microbatches,
            options.layers,
            options.hidden,
            options.seq,
            options.launches,
            options.rounds,
            options.steps,
            options.device,
        )
        launches = [launch(setting) for _ in range(setting.launches)]
        figures[setting.label] = report_step(setting, launches, cost_ns)
        if options.json is not None:
            options.json.write_text(json.dumps({"range_ns": cost_ns, "steps": figures}))


if __name__ == "__main__":
    main()
