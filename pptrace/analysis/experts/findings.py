"""Findings about experts: where most rows are, a capacity that drops too much, a rank that all wait for."""

from __future__ import annotations

from collections.abc import Sequence

from pptrace.analysis.experts.types import ExpertsReport, LayerLoad, RankLoad
from pptrace.analysis.experts.waits import SLOW
from pptrace.analysis.result import Finding, Severity, StepReport
from pptrace.analysis.stragglers.communication import CLEARLY, HotSpot
from pptrace.analysis.whole_run import UNEQUAL_ROUTES
from pptrace.axes import Axis

DROPPED_ROUTES = "dropped routes"
MOST_DROPPED = 0.1
"""Share of a layer's routes from which on its capacity drops too much."""
SLOW_EXPERTS = "slow experts"
MOST_WAITED = 0.05
"""Share of the ranks' time from which on waiting for one rank's experts is a finding."""


def hot_spot(layers: Sequence[LayerLoad], ranks: Sequence[RankLoad]) -> HotSpot | None:
    """The place where most rows are; None where nothing is known of them."""
    known = [rank for rank in ranks if rank.ratio is not None]
    if not known:
        return None
    hottest = max(known, key=lambda rank: (rank.ratio or 0, -rank.rank))
    counted = [layer for layer in layers if layer.expert_ratio is not None and layer.hottest is not None]
    held = range(hottest.first_expert or 0, (hottest.first_expert or 0) + (hottest.num_experts or 0))
    counted = [layer for layer in counted if layer.hottest in held and hottest.stage in (None, layer.stage)] or counted
    layer = max(counted, key=lambda layer: layer.expert_ratio or 0, default=None)
    expert = None if layer is None else layer.hottest
    same = sum(other.hottest == expert and (other.expert_ratio or 0) >= CLEARLY for other in layers)
    return HotSpot(
        hottest.rank,
        hottest.ratio or 1.0,
        expert,
        None if layer is None else layer.expert_ratio,
        None if layer is None else layer.layer,
        same,
    )


def with_findings(
    findings: Sequence[Finding], experts: ExpertsReport, steps: Sequence[StepReport]
) -> tuple[Finding, ...]:
    """The findings, that of a capacity that drops too much ahead of those that have a gain: it changes what is learned; and of
    ``steps`` without a pipeline the rank whose experts all wait for.
    """
    first = sum(finding.severity is Severity.CRITICAL for finding in findings)
    return (*findings[:first], *_capacity_findings(experts), *_late_findings(experts, steps), *findings[first:])


def _late_findings(experts: ExpertsReport, steps: Sequence[StepReport]) -> tuple[Finding, ...]:
    """The finding of a rank that others wait for because its experts have more rows, or are slow: at most one.

    Of steps with a pipeline replays say what it costs.
    """
    if not steps or any(step.has_pipeline for step in steps):
        return ()
    total = sum(rank.window_ns for step in steps for rank in step.ranks)
    known = [rank for rank in experts.ranks if rank.caused_after_ns is not None]
    late = max(known, key=lambda rank: rank.caused_after_ns or 0, default=None)
    share = 0.0 if late is None else (late.caused_after_ns or 0) / max(total, 1)
    if late is None or share < MOST_WAITED:
        return ()
    ratio, slowness = late.ratio or 0.0, late.slowness or 0.0
    if slowness >= SLOW:
        reason, figures = SLOW_EXPERTS, {"slowness": slowness}
        why = f"experts take {slowness:.1f} times as long as those of others for as many rows"
        advice = "look at that rank: its clock, its neighbours, the placement of its work"
    elif ratio >= CLEARLY:
        reason, figures = UNEQUAL_ROUTES, {"rank_ratio": ratio}
        why = f"experts have {ratio:.1f} times the rows of its group"
        advice = "balance the routes, or place hot experts on different ranks"
    else:
        return ()
    evidence = {"where": {"axis": str(Axis.EP), "rank": late.rank}, "reason": reason, "share": share, **figures}
    title = f"Experts: {share:.1%} of the ranks' time is waiting for rank {late.rank}, whose {why}"
    return (Finding(Severity.WARNING, title, advice, evidence=evidence),)


def _capacity_findings(experts: ExpertsReport) -> tuple[Finding, ...]:
    """The finding of a capacity that drops too much: one for the layer that drops most."""
    layers = [layer for layer in experts.layers if (layer.dropped_share or 0) >= MOST_DROPPED]
    if not layers:
        return ()
    worst = max(layers, key=lambda layer: layer.dropped_share or 0)
    share, name = worst.dropped_share or 0, f"layer {worst.nth if worst.layer is None else worst.layer}"
    num = f" ({len(layers)} of {len(experts.layers)} layers with experts drop {MOST_DROPPED:.0%} or more)"
    lost = worst.dropped_tokens_share
    figures = {"dropped_share": share, "num_layers": len(layers)} | (
        {} if lost is None else {"dropped_tokens_share": lost}
    )
    return (
        Finding(
            Severity.WARNING,
            f"Capacity: {share:.1%} of the routes of {name} are dropped{num}",
            f"expert {worst.hottest} has {worst.expert_ratio:.1f} times the mean: balance the routes, raise the capacity, or "
            "drop nothing; dropped routes add nothing to their token"
            + (f", and {lost:.1%} of its tokens have no other one" if lost else ""),
            evidence={
                "where": {} if worst.layer is None else {"layer": worst.layer},
                "reason": DROPPED_ROUTES,
                **figures,
            },
        ),
    )
