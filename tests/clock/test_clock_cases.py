"""Random cases of traces whose clocks were put wrong: the truth lies within the stated bounds in all of them.

The suite takes a few dozen; all 1,000 with PPTRACE_ALL set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from pptrace.clock import Clock, ClockMethod, estimate_clock
from pptrace.model.traces import HOST_NAME
from tests.support.extent import ALL
from tests.support.tables import Match, matched_comms

NUM_CASES = 1000 if ALL else 24
FAR_NS = 12_000_000_000
PER_MILLION = 50
START = 1_790_000_000_000_000_000


@dataclass
class Traffic:
    """Steps of a pipeline over gloo, in true time: a barrier that everyone posts and completes, then messages both ways."""

    rng: np.random.Generator
    num_ranks: int
    num_steps: int
    rows: list[Match] = field(default_factory=list)
    num_matches: int = 0

    def latency(self) -> int:
        return int(20_000 + self.rng.exponential(200_000))

    def match(self) -> int:
        self.num_matches += 1
        return self.num_matches - 1

    def collective(self, kind: str, ready: Sequence[int]) -> list[int]:
        match, last = self.match(), max(ready)
        ends = [last + self.latency() for _ in ready]
        self.rows += [(rank, kind, match, ready[rank], ends[rank]) for rank in range(self.num_ranks)]
        return ends

    def message(self, source: int, target: int, at: list[int]) -> None:
        match, sent, posted = self.match(), at[source], at[target]
        received = max(sent, posted) + self.latency()
        self.rows += [(source, "send", match, sent, sent + 5_000), (target, "recv", match, posted, received)]
        at[target] = received

    def run(self) -> pd.DataFrame:
        at = [START + self.latency() for _ in range(self.num_ranks)]
        for _ in range(self.num_steps):
            at = self.collective("barrier", at)
            for _ in range(int(self.rng.integers(2, 8))):
                for way in (range(self.num_ranks - 1), range(self.num_ranks - 1, 0, -1)):
                    for rank in way:
                        at[rank] += int(self.rng.exponential(2_000_000))
                        self.message(rank, rank + way.step, at)
            at = [time + int(self.rng.exponential(5_000_000)) for time in at]
            at = self.collective("all_reduce", at)
        return matched_comms(self.rows)


@dataclass(frozen=True)
class Wrong:
    """Clock of a rank that shows true time shifted and running fast."""

    offset_ns: int
    rate: float

    def shown(self, time_ns: int) -> int:
        return time_ns + self.offset_ns + round(self.rate * (time_ns - START))


@dataclass(frozen=True)
class Case:
    comms: pd.DataFrame
    wrong: tuple[Wrong, ...]
    names: bool

    @property
    def ranks(self) -> range:
        return range(len(self.wrong))

    def clock(self) -> Clock:
        facts: dict[int, dict[str, object]] = {rank: {HOST_NAME: "node-7"} if self.names else {} for rank in self.ranks}
        return estimate_clock(self.seen(), self.ranks, facts)

    def seen(self) -> pd.DataFrame:
        moved = {
            name: [
                self.wrong[rank].shown(time) for rank, time in zip(self.comms["rank"], self.comms[name], strict=True)
            ]
            for name in ("start_ns", "end_ns")
        }
        return self.comms.assign(**moved)

    def error_ns(self, clock: Clock) -> int:
        """Largest distance of the ranks' aligned times from the first one's over the whole trace, ns."""
        times = [int(self.comms["start_ns"].min()), int(self.comms["end_ns"].max())]
        times.insert(1, sum(times) // 2)
        aligned = [
            [int(clock.to_common_clock(rank, np.array([self.wrong[rank].shown(time)]))[0]) for rank in self.ranks]
            for time in times
        ]
        return max(abs(own - row[0]) for row in aligned for own in row)


def case(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    num_ranks = int(rng.integers(2, 6))
    comms = Traffic(rng, num_ranks, int(rng.integers(1, 12))).run()
    drifts = rng.random() < 0.7
    wrong = [
        Wrong(int(rng.integers(-FAR_NS, FAR_NS)), rng.uniform(-PER_MILLION, PER_MILLION) / 1e6 if drifts else 0.0)
        for _ in range(num_ranks)
    ]
    return Case(comms, tuple(wrong), bool(rng.random() < 0.5))


def test_the_truth_lies_within_the_stated_bounds_of_clocks_far_apart_that_drift() -> None:
    """The traces may name one host or not, which hosts far apart cannot be."""
    failures = []
    for seed in range(NUM_CASES):
        made = case(seed)
        clock = made.clock()
        if clock.method is not ClockMethod.BOUNDS or made.error_ns(clock) > clock.uncertainty_ns + 100:
            failures.append((seed, clock.method, made.error_ns(clock), clock.uncertainty_ns))
    assert failures == [], f"{len(failures)} of {NUM_CASES}"


def test_the_same_traffic_on_one_clock_of_one_host_is_left_as_it_is() -> None:
    for seed in range(NUM_CASES // 4):
        made = case(seed)
        right = Case(made.comms, tuple(Wrong(0, 0.0) for _ in made.wrong), True)
        assert right.clock() == Clock(ClockMethod.SAME_HOST, dict.fromkeys(made.ranks, 0), 50_000)
