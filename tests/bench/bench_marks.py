"""Cost of one range, with nobody listening and under PyTorch's profiler.

    python tests/bench/bench_marks.py

Medians over repeats, in ns per range, the loop's own cost taken off. Target with no listener: under 2000 ns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile

from instrument.recorder import Recorder
from pptrace.marks import Axis, Collective, SpanKind, Transfer
from pptrace.schedule.actions import Action, Kind, Phase

REPEATS = 15
TARGET_NS = 2000
ACTION = Action(Kind.F, 2, 3, 1, Phase.STEADY)


@dataclass(frozen=True, slots=True)
class Carried:
    action: Action

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


def main() -> None:
    kinds = (op, p2p, wait, collective, span)
    quiet = {kind.__name__: median_ns(kind, 20_000) - median_ns(empty, 20_000) for kind in kinds}
    loud = {}
    for kind in kinds:
        with profile(activities=[ProfilerActivity.CPU]):
            loud[kind.__name__] = median_ns(kind, 500)
    print(f"{'range':<12}{'no listener':>14}{'profiled':>14}   ns per range, medians of {REPEATS}")
    for name in quiet:
        print(f"{name:<12}{quiet[name]:>14.0f}{loud[name]:>14.0f}")
    worst = max(quiet.values())
    print(f"worst with no listener: {worst:.0f} ns (target < {TARGET_NS}): {'met' if worst < TARGET_NS else 'MISSED'}")


if __name__ == "__main__":
    main()
