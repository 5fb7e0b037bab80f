"""The tables of experts: loads of layers and of ranks, and the calls that bring rows to experts and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pptrace.analysis.experts.types import (
    ExpertCalls,
    ExpertsReport,
    ExpertStep,
    ExpertTraffic,
    LayerLoad,
    LayerSpread,
    RankLoad,
    RoutingGain,
)
from pptrace.model import units
from pptrace.model.report_table import FEW_RANKS, MAX_ROWS, MORE, Amount, ReportTable

if TYPE_CHECKING:
    from pptrace.analysis.questions import Rows
    from pptrace.analysis.result import Report

_WHY = {"rows": "most rows", "slow": "slow", "before": "late before", None: ""}
_BECAUSE = {
    "rows": ": its experts have most rows",
    "slow": ": its experts take longer than others for as many rows",
    "before": ": it comes late to the layers",
    None: "",
}


def tables(report: Report, amount: Amount) -> list[ReportTable]:
    """The tables of the run's experts, if it has any."""
    return [] if report.experts is None else expert_tables(report.experts, amount)


def _part(name: str) -> Callable[[Report], Iterable[Any]]:
    return lambda report: () if report.experts is None else getattr(report.experts, name)


FILES: Mapping[str, Rows] = {
    "experts": (_part("layers"), "routes of each layer's experts, rows of ranks, drops"),
    "expert-spread": (_part("over_layers"), "spread of the figures of experts over the layers of the model"),
    "expert-ranks": (_part("ranks"), "rows of each rank's experts, and who is waited for"),
    "expert-calls": (_part("calls"), "calls that bring rows to experts and back"),
    "expert-steps": (_part("steps"), "every step: waits in calls of experts, and the rank that they are for"),
}


def expert_tables(experts: ExpertsReport, amount: Amount) -> list[ReportTable]:
    """The tables of a run with experts: layers, of many of them what is usual, ranks, and with :attr:`Amount.WHOLE` every kind
    of call, steps, and rows from rank to rank.
    """
    tables = [_layers_table(experts, amount)] if experts.layers else []
    if len(experts.layers) > MAX_ROWS and experts.over_layers:
        tables.append(_spread_table(experts.over_layers))
    tables += [_ranks_table(experts, amount)] if experts.ranks else []
    if amount is Amount.WHOLE and experts.calls:
        tables.append(_calls_table(experts.calls))
    if amount is Amount.WHOLE and experts.steps:
        tables.append(_steps_table(experts.steps))
    if amount is Amount.WHOLE and experts.traffic is not None:
        tables.append(_traffic_table(experts.traffic))
    return tables


def layer_name(layer: int | None, stage: int | None, nth: int | None) -> str:
    """The name of a layer: its number in the model, else its place among those of its stage."""
    if layer is not None:
        return str(layer)
    of_stage = "" if stage is None else f"stage {stage}, "
    return "–" if nth is None else f"{of_stage}{nth}"


def _layers_table(experts: ExpertsReport, amount: Amount) -> ReportTable:
    """A row per layer; brief and of many, those with the most uneven rows."""
    layers, notes = list(experts.layers), [_options_note(experts)] if experts.top_k is not None else []
    if amount is Amount.BRIEF and len(layers) > MAX_ROWS:
        notes.append(MORE.format(len(layers) - MAX_ROWS))
        worst = sorted(layers, key=lambda layer: -max(layer.rank_ratio or 0, layer.expert_ratio or 0))[:MAX_ROWS]
        layers = [layer for layer in layers if layer in worst]
    are_dropped = any(layer.dropped_tokens for layer in layers)
    rows = tuple(_layer_row(layer, are_dropped) for layer in layers)
    columns = (
        *("layer", "stage", "routes", "hottest expert", "× mean", "by chance", "idle experts"),
        *("dropped", "rows of ranks, max / mean", "worst microbatch"),
        *(("tokens without expert",) if are_dropped else ()),
    )
    notes.append(
        "× mean: the routes of the hottest expert over the mean of all; by chance: up to there it says nothing"
    )
    notes += [_padding_note(experts)] if experts.padding_share else []
    notes += [] if experts.routing is None else [_routing_note(experts.routing)]
    return ReportTable("experts", "Experts, all steps", columns, rows, (*notes, *experts.reasons), 2, (9, 5, 6))


