"""Measure how often `pptrace live` names a slow rank, and how often one that is not: ``slow_ranks.py [--folder DIR]``.

Streams of steps that are made up, with noise of a stated size; then real runs of the training example on processes of this
machine, healthy ones, and ones of which the ops of a rank sleep 1.3 times as long from a step on; and streams drawn from the
healthy runs in blocks of steps (all ranks of a step stay together, so that what disturbs several at once does). Half of the
streams have a rank that is slow from the middle on, half have long ops with heavy tails. A folder keeps what was recorded; runs
that are there are not run again.

A slow rank is *in time* when it is named in the third slow step that was observed, or before. *Alarms* are names of ranks that
are not slow, each counted once for each stretch of steps.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from msgspec import structs

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from instrument.examples.faults import Fault
from pptrace.analysis.slow_rank import OpKind, OpTimes, SlowRank, SlowRanks, op_times
from pptrace.workflow.live.follow import LiveRun, core_waits
from tests.support.programs import ROOT, pptrace

SCRIPT = ROOT / "instrument" / "examples" / "train_gpt.py"
_SLEEPING = ("--hidden", "8", "--heads", "2", "--seq", "4", "--sleep-forward", "8", "--sleep-backward", "16")
_COMPUTING = ("--hidden", "128", "--heads", "4", "--seq", "128")
SLOW = 1.3
IN_TIME = 3
"""Observed steps of a slow rank within which it has to be named."""


@dataclass(frozen=True, slots=True)
class Setting:
    """``factor``: of what the ops of the last rank sleep from the middle of the run on."""

    pp: int
    dp: int
    sleeping: bool
    factor: float = 1.0
    steps: int = 60

    @property
    def since(self) -> int:
        return self.steps // 2

    @property
    def slow_rank(self) -> int | None:
        return None if self.factor == 1 else self.pp * self.dp - 1

    @property
    def arguments(self) -> tuple[str, ...]:
        sizes = ("--layers", str(self.pp), "--microbatch-size", "1", "--microbatches", "4", "--steps", str(self.steps))
        mesh = ("--pp", str(self.pp), "--dp", str(self.dp))
        return (*sizes, *mesh, *(_SLEEPING if self.sleeping else _COMPUTING))

    @property
    def name(self) -> str:
        ops = "ops sleep" if self.sleeping else "ops compute"
        return f"pp {self.pp}, dp {self.dp}, {ops}"


SETTINGS = tuple(Setting(pp, dp, sleeping) for pp, dp in ((2, 1), (4, 1), (2, 2)) for sleeping in (True, False))


@dataclass(frozen=True, slots=True)
class Step:
    """Step as the search sees it: the ops and the wait for a core of each rank."""

    number: int
    ranks: Mapping[int, Mapping[OpKind, OpTimes]]
    core_waits: Mapping[int, int]

    def slowed(self, rank: int, factor: float) -> Step:
        ops = {kind: OpTimes(times.count, times.median_ns * factor) for kind, times in self.ranks[rank].items()}
        return replace(self, ranks={**self.ranks, rank: ops})


def steps_of(run_dir: Path) -> list[Step]:
    """The observed steps of a run that all ranks have written."""
    run, steps = LiveRun(run_dir), []
    for whole in run.whole_steps():
        observed = {number: ranks for number, ranks in whole.items() if all(step.names for step in ranks.values())}
        if observed:
            times = op_times(run.analyse(observed.values()).data)
            steps += [Step(number, times[number], core_waits(ranks)) for number, ranks in observed.items()]
    return steps


def record(folder: Path, setting: Setting, number: int) -> list[Step]:
    """Run a setting, if it is not there yet."""
    run_dir = folder / f"{setting.name.replace(' ', '').replace(',', '-')}-{setting.factor:g}-{number}"
    if not run_dir.exists():
        rank = setting.slow_rank
        slow = None if rank is None else Fault("slow", (rank,), setting.factor, since=setting.since)
        fault = () if slow is None else ("--fault", str(slow))
        options = ("-n", str(setting.pp * setting.dp), "--live", "--profiler", "none", "--no-analyze", "-o", run_dir)
        ended = pptrace("run", *options, SCRIPT, *fault, *setting.arguments, forked=True)
        if ended.code:
            raise RuntimeError(f"{run_dir.name}: {ended.err}")
    return steps_of(run_dir)


def named_in(steps: Sequence[Step]) -> list[SlowRank]:
    """Ranks that the search names."""
    search = SlowRanks()
    return [slow for step in steps for slow in search.add(step.number, step.ranks, step.core_waits)]


@dataclass(frozen=True, slots=True)
class Counts:
    """Of some streams: how many there are, their steps, alarms, streams with any; slow ranks, those named, those in time."""

    streams: int = 0
    steps: int = 0
    alarms: int = 0
    with_alarm: int = 0
    slow: int = 0
    in_time: int = 0
    named: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))


def judged(steps: Sequence[Step], slow_rank: int | None = None, since: int = 0) -> Counts:
    """Count one stream, of which a rank may be slow from a step on."""
    named = named_in(steps)
    false = {(slow.rank, slow.since) for slow in named if slow.rank != slow_rank or slow.step < since}
    right = [slow.step for slow in named if slow.rank == slow_rank and slow.step >= since]
    slow_steps = [step.number for step in steps if step.number >= since]
    in_time = bool(right) and slow_rank is not None and right[0] <= slow_steps[IN_TIME - 1]
    is_slow = slow_rank is not None
    return Counts(1, len(steps), len(false), bool(false), is_slow, in_time, bool(right) and is_slow)


def drawn(
    steps: Sequence[Step], num: int, generator: np.random.Generator, heavy: float = 0.0, block: int = 8
) -> list[Step]:
    """A stream of so many steps from a healthy run's, in blocks; ``heavy``: the chance of an op time with a heavy tail.

    Steps that warm up are left out. A heavy tail is Pareto's with the exponent 1.5, from twice the op's time on: finite mean,
    infinite variance.
    """
    usual = steps[4:]
    chosen: list[Step] = []
    while len(chosen) < num:
        first = int(generator.integers(0, max(1, len(usual) - block)))
        chosen += usual[first : first + block]
    return [replace(_with_tails(step, generator, heavy), number=number) for number, step in enumerate(chosen[:num])]


def _with_tails(step: Step, generator: np.random.Generator, heavy: float) -> Step:
    if not heavy:
        return step
    ranks = {
        rank: {
            kind: structs.replace(times, median_ns=times.median_ns * (2 * (1 + generator.pareto(1.5))))
            if generator.random() < heavy
            else times
            for kind, times in ops.items()
        }
        for rank, ops in step.ranks.items()
    }
    return replace(step, ranks=ranks)


def of_streams(
    recorded: Sequence[Sequence[Step]], heavy: float, factor: float, num_streams: int, num_steps: int = 100
) -> Counts:
    """Count streams drawn from these healthy runs; from the middle on a rank is slow by ``factor``."""
    generator = np.random.default_rng(len(recorded))
    counts = Counts()
    for _ in range(num_streams):
        steps = drawn(recorded[int(generator.integers(len(recorded)))], num_steps, generator, heavy)
        if factor == 1:
            counts += judged(steps)
            continue
        rank, since = int(generator.choice(list(steps[0].ranks))), num_steps // 2
        slowed = [step.slowed(rank, factor) if step.number >= since else step for step in steps]
        counts += judged(slowed, rank, since)
    return counts


def noise_of(recorded: Sequence[Sequence[Step]]) -> float:
    """Typical noise: standard deviation (by quartiles) of a rank's op times from step to step, in parts of their median."""
    spreads = []
    for steps in recorded:
        for rank, ops in steps[0].ranks.items():
            for kind in ops:
                times = np.array([step.ranks[rank][kind].median_ns for step in steps[4:] if kind in step.ranks[rank]])
                low, middle, high = np.quantile(times, (0.25, 0.5, 0.75))
                spreads.append((high - low) / 1.349 / middle)
    return float(np.median(spreads))


