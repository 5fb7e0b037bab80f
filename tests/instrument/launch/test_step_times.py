"""Times of all steps of a rank, recorded or not."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import pytest

from instrument.launch.recording import step_times
from instrument.launch.recording.step_times import StepTimes
from instrument.launch.window import DEFAULT_WINDOW, StepWindow, parse_ranks
from pptrace.errors import UsageError


def run_steps(times: StepTimes, num: int) -> None:
    for _ in range(num):
        times.begin()
        times.end()


def test_every_step_is_stamped_on_the_wall_clock_and_what_lies_between_steps_is_no_part_of_one() -> None:
    times = StepTimes(lambda: False)
    before = time.time_ns()
    for _ in range(3):
        times.begin()
        time.sleep(0.002)
        times.end()
        time.sleep(0.06)
    after = time.time_ns()
    facts = times.facts(range(0))
    assert facts["first_step"] == 0
    assert before <= facts["start_ns"][0] + 1_000_000
    assert facts["end_ns"][-1] <= after + 1_000_000
    lengths = [end - start for start, end in zip(facts["start_ns"], facts["end_ns"], strict=True)]
    assert len(lengths) == 3
    assert all(2e6 <= length < 55e6 for length in lengths)  # a busy machine
    assert facts["device_ns"] is None
    assert facts["recorded"] is None


def test_recorded_and_disturbed_steps_are_told_apart() -> None:
    recording = False
    times = StepTimes(lambda: recording)
    for step in range(10):
        recording = step in (3, 6, 7)
        if step == 5:
            times.disturb(step)
        run_steps(times, 1)
    facts = times.facts(range(6, 8))
    assert facts["recorded"] == [6, 8]
    assert facts["disturbed"] == [3, 5]  # the profiler ran in step 3, but its trace is of others


def test_steps_within_a_time_are_those_most_of_which_is_and_the_last_one_may_go_on() -> None:
    times = StepTimes(lambda: False)
    stamps = []
    for _ in range(3):
        times.begin()
        stamps.append(time.perf_counter_ns())
        time.sleep(0.02)
        stamps.append(time.perf_counter_ns())
        times.end()
    assert times.steps_within(stamps[0], stamps[3]) == [0, 1]
    assert times.steps_within(stamps[1], stamps[4]) == [1]
    assert times.steps_within(stamps[1], stamps[2]) == times.steps_within(0, 0) == []
    times.begin()
    time.sleep(0.02)
    assert times.steps_within(stamps[4], time.perf_counter_ns()) == [2, 3]


def test_a_step_that_did_not_end_has_no_times() -> None:
    times = StepTimes(lambda: False)
    times.begin()
    assert times.facts(range(0)) is None
    times.end()
    times.end()  # a script that ends a step twice
    times.begin()
    facts = times.facts(range(0))
    assert len(facts["start_ns"]) == len(facts["end_ns"]) == 1


def test_a_long_run_has_the_steps_around_its_recording() -> None:
    recording = False
    times = StepTimes(lambda: recording)
    run_steps(times, 2_500)
    recording = True
    run_steps(times, 10)
    recording = False
    run_steps(times, 3_000)
    facts = times.facts(range(2_500, 2_510))
    assert facts["first_step"] == 1_500
    assert len(facts["start_ns"]) == len(facts["end_ns"]) == 2_010
    assert facts["recorded"] == [2_500, 2_510]


@dataclass
class Event:
    """An event of a device that lags behind its host: it comes when that many other events were asked for."""

    at: int
    asked: list[int] = field(default_factory=lambda: [0])

    def query(self) -> bool:
        return self.asked[0] >= 3

    def elapsed_time(self, other: Event) -> float:
        return float(other.at - self.at)


def test_events_of_the_device_are_read_when_they_have_come_and_never_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Event] = []
    asked = [0]

    def event() -> Event:
        made.append(Event(5 * len(made), asked))
        return made[-1]

    monkeypatch.setattr(step_times, "_event", event)
    times = StepTimes(lambda: False)
    run_steps(times, 2)
    assert times.facts(range(0))["device_ns"] is None
    asked[0] = 3
    assert times.facts(range(0))["device_ns"] == [5_000_000] * 2
    monkeypatch.setattr(Event, "query", lambda _: False)
    run_steps(times, 1)
    assert times.facts(range(0))["device_ns"] == [5_000_000, 5_000_000, None]


def test_a_step_begins_with_the_event_at_which_the_one_before_it_ended_unless_something_lies_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Event] = []
    monkeypatch.setattr(step_times, "_event", lambda: made.append(Event(5 * len(made), [3])) or made[-1])
    now = [0]
    monkeypatch.setattr(step_times.time, "perf_counter_ns", lambda: now[0])
    times = StepTimes(lambda: False)
    for gap in (0, 50_000, 5_000_000):
        now[0] += gap
        times.begin()
        now[0] += 20_000_000
        times.end()
    assert len(made) == 5
    assert times.facts(range(0))["device_ns"] == [5_000_000] * 3


def test_a_device_that_fails_hides_no_error_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Event) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(step_times, "_event", lambda: Event(0, [3]))
    monkeypatch.setattr(Event, "query", fail)
    times = StepTimes(lambda: False)
    run_steps(times, 2)
    assert times.facts(range(0))["device_ns"] is None


@pytest.mark.parametrize(
    ("num_steps", "window"), [(100, "4:14"), (15, "4:14"), (12, "4:11"), (6, "2:5"), (3, "1:2"), (2, "1:2"), (1, "0:1")]
)
def test_the_default_window_is_moved_into_a_shorter_run(num_steps: int, window: str) -> None:
    assert str(DEFAULT_WINDOW) == "4:14"
    assert str(DEFAULT_WINDOW.within(num_steps)) == window
    assert str(StepWindow(4, 14).within(num_steps)) == "4:14"  # somebody asked for it


def test_ranks_are_numbers_and_ranges_of_them() -> None:
    assert parse_ranks("all") is None
    assert parse_ranks("0,4,8-11") == {0, 4, 8, 9, 10, 11}
    for text in ("", "a", "3-1", "1,,2", "-1"):
        with pytest.raises(UsageError, match="--profile-ranks"):
            parse_ranks(text)
