"""Matching of two runs' figures by structure: each part at the finest level that both runs have.

Names of kernels, ops and groups take no part in it, so that runs of different schedules, torch versions and models compare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from msgspec import Struct

from pptrace.analysis.compare.figures import (
    BUBBLE,
    CAUSE,
    COMPUTE,
    COMPUTE_OF_RANKS,
    EXPOSED,
    IDLE,
    RANGE,
    WINDOW,
    Place,
    Series,
    StepFigures,
)
from pptrace.analysis.findings import window_parts
from pptrace.model.known import all_known
from pptrace.model.tables import Int64
from pptrace.model.wording import listed
from pptrace.schedule.actions import Kind

Parts = Mapping[Place, Series]
_FORWARD, _BACKWARD, _PAIR = str(Kind.F), str(Kind.B), str(Kind.OVERLAP_F_B)
_HALVES = (str(Kind.I), str(Kind.W))
_UNKNOWN = -1
OUTSIDE_WINDOWS = "outside the ranks' windows"
"""Time that a step takes beyond the mean window of its ranks; below 0 where windows reach into the next step."""
_COMPUTE_OF_WINDOW: Place = (("part", window_parts.COMPUTE),)
_ALL = "F+B"
"""Forwards and backwards together, where one run overlaps them in pairs."""


class MatchedPart(Struct, frozen=True, eq=False):
    """One part of the step in both runs: a value per whole step of each, ns; NaN where it is not known. ``lengths`` are those of
    the steps to which it sums with others, None where it is none of such parts.
    """

    name: str
    place: Place
    a: Series
    b: Series
    lengths: tuple[Int64, Int64] | None = None


def match_figures(
    a: StepFigures, b: StepFigures, is_same_schedule: bool, lengths: tuple[Int64, Int64] | None = None
) -> Iterator[MatchedPart]:
    """The parts that both runs have: compute first, then by name. Where one has no pipeline they are those of the ranks' windows,
    and what they leave of the ``lengths`` of steps.
    """
    has_pipelines = a.has_pipeline and b.has_pipeline
    if has_pipelines:
        yield from _match_compute(a, b, is_same_schedule)
    else:
        yield from _match_windows(a, b, lengths or (a.lengths, b.lengths))
    for name in _BESIDE_COMPUTE:
        of_a, of_b = a.parts.get(name, {}), b.parts.get(name, {})
        if ((of_a and of_b) or name == EXPOSED) and (has_pipelines or name not in _OF_PIPELINES):
            level = _level(name, of_a, of_b)
            yield from _match(name, _summed(of_a, level), _summed(of_b, level), a, b)


def _match_windows(a: StepFigures, b: StepFigures, lengths: tuple[Int64, Int64]) -> Iterator[MatchedPart]:
    """The parts of the ranks' windows that both runs tell apart, what they leave of the windows, and of the steps."""
    of_a, of_b = _known_of_windows(a), _known_of_windows(b)
    common, rest = _common_of_windows(of_a, of_b)
    if not common:
        return
    parts = {str(place[0][1]): (of_a[place], of_b[place]) for place in common}
    known = parts[window_parts.COMPUTE]
    windows = [np.where(np.isnan(of), np.nan, run.window) for of, run in zip(known, (a, b), strict=True)]
    left_a, left_b = (window - sum(both[side] for both in parts.values()) for side, window in enumerate(windows))
    beyond_a, beyond_b = (length.astype(np.float64) - window for length, window in zip(lengths, windows, strict=True))
    for name, (of_part, other) in (parts | {rest: (left_a, left_b), OUTSIDE_WINDOWS: (beyond_a, beyond_b)}).items():
        yield MatchedPart(name, (), of_part, other, lengths)


def _known_of_windows(run: StepFigures) -> Parts:
    """The parts of the ranks' windows that are known in every step in which any is."""
    parts = run.parts.get(WINDOW, {})
    is_known = ~np.isnan(parts[_COMPUTE_OF_WINDOW]) if _COMPUTE_OF_WINDOW in parts else np.zeros(0, dtype=np.bool_)
    return {place: series for place, series in parts.items() if is_known.any() and not np.isnan(series[is_known]).any()}


