"""Notes on predictions: what each takes for granted, and what the costs of the run do not tell."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pptrace.analysis.whatif.change import Change
from pptrace.analysis.whatif.collectives import notes_on_speeds
from pptrace.analysis.whatif.frameworks import PPTRACE, Framework, paste_options
from pptrace.analysis.whatif.replay import link_ends
from pptrace.analysis.whatif.stage_costs import StageCosts
from pptrace.analysis.whatif.stage_map import FEWEST_STAGES
from pptrace.schedule.needs import Output
from pptrace.schedule.plan import Plan, runs_of

UNCOUNTED = "the sum of its gradients over both is not counted"
"""The reason why what a plan gains that has every stage twice is not known."""
_MUCH_DELAY = 0.05
"""Delays of ops as a part of their lengths from which on it is noted what is assumed of them."""
_SOME_DELAY = 0.005
"""The same part from which on messages may be in them, where none is known."""


def notes_of(change: Change, plan: Plan, costs: StageCosts, framework: Framework | None = None) -> Iterator[str]:
    """Assumptions behind a prediction, a sentence each, and options to paste: a framework's own, where it is known."""
    does_other_parts = plan.chain_length != costs.num_stages or change.split is not None or change.microbatch_size != 1
    if plan.splits_backward and not costs.splits_backward:
        yield f"W is taken to be {_weights(costs)}"
    if does_other_parts or plan.splits_backward != costs.plan.splits_backward:
        yield from _of_fixed_parts(costs)
    if plan.chain_length != costs.num_stages:
        yield (
            "layers of a stage are taken to cost alike"
            if costs.layers
            else "a stage's work is taken to be spread evenly over its layers"
        )
    if change.split is not None:
        for name, option in paste_options(change.split, plan):
            if framework is None or name in framework.paste:
                yield option if name == PPTRACE else f"{name}: {option}"
        one_by_one = costs.measured is not None and costs.measured.weights is not None
        alike = "layers cost what they took one by one" if one_by_one else "layers of a stage are taken to cost alike"
        yield (
            f"{alike}; embedding and head cost what their parts of the forwards took"
            if costs.measured is not None and not np.isnan(costs.measured.ends[:, Output.FORWARD]).any()
            else f"{alike}; what the first and the last stage take beyond that is taken to stay there"
            if costs.num_stages >= FEWEST_STAGES
            else "layers of a stage are taken to cost alike; of two stages embedding and head cannot be distinguished from them "
            "(in the interval, what one takes beyond the other stays with it)"
        )
    if change.split is not None and costs.layers is None:
        yield "the run is taken to have as many layers in every stage"
    if change.microbatch_size != 1:
        yield "ops are taken to cost in proportion to the size of a microbatch"
    if (work := change.work(costs.plan)) != 1:
        yield f"a step does {work:g} times the work; the gain is for the same work"
    if change.recompute_layers:
        yield (
            "a layer that recomputes is taken to take what it takes today"
            if len(costs.recomputing) and all(costs.recomputing)
            else "a layer that recomputes is taken to take what its forward takes"
        )
    if not change.keeps_plan and (num_runs := len(runs_of(costs.plan))) > 1 and len(runs_of(plan)) == 1:
        yield (
            f"the run takes its microbatches in {num_runs} parts, each done before the next begins: no part is taken to need the "
            "one before, as it would behind an update"
        )
    if plan.has_pairs and not costs.plan.has_pairs:
        yield "an overlapped pair is taken to cost what its halves cost one after the other"
    if costs.plan.has_pairs and not plan.has_pairs:
        yield "each half of an overlapped pair is taken to have the part of it that ops of its stage have elsewhere"
    if does_other_parts and _is_late(costs, _MUCH_DELAY):
        yield "ops are taken to begin as late as now, however much they do (in the interval, in proportion to it)"
    if change.prefetch is not None:
        without = ", which --negotiate and Megatron-LM's --p2p-calls refuse" if change.prefetch else ""
        yield f"--prefetch {change.prefetch} of this project's runtime{without}; sends are taken to hold up nobody"
    if change.order is not None:
        yield "--csv FILE.csv writes it with its sends and receives, and ops keep their order"
    if change.microbatch_size != change.link_speed and costs.num_stages > 1:
        yield _of_scaled_messages(costs)
    yield from notes_on_speeds(costs, change.collective_speeds)
    if not set(zip(*link_ends(plan, change.placement), strict=True)) <= costs.links().keys():
        yield "messages on links that the run did not use are taken to take what its messages took elsewhere"
    if plan.num_chains > costs.plan.num_chains:
        yield f"every stage is on two ranks, and {UNCOUNTED}"


def note_on_split(split_cost: float, costs: StageCosts) -> str:
    """Sentence on what I and W together are taken to be, where they are longer by this part at one end of the interval."""
    here = ", as those of this run that are not in pairs" if costs.split_cost is not None else ""
    return (
        f"I and W together are taken to take what a B takes (in the interval also {1 + split_cost:.2f} of that{here})"
    )


def _weights(costs: StageCosts) -> str:
    """Say what W is taken to be of a full B, and where that comes from."""
    assumed, shares = costs.assumed.weight_share, costs.shares
    if assumed is not None:
        return f"{assumed:g} of a B (--wgrad-share)"
    low, usual, high = (float(np.mean(shares.of_weights(factor))) for factor in (0.0, None, 1.0))
    source = "as the report says of backwards" if not np.isnan(shares.weights).any() else "which is not measured here"
    if np.nansum(shares.recompute):
        source += f", recompute is {np.nanmean(shares.recompute):.2f} of it"
    return f"{usual:.2f} of a B ({low:.2f} to {high:.2f} in the interval), {source}"


def _of_fixed_parts(costs: StageCosts) -> Iterator[str]:
    if costs.assumed.fixed is not None:
        yield f"{costs.assumed.fixed:g} of what a usual op takes is taken to stay however much it does (--fixed-share)"
    elif costs.fixed.any():
        forward, backward, weights = costs.fixed.tolist()
        of_kinds = {"an F": forward}
        of_kinds |= {"an I": backward, "a W": weights} if costs.splits_backward else {"a B": backward + weights}
        parts = ", ".join(f"{ns / 1e6:.3g} ms of {kind}" for kind, ns in of_kinds.items() if ns)
        yield (
            f"{parts} are taken to stay however much an op does, as stages with other numbers of layers show (in the interval, "
            "nothing or 0.06 of a usual op)"
        )


def _of_scaled_messages(costs: StageCosts) -> str:
    if not costs.transfer.any():
        return "no message between stages is known to take time, so that none is scaled"
    if costs.knows_latency:
        return "messages keep the latency that was fitted to their links"
    return (
        "the whole time of a message is scaled, its latency too, as none could be fitted (in the interval, none of it)"
    )


def warnings_of_costs(costs: StageCosts) -> Iterator[str]:
    """Lines about costs in which ops are late, and no message has any."""
    if costs.num_stages > 1 and not costs.transfer.any() and _is_late(costs, _SOME_DELAY):
        yield (
            "messages between stages were not recorded: ops are predicted to start as late under every schedule as they did "
            "here, and faster links change nothing; record with `pptrace run`, or with ranges that name messages"
        )


def _is_late(costs: StageCosts, part: float) -> bool:
    """Return whether what delays ops is more than a part of what they take."""
    return float(costs.delay.sum()) > part * float(costs.work.sum())
