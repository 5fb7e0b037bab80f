"""Steps that repetition tells of ranks that exchange messages, as rings of context parallelism do; of a pipeline that is not
recognised its optimizers alone tell them.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pptrace.model.tables import COMM_ARGS
from pptrace.model.traces import Category, Trace
from tests.support.analysed import analyse, recognise
from tests.support.synthetic import MAIN_THREAD, START, Event, make_trace
from tests.support.tables import table_of

STEP = 100_000


def trace_of(rank: int, messages: list[tuple[str, int]], num_steps: int = 4, update: str = "SGD.step") -> Trace:
    """A rank's steps: three operators that compute, a node of autograd's engine and an update, with messages at these times."""
    events, rows = [], []

    def add(category: Category, name: str, start: int, lasts: int) -> None:
        events.append(Event(category, name, start, start + lasts, thread=MAIN_THREAD))

    for step in range(num_steps):
        at = START + step * STEP
        for index in range(3):
            add(Category.CPU_OP, "aten::mm", at + 10_000 * index, 8_000)
        add(Category.CPU_OP, "autograd::engine::evaluate_function: MmBackward0", at + 40_000, 8_000)
        if update:
            add(Category.ANNOTATION, f"Optimizer.step#{update}", at + 60_000, 5_000)
        add(Category.CPU_OP, "aten::_foreach_add_", at + 60_100, 4_000)
        for kind, when in messages:
            add(Category.CPU_OP, "c10d::send" if kind == "send" else "c10d::recv_", at + when, 10)
            add(Category.ANNOTATION, f"gloo:{kind}", at + when + 5, 100)
    trace = make_trace(events, rank)
    for index, code in enumerate(trace.events.name_id.tolist()):
        if (name := trace.events.names[code]).startswith("c10d::"):
            end = "dst" if name == "c10d::send" else "src"
            rows.append({"event": index, end: 1 - rank, "in_bytes": 64, "out_bytes": 64})
    return replace(trace, events=replace(trace.events, comm_args=table_of(COMM_ARGS, rows, -1)))


EXCHANGE = [("send", 8_200), ("recv", 8_400), ("send", 28_200), ("recv", 28_400)]


def test_steps_of_ranks_that_only_exchange_are_those_that_repeat() -> None:
    run = recognise([trace_of(rank, EXCHANGE) for rank in range(2)])
    steps = run.ops[(run.ops["kind"] == "STEP") & (run.ops["rank"] == 0)]
    assert (steps["end_ns"] - steps["start_ns"]).tolist() == [STEP] * 3
    assert any(line.startswith("nothing marks the steps: 3 steps from what repeats") for line in run.warnings)


@pytest.mark.parametrize("update", ["SGD.step", ""])
@pytest.mark.parametrize("messages", [[*EXCHANGE, ("send", 50_000)], [("send", 8_200), ("recv", 18_400)]])
def test_where_compute_may_read_a_message_and_make_the_next_optimizers_alone_tell_the_steps(
    messages: list[tuple[str, int]], update: str
) -> None:
    answers = [("recv" if kind == "send" else "send", at) for kind, at in messages]
    analysed = analyse([trace_of(rank, sides, 5, update) for rank, sides in enumerate((messages, answers))])
    report = analysed.report
    assert len(report.steps) == (4 if update else 0)
    for step in report.steps:
        assert (step.length_ns, step.has_pipeline) == (STEP, False)
        assert [rank.compute_ns for rank in step.ranks] == [36_000] * 2
        assert all(rank.exposed_comm_ns is not None for rank in step.ranks)
    assert any("forward or backward of a microbatch recognised" in line for line in report.warnings)