def _common_of_windows(a: Parts, b: Parts) -> tuple[list[Place], str]:
    """(the parts of windows that both runs tell apart, the name of what these leave): the runs' own where they tell the same."""
    common = [place for place in a if place in b]
    rests = [str(name) for ((kind, name),) in common if kind == "rest"]
    common = [place for place in common if place[0][0] == "part"]
    if rests and a.keys() == b.keys():
        return common, rests[0]
    names = {name for ((_, name),) in common}
    rest = "rest" if names <= {window_parts.COMPUTE, window_parts.EXPOSED} else "other rest"
    has_communication = names & {window_parts.EXPOSED, window_parts.WITH_WAITING}
    return common, rest if has_communication else f"{rest}, with exposed communication"


def lines_on_windows(a: StepFigures, b: StepFigures) -> Iterator[str]:
    """Lines on what is not compared, or not apart, where a run has no pipeline."""
    if a.has_pipeline and b.has_pipeline:
        return
    if a.has_pipeline != b.has_pipeline:
        one, other = ("A", "B") if a.has_pipeline else ("B", "A")
        yield (
            f"{other} has no pipeline: compute of stages, bubbles and causes of {one} are not compared; the parts are those that "
            "any step has"
        )
    of_runs = {"A": _known_of_windows(a), "B": _known_of_windows(b)}
    if unknown := [name for name, parts in of_runs.items() if not parts]:
        yield f"what a step was spent on is not known in {' and '.join(unknown)}: no parts that sum to it are compared"
    elif of_runs["A"].keys() != of_runs["B"].keys():
        common, rest = _common_of_windows(*of_runs.values())
        apart = {
            name: listed(place[0][1] for place, of in parts.items() if place not in common and np.nansum(of))
            for name, parts in of_runs.items()
        }
        of_each = "; ".join(f"in {name} {parts or 'no more'}" for name, parts in apart.items())
        yield f"{rest} is one part, as the runs do not tell the same apart: {of_each}"


def joined(runs: Sequence[StepFigures]) -> StepFigures:
    """The figures of all steps of several runs, run after run.

    A figure is not known (NaN) in the steps of a run that lacks it; a name that a run lacks has none.
    """
    if len(runs) == 1:
        return runs[0]
    spans, periods = (all_known(getattr(run, name) for run in runs) for name in ("span", "period"))
    names = {
        name for run in runs for name in run.parts if name == EXPOSED or all(name in other.parts for other in runs)
    }
    return StepFigures(
        None if spans is None else np.concatenate(spans),
        np.concatenate([run.window for run in runs]),
        {name: _joined_parts(name, runs) for name in sorted(names)},
        all(run.knows_communication for run in runs),
        runs[0].num_stages if len({run.num_stages for run in runs}) == 1 else None,
        None if periods is None else np.concatenate(periods),
        all(run.has_pipeline for run in runs),
    )


def _joined_parts(name: str, runs: Sequence[StepFigures]) -> dict[Place, Series]:
    """The figures of one name."""
    series: dict[Place, Series] = {}
    for place in dict.fromkeys(place for run in runs for place in run.parts.get(name, {})):
        of_runs = [(_or_nothing(run.parts.get(name, {}).get(place), name, place, run), run.num_steps) for run in runs]
        series[place] = np.concatenate([np.full(num, np.nan) if of is None else of for of, num in of_runs])
    return series


def _match(name: str, of_a: Parts, of_b: Parts, a: StepFigures, b: StepFigures) -> Iterator[MatchedPart]:
    for place in sorted({*of_a, *of_b}, key=str):
        both = all_known(_or_nothing(of.get(place), name, place, run) for of, run in ((of_a, a), (of_b, b)))
        if both is not None:
            yield MatchedPart(name, place, both[0], both[1])


def _match_compute(a: StepFigures, b: StepFigures, is_same_schedule: bool) -> Iterator[MatchedPart]:
    """Compute by kind and stage; by kind alone, the mean over ranks, where the runs do not have the same stages.

    Where runs of as many stages lack the traces of some, those that both have are compared.
    Kinds of backwards are taken together where the runs split them differently, pairs with all else where the schedules differ.
    """
    if COMPUTE not in a.parts or COMPUTE not in b.parts:
        return
    kinds_a, kinds_b = (_values(run.parts[COMPUTE], "kind") for run in (a, b))
    kind_of = _kind_level(kinds_a, kinds_b, is_same_schedule)
    stages_a, stages_b = (_values(run.parts[COMPUTE], "stage") for run in (a, b))
    common = stages_a & stages_b
    lacks_some = a.num_stages is not None and a.num_stages == b.num_stages
    has_same = bool(common) if lacks_some else stages_a == stages_b
    by_stage = has_same and _UNKNOWN not in stages_a | stages_b and kind_of(_FORWARD) != _ALL

    def level(place: Place) -> Place:
        (_, kind), *stage = place
        return (("kind", kind_of(str(kind))), *stage)

    parts_a, parts_b = (run.parts[COMPUTE if by_stage else COMPUTE_OF_RANKS] for run in (a, b))
    if by_stage:
        parts_a, parts_b = (
            {place: series for place, series in parts.items() if dict(place).get("stage") in common}
            for parts in (parts_a, parts_b)
        )
    of_a, of_b = _summed(parts_a, level), _summed(parts_b, level)
    yield from _match(COMPUTE, of_a, of_b, a, b)