_FIGURES: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "expert_ratio": ("hottest expert, × mean", units.ratio),
    "least_ratio": ("expert with fewest routes, × mean", units.ratio),
    "deviation_ratio": ("standard deviation of experts, × mean", units.ratio),
    "idle_experts": ("idle experts", lambda value: f"{value:,.0f}"),
    "dropped_share": ("dropped", units.percent),
    "dropped_tokens_share": ("tokens without expert", units.percent),
    "rank_ratio": ("rows of ranks, max / mean", units.ratio),
    "worst_rank_ratio": ("worst microbatch", units.ratio),
}
"""Figures of layers → the name in tables, and the way in which they are written."""


def _spread_table(spreads: Sequence[LayerSpread]) -> ReportTable:
    """A row per figure of the layers."""
    rows = []
    for spread in spreads:
        name, written = _FIGURES[spread.figure]
        values = (spread.min, spread.p50, spread.p75, spread.p90, spread.p95, spread.max)
        rows.append((name, str(spread.num_layers), *map(written, values)))
    columns = ("of a layer", "layers", "min", "p50", "p75", "p90", "p95", "max")
    notes = ("percentiles over layers, each that of a layer",)
    return ReportTable("expert-spread", "Experts, over the layers", columns, tuple(rows), notes, 1, (6, 4, 2))


def _padding_note(experts: ExpertsReport) -> str:
    share = units.percent(experts.padding_share)
    return f"{share} of the rows that experts compute are padding: balanced routes need less of it, which equal rows do not count"


def gain_of_equal_rows(gain: RoutingGain) -> str:
    """One line on what equal rows would change of a step."""
    change = "longer" if gain.gain_ns < 0 else "shorter"
    return (
        f"with equal rows for all experts a step would be {units.milliseconds(abs(gain.gain_ns))} ms {change} "
        f"({units.percent(abs(gain.share))}), by replay"
    )


def _routing_note(gain: RoutingGain) -> str:
    """One line on what equal rows would change of a step and its bubble."""
    return (
        f"{gain_of_equal_rows(gain)}; all ranks together would be between ops for "
        f"{units.milliseconds(gain.equal_bubble_ns)} ms, where now they are for {units.milliseconds(gain.bubble_ns)} ms"
    )


def _options_note(experts: ExpertsReport) -> str:
    """One line on which experts there are, and on who has them."""
    num = "several numbers of" if experts.num_experts is None else experts.num_experts
    words = [f"{num} experts in a layer, {experts.top_k} of each token"]
    if experts.dispatcher is not None:
        words.append(f"dispatcher {experts.dispatcher}")
    if experts.etp is not None and experts.etp > 1:
        words.append(f"{experts.etp} ranks share each expert (etp), and each of them computes all of its rows in part")
    return "; ".join(words)


def _layer_row(layer: LayerLoad, are_dropped: bool) -> tuple[str, ...]:
    return (
        layer_name(layer.layer, layer.stage, layer.nth),
        _number(layer.stage),
        _number(None if layer.routes is None else sum(layer.routes)),
        _number(layer.hottest),
        units.ratio(layer.expert_ratio),
        units.ratio(layer.chance_ratio),
        _number(layer.idle_experts),
        units.percent(layer.dropped_share),
        units.ratio(layer.rank_ratio),
        units.ratio(layer.worst_rank_ratio),
        *((units.percent(layer.dropped_tokens_share),) if are_dropped else ()),
    )


def _ranks_table(experts: ExpertsReport, amount: Amount) -> ReportTable:
    """A row per rank; brief and of many, those for which others wait longest."""
    ranks, notes = list(experts.ranks), []
    if amount is Amount.BRIEF and len(ranks) > FEW_RANKS:
        notes.append(MORE.format(len(ranks) - FEW_RANKS))
        worst = sorted(ranks, key=lambda rank: -_caused(rank))[:FEW_RANKS]
        ranks = [rank for rank in ranks if rank in worst]
    columns = (
        *("rank", "stage", "experts", "rows", "× mean", "in experts ms", "FLOP/s", "× others", "waits ms"),
        *("late before ms", "late after ms", "bytes", "predicted"),
        *("rows in flight", "× mean in flight"),
    )
    notes.append(
        "× mean: rows over the mean of its group; × others: how many times as long as others take for as many rows; "
        "late: what others wait for it before the experts, and after them"
    )
    late = late_in_most_steps(experts.steps)
    notes += [late] if late else []
    notes += [] if experts.layers else experts.reasons  # which the table of layers has
    rows = tuple(map(_rank_row, ranks))
    return ReportTable(
        "expert-ranks", "Ranks with experts, all steps", columns, rows, tuple(notes), 3, (12, 11, 6, 13, 8)
    )


def _caused(rank: RankLoad) -> int:
    return (rank.caused_before_ns or 0) + (rank.caused_after_ns or 0)


