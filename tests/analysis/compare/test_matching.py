"""Parts of two runs are matched at the finest level that both have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from pptrace.analysis.compare.figures import (
    BUBBLE,
    CAUSE,
    COMPUTE,
    COMPUTE_OF_RANKS,
    EXPOSED,
    IDLE,
    WINDOW,
    Place,
    StepFigures,
)
from pptrace.analysis.compare.matching import joined, lines_on_windows, match_figures, unmatched_names

STEPS = 3


def figures(
    compute: dict[tuple[str, int], int] | None = None,
    knows_communication: bool = True,
    **parts: dict[Place, int],
) -> StepFigures:
    """Figures that are the same in all steps; of ranks, compute is a hundredth of all stages'."""
    every: dict[str, dict[Place, int]] = {name.replace("_", " "): places for name, places in parts.items()}
    if compute:
        every[COMPUTE] = {(("kind", kind), ("stage", stage)): ns for (kind, stage), ns in compute.items()}
        of_ranks = every.setdefault(COMPUTE_OF_RANKS, {})
        for (kind, _), ns in compute.items():
            of_ranks[("kind", kind),] = of_ranks.get((("kind", kind),), 0) + ns // 100
    window = np.full(STEPS, 1000, dtype=np.int64)
    series = {
        name: {place: np.full(STEPS, float(ns)) for place, ns in places.items()} for name, places in every.items()
    }
    return StepFigures(window, window, series, knows_communication)


def matched(a: StepFigures, b: StepFigures, is_same_schedule: bool = True) -> dict[tuple[object, ...], tuple[int, int]]:
    """(name, coordinates…) → what A and B have."""
    return {
        (part.name, *(value for _, value in part.place)): (int(part.a[0]), int(part.b[0]))
        for part in match_figures(a, b, is_same_schedule)
    }


WHOLE = {("F", 0): 100, ("F", 1): 200, ("B", 0): 300, ("B", 1): 400}
SPLIT = {("F", 0): 100, ("F", 1): 200, ("I", 0): 110, ("I", 1): 210, ("W", 0): 120, ("W", 1): 220}


def test_split_backwards_are_whole_ones_against_whole_ones() -> None:
    parts = matched(figures(WHOLE), figures(SPLIT), is_same_schedule=False)
    assert parts == {
        ("compute", "F", 0): (100, 100),
        ("compute", "F", 1): (200, 200),
        ("compute", "B", 0): (300, 230),
        ("compute", "B", 1): (400, 430),
    }


def test_backwards_that_are_partly_split_are_taken_together_unless_the_schedule_is_the_same() -> None:
    mixed = {**SPLIT, ("B", 0): 50}
    assert matched(figures(mixed), figures(mixed), is_same_schedule=False)["compute", "B", 0] == (280, 280)
    assert matched(figures(mixed), figures(mixed), is_same_schedule=True)["compute", "W", 0] == (120, 120)


def test_other_stages_are_compared_by_kind_over_all_ranks() -> None:
    one = {("F", 0): 100, ("B", 0): 300}
    assert matched(figures(one), figures(SPLIT)) == {("compute", "F"): (1, 3), ("compute", "B"): (3, 6)}


def test_of_runs_with_as_many_stages_those_are_compared_that_both_have_traces_of() -> None:
    of_first = {place: ns for place, ns in WHOLE.items() if place[1] == 0}
    whole, first = (replace(figures(compute), num_stages=2) for compute in (WHOLE, of_first))
    assert matched(whole, first) == {("compute", "F", 0): (100, 100), ("compute", "B", 0): (300, 300)}
    assert matched(whole, replace(first, num_stages=1)) == {("compute", "F"): (3, 1), ("compute", "B"): (7, 3)}


def test_overlapped_pairs_are_compared_with_both_kinds_together() -> None:
    pairs = {("F", 0): 100, ("OVERLAP_F_B", 0): 500, ("I", 0): 200, ("W", 0): 300}
    parts = matched(figures(pairs), figures({("F", 0): 400, ("B", 0): 700}), is_same_schedule=False)
    assert parts == {("compute", "F+B"): (11, 11)}


def test_bubbles_without_phases_are_compared_as_a_whole() -> None:
    phases: dict[Place, int] = {(("phase", "warmup"),): 5, (("phase", "steady"),): 6, (("phase", "cooldown"),): 7}
    by_phase, whole = figures(bubble=phases), figures(bubble={(): 20})
    assert matched(by_phase, whole) == {(BUBBLE,): (18, 20)}
    assert matched(by_phase, by_phase)[BUBBLE, "steady"] == (6, 6)


def exposed(**kinds: int) -> StepFigures:
    """Exposed communication, by ``axis_kind``."""
    places: dict[Place, int] = {}
    for name, ns in kinds.items():
        axis, _, kind = name.partition("_")
        places[("axis", axis), ("kind", kind)] = ns
    return figures(exposed_communication=places)


def test_an_axis_with_other_calls_is_compared_as_a_whole() -> None:
    parts = matched(exposed(dp_all_reduce=9, pp_recv=3), exposed(dp_reduce_scatter=4, dp_all_gather=4, pp_recv=2))
    assert parts == {(EXPOSED, "dp"): (9, 8), (EXPOSED, "pp", "recv"): (3, 2)}


def test_an_axis_is_left_out_where_waiting_is_not_told_from_transfer() -> None:
    a, b = exposed(tp_all_reduce=9), figures(knows_communication=False)
    assert matched(a, b) == {}
    assert list(unmatched_names(a, b)) == [(EXPOSED, "B")]


