"""Ops of probed steps take longer by their part, at their end, on a clock that the test turns."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from instrument import delays as module
from instrument.delays import Delays
from instrument.recorder import null_range
from pptrace.schedule.actions import Action, Kind, parse_action
from pptrace.schedule.probe import parse_probes

MS = 1_000_000


class Clock:
    """A clock that goes on when somebody sleeps, always for ``late_ns`` too long."""

    def __init__(self, late_ns: int = 0) -> None:
        self.now_ns = 0
        self.late_ns = late_ns
        self.sleeps: list[float] = []

    def perf_counter_ns(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now_ns += round(seconds * 1e9) + self.late_ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter_ns=clock.perf_counter_ns, sleep=clock.sleep))
    return clock


def run(delays: Delays, clock: Clock, action: str, step: int, length_ns: int) -> int:
    """Run an op; how long it took."""
    begin = clock.now_ns
    with delays.around(null_range(), parse_action(action), step):
        clock.now_ns += length_ns
    return clock.now_ns - begin


def test_in_a_probed_step_all_ops_but_the_targets_take_longer(clock: Clock) -> None:
    delays = Delays(parse_probes(["F:0.25"]), lambda: True)
    assert [run(delays, clock, op, 1, 4 * MS) for op in ("0F0", "0B0", "0I1", "0W1")] == [4 * MS, *[5 * MS] * 3]
    assert [run(delays, clock, op, 2, 4 * MS) for op in ("0F0", "0B0")] == [4 * MS, 4 * MS]
    assert delays.facts() == {"probes": ["F:0.25"], "delays_ns": {"1": 3 * MS}, "on_device": False}


def test_nothing_is_delayed_while_nothing_is_recorded(clock: Clock) -> None:
    delays = Delays(parse_probes(["F:0.25"]), lambda: False)
    assert run(delays, clock, "0B0", 1, 4 * MS) == 4 * MS
    assert clock.sleeps == []


def test_what_a_sleep_takes_too_long_is_taken_off_the_next_ones(clock: Clock) -> None:
    clock.late_ns = 300_000
    delays = Delays(parse_probes(["F:0.1"]), lambda: True)
    total = sum(run(delays, clock, f"0B{microbatch}", 1, 2 * MS) for microbatch in range(100))
    assert total == pytest.approx(1.1 * 200 * MS, rel=0.003)


def test_short_ops_are_delayed_together(clock: Clock) -> None:
    delays = Delays(parse_probes(["F:0.1"]), lambda: True)
    total = sum(run(delays, clock, f"0B{microbatch}", 1, 10_000) for microbatch in range(1000))
    assert total == pytest.approx(1.1 * 10 * MS, rel=0.01)
    assert len(clock.sleeps) == 20


def test_a_host_that_only_launches_does_not_sleep(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    delays = Delays(parse_probes(["F:0.25"]), lambda: True)
    assert run(delays, clock, "0B0", 1, 4 * MS) == 4 * MS
    assert delays.facts() == {"probes": ["F:0.25"], "delays_ns": {}, "on_device": True}


def test_an_op_that_raises_is_not_delayed(clock: Clock) -> None:
    delays = Delays(parse_probes(["F:1"]), lambda: True)

    def broken() -> None:
        with delays.around(null_range(), Action(Kind.B, 0, 0), 1):
            clock.now_ns += 4 * MS
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        broken()
    assert clock.sleeps == []
