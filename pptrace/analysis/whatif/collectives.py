"""Collectives of an axis over other links: what ops take that wait for them, where they are so many times as fast.

Of what an op waits for collectives, what is transfer takes 1/X of the time; what it waits for a member that comes late stays.
The latency that was fitted to the collectives of the axis stays as well. What compute hides today is taken to stay hidden; of
slower links the interval has what comes out if none of what is added to it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from pptrace.analysis.links.types import CollectiveSpeed
from pptrace.analysis.result import StepReport
from pptrace.errors import UsageError
from pptrace.timeline.lanes import INNER_AXES

if TYPE_CHECKING:
    from pptrace.analysis.whatif.stage_costs import StageCosts

_MOST_TIMES = 1e6


class KnownOfCollectives(Struct, frozen=True):
    """Knowledge of the collectives of each axis: ``latency`` is the part of their transfers that is latency as far as a line
    was fitted to them, ``unfitted`` the part of those of which none was, and ``hidden`` the part that compute hides.
    """

    latency: Mapping[str, float] = field(default_factory=dict)
    unfitted: Mapping[str, float] = field(default_factory=dict)
    hidden: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, speeds: Iterable[CollectiveSpeed], steps: Sequence[StepReport]) -> KnownOfCollectives:
        total, latency, unfitted = Counter[str](), Counter[str](), Counter[str]()
        for speed in speeds:
            moved_ns = speed.transfer_ns or 0
            total[speed.axis] += moved_ns
            if speed.latency_ns is None:
                unfitted[speed.axis] += moved_ns
            else:
                latency[speed.axis] += min(speed.latency_ns * speed.count, moved_ns)

        def share(part: Counter[str]) -> dict[str, float]:
            return {axis: part[axis] / ns for axis, ns in total.items() if ns}

        moved: dict[str, list[int]] = {}
        for comm in (comm for step in steps for rank in step.ranks for comm in rank.comms):
            exposed, hidden = moved.setdefault(comm.axis, [0, 0])
            moved[comm.axis] = [exposed + (comm.exposed_ns or 0), hidden + (comm.hidden_ns or 0)]
        of_hidden = {axis: hidden / max(shown + hidden, 1) for axis, (shown, hidden) in moved.items()}
        return cls(share(latency), share(unfitted), of_hidden)


def parse_speed(text: str) -> tuple[str, float]:
    """Read what ``--collective-speed`` takes: an axis and how many times as fast.

    Raises:
        UsageError: it is none of that.
    """
    axis, _, times = text.partition("=")
    try:
        speed = float(times)
    except ValueError:
        speed = 0.0
    if axis not in INNER_AXES or not 1 / _MOST_TIMES <= speed <= _MOST_TIMES:
        raise UsageError(
            f"--collective-speed {text}: expected one of {', '.join(INNER_AXES)}, whose collectives are inside ops, and how many "
            "times as fast they are, such as tp=0.1"
        )
    return axis, speed


def with_speeds(
    costs: StageCosts, speeds: Iterable[tuple[str, float]], *, all_latency: bool = False, none_hidden: bool = False
) -> StageCosts:
    """The costs where collectives of some axes are so many times as fast.

    ``all_latency``: those without a fit are all latency. ``none_hidden``: nothing of what is added is hidden.

    Raises:
        UsageError: no op waits for collectives along an axis.
    """
    known = costs.collectives
    for axis, speed in speeds:
        of_axis = INNER_AXES.index(axis)
        if costs.exposed is None or not costs.exposed[..., of_axis].any():
            raise UsageError(
                f"--collective-speed {axis}={speed:g}: no op of this run waits for collectives along {axis}, or traces "
                "of their members are missing"
            )
        latency = known.latency.get(axis, 0.0) + all_latency * known.unfitted.get(axis, 1.0)
        longer = costs.exposed[..., of_axis] * (1 - latency) * (1 / speed - 1)
        if none_hidden and speed < 1:
            longer /= max(1 - known.hidden.get(axis, 0.0), 1e-3)
        inner = np.maximum(costs.inner + longer, 0)
        exposed = costs.exposed.copy()
        exposed[..., of_axis] = np.maximum(exposed[..., of_axis] + longer, 0)
        costs = replace(costs, work=costs.work + inner - costs.inner, inner=inner, exposed=exposed)
    return costs


def other_assumptions(costs: StageCosts, speeds: Sequence[tuple[str, float]]) -> Iterator[dict[str, bool]]:
    """Assumptions of :func:`with_speeds` with which a prediction may be another one."""
    if any(speed != 1 and costs.collectives.unfitted.get(axis, 1.0) for axis, speed in speeds):
        yield {"all_latency": True}
    if any(speed < 1 and costs.collectives.hidden.get(axis) for axis, speed in speeds):
        yield {"none_hidden": True}


def notes_on_speeds(costs: StageCosts, speeds: Sequence[tuple[str, float]]) -> Iterator[str]:
    """Assumptions, a sentence each."""
    for axis, speed in speeds:
        latency, unfitted = (known.get(axis) for known in (costs.collectives.latency, costs.collectives.unfitted))
        if latency:
            yield f"{latency:.0%} of what collectives along {axis} take is the latency that was fitted to them, and stays"
        if unfitted != 0:
            part = "all" if unfitted is None else f"{unfitted:.0%}"
            yield (
                f"{part} of what collectives along {axis} take is of some to which no latency could be fitted, and is scaled (in "
                "the interval, none of it)"
            )
        if speed < 1 and costs.collectives.hidden.get(axis):
            yield f"what compute hides of {axis} is taken to stay hidden (in the interval, nothing more is hidden)"
