"""Steps of a device of which kernels and their launches alone were recorded: the period of a loop that trains, or none."""

from __future__ import annotations

import pytest

from pptrace.model.traces import Category
from pptrace.recognise.device.work import device_work
from pptrace.recognise.repeats.loop import capture_times, steps_of_loop
from pptrace.recognise.repeats.repeated_calls import RepeatedSteps
from tests.recognise.repeats.test_repeated_calls import Host, lengths
from tests.support.analysed import analyse
from tests.support.synthetic import Event, make_trace

FORWARD = "a" + "bcde" * 3 + "f"  # three layers
BACKWARD = "g" + "hijk" * 3 + "l"
PASS = FORWARD + BACKWARD
UPDATE = "ooo"  # kernels of an optimizer


def steps_of(host: Host) -> RepeatedSteps:
    events = make_trace(host.events).events
    return steps_of_loop(events, capture_times(events), device_work(events), has_captured=False)


def starts_of(host: Host, name: str) -> list[int]:
    return [event.start for event in host.events if event.name == name]


def test_a_step_is_the_whole_loop_with_all_its_equal_layers() -> None:
    steps = steps_of(Host().run((PASS + UPDATE) * 5))
    assert lengths(steps) == [31 * 100] * 4
    assert (steps.on_device, steps.what, steps.reason) == (True, "31 launches", "")


def test_equal_passes_before_an_update_are_one_step() -> None:
    assert lengths(steps_of(Host().run((PASS * 4 + UPDATE) * 3))) == [(4 * 28 + 3) * 100] * 2


def test_kernels_whose_launches_were_not_recorded_repeat_as_well() -> None:
    host = Host().run((PASS + UPDATE) * 4)
    host.events = [event for event in host.events if event.category == Category.KERNEL]
    assert lengths(steps_of(host)) == [31 * 100] * 3


def test_a_recording_of_whole_turns_begins_with_a_step() -> None:
    """Though the host takes longer before the update."""
    host = Host()
    for _ in range(4):
        host.run(PASS)
        host.now += 9_000
        host.run(UPDATE)
    assert steps_of(host).start_ns.tolist() == starts_of(host, "a")[:-1]


def test_a_recording_that_begins_within_a_step_is_cut_where_the_host_takes_longest() -> None:
    host = Host().run("kl" + UPDATE)
    for _ in range(4):
        host.now += 9_000
        host.run(PASS + UPDATE)
    assert steps_of(host).start_ns.tolist() == starts_of(host, "a")[:-1]


@pytest.mark.parametrize(
    ("launches", "reason"),
    [
        (PASS * 4, ""),  # microbatches, or evaluations
        (FORWARD * 6, ""),
        (PASS * 4 + UPDATE, "other launches follow what repeats, which may be a part of a longer step"),
        ((PASS + UPDATE) * 4 + "uvw", "other launches follow what repeats, which may be a part of a longer step"),
        (PASS + "ompq" * 30, "other launches come before what repeats, which may be a part of a longer step"),
        (
            UPDATE + "rstu" * 8 + PASS * 4,
            "what repeats runs no optimizer's kernels, and may be a microbatch or an evaluation",
        ),
    ],
)
def test_what_may_be_less_than_a_step_is_none(launches: str, reason: str) -> None:
    steps = steps_of(Host().run(launches))
    assert (len(steps), steps.reason) == (0, reason)


def test_warm_up_turns_of_mostly_the_same_kernels_come_before_the_steps() -> None:
    assert lengths(steps_of(Host().run(PASS + "xyz" + UPDATE + (PASS + UPDATE) * 4))) == [31 * 100] * 4


def test_with_operators_the_optimizer_tells_the_steps_or_there_are_none() -> None:
    host = Host().run((PASS + UPDATE) * 4)
    host.events.append(Event(Category.CPU_OP, "aten::linear", 0, 5, thread=1))
    assert len(steps_of(host)) == 0


def test_a_line_says_what_the_steps_are_or_why_there_are_none() -> None:
    report = analyse([make_trace(Host().run((PASS + UPDATE) * 6).events)]).report
    line = "nothing marks the steps: 5 steps from what repeats, each from the first work of one to the first work of the next"
    assert f"{line} (31 launches)" in report.warnings
    assert [step.length_ns for step in report.steps] == [3_100] * 5
    without = analyse([make_trace(Host().run((PASS + UPDATE) * 3 + PASS * 2).events)]).report
    assert not without.steps
    assert any(text.startswith("nothing marks the steps, and other launches follow") for text in without.warnings)
