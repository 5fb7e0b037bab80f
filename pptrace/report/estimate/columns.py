"""An estimate as columns and as an object: what CSV, JSON and DataFrame hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pptrace.model.wording import listed
from pptrace.report.columns import as_rows
from pptrace.simulator.estimated_step import EstimatedStep
from pptrace.sizes.context import causal_scores, hiding_sequences
from pptrace.sizes.estimate import Estimate, RankEstimate

ESTIMATE_SCHEMA = "pptrace.estimate/1"

_RANK = {
    "rank": "rank",
    "layers": "num_layers",
    "parameters": "num_parameters",
    "weights_bytes": "weights_bytes",
    "gradients_bytes": "gradients_bytes",
    "optimizer_bytes": "optimizer_bytes",
    "in_flight": "in_flight",
    "activations_bytes": "activations_bytes",
    "total_bytes": "total_bytes",
    "model_flops": "model_flops",
    "hardware_flops": "hardware_flops",
}


def rank_columns(estimate: Estimate) -> dict[str, list[Any]]:
    """A row for each pipeline rank."""
    return {name: [getattr(rank, field) for rank in estimate.ranks] for name, field in _RANK.items()}


def communication_columns(estimate: Estimate, bytes_per_ns: Mapping[str, float]) -> dict[str, list[Any]]:
    """A row for each pipeline rank, axis and kind of call; ``ms`` is None where no speed of the axis is given,
    and so are bytes that the sizes do not tell.
    """
    rows = [row for rank in estimate.ranks for row in _calls(estimate, rank, bytes_per_ns)]
    names = ("rank", "axis", "kind", "group_size", "calls", "bytes", "wire_bytes", "ms")
    return {name: [row[at] for row in rows] for at, name in enumerate(names)}


def _calls(estimate: Estimate, rank: RankEstimate, bytes_per_ns: Mapping[str, float]) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    for (axis, kind), calls in sorted(rank.volume.items()):
        about = (rank.rank, axis, kind, estimate.group_size(axis, kind), calls.count)
        if not estimate.knows_bytes(axis):
            rows.append((*about, None, None, None))
            continue
        on_wire, speed = estimate.wire_bytes(axis, kind, calls), bytes_per_ns.get(axis)
        rows.append((*about, calls.bytes, on_wire, None if speed is None else on_wire / speed / 1e6))
    return rows


def estimate_object(
    estimate: Estimate,
    bytes_per_ns: Mapping[str, float],
    limit_bytes: int | None,
    step: EstimatedStep | None,
    flops_per_ns: float | None = None,
) -> dict[str, Any]:
    """The JSON object of an estimate."""
    plan, mesh = estimate.plan, estimate.mesh
    sizes = {"pp": plan.pp, "chunks": plan.num_chunks, "microbatches": plan.num_microbatches}
    simulation = None if step is None else step.simulation
    return {
        "schema": ESTIMATE_SCHEMA,
        "schedule": plan.name,
        **sizes,
        **{axis: getattr(mesh, axis) for axis in ("tp", "cp", "dp", "ep")},
        "zero": estimate.facts.zero,
        "recompute": estimate.facts.recompute,
        "layers_per_stage": list(estimate.facts.layers_per_stage),
        "parameters": estimate.num_parameters,
        "active_parameters": estimate.num_active_parameters,
        "peak_bytes": estimate.peak_bytes,
        "limit_bytes": limit_bytes,
        "fits": None if limit_bytes is None else estimate.peak_bytes <= limit_bytes,
        "step_ns": None if step is None else step.step_ns,
        "bubble_ratio": None if simulation is None else simulation.bubble_ratio,
        "layer_tensors": dict(estimate.layer_tensors),
        "ranks": as_rows(rank_columns(estimate)),
        "communication": as_rows(communication_columns(estimate, bytes_per_ns)),
        "context": context_object(estimate, bytes_per_ns, flops_per_ns),
        "reasons": list(missing_reasons(estimate)),
    }


def missing_reasons(estimate: Estimate) -> Iterator[str]:
    """Lines that say why something is None, or not counted."""
    yield from estimate.notes
    if estimate.facts.experts is not None and estimate.mesh.tp > 1:
        yield (
            "tp does not cut experts, as with Megatron-LM's --expert-tensor-parallel-size 1 (by default it is tp there): ep "
            "shares them among ranks of tp, cp and dp"
        )
    if "sequence" in estimate.missing:
        yield "without a sequence FLOPs, tokens and the time of a step are not known"
    sent = {axis for rank in estimate.ranks for axis, _ in rank.volume}
    axes = sorted(axis for axis in sent if not estimate.knows_bytes(axis))
    if axes:
        missing = " and ".join(estimate.missing)
        yield f"without {missing} the bytes along {listed(axes)} are not known, b·s·h numbers, nor how long they take"


def context_object(
    estimate: Estimate, bytes_per_ns: Mapping[str, float], flops_per_ns: float | None
) -> dict[str, Any] | None:
    """Scores of the ranks of a ring, and from which sequences on it hides its keys; None without one, or where some layers see
    only a part of the sequence.
    """
    facts, cp, speed = estimate.facts, estimate.mesh.cp, bytes_per_ns.get("cp")
    ring = cp // facts.ulysses
    is_cut = any(window is not None and window.size < facts.sequence for window in facts.form.windows)
    if ring == 1 or is_cut or facts.form.numbers is not None:
        return None
    is_known = flops_per_ns is not None and speed and facts.cp_comm_type == "p2p"
    hides = hiding_sequences(facts, cp, flops_per_ns / speed) if is_known and flops_per_ns and speed else None
    return {
        "balanced_scores": list(causal_scores(facts.sequence, ring, balanced=True)),
        "contiguous_scores": list(causal_scores(facts.sequence, ring, balanced=False)),
        "hides_forward_from": None if hides is None else hides.forward,
        "hides_backward_from": None if hides is None else hides.backward,
    }
