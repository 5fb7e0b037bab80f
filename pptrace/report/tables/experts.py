"""The tables of experts: loads of layers and of ranks, and the calls that bring rows to experts and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from pptrace.analysis.expert_parts import (
    ExpertCalls,
    ExpertsReport,
    ExpertStep,
    ExpertTraffic,
    LayerLoad,
    LayerSpread,
    RankLoad,
    RoutingGain,
)
from pptrace.report.tables.table import FEW_RANKS, MAX_ROWS, Amount, Columns, ReportTable, largest, more, rows_of
from pptrace.report.units import flops, milliseconds, num_bytes, number, percent, ratio

_WHY = {"rows": "most rows", "slow": "slow", "before": "late before", None: ""}
_BECAUSE = {
    "rows": ": its experts have most rows",
    "slow": ": its experts take longer than others for as many rows",
    "before": ": it comes late to the layers",
    None: "",
}
_FIGURES: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "expert_ratio": ("hottest expert, × mean", ratio),
    "least_ratio": ("expert with fewest routes, × mean", ratio),
    "deviation_ratio": ("standard deviation of experts, × mean", ratio),
    "idle_experts": ("idle experts", lambda value: f"{value:,.0f}"),
    "dropped_share": ("dropped", percent),
    "dropped_tokens_share": ("tokens without expert", percent),
    "rank_ratio": ("rows of ranks, max / mean", ratio),
    "worst_rank_ratio": ("worst microbatch", ratio),
}
"""Figures of layers → the name in tables, and the way in which they are written."""


def expert_tables(experts: ExpertsReport, amount: Amount) -> list[ReportTable]:
    """The tables of a run with experts: layers, of many of them what is usual, ranks, and with :attr:`Amount.WHOLE` every kind
    of call, steps, and rows from rank to rank.
    """
    tables = [_layers_table(experts, amount)] if experts.layers else []
    if len(experts.layers) > MAX_ROWS and experts.over_layers:
        tables.append(_spread_table(experts.over_layers))
    tables += [_ranks_table(experts, amount)] if experts.ranks else []
    if amount is Amount.WHOLE:
        tables += [_calls_table(experts.calls)] if experts.calls else []
        tables += [_steps_table(experts.steps)] if experts.steps else []
        tables += [_traffic_table(experts.traffic)] if experts.traffic is not None else []
    return tables


def layer_name(layer: int | None, stage: int | None, nth: int | None) -> str:
    """The name of a layer: its number in the model, else its place among those of its stage."""
    if layer is not None:
        return str(layer)
    of_stage = "" if stage is None else f"stage {stage}, "
    return "–" if nth is None else f"{of_stage}{nth}"


_LAYER_COLUMNS: Columns[LayerLoad] = {
    "layer": lambda layer: layer_name(layer.layer, layer.stage, layer.nth),
    "stage": lambda layer: number(layer.stage),
    "routes": lambda layer: number(None if layer.routes is None else sum(layer.routes)),
    "hottest expert": lambda layer: number(layer.hottest),
    "× mean": lambda layer: ratio(layer.expert_ratio),
    "by chance": lambda layer: ratio(layer.chance_ratio),
    "idle experts": lambda layer: number(layer.idle_experts),
    "dropped": lambda layer: percent(layer.dropped_share),
    "rows of ranks, max / mean": lambda layer: ratio(layer.rank_ratio),
    "worst microbatch": lambda layer: ratio(layer.worst_rank_ratio),
}


def _layers_table(experts: ExpertsReport, amount: Amount) -> ReportTable:
    """A row per layer; brief and of many, those with the most uneven rows."""
    layers: Sequence[LayerLoad] = experts.layers
    if amount is Amount.BRIEF:
        layers = largest(layers, MAX_ROWS, lambda layer: max(layer.rank_ratio or 0, layer.expert_ratio or 0))
    columns = _LAYER_COLUMNS
    if any(layer.dropped_tokens for layer in layers):
        columns = {**columns, "tokens without expert": lambda layer: percent(layer.dropped_tokens_share)}
    notes = [*_options_note(experts), *more(len(experts.layers) - len(layers))]
    notes.append(
        "× mean: the routes of the hottest expert over the mean of all; by chance: up to there it says nothing"
    )
    if experts.padding_share:
        notes.append(
            f"{percent(experts.padding_share)} of the rows that experts compute are padding: balanced routes need less of it, "
            "which equal rows do not count"
        )
    if (gain := experts.routing) is not None:
        notes.append(
            f"{gain_of_equal_rows(gain)}; all ranks together would be between ops for "
            f"{milliseconds(gain.equal_bubble_ns)} ms, where now they are for {milliseconds(gain.bubble_ns)} ms"
        )
    notes += experts.reasons
    rows = rows_of(layers, columns)
    return ReportTable("experts", "Experts, all steps", tuple(columns), rows, tuple(notes), 2, (9, 5, 6))


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


def gain_of_equal_rows(gain: RoutingGain) -> str:
    """One line on what equal rows would change of a step."""
    change = "longer" if gain.gain_ns < 0 else "shorter"
    return (
        f"with equal rows for all experts a step would be {milliseconds(abs(gain.gain_ns))} ms {change} "
        f"({percent(abs(gain.share))}), by replay"
    )


def _options_note(experts: ExpertsReport) -> list[str]:
    """One line on which experts there are, and on who has them, where that is known."""
    if experts.top_k is None:
        return []
    num = "several numbers of" if experts.num_experts is None else experts.num_experts
    words = [f"{num} experts in a layer, {experts.top_k} of each token"]
    if experts.dispatcher is not None:
        words.append(f"dispatcher {experts.dispatcher}")
    if experts.etp is not None and experts.etp > 1:
        words.append(f"{experts.etp} ranks share each expert (etp), and each of them computes all of its rows in part")
    return ["; ".join(words)]


def waits_for(rank: RankLoad) -> int:
    """How long others wait for a rank, before its experts and after them, ns."""
    return (rank.caused_before_ns or 0) + (rank.caused_after_ns or 0)


def _ranks_table(experts: ExpertsReport, amount: Amount) -> ReportTable:
    """A row per rank; brief and of many, those for which others wait longest."""
    ranks: Sequence[RankLoad] = experts.ranks
    if amount is Amount.BRIEF:
        ranks = largest(ranks, FEW_RANKS, waits_for)
    notes = [
        *more(len(experts.ranks) - len(ranks)),
        "× mean: rows over the mean of its group; × others: how many times as long as others take for as many rows; "
        "late: what others wait for it before the experts, and after them",
    ]
    late = late_in_most_steps(experts.steps)
    notes += [late] if late else []
    notes += [] if experts.layers else experts.reasons  # which the table of layers has
    leave_out = (12, 11, 6, 13, 8)
    title, rows = "Ranks with experts, all steps", rows_of(ranks, _RANK_COLUMNS)
    return ReportTable("expert-ranks", title, tuple(_RANK_COLUMNS), rows, tuple(notes), 3, leave_out)


def _experts_of(rank: RankLoad) -> str:
    """The experts that a rank has, by number."""
    first, num = rank.first_expert, rank.num_experts
    return "–" if first is None or not num else str(first) if num == 1 else f"{first}–{first + num - 1}"


def _flops_of(rank: RankLoad) -> str:
    return "–" if rank.flops is None or not rank.expert_ns else flops(rank.flops / rank.expert_ns * 1e9)


_RANK_COLUMNS: Columns[RankLoad] = {
    "rank": lambda rank: str(rank.rank),
    "stage": lambda rank: number(rank.stage),
    "experts": _experts_of,
    "rows": lambda rank: number(rank.rows),
    "× mean": lambda rank: ratio(rank.ratio),
    "in experts ms": lambda rank: milliseconds(rank.expert_ns),
    "FLOP/s": _flops_of,
    "× others": lambda rank: ratio(rank.slowness),
    "waits ms": lambda rank: milliseconds(rank.waited_ns),
    "late before ms": lambda rank: milliseconds(rank.caused_before_ns),
    "late after ms": lambda rank: milliseconds(rank.caused_after_ns),
    "bytes": lambda rank: num_bytes(rank.bytes),
    "predicted": lambda rank: num_bytes(rank.predicted_bytes),
    "rows in flight": lambda rank: number(rank.in_flight_rows),
    "× mean in flight": lambda rank: ratio(rank.in_flight_ratio),
}
_CALL_COLUMNS: Columns[ExpertCalls] = {
    "layer": lambda call: layer_name(call.layer, call.stage, call.nth),
    "stage": lambda call: number(call.stage),
    "direction": lambda call: call.direction or "–",
    "call": lambda call: call.role,
    "count": lambda call: str(call.count),
    "bytes": lambda call: num_bytes(call.bytes),
    "wait ms": lambda call: milliseconds(call.wait_ns),
    "transfer ms": lambda call: milliseconds(call.transfer_ns),
    "hidden ms": lambda call: milliseconds(call.hidden_ns),
    "exposed ms": lambda call: milliseconds(call.exposed_ns),
    "last rank": lambda call: number(call.last_rank),
    "in share of calls": lambda call: percent(call.last_share),
    "why": lambda call: _WHY[call.last_reason],
}


def _calls_table(calls: Sequence[ExpertCalls]) -> ReportTable:
    notes = ("why: its experts have most rows, it takes longer for as many, or it came late to the layer",)
    title, rows = "Calls of experts, all ranks and steps", rows_of(calls, _CALL_COLUMNS)
    return ReportTable("expert-calls", title, tuple(_CALL_COLUMNS), rows, notes, 4)


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
    "wait ms": lambda step: milliseconds(step.wait_ns),
    "late rank": lambda step: number(step.late_rank),
    "for it ms": lambda step: milliseconds(step.late_ns),
    "of the waits": lambda step: percent(step.late_share),
    "why": why_late,
    "rows of ranks, max / mean": lambda step: ratio(step.rank_ratio),
}


def _steps_table(steps: Sequence[ExpertStep]) -> ReportTable:
    notes = ("waits of all ranks in dispatches and combines; late rank: the one for which the others waited longest",)
    title, rows = "Who is late for experts, by step", rows_of(steps, _STEP_COLUMNS)
    return ReportTable("expert-steps", title, tuple(_STEP_COLUMNS), rows, notes, 1, (6, 5))


def _traffic_table(traffic: ExpertTraffic) -> ReportTable:
    """A row for each pair of two ranks that the report has."""
    away = percent(traffic.away_rows / max(traffic.num_rows, 1))
    by = "splits of the calls" if traffic.known_from == "splits" else "counts of the runtime"
    notes = [
        f"{traffic.num_rows:,} rows in forwards, by {by}; {away} of them go to another rank",
        "of its rows: share of all that the rank sends to experts, its own included",
    ]
    if len(traffic.pairs) < traffic.num_pairs:
        notes.append(f"the {len(traffic.pairs):,} pairs with most rows of {traffic.num_pairs:,}")
    rows = tuple(
        (str(pair.source), str(pair.target), f"{pair.rows:,}", percent(pair.share), num_bytes(pair.bytes))
        for pair in traffic.pairs
    )
    columns = ("from rank", "to rank", "rows", "of its rows", "bytes")
    return ReportTable("expert-traffic", "Rows from rank to rank, all steps", columns, rows, tuple(notes), 2)
