"""An estimate as tables for terminal and page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pptrace.model import units
from pptrace.model.report_table import ReportTable, table_of
from pptrace.model.wording import counted, listed
from pptrace.report.columns import as_rows
from pptrace.report.estimate.columns import communication_columns, context_object, missing_reasons
from pptrace.simulator.estimated_step import EstimatedStep, Speeds, estimated_step, missing_speeds
from pptrace.simulator.simulation import IDEAL, simulate
from pptrace.sizes.estimate import Estimate, RankEstimate

_MOST_RANKS = 16
_MOST_TENSORS = 8
_MOST_SCORES = 8
_STEP_NS = 1e12
"""Length of the ops of a rank where their ratios alone count, ns."""
_NOT_COUNTED = "at the peak, without temporaries, messages on their way and what an allocator rounds up"


def headline(estimate: Estimate) -> str:
    """Model, mesh and schedule in a line."""
    mesh, plan, facts = estimate.mesh, estimate.plan, estimate.facts
    axes = " ".join(f"{axis} {size}" for axis in ("pp", "tp", "cp", "dp", "ep") if (size := getattr(mesh, axis)) > 1)
    parameters, active = estimate.num_parameters, estimate.num_active_parameters
    of_token = f" ({active:,} active for a token)" if active < parameters else ""
    tokens = f" of {facts.sequence:,} tokens" if estimate.tokens is not None else ""
    parts = [
        f"{parameters:,} parameters{of_token} on {counted(mesh.world, 'rank')}" + (f" ({axes})" if axes else ""),
        f"{plan.name}, {counted(plan.num_microbatches, 'microbatch', 'microbatches')}",
        f"{counted(facts.microbatch_size, 'sequence')}{tokens} each",
    ]
    parts += [f"{plan.num_chunks} chunks"] if plan.num_chunks > 1 else []
    parts += [f"ZeRO-{facts.zero}"] if facts.zero else []
    parts += [f"{facts.recompute} recompute"] if facts.recompute != "none" else []
    return ", ".join(parts)


def rank_table(estimate: Estimate, limit_bytes: int | None = None) -> ReportTable:
    """Memory and FLOPs, a row for each pipeline rank; of many, some, the fullest among them."""
    ranks = shown = list(estimate.ranks)
    if len(ranks) > _MOST_RANKS:
        several = {index * (len(ranks) - 1) // (_MOST_RANKS - 2) for index in range(_MOST_RANKS - 1)}
        shown = [ranks[index] for index in sorted(several | {estimate.fullest.rank})]
    each, size = estimate.bytes_each, units.num_bytes
    of_parameter = f"{each.weights} weights, {each.gradients} gradients, {each.optimizer} optimizer"
    notes = [f"bytes of a parameter: {of_parameter}; {_NOT_COUNTED}", *_layer_notes(estimate)]
    if (again := estimate.recomputed_bytes) > 0:
        notes.append(f"a layer that is computed again has {size(again)} more while that lasts, which is not counted")
    fullest = estimate.fullest
    if (
        whole := fullest.num_parameters * each.gradients - fullest.gradients_bytes
    ) and estimate.plan.num_microbatches > 1:
        notes.append(
            "gradients are shared from the first microbatch on, as in arXiv 1910.02054; where replicas sum them once a step, as "
            f"the bytes below are counted, rank {fullest.rank} keeps {size(whole)} more until then"
        )
    notes += missing_reasons(estimate)
    if len(shown) < len(ranks):
        notes.append(f"… {counted(len(ranks) - len(shown), 'more rank')}: --csv and --json have all")
    columns: dict[str, Callable[[RankEstimate], str]] = {
        "rank": lambda rank: str(rank.rank),
        "layers": lambda rank: str(rank.num_layers),
        "parameters": lambda rank: f"{rank.num_parameters:,}",
        "weights": lambda rank: size(rank.weights_bytes),
        "gradients": lambda rank: size(rank.gradients_bytes),
        "optimizer": lambda rank: size(rank.optimizer_bytes),
        "in flight": lambda rank: str(rank.in_flight),
        "activations": lambda rank: size(rank.activations_bytes),
        "total": lambda rank: size(rank.total_bytes),
        "FLOP": lambda rank: units.flops(rank.model_flops),
    }
    if any(rank.hardware_flops != rank.model_flops for rank in ranks):
        columns["with recompute"] = lambda rank: units.flops(rank.hardware_flops)
    if limit_bytes is not None:
        columns[f"of {size(limit_bytes)}"] = lambda rank: units.percent(rank.total_bytes / limit_bytes)
    return table_of("estimate", "Each rank of a stage, one step", shown, columns, notes)


def _layer_notes(estimate: Estimate) -> Iterator[str]:
    """Lines on the bytes that a layer keeps of a microbatch, one for each kind of layers."""
    size, kinds = units.num_bytes, estimate.kinds_of_layers
    for has_experts, layer in kinds.items():
        if not (tensors := estimate.tensors_of(layer)):
            continue
        total = estimate.layer_bytes(layer, estimate.facts.recompute)
        of_experts = {"experts": rest} if (rest := total - sum(tensors.values())) else {}
        largest = sorted({**tensors, **of_experts}.items(), key=lambda tensor: -tensor[1])
        parts = listed((f"{name} {size(num_bytes)}" for name, num_bytes in largest), _MOST_TENSORS)
        which = "" if len(kinds) == 1 else " with experts" if has_experts else " with an MLP"
        yield f"a layer{which} keeps {size(total)} of a microbatch: {parts}"


def communication_table(estimate: Estimate, bytes_per_ns: Mapping[str, float]) -> ReportTable | None:
    """Bytes of each axis and kind of call, of the rank that sends most; None where nothing is sent."""
    most: dict[tuple[str, str], dict[str, Any]] = {}
    for row in as_rows(communication_columns(estimate, bytes_per_ns)):
        known = most.setdefault((row["axis"], row["kind"]), row)
        if (row["wire_bytes"] or row["calls"]) > (known["wire_bytes"] or known["calls"]):
            most[row["axis"], row["kind"]] = row
    if not most:
        return None
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "axis": lambda row: str(row["axis"]),
        "kind": lambda row: str(row["kind"]),
        "ranks": lambda row: str(row["group_size"]),
        "calls": lambda row: f"{row['calls']:,}",
        "bytes": lambda row: units.num_bytes(row["bytes"]),
        "on the wire": lambda row: units.num_bytes(row["wire_bytes"]),
    }
    if bytes_per_ns:
        columns["ms"] = lambda row: "–" if row["ms"] is None else f"{row['ms']:,.2f}"
    notes = ["of the rank that sends most; bytes as nccl-tests counts them, on the wire as rings send them"]
    title = "Communication of a rank, one step"
    return table_of("estimate-communication", title, most.values(), columns, notes, num_labels=2)


def tables(estimate: Estimate, bytes_per_ns: Mapping[str, float], limit_bytes: int | None) -> Sequence[ReportTable]:
    """All tables of an estimate."""
    sent = communication_table(estimate, bytes_per_ns)
    return [rank_table(estimate, limit_bytes), *([] if sent is None else [sent])]


def verdict_lines(
    estimate: Estimate,
    step: EstimatedStep | None,
    speeds: Speeds | None,
    bytes_per_ns: Mapping[str, float],
    limit_bytes: int | None,
    unused: Sequence[str],
) -> list[str]:
    """Lines on whether it fits, the predicted step, speeds of ``unused`` links, and the context."""
    lines = (
        "" if limit_bytes is None else fit_line(estimate, limit_bytes),
        step_line(estimate, step, speeds),
        unused_line(unused),
        context_line(estimate, bytes_per_ns, None if speeds is None else speeds.flops_per_ns),
    )
    return [line for line in lines if line]


def step_line(estimate: Estimate, step: EstimatedStep | None, speeds: Speeds | None) -> str:
    """The predicted step, and what it rests on; without speeds the bubble alone, "" where FLOPs are not known."""
    if estimate.tokens is None:
        return ""
    equal = simulate(estimate.plan.compute_only(), IDEAL).bubble_ratio
    if step is None or speeds is None:
        most = max(rank.hardware_flops or 0 for rank in estimate.ranks)
        alone = estimated_step(estimate, Speeds(most / _STEP_NS, {}))
        return (
            f"bubble ratio {units.ratio(alone.simulation.bubble_ratio)} by FLOPs alone ({units.ratio(equal)} with equal stages). "
            "TFLOP/s of a rank and GB/s of its links predict the step."
        )
    flops = sum(rank.model_flops or 0 for rank in estimate.ranks) / estimate.plan.pp / step.step_ns / 1e3
    missing = ", ".join(missing_speeds(estimate, speeds))
    free = f"; no speed of {missing} is given, so that it takes no time" if missing else ""
    return (
        f"predicted step {units.milliseconds(step.step_ns)} ms: bubble ratio {units.ratio(step.simulation.bubble_ratio)} "
        f"({units.ratio(equal)} with equal stages and free messages), {flops:,.1f} model TFLOP/s of each rank, "
        f"{(estimate.tokens or 0) / step.step_ns * 1e9:,.0f} tokens/s. Nothing overlaps but messages of the pipeline{free}."
    )


def unused_line(axes: Sequence[str]) -> str:
    """Line on speeds of links that change nothing, for these axes; "" for none."""
    given = "the speed given for it changes" if len(axes) == 1 else "the speeds given for them change"
    return f"nothing is sent along {listed(axes)}: {given} nothing." if axes else ""


def context_line(estimate: Estimate, bytes_per_ns: Mapping[str, float], flops_per_ns: float | None) -> str:
    """Say how many scores each rank of a ring has, and from which sequence on it hides its keys; "" without a ring."""
    known = context_object(estimate, bytes_per_ns, flops_per_ns)
    if known is None:
        return ""
    scores = [f"{number:,}" for number in known["contiguous_scores"]]
    contiguous = " / ".join(scores) if len(scores) <= _MOST_SCORES else f"{scores[0]} to {scores[-1]}"
    line = (
        f"causal scores of a head and sequence: {known['balanced_scores'][0]:,} on each rank of the ring; a contiguous layout "
        f"would have {contiguous}"
    )
    if known["hides_forward_from"] is None:
        return f"{line}."
    return (
        f"{line}. Keys hide behind attention from {known['hides_forward_from']:,} tokens a sequence on, in backward from "
        f"{known['hides_backward_from']:,}; this one has {estimate.facts.sequence:,}."
    )


def fit_line(estimate: Estimate, limit_bytes: int) -> str:
    """Say whether the fullest rank has room, and what fills it."""
    size = units.num_bytes(limit_bytes)
    return f"{'fits' if estimate.peak_bytes <= limit_bytes else 'does not fit'} {size}: {excess(estimate)}"


def excess(estimate: Estimate) -> str:
    """Bytes that the fullest rank needs."""
    rank, size = estimate.fullest, units.num_bytes
    return (
        f"rank {rank.rank} needs {size(rank.total_bytes)}: {size(rank.state_bytes)} of weights, gradients and optimizer, "
        f"{size(rank.activations_bytes)} of activations, {rank.in_flight} in flight"
    )
