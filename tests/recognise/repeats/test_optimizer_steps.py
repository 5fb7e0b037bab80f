"""Steps of plain training loops from their optimizers: the period of the loop, or none where that is not sure."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from pptrace.analysis.report import Report
from pptrace.model.tables import CALLS
from pptrace.model.traces import Category, Trace
from pptrace.recognise.device.work import device_work
from pptrace.recognise.rank import recognise_rank
from pptrace.recognise.repeats.loop import capture_times, steps_of_loop
from pptrace.recognise.repeats.repeated_calls import RepeatedSteps
from pptrace.recognise.run import recognise_ranks
from tests.support.analysed import analyse
from tests.support.synthetic import START, Event, make_trace
from tests.support.tables import table_of

_LETTERS = {
    "D": (Category.ANNOTATION, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 30),
    "F": (Category.CPU_OP, "aten::linear", 100),
    "L": (Category.CPU_OP, "aten::mse_loss", 10),
    "B": (Category.CPU_OP, "autograd::engine::evaluate_function: AddmmBackward0", 200),
    "C": (Category.CPU_OP, "autograd::engine::evaluate_function: TanhBackward0", 150),
    "O": (Category.ANNOTATION, "Optimizer.step#AdamW.step", 60),
    "S": (Category.ANNOTATION, "Optimizer.step#SGD.step", 60),
    "Z": (Category.ANNOTATION, "Optimizer.zero_grad#AdamW.zero_grad", 20),
    "U": (Category.CPU_OP, "aten::sub_", 40),
}
"""Category, name and duration of what a letter stands for; ``_`` is a pause of 50."""
STEP = "FFLBBOZ"
LENGTH = 2 * 100 + 10 + 2 * 200 + 60 + 20


def trace_of(letters: str, rank: int = 0, begins: int = START) -> Trace:
    now, events = begins, []
    for letter in letters:
        if letter == "_":
            now += 50
            continue
        category, name, duration = _LETTERS[letter]
        events.append(Event(category, name, now, now + duration, thread=1))
        if letter == "O":  # the operators of an optimizer are no part of a loop around it
            events.append(Event(Category.CPU_OP, "aten::_foreach_add_", now + 1, now + 9, thread=1))
        now += duration
    return make_trace(events, rank)


def steps_of(letters: str) -> RepeatedSteps:
    events = trace_of(letters).events
    return steps_of_loop(events, capture_times(events), device_work(events), has_captured=False)


def lengths(letters: str) -> list[int]:
    steps = steps_of(letters)
    return [int(length) for length in steps.end_ns - steps.start_ns]


def test_a_step_is_the_period_of_the_loop_with_all_that_is_in_it() -> None:
    assert lengths(f"{STEP}_" * 5) == [LENGTH + 50] * 4  # a pause between the last operator and the next first one
    assert lengths(f"_D{STEP}" * 5) == [LENGTH + 80] * 4
    assert lengths(f"Z_{STEP[:-1]}" * 5) == [LENGTH + 50] * 4


def test_zero_grad_belongs_to_the_step_that_it_follows_at_once() -> None:
    steps = steps_of(STEP * 3)
    assert steps.start_ns.tolist() == [START + LENGTH, START + 2 * LENGTH]
    assert steps_of(f"{STEP}{STEP[:-1]}_Z{STEP}{STEP}").start_ns[0] == START + LENGTH  # once a little later
    before_forward = steps_of("_Z_FFLBBO" * 3)
    assert before_forward.start_ns[0] == START + LENGTH + 100  # the end of Optimizer.step
    assert "each from" not in steps.what
    assert steps.what == "1 call of Optimizer.step"
    assert steps.boundary == "the end of one Optimizer.step to the end of the next"


def test_several_backwards_before_an_update_are_one_step() -> None:
    assert lengths("FFLBBFFLBBOZ" * 4) == [2 * LENGTH - 80] * 3


def test_several_optimizers_do_not_make_more_steps() -> None:
    assert len(lengths("FFLBBOOZZ" * 4)) == 3  # one for each part of the model
    assert lengths("FBOFFCBO" * 4) == [360 + 610] * 3  # a generator and a discriminator with optimizers of one name
    assert lengths("FBOFBS" * 4) == [720] * 3
    assert steps_of("FBOFBS" * 4).what == "2 calls of Optimizer.step"
    assert lengths("FBOFBOFBOFFCO" * 3) == [3 * 360 + 410] * 2


def test_an_evaluation_is_a_part_of_the_step_before_it() -> None:
    assert lengths(f"{STEP}{STEP}FFFFFFF" * 3) == [LENGTH + 700, LENGTH, LENGTH + 700, LENGTH, LENGTH]
    assert lengths(f"D{STEP}D{STEP}DFFF" * 3) == [LENGTH + 360, LENGTH + 30, LENGTH + 360, LENGTH + 30, LENGTH + 30]


def test_a_pause_before_a_step_is_its_own_even_after_an_evaluation() -> None:
    assert lengths(f"_{STEP}_{STEP}FFFFFFF" * 3)[1] == LENGTH + 50


@pytest.mark.parametrize("letters", ["FFLBBOZ", "FFLBBOZ" * 2 + "F", "FBOFBOFBOFBOFBOFCCCCCO", "FFF" * 6, "FFUU" * 6])
def test_no_step_where_too_little_repeats_or_nothing_trains(letters: str) -> None:
    found = lengths(letters)
    assert found == ([LENGTH] if letters.startswith("FFLBBOZFFLBBOZ") else [])


def test_an_update_that_was_skipped_is_made_up_for_by_zero_grad() -> None:
    """A gradient scaler leaves out updates whose gradients overflowed."""
    assert lengths("FBOZFBOZFBZFBOZFBOZFBOZ") == [380, 320, 380, 380, 380]
    assert lengths("FBOFBOFBFBOFBO") == []


def test_steps_whose_backwards_vary_a_little_are_steps() -> None:
    varying = "".join("F" + "B" * (8 + at % 2 * (at > 3)) + "O" for at in range(9))
    assert len(lengths(varying)) == 8
    assert lengths("".join("F" + "B" * (at + 1) ** 2 + "O" for at in range(9))) == []


def test_without_optimizers_operators_with_one_backward_each_are_steps() -> None:
    assert lengths("FLBCUU" * 5) == [540] * 4
    assert lengths("FLBCFLBCUU" * 5) == []  # microbatches, or steps with something after every second one
    assert lengths(("FLBCUU" * 2 + "FLFL") * 4) == []


def test_on_a_device_a_step_lasts_from_its_first_work_to_that_of_the_next() -> None:
    """The host needs 360 ns for a step, its device 900."""
    host = trace_of("FBO" * 6).events
    events = [
        Event(Category(host.category[row]), host.names[host.name_id[row]], int(host.start_ns[row]), int(end), thread=1)
        for row, end in enumerate(host.end_ns.tolist())
    ]
    for step in range(6):
        launched = START + 360 * step + 10
        begins = START + 900 * step + 20
        events += [
            Event(Category.RUNTIME, "cudaLaunchKernel", launched, launched + 5, thread=1, correlation=step + 1),
            Event(Category.KERNEL, "gemm", begins, begins + 900, 0, 7, correlation=step + 1),
        ]
    columns = make_trace(events).events
    steps = steps_of_loop(columns, capture_times(columns), device_work(columns), has_captured=False)
    assert steps.on_device
    assert np.diff(steps.start_ns).tolist() == [900] * 4
    assert steps.end_ns[-1] == START + 900 * 6 + 20


def report_of(*letters: str) -> Report:
    return analyse([trace_of(of_rank, rank) for rank, of_rank in enumerate(letters)]).report


def test_a_plain_loop_has_steps_with_compute_and_the_times_of_its_optimizer() -> None:
    report = report_of("_D" + f"{STEP}_D" * 6)
    assert [step.length_ns for step in report.steps] == [LENGTH + 80] * 5
    for step in report.steps:  # what is loaded after the last one is of no step
        assert (step.ranks[0].compute_ns, step.ranks[0].spans) == (610 + 8, {"OPTIMIZER": 60, "DATA": 30})
    line = (
        "nothing marks the steps: 5 steps from what repeats, each from the end of one Optimizer.step to the end of the "
        "next (1 call of Optimizer.step)"
    )
    assert line in report.warnings


def test_ranks_that_take_different_numbers_of_steps_have_none() -> None:
    report = report_of(STEP * 6, STEP * 5)
    assert not report.steps
    assert any("differently often by rank" in line for line in report.warnings)


def test_without_steps_the_report_is_of_the_whole_trace() -> None:
    report = report_of("FF__FB" * 2, "FFF___F____")
    assert not report.steps
    assert not any("nothing marks the steps" in line for line in report.warnings)
    first, second = (entry.on_host for entry in report.device)
    assert first.last_ns - first.first_ns == 1200
    assert (first.compute_ns, first.communication_ns, first.rest_ns) == (1000, 0, 200)
    assert (second.compute_ns, second.rest_ns) == (400, 150)
    shares = " The 2 traces last, at the mean, 0.001 ms: 80% compute, 20% between operators (Python, input)."
    assert report.verdict.endswith(shares)


def test_updates_that_differ_say_why_there_are_no_steps() -> None:
    report = report_of("FBOFBOFBOFBOFBOFCCCCCO")
    why = "nothing marks the steps, and the backwards between optimizer steps differ: the report is of the whole trace"
    assert why in report.warnings
    once = "nothing marks the steps, and the optimizer is called in one step only: the report is of the whole trace"
    assert once in report_of("FFFBBBO").warnings, "one update cannot differ from others"


def test_ranks_that_exchange_messages_have_the_steps_of_their_optimizers_and_none_of_what_else_repeats() -> None:
    """They may be a pipeline that was not recognised, whose microbatches repeat too."""
    for letters, has_steps in ((STEP, True), ("FLBCUU", False)):
        sender, receiver = (recognise_rank(trace_of(letters * 6, rank)) for rank in range(2))
        assert len(recognise_ranks([sender, receiver]).ops) > 0
        sent = table_of(CALLS, [{"kind": "send"}], -1)
        assert (len(recognise_ranks([replace(sender, calls=sent), receiver]).ops) > 0) is has_steps
