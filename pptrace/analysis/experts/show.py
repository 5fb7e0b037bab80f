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
    RankLoad,
    RoutingGain,
    TrafficPair,
)
from pptrace.model import units
from pptrace.model.report_table import FEW_RANKS, MAX_ROWS, Amount, Columns, ReportTable, largest, more, table_of

if TYPE_CHECKING:
    from pptrace.analysis.questions import Rows
    from pptrace.analysis.report import Report

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
        rows = []
        for spread in experts.over_layers:
            name, written = _FIGURES[spread.figure]
            values = (spread.min, spread.p50, spread.p75, spread.p90, spread.p95, spread.max)
            rows.append((name, str(spread.num_layers), *map(written, values)))
        columns = ("of a layer", "layers", "min", "p50", "p75", "p90", "p95", "max")
        notes = ("percentiles over layers, each that of a layer",)
        tables.append(
            ReportTable("expert-spread", "Experts, over the layers", columns, tuple(rows), notes, 1, (6, 4, 2))
        )
    tables += [_ranks_table(experts, amount)] if experts.ranks else []
    if amount is Amount.WHOLE and experts.calls:
        title = "Calls of experts, all ranks and steps"
        tables.append(table_of("expert-calls", title, experts.calls, _CALL_COLUMNS, _CALL_NOTES, 4))
    if amount is Amount.WHOLE and experts.steps:
        title = "Who is late for experts, by step"
        tables.append(table_of("expert-steps", title, experts.steps, _STEP_COLUMNS, _STEP_NOTES, 1, (6, 5)))
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
    if amount is Amount.BRIEF:
        notes += more(len(layers) - MAX_ROWS)
        layers = largest(layers, MAX_ROWS, lambda layer: max(layer.rank_ratio or 0, layer.expert_ratio or 0))
    are_dropped = any(layer.dropped_tokens for layer in layers)
    columns = _LAYER_COLUMNS if are_dropped else {name: _LAYER_COLUMNS[name] for name in [*_LAYER_COLUMNS][:-1]}
    notes.append(
        "× mean: the routes of the hottest expert over the mean of all; by chance: up to there it says nothing"
    )
    if experts.padding_share:
        notes.append(
            f"{units.percent(experts.padding_share)} of the rows that experts compute are padding: balanced routes need less of "
            "it, which equal rows do not count"
        )
    if (gain := experts.routing) is not None:
        bubble, equal = units.milliseconds(gain.bubble_ns), units.milliseconds(gain.equal_bubble_ns)
        notes.append(
            f"{gain_of_equal_rows(gain)}; all ranks together would be between ops for {equal} ms, where now they are for "
            f"{bubble} ms"
        )
    return table_of("experts", "Experts, all steps", layers, columns, (*notes, *experts.reasons), 2, (9, 5, 6))


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


