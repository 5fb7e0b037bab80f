"""Time of building, simulating, lowering and validating plans, and of a sweep. One process, one core.

python tools/bench/bench_simulator.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from pptrace.api.sweep import SweepOptions, grid_of
from pptrace.schedule.lower import lower
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import build
from pptrace.schedule.validate import validate
from pptrace.simulator import simulate, uniform
from pptrace.simulator.sweep.run import run_sweep

T = TypeVar("T")
TARGET_S = 10.0


def timed(work: Callable[[], T]) -> tuple[float, T]:
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result


def report_large(pp: int = 64, num_microbatches: int = 512, num_chunks: int = 8) -> None:
    """Build and simulate a plan of half a million actions."""
    costs = uniform(1_000_000, 2_000_000, p2p_ns=10_000)
    build_s, plan = timed(lambda: build("interleaved-1f1b", pp, num_microbatches, num_chunks))
    simulate_s, simulation = timed(lambda: simulate(plan, costs))
    num_actions = sum(map(len, plan.ranks))
    total = build_s + simulate_s
    print(f"interleaved-1f1b p={pp} m={num_microbatches} v={num_chunks}: {num_actions:,} actions")
    print(f"  build    {build_s:7.3f} s")
    print(f"  simulate {simulate_s:7.3f} s   bubble ratio {simulation.bubble_ratio:.4f}")
    verdict = "within" if total < TARGET_S else "BEYOND"
    print(
        f"  together {total:7.3f} s   {verdict} the target of {TARGET_S:.0f} s; {num_actions / total / 1e6:.2f} M actions/s"
    )


def report_checks(pp: int = 16, num_microbatches: int = 128, num_chunks: int = 4) -> None:
    """Lower and validate a plan of a size that a command meets every day."""
    plan: Plan = build("interleaved-1f1b", pp, num_microbatches, num_chunks)
    lower_s, lowered = timed(lambda: lower(plan))
    validate_s, _ = timed(lambda: validate(plan))
    print(
        f"interleaved-1f1b p={pp} m={num_microbatches} v={num_chunks}: {sum(map(len, lowered.ranks)):,} actions lowered"
    )
    print(f"  lower    {lower_s:7.3f} s")
    print(f"  validate {validate_s:7.3f} s")


def report_sweep(schedules: str = "gpipe,1f1b,zb-h1,interleaved-1f1b,zbv") -> None:
    """Simulate a thousand points, processor time."""
    options = SweepOptions(schedules, pp="4,8,16,32", microbatches="16..256:16", p2p="0,0.01,0.05,0.1")
    begin = time.process_time()
    sweep = run_sweep(grid_of(options))
    print(f"sweep of {len(sweep.points):,} points: {time.process_time() - begin:.1f} s of processor time")


def main() -> None:
    report_large()
    report_checks()
    report_sweep()


if __name__ == "__main__":
    main()
