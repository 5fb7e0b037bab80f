"""Figures of steps as means over ranks, by hand, and which steps they are of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pptrace.analysis.compare.figures import (
    BUBBLE,
    EXPOSED,
    IDLE,
    RANGE,
    Place,
    Series,
    _causes,
    _knows_communication,
    _mean_over_ranks,
    _mean_over_stages,
    _of_ranks,
    _parts_of,
    whole_steps,
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
from pptrace.model.device import DeviceBreakdown
from pptrace.model.device_idle import HostIdle
from pptrace.model.mesh import MeshSizes

NO_DEVICE = DeviceBreakdown(None, None, None, None, None, None, None, None)


def rank_of(**changes: Any) -> RankStep:
    return replace(RankStep(0, 0, 1000, 600, 100, 300, {}, (), {}, NO_DEVICE, None, ()), **changes)


def step_of(*ranks: RankStep, span: int | None = 1000, causes: tuple[Cause, ...] | None = None) -> StepReport:
    ideal = None if causes is None else (span or 0) - sum(cause.ns for cause in causes)
    return StepReport(0, 0, 9, span, Bubble(None, None, None, None, None), ranks, ideal, causes)


def comm_of(axis: str, kind: str, exposed: int | None) -> CommSummary:
    return CommSummary(axis, kind, 1, 8, 9, 0, 0, exposed, None, None, None)


def values(series: dict[Place, Series]) -> dict[tuple[object, ...], list[float]]:
    return {tuple(value for _, value in place): of.tolist() for place, of in series.items()}


def parts_of(rank: RankStep, wanted: str) -> list[tuple[Place, int | None]]:
    return [(place, ns) for name, place, ns in _parts_of(rank) if name == wanted]


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


def test_bubbles_are_by_phase_where_there_are_phases() -> None:
    phases = {"warmup": PhaseSummary(0, 9, 1, 0, 5), "steady": PhaseSummary(9, 20, 1, 1, None)}
    assert parts_of(rank_of(phases=phases), BUBBLE) == [((("phase", "warmup"),), 5), ((("phase", "steady"),), None)]
    assert parts_of(rank_of(), BUBBLE) == [((), 300)]


def test_idle_time_is_not_known_without_a_device() -> None:
    names = ("launch_starved", "blocking", "dependency")
    assert parts_of(rank_of(), IDLE) == [((("reason", name),), None) for name in names]
    host = rank_of(host=HostIdle(1, 2, 3))
    assert parts_of(host, IDLE) == [((("reason", name),), ns) for name, ns in zip(names, (1, 2, 3), strict=True)]


def test_exposed_communication_is_by_axis_and_kind() -> None:
    rank = rank_of(comms=(comm_of("dp", "all_reduce", 5), comm_of("pp", "send", None)))
    found = parts_of(rank, EXPOSED)
    assert found == [((("axis", "dp"), ("kind", "all_reduce")), 5), ((("axis", "pp"), ("kind", "send")), None)]


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


def test_steps_that_are_explained_are_compared_else_those_of_known_length() -> None:
    empty, unknown, known = step_of(), step_of(rank_of(), span=None), step_of(rank_of())
    explained = step_of(rank_of(), causes=())
    assert whole_steps([empty, unknown, known, explained]) == [explained]
    assert whole_steps([empty, unknown, known]) == [known]
    assert whole_steps([empty, unknown]) == [unknown]
    assert whole_steps([empty]) == []


@pytest.mark.parametrize(
    ("formats", "exposed", "comms", "knows"),
    [
        (("kineto", "nsys-sqlite"), 3, True, True),
        (("kineto", "chrome"), 3, True, False),
        (("kineto",), None, True, False),
        (("kineto",), 3, False, False),
    ],
)
def test_all_communication_is_known_of_profilers_that_tell_waiting_from_transfer(
    formats: tuple[str, ...], exposed: int | None, comms: bool, knows: bool
) -> None:
    steps = [step_of(rank_of(comms=(comm_of("pp", "send", 1),) if comms else ()), rank_of(exposed_comm_ns=exposed))]
    report = Report(
        *("0", (), "other", MeshSizes(2, 2, 1, 1, 1, 1, 1), ScheduleSummary("1f1b", 4, 2, 1, "marks", ())),
        *(ClockSummary("none", {}, 0), tuple(steps), (), (), (), ()),
    )
    report = replace(report, inputs=tuple(InputInfo("x", name, 0, 1, "", ()) for name in formats))
    assert _knows_communication(report, steps) is knows


def test_compute_is_the_mean_over_the_ranks_of_a_stage_and_over_all_ranks_by_kind() -> None:
    forward = [(("kind", "F"), ("stage", stage)) for stage in (0, 1)]
    ranks = [{forward[0]: np.array([10.0])}, {forward[0]: np.array([30.0])}, {forward[1]: np.array([5.0])}]
    assert values(_mean_over_stages(ranks)) == {("F", 0): [20], ("F", 1): [5]}
    both = [{forward[0]: np.array([10.0]), forward[1]: np.array([2.0])}, {forward[1]: np.array([6.0])}]
    assert values(_mean_over_ranks(both)) == {("F",): [9]}