def gain_of_equal_rows(gain: RoutingGain) -> str:
    """One line on what equal rows would change of a step."""
    change = "longer" if gain.gain_ns < 0 else "shorter"
    return (
        f"with equal rows for all experts a step would be {units.milliseconds(abs(gain.gain_ns))} ms {change} "
        f"({units.percent(abs(gain.share))}), by replay"
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


_LAYER_COLUMNS: Columns[LayerLoad] = {
    "layer": lambda layer: layer_name(layer.layer, layer.stage, layer.nth),
    "stage": lambda layer: units.number(layer.stage),
    "routes": lambda layer: units.number(None if layer.routes is None else sum(layer.routes)),
    "hottest expert": lambda layer: units.number(layer.hottest),
    "× mean": lambda layer: units.ratio(layer.expert_ratio),
    "by chance": lambda layer: units.ratio(layer.chance_ratio),
    "idle experts": lambda layer: units.number(layer.idle_experts),
    "dropped": lambda layer: units.percent(layer.dropped_share),
    "rows of ranks, max / mean": lambda layer: units.ratio(layer.rank_ratio),
    "worst microbatch": lambda layer: units.ratio(layer.worst_rank_ratio),
    "tokens without expert": lambda layer: units.percent(layer.dropped_tokens_share),
}


def _ranks_table(experts: ExpertsReport, amount: Amount) -> ReportTable:
    """A row per rank; brief and of many, those for which others wait longest."""
    ranks, notes = list(experts.ranks), []
    if amount is Amount.BRIEF:
        notes += more(len(ranks) - FEW_RANKS)
        ranks = largest(ranks, FEW_RANKS, waits_for)
    notes.append(
        "× mean: rows over the mean of its group; × others: how many times as long as others take for as many rows; "
        "late: what others wait for it before the experts, and after them"
    )
    late = late_in_most_steps(experts.steps)
    notes += [late] if late else []
    notes += [] if experts.layers else experts.reasons  # which the table of layers has
    return table_of("expert-ranks", "Ranks with experts, all steps", ranks, _RANK_COLUMNS, notes, 3, (12, 11, 6, 13, 8))


def waits_for(rank: RankLoad) -> int:
    """The time for which others wait for a rank, before its experts and after them, ns."""
    return (rank.caused_before_ns or 0) + (rank.caused_after_ns or 0)


def _experts_of(rank: RankLoad) -> str:
    first, num = rank.first_expert, rank.num_experts
    return "–" if first is None or not num else str(first) if num == 1 else f"{first}–{first + num - 1}"


_RANK_COLUMNS: Columns[RankLoad] = {
    "rank": lambda rank: str(rank.rank),
    "stage": lambda rank: units.number(rank.stage),
    "experts": _experts_of,
    "rows": lambda rank: units.number(rank.rows),
    "× mean": lambda rank: units.ratio(rank.ratio),
    "in experts ms": lambda rank: units.milliseconds(rank.expert_ns),
    "FLOP/s": lambda rank: (
        "–" if rank.flops is None or not rank.expert_ns else units.flops(rank.flops / rank.expert_ns * 1e9)
    ),
    "× others": lambda rank: units.ratio(rank.slowness),
    "waits ms": lambda rank: units.milliseconds(rank.waited_ns),
    "late before ms": lambda rank: units.milliseconds(rank.caused_before_ns),
    "late after ms": lambda rank: units.milliseconds(rank.caused_after_ns),
    "bytes": lambda rank: units.num_bytes(rank.bytes),
    "predicted": lambda rank: units.num_bytes(rank.predicted_bytes),
    "rows in flight": lambda rank: units.number(rank.in_flight_rows),
    "× mean in flight": lambda rank: units.ratio(rank.in_flight_ratio),
}


_CALL_COLUMNS: Columns[ExpertCalls] = {
    "layer": lambda call: layer_name(call.layer, call.stage, call.nth),
    "stage": lambda call: units.number(call.stage),
    "direction": lambda call: call.direction or "–",
    "call": lambda call: call.role,
    "count": lambda call: str(call.count),
    "bytes": lambda call: units.num_bytes(call.bytes),
    "wait ms": lambda call: units.milliseconds(call.wait_ns),
    "transfer ms": lambda call: units.milliseconds(call.transfer_ns),
    "hidden ms": lambda call: units.milliseconds(call.hidden_ns),
    "exposed ms": lambda call: units.milliseconds(call.exposed_ns),
    "last rank": lambda call: units.number(call.last_rank),
    "in share of calls": lambda call: units.percent(call.last_share),
    "why": lambda call: _WHY[call.last_reason],
}
_CALL_NOTES = ("why: its experts have most rows, it takes longer for as many, or it came late to the layer",)


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


_STEP_COLUMNS: Columns[ExpertStep] = {
    "step": lambda step: str(step.step),
    "wait ms": lambda step: units.milliseconds(step.wait_ns),
    "late rank": lambda step: units.number(step.late_rank),
    "for it ms": lambda step: units.milliseconds(step.late_ns),
    "of the waits": lambda step: units.percent(step.late_share),
    "why": why_late,
    "rows of ranks, max / mean": lambda step: units.ratio(step.rank_ratio),
}
_STEP_NOTES = ("waits of all ranks in dispatches and combines; late rank: the one for which the others waited longest",)


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
    columns: Columns[TrafficPair] = {
        "from rank": lambda pair: str(pair.source),
        "to rank": lambda pair: str(pair.target),
        "rows": lambda pair: f"{pair.rows:,}",
        "of its rows": lambda pair: units.percent(pair.share),
        "bytes": lambda pair: units.num_bytes(pair.bytes),
    }
    return table_of("expert-traffic", "Rows from rank to rank, all steps", traffic.pairs, columns, notes, 2)
