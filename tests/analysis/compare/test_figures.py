"""Figures of steps as means over ranks, by hand, and which steps they are of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from pptrace.analysis.compare.figures import (
    BUBBLE,
    RANGE,
    Place,
    Series,
    _causes,
    _knows_communication,
    _mean_over_ranks,
    _mean_over_stages,
    _of_ranks,
)
from pptrace.analysis.report import Report
from pptrace.analysis.result import (
    ClockSummary,
    CommSummary,
    InputInfo,
    PhaseSummary,
    RankStep,
    ScheduleSummary,
    StepReport,
)
from pptrace.analysis.whole_run import Bubble, Cause
from pptrace.model.mesh import MeshSizes
from tests.support.parts import rank_step

PHASES = {"steady": PhaseSummary(0, 9, 1, 1, 3)}


def rank_of(**changes: Any) -> RankStep:
    return replace(rank_step(0, 600, 100, 300), **changes)


def step_of(*ranks: RankStep, span: int | None = 1000, causes: tuple[Cause, ...] | None = None) -> StepReport:
    ideal = None if causes is None else (span or 0) - sum(cause.ns for cause in causes)
    return StepReport(
        **{"step": 0, "start_ns": 0, "end_ns": 9, "span_ns": span},
        bubble=Bubble(None, None, None, None, None),
        ranks=ranks,
        ideal_ns=ideal,
        causes=causes,
    )


def values(series: dict[Place, Series]) -> dict[tuple[object, ...], list[float]]:
    return {tuple(value for _, value in place): of.tolist() for place, of in series.items()}


def test_figures_of_ranks_are_means_and_not_known_where_one_is_not() -> None:
    steps = [
        step_of(rank_of(bubble_ns=10), rank_of(bubble_ns=30)),
        step_of(rank_of(bubble_ns=7), rank_of(bubble_ns=None)),
    ]
    (series,) = _of_ranks(steps)[BUBBLE].values()
    assert series[0] == 20
    assert np.isnan(series[1])
    alone = [step_of(rank_of(), rank_of(spans={"OPTIMIZER": 50, "STEP": 900})), step_of(rank_of(spans={"GC": 4}))]
    assert values(_of_ranks(alone)[RANGE]) == {("OPTIMIZER",): [25, 0], ("GC",): [0, 4]}


def test_causes_are_those_of_all_steps_wherever_they_are() -> None:
    first = step_of(rank_of(), causes=(Cause("jitter", {"rank": 0}, 30), Cause("jitter", {"rank": 1}, 40)))
    second = step_of(rank_of(), causes=(Cause("straggler", {"rank": 1}, 9), Cause("communication", {}, 6)))
    known = values(_causes([first, second], with_communication=True))
    assert known["jitter",] == [70, 0]
    assert known["straggler",] == [0, 9]
    assert known["communication",] == [0, 6]
    assert known["compute",] == [930, 985]
    assert set(known) == set(values(_causes([first, second], with_communication=False))) | {("communication",)}
    assert _causes([first, step_of(rank_of())], with_communication=True) == {}


@pytest.mark.parametrize(
    ("formats", "exposed", "comms", "phases", "knows"),
    [
        (("kineto", "nsys-sqlite"), 3, True, PHASES, True),
        (("kineto", "chrome"), 3, True, PHASES, False),
        (("kineto",), None, True, PHASES, False),
        (("kineto",), 3, False, PHASES, False),
        (("kineto",), 3, False, {}, True),  # without a pipeline there may be nothing to communicate
        (("kineto",), None, False, {}, False),
    ],
)
def test_all_communication_is_known_of_profilers_that_tell_waiting_from_transfer(
    formats: tuple[str, ...], exposed: int | None, comms: bool, phases: dict[str, PhaseSummary], knows: bool
) -> None:
    calls = (CommSummary("pp", "send", 1, 8, 9, 0, 0, 1, None, None, None),) if comms else ()
    steps = [step_of(rank_of(comms=calls, phases=phases), rank_of(exposed_comm_ns=exposed))]
    report = Report(
        **{
            "pptrace_version": "0",
            "framework": "other",
            "marked_steps": (),
            "device": (),
            "findings": (),
            "warnings": (),
        },
        inputs=tuple(InputInfo("x", name, 0, 1, "", ()) for name in formats),
        mesh=MeshSizes(2, 2, 1, 1, 1, 1, 1),
        schedule=ScheduleSummary("1f1b", 4, 2, 1, "marks", ()),
        clock=ClockSummary("none", {}, 0),
        steps=tuple(steps),
    )
    assert _knows_communication(report, steps) is knows


def test_compute_is_the_mean_over_the_ranks_of_a_stage_and_over_all_ranks_by_kind() -> None:
    forward = [(("kind", "F"), ("stage", stage)) for stage in (0, 1)]
    ranks = [{forward[0]: np.array([10.0])}, {forward[0]: np.array([30.0])}, {forward[1]: np.array([5.0])}]
    assert values(_mean_over_stages(ranks)) == {("F", 0): [20], ("F", 1): [5]}
    both = [{forward[0]: np.array([10.0]), forward[1]: np.array([2.0])}, {forward[1]: np.array([6.0])}]
    assert values(_mean_over_ranks(both)) == {("F",): [9]}