def unmatched_names(a: StepFigures, b: StepFigures) -> Iterator[tuple[str, str]]:
    """(name, which run lacks it) of what one run alone tells; without a pipeline that of one is not missed."""
    has_pipelines = a.has_pipeline and b.has_pipeline
    for name in (COMPUTE, *_BESIDE_COMPUTE):
        if not has_pipelines and name in (COMPUTE, *_OF_PIPELINES):
            continue
        if (name in a.parts) != (name in b.parts) and name not in (EXPOSED, RANGE):
            yield name, "B" if name in a.parts else "A"
    for name, run, other in (("A", a, b), ("B", b, a)):
        if not run.knows_communication and EXPOSED in other.parts:
            yield EXPOSED, name


Level = Callable[[Place], Place]
"""The place at which a figure is compared."""


def _summed(parts: Parts, level: Level) -> dict[Place, Series]:
    """The sums of the parts that are compared at one place."""
    sums: dict[Place, Series] = {}
    for place, series in parts.items():
        of = level(place)
        sums[of] = sums[of] + series if of in sums else series
    return sums


def _or_nothing(series: Series | None, name: str, place: Place, run: StepFigures) -> Series | None:
    """The series; 0 where the run is known to have nothing of the kind, None where it is not."""
    if series is not None:
        return series
    if name == EXPOSED:
        has_none = run.knows_communication
    else:
        is_rare = name == CAUSE and CAUSE in run.parts and place in _RARE_CAUSES
        has_none = is_rare and (place != _HOST or IDLE in run.parts)
    return np.zeros(run.num_steps) if has_none else None


_HOST: Place = (("cause", "host"),)
_RARE_CAUSES: tuple[Place, ...] = (_HOST, (("cause", "straggler"),))
"""Causes that a report leaves out where a step has none of them."""


def _kind_level(a: set[object], b: set[object], is_same_schedule: bool) -> Callable[[str], str]:
    is_split = any(half in a | b for half in _HALVES)
    if a == b and (is_same_schedule or not (is_split and _BACKWARD in a)) and (is_same_schedule or _PAIR not in a):
        together: dict[str, str] = {}
    elif _PAIR in a | b:
        together = dict.fromkeys((_FORWARD, _BACKWARD, *_HALVES, _PAIR), _ALL)
    else:
        together = dict.fromkeys(_HALVES, _BACKWARD)
    return lambda kind: together.get(kind, kind)


def _level(name: str, a: Parts, b: Parts) -> Level:
    """The level of bubbles is the phase, all of them together where one run has none; that of communication axis and kind, the
    axis alone where the runs use it with different kinds of calls; all else is compared as it is.
    """
    if name == BUBBLE and not (_values(a, "phase") and _values(b, "phase")):
        return lambda _: ()
    kinds_a, kinds_b = (_kinds_by_axis(parts) if name == EXPOSED else {} for parts in (a, b))
    together = {axis for axis in kinds_a.keys() & kinds_b.keys() if kinds_a[axis] != kinds_b[axis]}
    return lambda place: place[:1] if together and place[0][1] in together else place


def _kinds_by_axis(parts: Parts) -> dict[object, set[object]]:
    kinds: dict[object, set[object]] = {}
    for (_, axis), (_, kind) in parts:
        kinds.setdefault(axis, set()).add(kind)
    return kinds


def _values(parts: Parts, name: str) -> set[object]:
    return {value for place in parts for coordinate, value in place if coordinate == name}


_BESIDE_COMPUTE = (BUBBLE, EXPOSED, CAUSE, IDLE, RANGE)
_OF_PIPELINES = (BUBBLE, CAUSE)
