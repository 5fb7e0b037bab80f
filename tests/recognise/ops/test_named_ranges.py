"""Ranges that others recorded of what is no op: which names say so, and the step of each."""

from __future__ import annotations

import numpy as np
import pytest

from pptrace.model.tables import OPS
from pptrace.model.traces import Category
from pptrace.recognise.device.work import device_work
from pptrace.recognise.ops.host_compute import host_work
from pptrace.recognise.ops.named_ranges import ranges_around, with_named_ranges
from tests.support.synthetic import Event, make_trace
from tests.support.tables import named, table_of

NAMES = {
    "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__": "DATA",
    "get_batch": "DATA",
    "Data loading": "DATA",
    "[pl][profile][_TrainingEpochLoop].train_dataloader_next": "DATA",
    "save_checkpoint": "CHECKPOINT",
    "model checkpoint": "CHECKPOINT",
    "logging": "LOGGING",
    "pptrace.mark: checkpoint": "CHECKPOINT",
    "pptrace.mark: logging": "LOGGING",
    "log_metrics": "LOGGING",
    "gc.collect": "GC",
    "validation_loop": "EVAL",
    "Evaluation": "EVAL",
    "database": "",
    "checkpoint_wrapper": "",
    "logits": "",
    "dataclass": "",
}


@pytest.mark.parametrize("kind_of_ops", ["OPTIMIZER", "F"])
@pytest.mark.parametrize(("name", "begin"), [*((name, 110) for name in NAMES), ("get_batch", 185), ("get_batch", 165)])
def test_a_name_says_what_its_range_is(name: str, begin: int, kind_of_ops: str) -> None:
    """Data is that of the step whose first op comes next; of steps without ops, of the one that it is in, else the next."""
    steps = [("STEP", step, 100 * step, 100 * step + 80) for step in range(3)]
    steps += [(kind_of_ops, step, 100 * step + 30, 100 * step + 60) for step in range(3)]
    ops = table_of(OPS, named("kind step start_ns end_ns", steps), -1).assign(clock="host", source="label")
    events = make_trace([Event(Category.ANNOTATION, name, begin, begin + 10, thread=1)]).events
    found = with_named_ranges(ops, events, device_work(events)).iloc[6:]
    is_of_next = begin >= (180 if kind_of_ops == "OPTIMIZER" else 130) and NAMES[name] == "DATA"
    expected = [(NAMES[name], 2 if is_of_next else 1, begin, begin + 10)] if NAMES[name] else []
    assert list(zip(found["kind"], found["step"], found["start_ns"], found["end_ns"], strict=True)) == expected


@pytest.mark.parametrize(("clock", "step"), [("host", 0), ("device", 1)])
def test_data_between_ops_of_a_host_is_of_their_step_and_between_those_of_a_device_of_the_next(
    clock: str, step: int
) -> None:
    """A device may still run a step's ops while its host loads the next step's data."""
    rows = [("F", at // 100, at, at + 20) for at in (0, 60, 100, 160)]
    ops = table_of(OPS, named("kind step start_ns end_ns", rows), -1).assign(clock=clock, source="label")
    events = make_trace([Event(Category.ANNOTATION, "get_batch", 30, 50, thread=1)]).events
    assert with_named_ranges(ops, events, device_work(events)).iloc[4:]["step"].tolist() == [step]


def test_ranges_count_once_and_of_the_threads_that_train_but_all_stand_still_in_collections() -> None:
    ranges = [("ProfilerStep#1", 100, 180, 1), ("Data loading", 110, 130, 1), ("get_batch", 112, 120, 1)]
    ranges += [("get_batch", 140, 150, 2), ("gc.collect", 160, 170, 2)]
    events = make_trace([Event(Category.ANNOTATION, name, *times, thread=at) for name, *times, at in ranges]).events
    ops = table_of(OPS, named("kind step start_ns end_ns", [("F", 1, 135, 155)]), -1).assign(
        clock="host", source="label"
    )
    found = with_named_ranges(ops, events, device_work(events)).iloc[1:]
    assert list(zip(found["kind"], found["start_ns"], strict=True)) == [("GC", 160), ("DATA", 110)]


def test_a_host_computes_in_operators_but_for_those_that_load_save_or_log_on_their_thread() -> None:
    operators = [("aten::mm", 0, 9, 1), ("c10d::send", 10, 19, 1), ("aten::cat", 25, 30, 1), ("aten::cat", 28, 35, 2)]
    ranges = [("get_batch", 20, 40, 1), ("logging", 50, 60, 1)]
    events = [
        Event(Category.CPU_OP, name, *times, thread=at) for name, *times, at in [*operators, ("aten::add", 55, 57, 1)]
    ]
    events += [Event(Category.ANNOTATION, name, *times, thread=at) for name, *times, at in ranges]
    assert host_work(make_trace(events).events).tolist() == [[0, 9], [28, 35]]


def test_pauses_are_in_the_innermost_range_of_the_thread_that_trains() -> None:
    """Pauses of 2 ms: in an update, in the range around it, in a thread that only waits, and between two nodes of a backward."""
    ms, node = 1_000_000, "autograd::engine::evaluate_function: AddmmBackward0"
    ranges = [
        ("ProfilerStep#1", 0, 12, 1),
        ("iteration 3", 0, 12, 1),
        ("update 7", 0, 5, 1),
        ("Optimizer.step#SGD.step", 1, 3, 1),
        ("pin memory", 0, 12, 2),
        ("next", 11, 12, 1),
    ]
    events = [Event(Category.ANNOTATION, name, begin * ms, end * ms, thread=at) for name, begin, end, at in ranges]
    operators = [("aten::add_", 0, 1), ("aten::mul_", 3, 3), (node, 5, 6), (node, 8, 9), ("aten::linear", 11, 11)]
    events += [Event(Category.CPU_OP, name, begin * ms, end * ms, thread=1) for name, begin, end in operators]
    pauses = np.array([(1, 3), (3, 5), (6, 8), (9, 11)]) * ms
    found = ranges_around(make_trace(events).events, pauses)
    assert found.names == ("Optimizer.step#SGD.step", "update 7", "backward")
    assert (found.name.tolist(), (found.start_ns // ms).tolist()) == ([0, 1, 2], [1, 3, 6])
    assert (found.end_ns - found.start_ns).tolist() == [2 * ms] * 3
