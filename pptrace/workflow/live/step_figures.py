"""Figures of steps, from templates of the steps before them where there is one, else from an analysis of their own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from pptrace.analysis.result import RankStep
from pptrace.live_records.file import LiveStep
from pptrace.workflow.analyse import analyse
from pptrace.workflow.live.figures import RankFigures, StepFigures
from pptrace.workflow.live.template import StepTemplate
from pptrace.workflow.live.traces import trace_of

_MOST_KEPT = 64

Facts = Mapping[int, Mapping[str, Any]]
Ranges = tuple[tuple[int, int], ...]
"""The program of each rank, which a template is for."""


class StepAnalyser:
    """Figures of steps of one run."""

    def __init__(self) -> None:
        self._templates: OrderedDict[Ranges, StepTemplate | None] = OrderedDict()

    def figures(self, steps: Sequence[Mapping[int, LiveStep]], facts: Facts) -> dict[int, StepFigures]:
        """The figures of each step, by its number; a step of which nothing is known has none.

        Raises:
            PptraceError: a step cannot be analysed.
        """
        alike: dict[Ranges, list[Mapping[int, LiveStep]]] = {}
        for step in steps:
            alike.setdefault(_ranges_of(step), []).append(step)
        figures: dict[int, StepFigures] = {}
        for ranges, of_ranges in alike.items():
            template = self._template(ranges, of_ranges[0], facts)
            if template is None:
                figures |= _analysed(of_ranges, facts)
            else:
                numbers = [_number(step) for step in of_ranges]
                figures |= dict(zip(numbers, template.figures(of_ranges), strict=True))
        return figures

    def _template(self, ranges: Ranges, step: Mapping[int, LiveStep], facts: Facts) -> StepTemplate | None:
        if ranges not in self._templates:
            self._templates[ranges] = StepTemplate.of(step, facts)
            if len(self._templates) > _MOST_KEPT:
                self._templates.popitem(last=False)
        return self._templates[ranges]


def _ranges_of(step: Mapping[int, LiveStep]) -> Ranges:
    return tuple((rank, step[rank].record.program) for rank in sorted(step))


def _number(step: Mapping[int, LiveStep]) -> int:
    return next(iter(step.values())).step


def _analysed(steps: Sequence[Mapping[int, LiveStep]], facts: Facts) -> dict[int, StepFigures]:
    """The figures of steps from an analysis of their own."""
    ranks = list(steps[0])
    traces = [trace_of(rank, "", facts[rank], [step[rank] for step in steps]) for rank in ranks]
    report = analyse(traces, num_ranks=len(traces))
    return {
        step.step: StepFigures(
            step.span_ns, {rank.rank: _figures_of(rank) for rank in step.ranks if rank.compute_ns is not None}
        )
        for step in report.report.steps
    }


def _figures_of(rank: RankStep) -> RankFigures:
    waits = [comm.wait_ns for comm in rank.comms]
    return RankFigures(
        rank.compute_ns,
        rank.exposed_comm_ns,
        rank.bubble_ns,
        rank.not_compute_ns,
        None if None in waits else sum(ns for ns in waits if ns is not None),
    )
