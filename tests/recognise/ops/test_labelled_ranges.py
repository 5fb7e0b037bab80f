"""Labelled ranges in their steps."""

from __future__ import annotations

from pptrace.model.traces import Category
from pptrace.recognise.labels import read_label
from pptrace.recognise.ops.infer_from_operators import messages_in_ranges
from pptrace.recognise.ops.label_actions import LabelledActions, steps_of_ranges, with_microbatches
from pptrace.recognise.ops.label_columns import Range, Ranges
from pptrace.recognise.ops.label_steps import num_outside_steps
from pptrace.schedule.actions import KINDS, Kind
from tests.support.synthetic import Event, make_trace


def ranges(*named: tuple[str, int, int]) -> Ranges:
    result = []
    for name, start, end in named:
        label = read_label(name)
        assert label is not None, name
        result.append(Range(label, start, end, thread=1))
    return Ranges.of(result)


def ops_of(labelled: LabelledActions) -> list[tuple[int, str]]:
    """(step, op) in time order."""
    rows = labelled.in_time_order()
    columns = (rows[name].tolist() for name in ("step", "stage", "kind", "microbatch"))
    actions = [(step, f"{stage}{KINDS[kind]}{number}") for step, stage, kind, number in zip(*columns, strict=True)]
    return [(step, text) for step, text in actions if "RECV" not in text]


def test_ops_before_the_first_range_of_a_step_are_counted_as_left_out() -> None:
    cut = ranges(("PP:0F6", 0, 5), ("PP:0F7", 5, 9), ("ProfilerStep#3", 10, 30), ("PP:0F0", 11, 15), ("PP:0F1", 15, 19))
    assert num_outside_steps(cut, steps_of_ranges(cut)) == 2
    assert ops_of(with_microbatches(steps_of_ranges(cut))) == [(3, "0F0"), (3, "0F1")]


def test_messages_before_the_first_step_are_no_ops_that_are_left_out() -> None:
    cut = ranges(("PP:0F6", 0, 5), ("PP:0RECV_F7", 5, 9), ("ProfilerStep#3", 10, 30), ("PP:0F0", 11, 15))
    assert num_outside_steps(cut, steps_of_ranges(cut)) == 1


def test_a_range_of_a_step_that_was_written_twice_is_one_step() -> None:
    twice = [
        ("ProfilerStep#0", 0, 20),
        ("ProfilerStep#0", 1, 19),
        ("ProfilerStep#1", 20, 40),
        ("ProfilerStep#1", 20, 40),
    ]
    result = with_microbatches(steps_of_ranges(ranges(*twice, ("PP:0F0", 2, 5), ("PP:0F0", 22, 25))))
    assert ops_of(result) == [(0, "0F0"), (1, "0F0")]


def test_a_message_is_of_the_op_around_it_in_its_thread() -> None:
    calls = [("c10d::send", 7, 1), ("c10d::recv_", 2, 1), ("c10d::send", 8, 2), ("c10d::send", 12, 1)]
    rows = [Event(Category.CPU_OP, name, start, start + 1, thread=thread) for name, start, thread in calls]
    messages = messages_in_ranges(make_trace(rows).events, ranges(("PP:0F0", 0, 5), ("PP:0F1", 5, 10)), "torch")
    found = [
        (entry.start_ns, action.kind, action.microbatch)
        for entry in messages.objects()
        for action in entry.label.actions
    ]
    assert found == [(7, Kind.SEND_F, 1), (2, Kind.RECV_F, 0)]


def test_ops_without_ranges_of_steps_are_all_kept() -> None:
    counted = ranges(("PP:0F0", 0, 5), ("PP:0F1", 5, 9), ("PP:0F0", 10, 15))
    assert num_outside_steps(counted, steps_of_ranges(counted)) == 0
