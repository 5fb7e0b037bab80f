"""Parts of two runs are matched at the finest level that both have."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from pptrace.analysis.compare.figures import BUBBLE, CAUSE, COMPUTE, COMPUTE_OF_RANKS, EXPOSED, IDLE, Place, StepFigures
from pptrace.analysis.compare.matching import match_figures, unmatched_names

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
