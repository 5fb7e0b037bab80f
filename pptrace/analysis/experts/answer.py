"""The report's part on experts, from the exchanges and counts of all ranks and the costs of whole steps.

Findings are of where most rows are, a capacity that drops too much, a rank that all wait for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from pptrace.analysis.aligned import AlignedRun, StepsOfRank
from pptrace.analysis.experts.counts import RankCounts, TokenSizes, counts_of_ranks, sizes_of_run
from pptrace.analysis.experts.exchanges import exchanges_of, join_exchanges
from pptrace.analysis.experts.loads import layer_loads, rank_loads, spread_over_layers
from pptrace.analysis.experts.routing import Routing
from pptrace.analysis.experts.traffic import NO_TRAFFIC, SentRows, Traffic, names_of, sent_rows_of, traffic_of
from pptrace.analysis.experts.turns import Place, layers_of_places, with_model_stages, with_rows
from pptrace.analysis.experts.types import ExpertCalls, ExpertsReport, LayerLoad, RankLoad, RoutingGain, report_traffic
from pptrace.analysis.experts.waits import LEAST_COMPARED, ROLES, SLOW, Waits, expert_steps
from pptrace.analysis.matrix.step_matrix import StepMatrix
from pptrace.analysis.result import Finding, Severity, StepReport, behind_critical
from pptrace.analysis.stragglers.communication import CLEARLY, HotSpot
from pptrace.analysis.stragglers.reason import gain_interval, gains
from pptrace.analysis.whole_run import UNEQUAL_ROUTES
from pptrace.axes import Axis
from pptrace.model.known import common
from pptrace.model.tables import UNKNOWN, Int64
from pptrace.model.wording import as_ranges
from pptrace.schedule.plan import Plan
from pptrace.slices import Slice

if TYPE_CHECKING:
    from pptrace.analysis.questions import QuestionInputs


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


def _late_findings(experts: ExpertsReport, steps: Sequence[StepReport]) -> Iterator[Finding]:
    """The finding of a rank that others wait for because its experts have more rows, or are slow: at most one.

    Of steps with a pipeline replays say what it costs.
    """
    if not steps or any(step.has_pipeline for step in steps):
        return
    total = sum(rank.window_ns for step in steps for rank in step.ranks)
    known = [rank for rank in experts.ranks if rank.caused_after_ns is not None]
    late = max(known, key=lambda rank: rank.caused_after_ns or 0, default=None)
    share = 0.0 if late is None else (late.caused_after_ns or 0) / max(total, 1)
    if late is None or share < MOST_WAITED:
        return
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
        return
    evidence = {"where": {"axis": str(Axis.EP), "rank": late.rank}, "reason": reason, "share": share, **figures}
    title = f"Experts: {share:.1%} of the ranks' time is waiting for rank {late.rank}, whose {why}"
    yield Finding(Severity.WARNING, title, advice, evidence=evidence)


def _capacity_findings(experts: ExpertsReport) -> Iterator[Finding]:
    """The finding of a capacity that drops too much: one for the layer that drops most."""
    layers = [layer for layer in experts.layers if (layer.dropped_share or 0) >= MOST_DROPPED]
    if not layers:
        return
    worst = max(layers, key=lambda layer: layer.dropped_share or 0)
    share, name = worst.dropped_share or 0, f"layer {worst.nth if worst.layer is None else worst.layer}"
    num = f" ({len(layers)} of {len(experts.layers)} layers with experts drop {MOST_DROPPED:.0%} or more)"
    lost = worst.dropped_tokens_share
    of_tokens = f", and {lost:.1%} of its tokens have no other one" if lost else ""
    evidence: dict[str, object] = {
        "where": {} if worst.layer is None else {"layer": worst.layer},
        "reason": DROPPED_ROUTES,
        "dropped_share": share,
        "num_layers": len(layers),
    }
    yield Finding(
        Severity.WARNING,
        f"Capacity: {share:.1%} of the routes of {name} are dropped{num}",
        f"expert {worst.hottest} has {worst.expert_ratio:.1f} times the mean: balance the routes, raise the capacity, or "
        f"drop nothing; dropped routes add nothing to their token{of_tokens}",
        evidence=evidence | ({} if lost is None else {"dropped_tokens_share": lost}),
    )


Exchanged = tuple[Slice, SentRows]
"""The exchanges of a rank, and the rows that their splits say it sent."""


def of_rank(rank: int, steps: StepsOfRank, data: AlignedRun) -> Exchanged | None:
    """The exchanges of a rank in its comparable steps; of traces without any steps in all calls together. None without any."""
    compared = [UNKNOWN] if steps.none_compare and data.compares_without_steps else steps.comparable
    if not compared or data.work[rank].missing_device_events:
        return None
    rows = data.rows.of_rank(rank)
    exchanges = exchanges_of(rank, rows, compared, data.lanes[rank].compute)
    return (exchanges, sent_rows_of(exchanges, rows.comms)) if len(exchanges) else None


def answer(inputs: QuestionInputs) -> Mapping[str, Any]:
    """The part on experts, and the findings that are about them alone."""
    report, experts = inputs.report, inputs.experts
    steps = [step.step for step in report.steps]
    part = None if experts is None else report_experts(experts, inputs.costs, inputs.run.facts, steps)
    if part is None:
        return {}
    # a capacity that drops too much changes what is learned
    findings = (*_capacity_findings(part), *_late_findings(part, report.steps))
    return {"experts": part, "findings": behind_critical(report.findings, findings)}


class ExpertsOfRun(Struct, frozen=True, eq=False, dict=True):
    """Exchanges of all ranks, with rows where they are known, counts of the ranks whose runtime recorded them, and rows from rank
    to rank. Where the ranks' times do not compare (``is_compared``) there are no exchanges.
    """

    exchanges: Slice
    counts: Mapping[int, RankCounts]
    traffic: Traffic = NO_TRAFFIC
    is_compared: bool = True

    @classmethod
    def of(
        cls,
        of_ranks: Mapping[int, Exchanged],
        facts: Mapping[int, Mapping[str, Any]],
        steps: Mapping[int, StepsOfRank],
        plan: Plan | None = None,
    ) -> ExpertsOfRun:
        """The exchanges (:func:`of_rank`) and counts of the ranks in their steps whose times compare, or where there are none the
        counts of every step; ``plan`` tells which stages are of the same layers.
        """
        is_compared = any(of.comparable for of in steps.values()) or not any(of.every for of in steps.values())
        counted = {rank: of.comparable if is_compared else of.every for rank, of in steps.items()}
        counts = counts_of_ranks(facts, {rank: of for rank, of in counted.items() if of})
        joined = join_exchanges(rows for rows, _ in of_ranks.values())
        sent = {rank: of_rank for rank, (_, of_rank) in of_ranks.items()}
        traffic = traffic_of(joined, counts, sent, sizes_of_run(facts.values()))
        return cls(with_rows(with_model_stages(joined, plan), counts), counts, traffic, is_compared)

    @cached_property
    def waits(self) -> Waits:
        """Waits of ranks in the exchanges."""
        return Waits(self.exchanges)

    @property
    def hot_spot(self) -> HotSpot | None:
        """The place where most rows are; None where nothing is known of rows."""
        return hot_spot(layer_loads(self.exchanges, self.counts), rank_loads(self.waits, self.counts, None))

    @property
    def routing(self) -> Routing | None:
        """The changes that equal rows would make; None without exchanges."""
        return Routing.of(self.exchanges)


def report_experts(
    experts: ExpertsOfRun,
    plans: Sequence[StepMatrix],
    facts: Mapping[int, Mapping[str, Any]],
    steps: Sequence[int] = (),
) -> ExpertsReport | None:
    """The part on experts, with a member for each of the report's ``steps``; None of a run without any."""
    exchanges, counts = experts.exchanges, experts.counts
    if not len(exchanges) and not counts:
        return None
    has_rows = bool(len(exchanges)) and bool((exchanges["rows"] >= 0).any())
    source = "counts" if counts else "splits" if has_rows else "calls"
    gain, sizes = routing_gain(plans) if has_rows else None, sizes_of_run(facts.values())
    ranks = rank_loads(experts.waits, counts, sizes)
    layers = layer_loads(exchanges, counts, *((), ()) if sizes is None else (sizes.ep_groups, sizes.layers_per_stage))
    return ExpertsReport(
        source=source,
        num_experts=common(num for of_rank in counts.values() for num in np.unique(of_rank.num).tolist()),
        top_k=common(of_rank.top_k for of_rank in counts.values()),
        layers=layers,
        ranks=ranks,
        calls=_calls(experts),
        routing=gain,
        reasons=(
            *_reasons(experts, has_rows, gain, sizes),
            *_reasons_of_ranks(exchanges, ranks, counts, sizes),
            *experts.traffic.reasons,
        ),
        dispatcher=None if sizes is None else sizes.dispatcher,
        etp=None if sizes is None else sizes.etp,
        padding_share=None if sizes is None else _padding_share(counts, sizes),
        steps=expert_steps(experts.waits, steps) if len(exchanges) else (),
        traffic=report_traffic(experts.traffic.matrix),
        over_layers=spread_over_layers(layers),
    )


