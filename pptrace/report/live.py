"""Steps of a run that goes on, as lines of text."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pptrace.analysis.live_cost import LiveCosts
from pptrace.analysis.slow_rank import SlowRank
from pptrace.workflow.live.follow import LiveStepFigures

_NUMBERS = re.compile(r"\d[\d\W]*")


def step_line(step: LiveStepFigures) -> str:
    """One line about a step."""
    words = [f"step {step.step:6d}   {step.step_ns / 1e6:10,.1f} ms"]
    if step.deviation is not None:
        words.append(f"{step.deviation:+7.1%}")
    if step.slowest_rank is not None and step.span_ns:
        compute = {rank.rank: rank.compute_ns for rank in step.ranks}[step.slowest_rank]
        bubbles = [rank.bubble_ns for rank in step.ranks]
        words.append(f"rank {step.slowest_rank} computed longest ({(compute or 0) / 1e6:,.1f} ms)")
        if all(ns is not None for ns in bubbles):
            share = sum(ns for ns in bubbles if ns is not None) / (step.span_ns * len(bubbles))
            words.append(f"bubble {share:.1%} of all ranks' time")
    words += [slow_rank_text(slow) for slow in step.slow_ranks]
    return "   ".join(words)


def slow_rank_text(slow: SlowRank) -> str:
    """A named rank in words."""
    return f"slow rank {slow.rank}: its ops take {slow.excess:.0%} longer than {slow.than}, since step {slow.since}"


def new_notes(step: LiveStepFigures, noted: set[str]) -> Iterator[str]:
    """The reasons why figures of a step are missing that are not ``noted`` yet but for their numbers, and note them."""
    for note in step.notes:
        words = _NUMBERS.sub("", note)
        if words not in noted:
            noted.add(words)
            yield note


def cost_lines(costs: LiveCosts) -> Iterator[str]:
    """Lines about the cost of observing, for the end of a run."""
    if costs.measured is None:
        yield "--live: its cost is not known: no unobserved step between two observed ones that no profiler recorded"
    else:
        yield f"--live: cost {costs.measured}"
    if costs.own is not None:
        yield f"--live: ranges and records took {costs.own:.2%} of a step on the ranks, as they counted it"