def _rank_row(rank: RankLoad) -> tuple[str, ...]:
    first, num = rank.first_expert, rank.num_experts
    return (
        str(rank.rank),
        _number(rank.stage),
        "–" if first is None or not num else str(first) if num == 1 else f"{first}–{first + num - 1}",
        _number(rank.rows),
        units.ratio(rank.ratio),
        units.milliseconds(rank.expert_ns),
        "–" if rank.flops is None or not rank.expert_ns else units.flops(rank.flops / rank.expert_ns * 1e9),
        units.ratio(rank.slowness),
        units.milliseconds(rank.waited_ns),
        units.milliseconds(rank.caused_before_ns),
        units.milliseconds(rank.caused_after_ns),
        units.num_bytes(rank.bytes),
        units.num_bytes(rank.predicted_bytes),
        _number(rank.in_flight_rows),
        units.ratio(rank.in_flight_ratio),
    )


def _calls_table(calls: Sequence[ExpertCalls]) -> ReportTable:
    columns = (
        *("layer", "stage", "direction", "call", "count", "bytes", "wait ms", "transfer ms", "hidden ms", "exposed ms"),
        *("last rank", "in share of calls", "why"),
    )
    notes = ("why: its experts have most rows, it takes longer for as many, or it came late to the layer",)
    rows = tuple(
        (
            layer_name(call.layer, call.stage, call.nth),
            _number(call.stage),
            call.direction or "–",
            call.role,
            str(call.count),
            units.num_bytes(call.bytes),
            units.milliseconds(call.wait_ns),
            units.milliseconds(call.transfer_ns),
            units.milliseconds(call.hidden_ns),
            units.milliseconds(call.exposed_ns),
            _number(call.last_rank),
            units.percent(call.last_share),
            _WHY[call.last_reason],
        )
        for call in calls
    )
    return ReportTable("expert-calls", "Calls of experts, all ranks and steps", columns, rows, notes, 4)


def late_in_most_steps(steps: Sequence[ExpertStep]) -> str:
    """One line on the rank that others wait for most in more than half of the steps, with the reason of most of these; "" where
    none is, or there is one step alone.
    """
    known = [step for step in steps if step.wait_ns is not None]
    ranks = Counter(step.late_rank for step in known if step.late_rank is not None)
    if len(known) < 2 or not ranks:
        return ""
    ((rank, count),) = ranks.most_common(1)
    if count <= len(known) / 2:
        return ""
    ((reason, num),) = Counter(step.reason for step in known if step.late_rank == rank).most_common(1)
    because = _BECAUSE[reason if num > count / 2 else None]
    return f"rank {rank} is the one that others wait for most in {count:,} of {len(known):,} steps{because}"


def why_late(step: ExpertStep) -> str:
    """The reason in the words of the tables; "" where nothing tells."""
    return _WHY[step.reason]


def _steps_table(steps: Sequence[ExpertStep]) -> ReportTable:
    columns = ("step", "wait ms", "late rank", "for it ms", "of the waits", "why", "rows of ranks, max / mean")
    notes = ("waits of all ranks in dispatches and combines; late rank: the one for which the others waited longest",)
    rows = tuple(
        (
            str(step.step),
            units.milliseconds(step.wait_ns),
            _number(step.late_rank),
            units.milliseconds(step.late_ns),
            units.percent(step.late_share),
            why_late(step),
            units.ratio(step.rank_ratio),
        )
        for step in steps
    )
    return ReportTable("expert-steps", "Who is late for experts, by step", columns, rows, notes, 1, (6, 5))


def _traffic_table(traffic: ExpertTraffic) -> ReportTable:
    """A row for each pair of two ranks that the report has."""
    away = units.percent(traffic.away_rows / max(traffic.num_rows, 1))
    by = "splits of the calls" if traffic.known_from == "splits" else "counts of the runtime"
    notes = [
        f"{traffic.num_rows:,} rows in forwards, by {by}; {away} of them go to another rank",
        "of its rows: share of all that the rank sends to experts, its own included",
    ]
    if len(traffic.pairs) < traffic.num_pairs:
        notes.append(f"the {len(traffic.pairs):,} pairs with most rows of {traffic.num_pairs:,}")
    rows = tuple(
        (
            str(pair.source),
            str(pair.target),
            f"{pair.rows:,}",
            units.percent(pair.share),
            units.num_bytes(pair.bytes),
        )
        for pair in traffic.pairs
    )
    columns = ("from rank", "to rank", "rows", "of its rows", "bytes")
    return ReportTable("expert-traffic", "Rows from rank to rank, all steps", columns, rows, tuple(notes), 2)


def _number(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"
