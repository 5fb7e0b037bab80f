"""Replays of a plan per second, in batches and one at a time, and the time of ``pptrace simulate`` for the largest plan.

    python tools/bench/bench_replay.py [--rounds N]

One process, one core. Times are of the processor, so that others on the machine count for little; the best of the rounds. Every
replay of a batch has durations and latencies of its own; its figures are checked against those of one replay at a time. The
limits are stated with each figure; the program ends with 1 if one is exceeded.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from pptrace.schedule.plan import Plan
from pptrace.schedule.plan_table import PlanTable, make_table
from pptrace.schedule.registry import build
from pptrace.schedule.replay_table import Times, makespans, replay_table

T = TypeVar("T")
BATCH = 1_000
LEAST_IN_BATCHES = 50_000
"""Replays a second of a plan of a thousand ops."""
LEAST_OF_LARGEST = 4
MOST_S_OF_COMMAND = 1.5
MOST_GROWTH = 1.5
"""Of the time for each action, from the smallest plan to the largest."""
LARGEST = (64, 512, 8)


class Limits:
    """Prints figures with their limits, and remembers whether one was exceeded."""

    exceeded = False

    def show(self, what: str, text: str, is_within: bool, limit: str) -> None:
        self.exceeded |= not is_within
        print(f"  {what:52s} {text:>16s}   {'within' if is_within else 'BEYOND'} {limit}")


def best(rounds: int, work: Callable[[], T]) -> tuple[float, T]:
    times = []
    for _ in range(rounds):
        begin = time.process_time()
        result = work()
        times.append(time.process_time() - begin)
    return min(times), result


def made_up(table: PlanTable, num: int) -> tuple[Times, Times]:
    draw = np.random.default_rng(1)
    return draw.integers(10_000, 1_000_000, (num, len(table))), draw.integers(0, 50_000, (num, table.num_messages))


def report_batches(limits: Limits, rounds: int, name: str, *shape: int) -> None:
    """Replays of a plan of about a thousand ops, in batches and one at a time."""
    table = build(name, *shape).table
    durations, latencies = made_up(table, BATCH)
    one_s, singly = best(1, lambda: [replay_table(table, *both).end for both in zip(durations, latencies, strict=True)])
    whole_s, whole = best(rounds, lambda: replay_table(table, durations, latencies))
    length_s, lengths = best(rounds, lambda: makespans(table, durations, latencies))
    if not (np.array_equal(whole.end, np.array(singly)) and np.array_equal(lengths, whole.end.max(axis=1))):
        raise SystemExit(f"{name}: replays of a batch differ from the same ones one at a time")
    print(f"{name} p={shape[0]} m={shape[1]}: {len(table):,} ops on {table.num_levels} levels, batches of {BATCH:,}")
    print(f"  {'one at a time':52s} {BATCH / one_s:12,.0f} /s")
    for what, seconds in (("starts and ends of every op", whole_s), ("makespans alone", length_s)):
        rate = BATCH / seconds
        text = f"{rate:12,.0f} /s"
        limits.show(
            f"{what}, {one_s / seconds:.0f} × one at a time", text, rate >= LEAST_IN_BATCHES, f"{LEAST_IN_BATCHES:,}"
        )


def report_largest(limits: Limits, rounds: int) -> None:
    """Table and replays of the largest plan, one at a time; and how the time grows with the plan."""
    each_of_smallest = 0.0
    for num_microbatches in (64, 128, 256, 512):
        build_s, plan = best(1, lambda: build("interleaved-1f1b", LARGEST[0], num_microbatches, LARGEST[2]))  # noqa: B023
        table_s, table = best(rounds, lambda: compiled(plan))  # noqa: B023
        durations, latencies = (part[0] for part in made_up(table, 1))
        replay_s, _ = best(rounds, lambda: replay_table(table, durations, latencies))  # noqa: B023
        each = (table_s + replay_s) / len(table)
        each_of_smallest = each_of_smallest or each
        print(
            f"interleaved-1f1b p={LARGEST[0]} m={num_microbatches} v={LARGEST[2]}: {len(table):,} ops, {build_s:.2f} s to build"
        )
        growth = each / each_of_smallest
        text = f"{each * 1e9:12,.0f} ns"
        limits.show("table and replay, for each op", text, growth <= MOST_GROWTH, f"{MOST_GROWTH} × the smallest's")
    print(f"  {'table and levels':52s} {table_s:14.3f} s")
    rate = 1 / replay_s
    limits.show(
        "replays of the largest, one at a time", f"{rate:12,.1f} /s", rate >= LEAST_OF_LARGEST, str(LEAST_OF_LARGEST)
    )


def compiled(plan: Plan) -> PlanTable:
    table = make_table(plan)
    assert table.program.rows.size == len(table)
    return table


def report_command(limits: Limits, rounds: int) -> None:
    """The command from its start to its end, compared with a start of Python and of the command's imports."""
    simulate = ["-m", "pptrace", "simulate", "interleaved-1f1b", "--pp", "64", "--microbatches", "512", "--chunks", "8"]
    print(f"pptrace {' '.join(simulate[2:])}")
    runs = (
        ("Python alone", ["-c", "pass"]),
        (
            "with the imports of the command",
            ["-c", "import pptrace.cli.main, pptrace.cli.simulate, pptrace.schedule.replay_table"],
        ),
        ("the command", simulate),
    )
    for what, arguments in runs:
        seconds = min(run(arguments) for _ in range(rounds))
        text = f"{seconds:14.2f} s"
        if arguments is simulate:
            limits.show(what, text, seconds <= MOST_S_OF_COMMAND, f"{MOST_S_OF_COMMAND} s")
        else:
            print(f"  {what:52s} {text}")


def run(arguments: list[str]) -> float:
    """Processor time of a program in Python, s."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"PYTHONHASHSEED": "0"}
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, env=environment, timeout=120)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    limits = Limits()
    report_batches(limits, options.rounds, "1f1b", 8, 64)
    report_batches(limits, options.rounds, "zb-h1", 4, 86)
    report_largest(limits, options.rounds)
    report_command(limits, options.rounds)
    sys.exit(limits.exceeded)


if __name__ == "__main__":
    main()
