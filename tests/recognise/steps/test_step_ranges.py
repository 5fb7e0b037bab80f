"""Ranges that a script numbers itself are steps, as those of torch's profiler are; others with numbers are not."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import pytest

from pptrace.model.traces import Category, Trace
from pptrace.recognise.rank import recognise_rank
from pptrace.recognise.run import RecognisedRun, recognise_ranks
from tests.support.synthetic import START, Event, make_trace

_LINE = "nothing else marks the steps"
_FORWARD, _BACKWARD = (Category.CPU_OP, "aten::linear"), (Category.CPU_OP, "autograd::engine::evaluate_function: A0")
_UPDATE = (Category.ANNOTATION, "Optimizer.step#SGD.step")
_ALL = (_FORWARD, _BACKWARD, _UPDATE)
_WORK = {_FORWARD: 100, _BACKWARD: 200, _UPDATE: 400}


def loop(ranges: Sequence[Sequence[str]], inside: Sequence[tuple[Category, str]] = _ALL, rank: int = 0) -> Trace:
    """Turns of a forward, a backward and a long update; a turn has these ranges around what is ``inside``, the last outermost."""
    events, now = list[Event](), START
    for names in ranges:
        begin = end = now
        for work in _ALL:
            events.append(Event(*work, now, now + _WORK[work] - 20, thread=1))
            begin = now if work == inside[0] else begin
            now += _WORK[work]
            end = now if work == inside[-1] else end
        events += [
            Event(Category.ANNOTATION, name, begin, end - at, thread=1) for at, name in enumerate(reversed(names))
        ]
    return make_trace(events, rank)


def numbered(form: str, numbers: Sequence[int] = (3, 4, 5, 6)) -> list[list[str]]:
    return [[form.format(number)] for number in numbers]


def recognised(*traces: Trace) -> RecognisedRun:
    return recognise_ranks([recognise_rank(trace) for trace in traces])


def steps(run: RecognisedRun, rank: int = 0) -> list[int]:
    return run.ops.loc[(run.ops["kind"] == "STEP") & (run.ops["rank"] == rank), "step"].tolist()


FORMS = ["iteration_{}", "iteration {}", "iter_{}", "train_step_{}", "step#{}", "Step {}", "Iteration: {}"]


@pytest.mark.parametrize("form", [*FORMS, "training-iter{}"])
def test_a_numbered_sequence_is_that_of_the_steps(form: str) -> None:
    run, reference = recognised(loop(numbered(form))), recognised(loop(numbered("ProfilerStep#{}")))
    assert steps(run) == [3, 4, 5, 6]
    pd.testing.assert_frame_equal(run.ops, reference.ops)
    assert [line for line in run.warnings if line not in reference.warnings] == [
        f"{_LINE}: they are the ranges {form.format(3)!r} to {form.format(6)!r} of the script"
    ]


@pytest.mark.parametrize(
    "trace",
    [
        *(loop(numbered(form)) for form in ("microbatch_{}", "layer_{}", "forward_{}", "eval_step_{}", "substep {}")),
        loop(numbered("step_{}", [3])),
        loop(numbered("step_{}", [0, 1, 0, 1])),
        loop(numbered("step_{}", [3, 2, 1, 0])),
        loop(numbered("step_{}", [0, 10, 20])),
        loop([["step_1", "step_0"], ["step_2"]]),
        loop(numbered("step_{}"), inside=(_UPDATE,)),
        loop(numbered("step_{}"), inside=(_FORWARD, _BACKWARD)),
    ],
    ids=[
        *("microbatch", "layer", "forward", "eval", "substep", "one", "again", "backwards", "gaps", "at once"),
        *("updates alone", "no update"),
    ],
)
def test_other_ranges_with_numbers_are_no_steps(trace: Trace) -> None:
    run = recognised(trace)
    assert steps(run) == list(range(len(steps(run)))), "those from one update to the next, if any"
    assert not any(_LINE in line for line in run.warnings)


def test_ranges_that_leave_out_most_of_the_time_are_no_steps() -> None:
    names = [name if at % 4 == 0 else [] for at, name in enumerate(numbered("step_{}", [0, 0, 0, 0, 1, 1, 1, 1, 2]))]
    assert not any(_LINE in line for line in recognised(loop(names)).warnings)


def test_of_two_sequences_the_steps_are_those_around_the_other() -> None:
    assert steps(recognised(loop([[f"iter_{at}", f"step_{at + 7}"] for at in range(3)]))) == [7, 8, 9]


def test_the_profilers_own_steps_come_first() -> None:
    both = [[f"ProfilerStep#{at}", f"iteration_{at + 7}"] for at in range(3)]
    assert steps(recognised(loop(both))) == [0, 1, 2]


def test_ranges_on_few_ranks_are_left_for_what_all_ranks_have() -> None:
    few, others = loop(numbered("iter_{}")), [loop([[]] * 4, rank=rank) for rank in (1, 2)]
    run = recognised(few, *others)
    assert [steps(run, rank) for rank in range(3)] == [[0, 1, 2]] * 3
    assert not any(_LINE in line for line in run.warnings)
    run = recognised(few, loop(numbered("iter_{}"), rank=1), others[1])
    assert [steps(run, rank) for rank in range(3)] == [[3, 4, 5, 6], [3, 4, 5, 6], []]
    assert sum(_LINE in line for line in run.warnings) == 1