def _padding_share(counts: Mapping[int, RankCounts], sizes: TokenSizes) -> float | None:
    """Share of the rows of all experts that no route takes, on ranks whose tokens and experts were all counted; None where none
    were.
    """
    whole = [rank for group in sizes.sharing_groups if set(group) <= set(counts) for rank in group]
    rows, kept = (sum(int(getattr(counts[rank], name).sum()) for rank in whole) for name in ("rows", "kept"))
    return max(0.0, 1 - sizes.etp * kept / rows) if rows else None


def routing_gain(plans: Sequence[StepMatrix]) -> RoutingGain | None:
    """The gain of whole steps with equal rows; None without whole steps."""
    whole = [costs for costs in plans if len(costs.step)]
    if not whole:
        return None
    equal = [costs.with_equal_routes() for costs in whole]
    gained, before = gains(whole, equal), sum(int(costs.lengths.sum()) for costs in whole)
    low, high = gain_interval(gained)
    bubbles = [_bubble(part) // len(gained) for part in (whole, equal)]
    return RoutingGain(int(gained.sum()) // len(gained), low, high, float(gained.sum() / max(before, 1)), *bubbles)


def _bubble(plans: Sequence[StepMatrix]) -> int:
    """The time of all ranks in all steps that no op fills, ns."""
    bubble = 0
    for costs in plans:
        _, num_windows = np.unique(costs.step, return_counts=True)
        bubble += int((costs.lengths * num_windows).sum()) * costs.table.pp - int(costs.durations.sum())
    return bubble


def _calls(experts: ExpertsOfRun) -> tuple[ExpertCalls, ...]:
    exchanges, numbers = experts.exchanges, layers_of_places(experts.exchanges, experts.counts)
    keys = np.stack([exchanges[name] for name in ("stage", "layer", "backward")])
    found = []
    for stage, layer, backward in np.unique(keys, axis=1).T.tolist():
        at = np.flatnonzero((keys == [[stage], [layer], [backward]]).all(axis=0))
        number = numbers.get(Place(stage, layer))
        found += [_calls_of(experts.waits, role, (stage, layer, backward), number, at) for role in ROLES]
    return tuple(found)


def _calls_of(waits: Waits, role: str, place: tuple[int, int, int], number: int | None, at: Int64) -> ExpertCalls:
    names = ("bytes", "received_bytes", "transfer_start_ns", "transfer_end_ns", "hidden_ns")
    call = {name: waits.exchanges[f"{ROLES[role]}_{name}"][at] for name in names}
    waited = waits.lateness[role].waited[at]
    is_matched = bool((waited >= 0).all())
    transfer = int((call["transfer_end_ns"] - call["transfer_start_ns"]).sum()) if is_matched else None
    hidden = int(call["hidden_ns"].sum()) if is_matched else None
    got = np.where(call["received_bytes"] < 0, call["bytes"], call["received_bytes"])
    stage, layer, backward = (None if value < 0 else value for value in place)
    last_rank, last_share, last_reason = waits.last_rank(role, at) or (None, None, None)
    return ExpertCalls(
        layer=number,
        stage=stage,
        nth=layer,
        direction=None if backward is None else "FB"[backward],
        role=role,
        count=len(at),
        bytes=int(call["bytes"].sum()) if (call["bytes"] >= 0).all() else None,
        received_bytes=int(got.sum()) if (got >= 0).all() else None,
        wait_ns=int(waited.sum()) if is_matched else None,
        transfer_ns=transfer,
        hidden_ns=hidden,
        exposed_ns=None if transfer is None or hidden is None else transfer - hidden,
        last_rank=last_rank,
        last_share=last_share,
        last_reason=last_reason,
    )


def _has_more_rows(exchanges: Slice, counts: Mapping[int, RankCounts]) -> bool:
    """Return whether ranks counted more forwards than there are exchanges."""
    is_forward = (exchanges["backward"] == 0) & (exchanges["again"] == 0)
    ranks, num = np.unique(exchanges["rank"][is_forward], return_counts=True)
    forwards = dict(zip(ranks.tolist(), num.tolist(), strict=True))
    return any(len(of.step) > forwards.get(rank, 0) for rank, of in counts.items())


def _reasons(
    experts: ExpertsOfRun, has_rows: bool, gain: RoutingGain | None, sizes: TokenSizes | None
) -> Iterable[str]:
    exchanges, counts = experts.exchanges, experts.counts
    is_shared = sizes is not None and sizes.etp > 1
    in_no_op = exchanges["op_output"] < 0
    if not counts:
        yield (
            "routes of each expert were not recorded, as pptrace's own runtime does: loads of experts and dropped routes are null"
        )
    if not experts.is_compared:
        yield "the times of the ranks do not compare: who waits for whom is null, and loads of ranks"
    elif not len(exchanges):
        yield (
            "no calls along ep: no rank waits for others that have other experts, and loads of ranks are not compared"
            + ("; waits of those that share each expert are in the communication along etp" if is_shared else "")
        )
    elif not has_rows and not counts:
        yield "calls do not tell how many rows they carry: loads of ranks and what unequal routes cost are null"
    elif not has_rows:
        yield "which forward each call is of is not known, and so not its rows: slowness and what unequal routes cost are null"
    if len(exchanges) and _has_more_rows(exchanges, counts) and not in_no_op.any():
        yield (
            "of some forwards dispatch and combine are not known: overlapped pairs interleave them, or calls are missing; times, "
            f"waits and calls are those of the other ops, routes {'and rows' if sizes is not None else 'of experts'} those of all"
        )
    if has_rows and (few := experts.waits.hardly_compared):
        of_ranks = f"of rank{'s' * (len(few) > 1)} {as_ranges(few)}"
        yield f"{of_ranks} fewer than {LEAST_COMPARED} exchanges have rows to compare with those of others: slowness is null"
    if has_rows and gain is None:
        yield "no step has every op of a known plan: what unequal routes cost is null"
    if len(exchanges) and in_no_op.all():
        yield "no ops of a pipeline: of calls the layer and the direction are null"
    elif in_no_op.any():
        yield (
            "some calls are in no op that counts, as those of forwards that ran again after an update was taken back: their "
            "layer and direction are null, and of their ranks `in_flight_rows`"
        )
    elif len(exchanges) and (exchanges["layer"] < 0).any():
        yield "ops do not have equally many exchanges with experts: of some calls the layer is null"


def _reasons_of_ranks(
    exchanges: Slice, ranks: Sequence[RankLoad], counts: Mapping[int, RankCounts], sizes: TokenSizes | None
) -> Iterable[str]:
    """Lines on figures of ranks that counted routes of known sizes, or whose rows calls tell, and on ranks without counts that
    share experts with ranks that have some.
    """
    counted = () if sizes is None else counts
    nulls = {(rank.predicted_bytes is None, rank.flops is None) for rank in ranks if rank.rank in counted}
    if (True, True) in nulls:
        yield (
            "of some forwards that were counted the calls, or those of their backward, are not known: `predicted_bytes` and "
            "`flops` are null"
        )
    if (True, False) in nulls:
        yield "not all ranks that share experts counted routes: `predicted_bytes` of some is null"
    if (False, True) in nulls:
        yield "no calls of backwards are known: `flops` is null"
    has_rows = len(exchanges) > 0 and (exchanges["rows"] >= 0).all() and (exchanges["backward"] >= 0).all()
    if has_rows and any(rank.in_flight_rows is None for rank in ranks):
        yield "some backwards have no known calls: `in_flight_rows` is null"
    groups = () if sizes is None else sizes.sharing_groups
    missing = [rank for group in groups if set(group) & set(counts) for rank in set(group) - set(counts)]
    if missing:
        yield f"no counts of rank {names_of(missing)}: routes of experts are those of the other ranks' tokens"