def test_a_rare_cause_that_one_run_does_not_have_is_0_there() -> None:
    a = figures(cause={(("cause", "straggler"),): 5, (("cause", "jitter"),): 6, (("cause", "communication"),): 8})
    b = figures(cause={(("cause", "jitter"),): 7})
    assert matched(a, b) == {(CAUSE, "straggler"): (5, 0), (CAUSE, "jitter"): (6, 7)}


def test_the_host_is_no_cause_only_where_it_is_known_why_devices_were_idle() -> None:
    a = figures(cause={(("cause", "host"),): 5})
    idle: dict[Place, int] = {(("reason", "blocking"),): 5}
    assert matched(a, figures(cause={(("cause", "jitter"),): 7})) == {}
    assert matched(a, figures(cause={(("cause", "jitter"),): 7}, device_idle=idle)) == {(CAUSE, "host"): (5, 0)}


def test_idle_time_of_one_run_alone_is_not_compared() -> None:
    a = figures(device_idle={(("reason", "blocking"),): 5})
    assert matched(a, figures()) == {}
    assert list(unmatched_names(a, figures())) == [(IDLE, "B")]


def plain(rest: str = "gaps", **named: float) -> StepFigures:
    """Steps of 1,100 without a pipeline, whose windows of 1,000 have these parts: nan is not known."""
    parts = {(("part", name.replace("_", " ")),): ns for name, ns in named.items()}
    parts[("rest", rest),] = 1000 - sum(named.values())
    series = {WINDOW: {place: np.full(STEPS, float(ns)) for place, ns in parts.items()}}
    period, window = np.full(STEPS, 1100, dtype=np.int64), np.full(STEPS, 1000, dtype=np.int64)
    return StepFigures(None, window, series, knows_communication=False, period=period, has_pipeline=False)


def summed(a: StepFigures, b: StepFigures) -> dict[str, tuple[int, int]]:
    """The parts that sum to the steps of A and of B; that they do."""
    parts = {
        part.name: (int(part.a[0]), int(part.b[0])) for part in match_figures(a, b, True) if part.lengths is not None
    }
    assert not parts or [sum(of) for of in zip(*parts.values(), strict=True)] == [1100, 1100]
    return parts


COMMON = {"compute": 600.0, "exposed_communication": 100.0}


def test_windows_with_the_same_parts_keep_the_name_of_the_rest() -> None:
    a, b = plain(**COMMON, loading=50), plain(**COMMON | {"compute": 500}, loading=0)
    assert summed(a, b) == {
        **{"compute": (600, 500), "exposed communication": (100, 100), "loading": (50, 0), "gaps": (250, 400)},
        "outside the ranks' windows": (100, 100),
    }
    assert list(lines_on_windows(a, b)) == []


@pytest.mark.parametrize(
    ("of_b", "rest", "num_apart"),
    [
        ({"loading": 50}, "rest", 2),
        ({"rest": "waiting"}, "rest", 2),
        ({"compute": 500}, "gaps", 0),
    ],
)
def test_what_one_run_does_not_tell_apart_is_in_the_rest_of_both(
    of_b: dict[str, Any], rest: str, num_apart: int
) -> None:
    a, b = plain(**COMMON), plain(**COMMON | of_b)
    assert set(summed(a, b)) == {"compute", "exposed communication", rest, "outside the ranks' windows"}
    lines = list(lines_on_windows(a, b))
    assert len(lines) == bool(num_apart)
    assert all(line.startswith("rest is one part") and line.count(" in ") == num_apart for line in lines)


def test_the_rest_has_communication_where_one_run_does_not_know_it() -> None:
    waiting = "communication_that_no_compute_hides,_with_the_waiting_in_it"
    a, b = plain(compute=600, loading=10, **{waiting: 90}), plain(**COMMON, loading=10)
    assert summed(a, b)["other rest, with exposed communication"] == (390, 390)
    assert "gaps" in summed(a, plain(compute=500, loading=10, **{waiting: 0}))
    assert "other rest" in summed(a, plain("waiting", compute=500, loading=10, **{waiting: 0}))


def test_a_part_that_is_not_known_in_some_steps_is_in_the_rest() -> None:
    a, b = plain(**COMMON, loading=50), plain(**COMMON, loading=50)
    a.parts[WINDOW][("part", "loading"),][1] = np.nan
    parts = summed(a, b)
    assert "loading" not in parts
    assert parts["rest"] == (300, 300)


def test_steps_of_which_nothing_is_known_are_left_out() -> None:
    a, b = plain(**COMMON), plain(**COMMON)
    for series in a.parts[WINDOW].values():
        series[2] = np.nan
    parts = [part for part in match_figures(a, b, True) if part.lengths is not None]
    assert len(parts) == 4
    assert all(np.isnan(part.a).tolist() == [False, False, True] for part in parts)
    for series in a.parts[WINDOW].values():
        series[:] = np.nan
    assert summed(a, b) == {}
    assert [line.partition(":")[0] for line in lines_on_windows(a, b)] == ["what a step was spent on is not known in A"]


def test_several_runs_are_without_a_pipeline_where_one_is() -> None:
    runs = [plain(**COMMON), plain(**COMMON)]
    assert not joined(runs).has_pipeline
    assert set(summed(joined(runs), runs[0])) == set(summed(*runs))
    assert not joined([runs[0], replace(runs[1], has_pipeline=True)]).has_pipeline
    assert joined([replace(run, has_pipeline=True) for run in runs]).has_pipeline
