"""Steps from what repeats: their times on the device, and every case in which there are none rather than wrong ones."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pptrace.model.traces import Category
from pptrace.recognise.repeats.loop import capture_times
from pptrace.recognise.repeats.repeated_calls import RepeatedSteps, find_period, occurs_in, repeated_steps
from tests.support.synthetic import Event, make_trace

STEP = "abcdef"
_KERNELS = {"o": "multi_tensor_apply_kernel<AdamFunctor>"}


@dataclass
class Host:
    """A host that launches a kernel per letter, an optimizer's for ``o``, one graph for ``G``, and waits for its device at
    ``.``.
    """

    events: list[Event] = field(default_factory=list)
    now: int = 0
    device: int = 0
    number: int = 0

    def run(self, letters: str, launch: int = 10, kernel: int = 100) -> Host:
        for letter in letters:
            if letter == ".":
                self.call("cudaDeviceSynchronize", max(self.device - self.now, 1))
            elif letter == "G":
                self.launch("cudaGraphLaunch", ("n1", "n2", "n3"), launch, kernel)
            else:
                self.launch("cudaLaunchKernel", (_KERNELS.get(letter, letter),), launch, kernel)
        return self

    def launch(self, call: str, names: tuple[str, ...], took: int, kernel: int) -> None:
        self.number += 1
        self.call(call, took, self.number)
        for name in names:
            self.device = max(self.device, self.now) + kernel
            self.events.append(
                Event(Category.KERNEL, name, self.device - kernel, self.device, 0, 7, correlation=self.number)
            )

    def call(self, name: str, took: int, number: int = -1) -> None:
        self.events.append(Event(Category.RUNTIME, name, self.now, self.now + took, thread=1, correlation=number))
        self.now += took + 1

    def steps(self) -> RepeatedSteps:
        events = make_trace(self.events).events
        return repeated_steps(events, capture_times(events))


def lengths(steps: RepeatedSteps) -> list[int]:
    return [int(length) for length in steps.end_ns - steps.start_ns]


def test_a_loop_of_launches_has_a_step_from_each_first_work_to_the_next() -> None:
    steps = Host().run(STEP * 5).steps()
    assert lengths(steps) == [600] * 4  # a host that runs ahead would have had 66
    assert (steps.on_device, steps.what, steps.reason) == (True, "6 launches", "")


def test_the_shortest_sequence_counts_with_all_that_is_in_it() -> None:
    """Layers and microbatches come again within a step, which is what holds them all."""
    steps = Host().run(("abcd" * 4 + "dcba" * 4 + "op") * 3).steps()
    assert lengths(steps) == [34 * 100] * 2


def test_a_replayed_graph_is_one_launch_and_its_loop_a_step() -> None:
    steps = Host().run("GGGG." * 4).steps()
    assert lengths(steps)[1:] == [lengths(steps)[0]] * 2
    assert steps.what == "4 CUDA graphs, 1 copy or wait"
    assert lengths(Host().run("G" * 6).steps()) == [300] * 5


def test_the_capture_and_what_came_before_it_are_no_steps() -> None:
    host = Host().run(STEP * 4)
    host.call("cudaStreamBeginCapture", 5)
    host.call("cudaLaunchKernel", 5)
    host.call("cudaStreamEndCapture", 5)
    host.call("cudaGraphInstantiateWithFlags", 3_000)
    captured = host.now
    steps = host.run("G." * 20).steps()
    assert len(steps) == 19
    assert steps.start_ns[0] >= captured


def test_logging_in_some_steps_does_not_hide_the_loop() -> None:
    steps = Host().run("".join(STEP + ("." if step % 3 == 1 else "") for step in range(8))).steps()
    assert len(steps) == 7


def test_warm_up_turns_that_ran_otherwise_are_no_steps() -> None:
    assert len(Host().run("uvwxyzuvw" + STEP * 5).steps()) == 4


@pytest.mark.parametrize(
    ("launches", "reason"),
    [
        ("abcdefgh", "what was launched does not repeat"),
        ("aaaaaaaa", "what repeats has fewer than 4 different launches"),
        (STEP * 8 + "op", "other launches follow what repeats, which may be a part of a longer step"),
        ("op" + STEP * 8, "other launches come before what repeats, which may be a part of a longer step"),
        (
            STEP * 2 + "op" + STEP * 8,
            "what repeats is interrupted by other launches, and may be a part of a longer step",
        ),
    ],
)
def test_microbatches_of_a_single_step_are_no_steps(launches: str, reason: str) -> None:
    steps = Host().run(launches).steps()
    assert (len(steps), steps.reason) == (0, reason)


def test_a_rank_without_a_device_repeats_its_operators() -> None:
    events = [
        Event(Category.CPU_OP, f"aten::{name}", 100 * at, 100 * at + 80, thread=1)
        for at, name in enumerate(["mm", "add", "relu", "sum"] * 4)
    ]
    inner = [Event(Category.CPU_OP, "aten::empty", 100 * at + 1, 100 * at + 9, thread=1) for at in range(16)]
    trace = make_trace([event for pair in zip(events, inner, strict=True) for event in pair])
    steps = repeated_steps(trace.events, capture_times(trace.events))
    assert (lengths(steps), steps.on_device, steps.what) == ([400] * 3, False, "4 operators")


def test_a_trace_without_events_has_none() -> None:
    steps = Host().steps()
    assert (len(steps), steps.has_graphs) == (0, False)


@given(st.lists(st.integers(0, 20), min_size=2, max_size=12, unique=True), st.integers(2, 6), st.data())
def test_a_repeated_sequence_of_different_tokens_has_its_own_length(
    piece: list[int], repeats: int, data: st.DataObject
) -> None:
    tokens = np.array(piece * repeats + piece[: data.draw(st.integers(0, len(piece) - 1))], dtype=np.int64)
    period = find_period(tokens)
    assert (period.length, period.start, period.stop) == (len(piece), 0, len(tokens))


def test_a_piece_is_found_however_it_is_turned() -> None:
    piece = np.array([1, 2, 3, 4])
    assert occurs_in(np.array([9, 3, 4, 1, 2, 9]), piece)
    assert not occurs_in(np.array([9, 3, 4, 1, 9, 2, 3, 4]), piece)
