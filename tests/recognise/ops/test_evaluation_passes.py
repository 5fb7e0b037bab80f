"""Ranges of torch's schedules that hold nothing: evaluation passes, and inputs' gradients of a first stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pptrace.model.traces import Category
from pptrace.recognise.rank import recognise_rank
from pptrace.recognise.recognised_rank import RecognisedRank
from tests.support.synthetic import MAIN_THREAD, START, Event, make_trace

GLOO_THREAD = 300


class Pass:
    """The labels of one microbatch of a stage in the middle, one after the other; times count from :data:`START`."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.events: list[Event] = []

    def add(self, name: str, *inside: str) -> None:
        """A label that lasts 100, with operators of 20 in it."""
        self.events.append(Event(Category.ANNOTATION, name, START + self.at, START + self.at + 100, thread=MAIN_THREAD))
        for index, operator in enumerate(inside):
            start = START + self.at + 10 + 30 * index
            self.events.append(Event(Category.CPU_OP, operator, start, start + 20, thread=MAIN_THREAD))
        self.at += 200


def one_pass(at: int, backward: Sequence[str], message: Sequence[str]) -> list[Event]:
    """A forward and a backward with their messages, the backward's with what is given."""
    made = Pass(at)
    made.add("PP:1RECV_F0", "c10d::recv_")
    made.add("PP:1F0", "aten::addmm")
    made.add("PP:1SEND_F0", "c10d::send")
    made.add("PP:1RECV_B0", *("c10d::recv_" for _ in message))
    made.add("PP:1B0", *backward)
    made.add("PP:1SEND_B0", *message)
    return made.events


def trained(at: int) -> list[Event]:
    return one_pass(at, ["autograd::engine::evaluate_function: AddmmBackward0"], ["c10d::send"])


def evaluated(at: int) -> list[Event]:
    return one_pass(at, [], [])


def shown(rank: RecognisedRank) -> list[tuple[int, str]]:
    ops = rank.ops.sort_values("start_ns")
    return list(zip(ops["step"].tolist(), ops["kind"].tolist(), strict=True))


def test_a_pass_whose_backwards_hold_nothing_is_evaluation_and_no_step() -> None:
    rank = recognise_rank(make_trace([*trained(0), *evaluated(2000), *trained(4000)]))
    assert shown(rank) == [(0, "F"), (0, "B"), (0, "EVAL"), (1, "F"), (1, "B")]
    evaluation = rank.ops[rank.ops["kind"] == "EVAL"].iloc[0]
    assert (evaluation["start_ns"], evaluation["end_ns"]) == (START + 2000, START + 2000 + 1100)
    assert set(rank.comms.groupby("step").size()) == {4}
    assert any("1 of 3 passes" in line for line in rank.warnings)


def test_kernels_alone_tell_an_evaluation_too() -> None:
    events: list[Event] = []
    for number, event in enumerate([*trained(0), *evaluated(2000), *trained(4000)]):
        computes = event.category is Category.CPU_OP and not event.name.startswith("c10d::")
        launch = replace(event, category=Category.RUNTIME, name="cudaLaunchKernel", correlation=number)
        kernel = Event(Category.KERNEL, "gemm", event.end, event.end + 5, 0, 7, correlation=number)
        events += [launch, kernel] if computes else [event]
    rank = recognise_rank(make_trace(events))
    assert shown(rank) == [(0, "F"), (0, "B"), (0, "EVAL"), (1, "F"), (1, "B")]
    evaluation = rank.ops[rank.ops["kind"] == "EVAL"].iloc[0]
    (kernel,) = [
        event for event in events if event.category is Category.KERNEL and START + 2000 < event.start < START + 4000
    ]
    assert (evaluation["start_ns"], evaluation["end_ns"]) == (kernel.start, kernel.end)


def test_an_evaluation_in_the_range_of_a_step_doubles_none_of_its_ops() -> None:
    steps = [
        Event(Category.ANNOTATION, f"ProfilerStep#{number}", START + start, START + end, thread=MAIN_THREAD)
        for number, start, end in ((4, -10, 3500), (5, 3500, 6000))
    ]
    rank = recognise_rank(make_trace([*steps, *trained(0), *evaluated(2000), *trained(4000)]))
    assert [op for op in shown(rank) if op[1] in "FB"] == [(4, "F"), (4, "B"), (5, "F"), (5, "B")]


def test_where_nothing_trained_forwards_alone_are_ops() -> None:
    rank = recognise_rank(make_trace([*evaluated(0), *evaluated(2000)]))
    assert shown(rank) == [(0, "F"), (1, "F")]
    assert set(rank.comms["direction"]) == {"F"}


def test_a_stage_without_gradients_of_its_own_that_receives_some_trained() -> None:
    frozen = one_pass(0, [], ["c10d::send"])
    assert shown(recognise_rank(make_trace(frozen))) == [(0, "F"), (0, "B")]


def test_a_first_stages_input_gradient_does_not_wait_for_its_output_gradient() -> None:
    made = Pass(0)
    made.add("PP:0F0", "aten::addmm")
    made.add("PP:0RECV_B0", "c10d::recv_")
    begin = made.at
    made.add("PP:0I0")
    end = START + begin + 100
    made.add("PP:0W0", "autograd::engine::evaluate_function: AddmmBackward0")
    received = next(event.start for event in made.events if event.name == "PP:0RECV_B0") + 40
    arrived = Event(Category.ANNOTATION, "gloo:recv", received, end - 5, thread=GLOO_THREAD)
    ops = recognise_rank(make_trace([*made.events, arrived])).ops
    own = ops[ops["kind"] == "I"].iloc[0]
    assert (own["start_ns"], own["end_ns"]) == (end - 5, end)
