"""The loss of torch's GPipe, which the range "Forward i" ends before: it is of the forward, up to the next op of the pass."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pptrace.model.traces import Category
from pptrace.recognise.rank import recognise_rank
from tests.support.synthetic import MAIN_THREAD, START, Event, make_trace

NODE = "autograd::engine::evaluate_function: AddmmBackward0"


def last_stage(labels: Sequence[str], losses: bool, kernels: bool = False) -> list[Event]:
    """Labels of 100 with an operator of 20, or its kernel; behind each forward a loss of 30, and an optimizer at the end."""
    events = []

    def operator(name: str, start: int) -> None:
        events.append(Event(Category.CPU_OP, name, start, start + 20, thread=MAIN_THREAD))
        if kernels:
            number = len(events)
            events.append(
                Event(
                    Category.RUNTIME, "cudaLaunchKernel", start + 1, start + 5, thread=MAIN_THREAD, correlation=number
                )
            )
            events.append(Event(Category.KERNEL, "gemm", start + 6, start + 36, device=0, stream=7, correlation=number))

    for index, label in enumerate(labels):
        at = START + 200 * index
        events.append(Event(Category.ANNOTATION, label, at, at + 100, thread=MAIN_THREAD))
        operator(NODE if label.startswith("Backward") else "aten::addmm", at + 10)
        if losses and label.startswith("Forward"):
            operator("aten::mse_loss", at + 120)
    end = START + 200 * len(labels)
    operator("aten::_foreach_add_", end + 10)
    events.append(Event(Category.ANNOTATION, "Optimizer.step#SGD.step", end, end + 50, thread=MAIN_THREAD))
    return events


def lengths(events: list[Event]) -> list[tuple[str, int]]:
    ops = recognise_rank(make_trace(events)).ops
    ops = ops[ops["kind"].isin(["F", "B"])].sort_values("start_ns")
    return [(kind, end - start) for kind, start, end in zip(ops["kind"], ops["start_ns"], ops["end_ns"], strict=True)]


PASS = ["Forward 0", "Forward 1", "Backward 0", "Backward 1"]


@pytest.mark.parametrize(("kernels", "with_loss", "alone"), [(False, 130, 20), (True, 140, 30)])
def test_a_loss_behind_the_range_of_a_forward_is_of_it(kernels: bool, with_loss: int, alone: int) -> None:
    assert lengths(last_stage(PASS, True, kernels)) == [("F", with_loss), ("F", with_loss), ("B", alone), ("B", alone)]
    assert lengths(last_stage(PASS, False, kernels)) == [("F", alone), ("F", alone), ("B", alone), ("B", alone)]


def test_what_runs_between_two_passes_is_of_none() -> None:
    """A forward that no other op of its pass follows: the next one is of the same microbatch again."""
    found = lengths(last_stage([*PASS, "Forward 0", *PASS], True))
    assert [length for kind, length in found if kind == "F"] == [130, 130, 20, 130, 130]


def test_ranges_that_name_the_stage_have_the_loss_in_them() -> None:
    labels = ["PP:1F0", "PP:1F1", "PP:1B0", "PP:1B1"]
    events = last_stage(labels, False)
    events.append(Event(Category.CPU_OP, "aten::zero_", START + 120, START + 140, thread=MAIN_THREAD))
    assert {length for kind, length in lengths(events) if kind == "F"} == {20}


@pytest.mark.parametrize(("name", "at"), [("send", 40), ("send", 110), ("recv", 110), ("recv", 40)])
def test_labels_of_other_stages_and_of_loops_by_hand_are_ops(name: str, at: int) -> None:
    """A forward that sends on has no loss behind it; with messages between labels, so may anything else be."""
    events = last_stage(PASS, True)
    events.append(Event(Category.ANNOTATION, f"gloo:{name}", START + at, START + at + 5, thread=MAIN_THREAD))
    operator = {"send": "c10d::send", "recv": "c10d::recv_"}[name]
    events.append(Event(Category.CPU_OP, operator, START + at, START + at + 2, thread=MAIN_THREAD))
    is_of_last = (name, at) == ("recv", 40)
    assert {length for kind, length in lengths(events) if kind == "F"} == {130 if is_of_last else 20}