def row(name: str, noise: float, healthy: Counts, slow: Counts) -> str:
    """A line of the table."""
    rate = 1000 * healthy.alarms / healthy.steps if healthy.steps else 0
    length = healthy.steps // max(healthy.streams, 1)
    of_healthy = f"{healthy.streams} × {length} | {healthy.with_alarm} | {rate:.2f}"
    of_slow = f"{slow.in_time} of {slow.slow} | {slow.named} | {slow.with_alarm}" if slow.slow else "| |"
    return f"| {name} | {noise:.0%} | {of_healthy} | {of_slow} |"


HEADER = (
    "| steps of | noise | healthy × steps | with an alarm | alarms in 1,000 steps | slow rank in time | named | others named |",
    "|---|---:|---:|---:|---:|---:|---:|---:|",
)


def made_up(pp: int, dp: int, noise: float, generator: np.random.Generator, num: int = 60) -> list[Step]:
    """Steps of ops whose medians vary by so much (lognormal), half of it from step to step and half as a walk that comes back."""
    ranks = pp * dp
    walk = np.zeros((ranks, 2))
    steps = []
    for number in range(num):
        walk = 0.8 * walk + 0.6 * generator.normal(0, noise / np.sqrt(2), walk.shape)
        factors = np.exp(walk + generator.normal(0, noise / np.sqrt(2), walk.shape))
        of_rank = {
            rank: {
                ("F", rank // dp): OpTimes(4, 1e7 * factors[rank, 0]),
                ("B", rank // dp): OpTimes(4, 2e7 * factors[rank, 1]),
            }
            for rank in range(ranks)
        }
        steps.append(Step(number, of_rank, {}))
    return steps


def table(folder: Path, repeats: int, num_streams: int) -> Iterator[str]:
    """The lines of the table; they come as they are known."""
    yield from HEADER
    generator = np.random.default_rng(0)
    for noise in (0.02, 0.05, 0.1):
        for pp, dp in ((2, 1), (4, 1), (2, 2)):
            runs = [made_up(pp, dp, noise, generator) for _ in range(20)]
            yield from _of_drawn(f"made up, pp {pp}, dp {dp}", runs, num_streams)
    for setting in SETTINGS:
        runs = [record(folder, setting, number) for number in range(repeats)]
        counts, slow = sum((judged(steps) for steps in runs), Counts()), Counts()
        for number in range(repeats if setting.sleeping else 0):
            faulty = replace(setting, factor=SLOW)
            slow += judged(record(folder, faulty, number), faulty.slow_rank, faulty.since)
        yield row(f"real runs, {setting.name}", noise_of(runs), counts, slow)
        yield from _of_drawn(f"drawn, {setting.name}", runs, num_streams)


def _of_drawn(name: str, runs: Sequence[Sequence[Step]], num_streams: int) -> Iterator[str]:
    for heavy in (0.0, 0.02):
        tails = f", {heavy:.0%} of ops long" if heavy else ""
        healthy, slow = (of_streams(runs, heavy, factor, num_streams) for factor in (1.0, SLOW))
        yield row(f"{name}{tails}", noise_of(runs), healthy, slow)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where runs are kept, and taken from where they are there")
    parser.add_argument("--repeats", type=int, default=4, metavar="N", help="runs of each setting")
    parser.add_argument("--streams", type=int, default=100, metavar="N", help="drawn streams of each setting")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        for line in table(options.folder or Path(temporary), options.repeats, options.streams):
            print(line, flush=True)
    print(json.dumps({"cores": os.cpu_count(), "load": os.getloadavg()}), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
